"""Batches through Petastorm's own readers (`loader.reader: petastorm`), to compare both readers in one job.

Petastorm deals whole row groups: rank r of R gets every R-th one, from number r on. All ranks compute the rows of each
rank from the footers. So they take the same number of steps without communication.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.data.columns.batch import BatchBuilder, Prepare, StepBatches, StepRows
from spark_dl.data.columns.policies import first_nonfinite_row, nonfinite_as_read
from spark_dl.data.columns.ragged import Array
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.petastorm.metadata import COMMON_METADATA, UNISCHEMA_KEY, read_metadata
from spark_dl.data.petastorm.unischema import read_unischema
from spark_dl.data.petastorm_plan import PetastormPlan
from spark_dl.data.plan import Split

_log = logging.getLogger("spark_dl")
_EARLY_ENDS = 1000
_EARLY_END_S = 0.01


class PetastormLoader:
    """The batches of one rank through Petastorm, with the interface of `Loader`. Not collective.

    Training (`shuffle=True`) ends an epoch with the rank that has the fewest rows. The number of rows left out is
    logged. With `shuffle=False` every row is used once, and ranks without rows left give rows of weight 0. Rows are
    shuffled within windows of `loader.shuffle_window_rows`, divided among the ranks.

    Raises ValueError if Petastorm cannot be imported, cannot open the dataset, or deals no rows to a rank.
    """

    def __init__(
        self,
        shards: ShardSet,
        config: Config,
        *,
        rank: int,
        world_size: int,
        split: Split = "all",
        shuffle: bool = True,
        micro_batches: int = 1,
        prepare: Prepare | None = None,
        pin: bool = False,
    ):
        assert split != "validation", "the checks of the configuration exclude train.validation_fraction here"
        self.columns = shards.select(config.data.columns)
        self._shards, self._config = shards, config
        self._rank, self._world_size = rank, world_size
        self._shuffle = shuffle and config.loader.shuffle
        self._build = BatchBuilder(self.columns, config.data, micro_batches, config.loader.ragged, prepare, pin).build
        _check_metadata(shards.url)
        self._petastorm = _import_petastorm()
        self.plan = PetastormPlan(self._dealt_rows(), config.train.global_batch_size, every_row=not shuffle)
        if self.plan.left_out and rank == 0:
            _log.warning(
                "Petastorm deals %s of %d rows to the ranks; an epoch ends with the rank that has the fewest rows, and "
                "leaves out %d rows (loader.reader: spark_dl uses every row)",
                list(self.plan.rank_rows), shards.rows, self.plan.left_out,
            )  # fmt: skip

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[StepBatches, None, None]:
        """Yields the steps of an epoch, from `start_step` on. The steps before it are read and skipped.

        Petastorm's order of rows differs from run to run. Raises RuntimeError if Petastorm fails, or if its number of
        rows differs from that of the row groups.
        """
        if start_step:
            _log.warning(
                "epoch %d resumes at step %d with Petastorm, whose order of rows differs from run to run: until the "
                "epoch ends, some rows can be repeated and some left out", epoch, start_step,
            )  # fmt: skip
        seed = int(np.random.default_rng((self._config.train.seed, epoch)).integers(1, 2**31))  # Petastorm ignores 0
        batch, plan = self.plan.rank_batch(self._rank), self.plan
        pieces = self._pieces(seed)
        windows = self._windows(pieces, np.random.default_rng((seed, self._rank)))
        try:
            filler: list[Array] | None = None
            for step, arrays in enumerate(itertools.islice(_batches(windows, batch), plan.steps)):
                filler = [a[-1:] for a in arrays]
                if step >= start_step:
                    yield self._step(epoch, step, arrays, filler)
            assert filler is not None
            for step in range(max(start_step, -(-plan.rank_rows[self._rank] // batch)), plan.steps):
                yield self._step(epoch, step, [a[:0] for a in filler], filler)
        finally:
            pieces.close()

    def name_rows(self, epoch: int, step: int) -> str:
        """Says that the rows of a step are not known, for messages."""
        return "not known, as Petastorm's order of rows differs from run to run (loader.reader)"

    def _step(self, epoch: int, step: int, arrays: Sequence[Array], filler: Sequence[Array]) -> StepBatches:
        rows, batch = len(arrays[0]), self.plan.rank_batch(self._rank)
        padded = [np.concatenate([a, np.repeat(f, batch - rows, axis=0)]) for a, f in zip(arrays, filler, strict=True)]
        weight = (np.arange(batch) < rows).astype(np.float32)
        batches = self._build([StepRows(padded, weight)], (epoch, step, self._rank))
        return StepBatches(step, batches, self.plan.batch_rows(step))

    def _windows(self, pieces: Iterator[list[Array]], rng: np.random.Generator) -> Iterator[list[Array]]:
        """Yields the reader's rows, joined to windows and shuffled within them. # each array: (window rows, *cell)"""
        window = self._config.loader.shuffle_window_rows // self._world_size if self._shuffle else 0
        target = max(window, self.plan.rank_batch(self._rank))
        held: list[list[Array]] = []
        rows = 0
        for arrays in pieces:
            held.append(arrays)
            rows += len(arrays[0])
            if rows >= target:
                yield self._shuffled(held, rng)
                held, rows = [], 0
        if held:
            yield self._shuffled(held, rng)

    def _shuffled(self, held: list[list[Array]], rng: np.random.Generator) -> list[Array]:
        arrays = [np.concatenate(parts) for parts in zip(*held, strict=True)]
        if not self._shuffle:
            return arrays
        order = rng.permutation(len(arrays[0]))
        return [a[order] for a in arrays]

    def _pieces(self, seed: int) -> Generator[list[Array], None, None]:
        """Yields the output of this rank's reader: row groups, or single rows. # each array: (rows, *cell)"""
        left, early_ends = self.plan.rank_rows[self._rank], 0
        reader = self._open(seed, cur_shard=self._rank, shard_count=self._world_size)
        try:
            while left > 0:
                item = _next(reader, self._shards.url)
                if item is None:
                    # NOTE: Petastorm's thread pool checks its queues and its ventilator one after the other. It can
                    # report the end while row groups are still to come. The next call then continues.
                    early_ends += 1
                    if early_ends > _EARLY_ENDS:
                        raise RuntimeError(f"Petastorm left out {left} rows of {self._shards.url} on rank {self._rank}")
                    time.sleep(_EARLY_END_S)
                    continue
                arrays = self._arrays(item, is_batch=reader.batched_output)
                left -= len(arrays[0])
                yield arrays
            if left < 0:
                raise RuntimeError(f"Petastorm gave {-left} rows more than {self._shards.url} has")
        finally:
            reader.stop()
            reader.join()

    def _arrays(self, item: Any, *, is_batch: bool) -> list[Array]:
        arrays = []
        for column in self.columns:
            value = getattr(item, column.name)
            array = np.asarray(value) if is_batch else np.asarray(value)[None]
            if column.codec == "partition" and column.encoding.kind == "number":
                array = array.astype(column.dtype)
            if str(array.dtype) != column.dtype or array.shape[1:] != column.shape:
                raise RuntimeError(
                    f"column {column.name!r} of {self._shards.url}: found cells of {array.dtype}, shape "
                    f"{array.shape[1:]} from Petastorm, expected {column.dtype}, shape {column.shape}; set "
                    "loader.reader to spark_dl, which reads it"
                )
            may_be_bad = self._config.data.nonfinite == "error" and not self._shards.is_checked
            if may_be_bad and first_nonfinite_row(array) is not None:
                raise RuntimeError(f"{nonfinite_as_read(column.name)} (in {self._shards.url})")
            arrays.append(array)
        return arrays

    def _open(self, seed: int, **shard: int) -> Any:
        """Opens `make_batch_reader` if all columns have plain Parquet types, else `make_reader`, which decodes cells.

        Raises ValueError if Petastorm cannot open the dataset.
        """
        is_plain = all(c.codec in ("scalar", "list", "partition") for c in self.columns)
        make = self._petastorm.make_batch_reader if is_plain else self._petastorm.make_reader
        url = f"file://{self._shards.url}" if storage.is_local(self._shards.url) else self._shards.url
        fields, threads = [re.escape(c.name) for c in self.columns], self._config.loader.reader_threads
        try:
            return make(
                url, schema_fields=fields, shuffle_row_groups=self._shuffle, workers_count=threads, seed=seed, **shard
            )
        except Exception as error:  # Petastorm raises many types
            raise ValueError(f"Petastorm cannot open {self._shards.url}: {type(error).__name__}: {error}") from error

    def _dealt_rows(self) -> tuple[int, ...]:
        """Returns the rows of each rank, from the row groups that Petastorm finds, in Petastorm's order."""
        stored = {(s.name, group): rows for s in self._shards.shards for group, rows in enumerate(s.row_groups)}
        load_row_groups = self._petastorm.etl.dataset_metadata.load_row_groups
        reader = self._open(1)
        try:
            found = [(piece.path, piece.row_group) for piece in load_row_groups(reader.dataset)]
        finally:
            reader.stop()
            reader.join()
        root = storage.resolve(self._shards.url)[1].rstrip("/") + "/"
        names = [(path[path.find(root) + len(root) :], group) for path, group in found]
        if sorted(names) != sorted(stored):
            raise ValueError(
                f"{self._shards.url}: found {len(names)} row groups with Petastorm, expected the {len(stored)} of "
                "spark_dl; Petastorm reads whole folders, so remove the other files, or set loader.reader to spark_dl"
            )
        rows = tuple(sum(stored[n] for n in names[rank :: self._world_size]) for rank in range(self._world_size))
        if not all(rows):
            raise ValueError(
                f"{self._shards.url}: found {len(names)} row groups for {self._world_size} ranks, and Petastorm deals "
                "whole row groups, so one rank would have no rows; write smaller row groups "
                "(shards.rows_per_row_group), or use fewer ranks"
            )
        return rows


