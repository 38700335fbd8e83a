"""Local storage: the rows of a DataFrame on the local disks of the ranks' hosts, without shared storage.

1. `dealt_rows` (driver): Spark distributes the rows round-robin to one partition per rank.
2. `spill` (rank): the rank's barrier task writes its streamed rows as shards, in bounded memory.
3. `Spilled.assemble` (rank): the ranks exchange descriptions of their shards. Each rank then has the same dataset, of
   which it reads its own part, and the plan assigns streams by parts.

The rows of two parts differ by at most the number of partitions of the DataFrame, so there is little padding.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import logging
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from spark_dl.config import Config, Data, Launch, Loader, Shards, Train
from spark_dl.data.columns.ragged import Array, Ragged, check_one_batch
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.records import LocalPlacement, ShardSet, ShardTable
from spark_dl.data.load import loader as loaders
from spark_dl.data.plan import Segment, Split
from spark_dl.data.read import rows
from spark_dl.data.write.partition import PartitionResult, agreed_columns, with_sizes, write_part
from spark_dl.data.write.shards import selected_sources
from spark_dl.storage.owner import temporary_prefix

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("spark_dl")

Gather = Callable[[str, Any], list[Any]]
"""(name, JSON value) -> the values of all ranks. Collective."""

_DELETE_WAIT_S = 60.0
_GUARD = "import shutil, sys; sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1])"


@contextlib.contextmanager
def dealt_rows(
    df: DataFrame, data: Data, layout: Shards, num_ranks: int, reference_columns: Sequence[Column] = ()
) -> Iterator[tuple[DataFrame, tuple[SourceColumn, ...]]]:
    """Yields the DataFrame with one partition per rank, and its columns. Lazy. Called on the driver.

    Round-robin partitioning is deterministic if the DataFrame is, but the order of rows within a partition depends on
    the arrival of shuffle blocks. Therefore each partition is sorted by a hash of the rows, which is independent of the
    order in which they were stored.

    Args:
        reference_columns: columns whose vocabularies are used.

    Raises:
        ValueError: For a missing column or a type that cannot become a tensor.
    """
    with selected_sources(df, data.columns, data, layout, reference_columns) as (selected, sources):
        order = f"order_{uuid.uuid4().hex}"
        row_hash = f"xxhash64({', '.join(selected.columns)}) AS {order}"
        dealt = selected.repartition(num_ranks).selectExpr("*", row_hash)
        yield dealt.sortWithinPartitions(order).drop(order), sources


@dataclass(frozen=True)
class Spilled:
    """The shards of a rank on its local disk."""

    url: str
    sources: tuple[SourceColumn, ...]
    result: PartitionResult

    def assemble(self, gather: Gather) -> ShardSet:
        """Returns the dataset of all ranks, of which this rank can read its own part. Collective: called on every rank.

        Raises the same ValueError on all ranks for invalid cells on any rank, cells of unequal shape, and no rows.
        """
        results = (PartitionResult.from_plain(p) for p in gather("parts", asdict(self.result)))
        parts = sorted(results, key=lambda p: p.partition)
        own = self.result.partition
        assert [p.partition for p in parts] == list(range(len(parts)))
        parts[own] = self.result  # not gathered, to open the files that this rank wrote
        columns = with_sizes(agreed_columns(self.sources, parts), parts)
        row = _first_row(self, columns) if self.result.shards else None
        if not all(p.shards for p in parts):  # ranks without rows pad their batches with a row of another rank
            donor = next(p.partition for p in parts if p.shards)
            offered = gather("filler", _pack(row) if row and donor == own else None)
            row = row or _unpack(next(o for o in offered if o))
        assert row is not None
        return ShardSet(
            self.url,
            columns,
            ShardTable.of(s for p in parts for s in p.shards),
            placement=LocalPlacement(
                part=own,
                part_shards=tuple(len(p.shards) for p in parts),
                filler=dict(zip([c.name for c in columns], row, strict=True)),
            ),
        )


@contextlib.contextmanager
def spill(
    batches: Iterator[pa.RecordBatch],
    sources: tuple[SourceColumn, ...],
    data: Data,
    *,
    layout: Shards,
    task: int,
    folder: str,
    env: Mapping[str, str] | None = None,
) -> Iterator[Spilled]:
    """Writes the rows of a task to a new folder in `folder`, and deletes it after the block. Called on a rank.

    Errors of cells are returned in the result, so that all ranks raise them in `assemble`.

    Args:
        env: environment of the process that deletes it, which must outlive the rank.

    Raises:
        RuntimeError: If the disk is not writable.
    """
    with _temporary_folder(folder, env) as path:
        try:
            written = write_part(batches, path, f"part-{task:05d}", sources, data, task, layout=layout)
            if written.error:
                written = dataclasses.replace(written, error=f"{written.error} (after rows were distributed to ranks)")
        except OSError as error:
            raise RuntimeError(
                f"cannot spill the rows of task {task} to {path}: {error}; free space there, or set spark.local.dir to "
                "other disks"
            ) from error
        yield Spilled(path, sources, written)


@contextlib.contextmanager
def _temporary_folder(parent: str, env: Mapping[str, str] | None) -> Iterator[str]:
    """Creates a folder with a random name and mode 0700. Deletes it after the block, even if this process is killed.

    Another process deletes the folder when its standard input is closed, which happens when this process ends.
    """
    path = tempfile.mkdtemp(prefix=temporary_prefix(), dir=parent)
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, path],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
        env=env,
    )  # fmt: skip
    try:
        yield path
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            if guard.wait(_DELETE_WAIT_S):
                _log.warning("%s could not be deleted", path)
        except subprocess.TimeoutExpired:
            _log.warning("%s is still being deleted after %g s", path, _DELETE_WAIT_S)


def _first_row(spilled: Spilled, columns: tuple[Column, ...]) -> list[Array]:
    """Returns the cells of this rank's first row; for ragged columns their values."""
    out: list[Array | list[Ragged]] = [[] if c.is_ragged else np.empty((1, *c.inner), dtype=c.dtype) for c in columns]
    spilled_shards = ShardSet(spilled.url, columns, ShardTable.of(spilled.result.shards))
    rows.Rows(spilled_shards, columns, 0.0, 0, "all").read_into([Segment(0, 0, 1)], out)
    return [cells[0].own_values if isinstance(cells, list) else cells[0] for cells in out]


def _pack(row: Sequence[Array]) -> list[str]:
    packed = []
    for cell in row:
        out = io.BytesIO()
        np.lib.format.write_array(out, np.asarray(cell), allow_pickle=False)
        packed.append(base64.b64encode(out.getvalue()).decode())
    return packed


def _unpack(row: Sequence[str]) -> list[Array]:
    return [np.lib.format.read_array(io.BytesIO(base64.b64decode(c)), allow_pickle=False) for c in row]


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of streamed rows, for `run_on_dataframe`."""

    data: Data
    shards: Shards = field(default_factory=Shards)
    loader: Loader = field(default_factory=Loader)
    """Order of rows and form of batches. The number of streams is the number of ranks."""
    validation_fraction: float = 0.0

    def rank_rows(self, dataset: ShardSet) -> RankRows:
        """Returns the first argument of the function."""
        return RankRows(dataset, self)


@dataclass(frozen=True)
class RankRows:
    """The rows of a DataFrame on the local disk of one rank: the first argument of the function of `run_on_dataframe`.

    Reading is not collective. All ranks have the same number of steps.
    """

    dataset: ShardSet
    """The dataset of all ranks. Only the files of this rank are on this host's disk."""
    settings: RowSettings

    @property
    def shards(self) -> ShardSet:
        """The rows of this rank, as Parquet files in a local folder, which is deleted when the function returns."""
        assert self.dataset.placement is not None
        part, counts = self.dataset.placement.part, self.dataset.placement.part_shards
        first = sum(counts[:part])
        own = ShardTable.of(self.dataset.shards[first : first + counts[part]])
        return ShardSet(self.dataset.url, self.dataset.columns, own)

    def loader(
        self, batch_size: int, *, shuffle: bool = True, seed: int = 0, split: Split = "all"
    ) -> loaders.ShardLoader:
        """Returns a loader of batches of `batch_size` rows per rank.

        `for step in loader.epoch(0)` yields `step.micro_batches[0]` (columns, and `weight`, 0 for padding) and
        `step.rows`, the number of true rows over all ranks.

        Args:
            split: the rows to read, if `validation_fraction` is set: `all`, `train` or `validation`.
        """
        assert self.dataset.placement is not None
        config, own = self.config(batch_size, seed=seed), self.dataset.placement.part
        return loaders.ShardLoader(
            self.dataset, config, rank=own, world_size=config.launch.num_ranks, split=split, shuffle=shuffle
        )

    def config(self, batch_size: int, *, seed: int = 0) -> Config:
        """Returns the settings of a loader of batches of `batch_size` rows per rank."""
        assert self.dataset.placement is not None
        check_one_batch(self.settings.loader)
        num_ranks = len(self.dataset.placement.part_shards)
        return Config(
            data=self.settings.data,
            loader=dataclasses.replace(self.settings.loader, num_streams=num_ranks),
            train=Train(
                global_batch_size=batch_size * num_ranks,
                seed=seed,
                validation_fraction=self.settings.validation_fraction,
            ),
            launch=Launch(num_ranks=num_ranks),
        )

    def batches(
        self, batch_size: int, *, epoch: int = 0, shuffle: bool = True, seed: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """Yields the batches of one epoch: columns by name, [batch_size, ...], and `weight`, [batch_size] float32.

        Ragged columns have the form of `loader.ragged`: padded, with `<name>_mask`, or concatenated, with
        `<name>_offsets`.
        """
        for step in self.loader(batch_size, shuffle=shuffle, seed=seed).epoch(epoch):
            yield step.micro_batches[0]