def _import_petastorm() -> Any:
    try:
        import petastorm.etl.dataset_metadata

        return petastorm
    except (ImportError, AttributeError) as error:  # Petastorm uses names that newer pyarrow versions removed
        raise ValueError(
            f"loader.reader: petastorm cannot be imported here, with pyarrow {pa.__version__} and numpy "
            f"{np.__version__} ({error}); pip install 'pyarrow<15' 'numpy<2' petastorm==0.13.1, or set loader.reader "
            "to spark_dl, which reads the same datasets without it"
        ) from error


def _check_metadata(url: str) -> None:
    """Checks that the metadata has only a plain Unischema, as Petastorm unpickles it. Raises ValueError if not."""
    for name in (COMMON_METADATA, "_metadata"):
        metadata = read_metadata(url, name)
        if UNISCHEMA_KEY in metadata:
            read_unischema(metadata[UNISCHEMA_KEY])


def _next(reader: Any, url: str) -> Any:
    try:
        return next(reader, None)
    except Exception as error:  # Petastorm raises many types
        raise RuntimeError(f"Petastorm cannot read {url}: {type(error).__name__}: {error}") from error


def _batches(windows: Iterator[list[Array]], rows: int) -> Iterator[list[Array]]:
    """Yields the rows of windows in batches of `rows`; the last batch can be shorter. # each array: (rows, *cell)"""
    held: list[Array] | None = None
    for window in windows:
        held = window if held is None else [np.concatenate([h, w]) for h, w in zip(held, window, strict=True)]
        start = 0
        while len(held[0]) - start >= rows:
            yield [a[start : start + rows] for a in held]
            start += rows
        held = [a[start:] for a in held]
    if held is not None and len(held[0]):
        yield held
