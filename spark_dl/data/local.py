"""The rows of a DataFrame on the disks of the ranks' own hosts: no storage that all of them reach is needed.

1. `deal_rows` (driver): Spark deals the rows round-robin to one partition per rank, in an order that the rows decide.
2. `spill` (rank): the rank's barrier task writes the rows that stream in as shards, in bounded memory.
3. `assemble` (rank): the ranks tell each other what they have; each then holds the same dataset, of which it can read
   its own part, and the plan deals streams by parts.

A part's rows differ from another's by at most the number of partitions of the DataFrame, so few places are padded.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import logging
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from spark_dl.config import Config, Data, Launch, Loader, Shards, Train
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.records import LocalPlacement, ShardSet
from spark_dl.data.dataset.shard_table import ShardTable
from spark_dl.data.load import loader as loaders
from spark_dl.data.plan import Segment, Split
from spark_dl.data.read import rows
from spark_dl.data.write.partition import PartitionResult, agreed_columns, with_sizes, write_part
from spark_dl.data.write.shards import select_sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("spark_dl")

_DELETE_WAIT_S = 60.0
_GUARD = "import shutil, sys; sys.stdin.buffer.read(); shutil.rmtree(sys.argv[1])"

Gather = Callable[[str, Any], list[Any]]
"""(name, JSON value) -> the values of all ranks. Collective."""


def deal_rows(
    df: DataFrame, data: Data, layout: Shards, num_ranks: int, reference_columns: Sequence[Column] = ()
) -> tuple[DataFrame, tuple[SourceColumn, ...]]:
    """The DataFrame with one partition per rank, and its columns. Called on the driver; nothing runs yet.

    Spark deals the rows of each partition round-robin, which is repeatable where the DataFrame is, but a rank gets them
    in the order in which shuffled blocks arrive. So each partition is sorted, by a hash of the row: any DataFrame has
    one, and it leaves no trace of the order in which the rows were stored. `like` are columns whose vocabularies serve.
    Raises ValueError for a missing column or a type that cannot become a tensor.
    """
    selected, sources = select_sources(df, data.columns, data, layout, reference_columns)
    order = f"order_{uuid.uuid4().hex}"
    row_hash = f"xxhash64({', '.join(selected.columns)}) AS {order}"
    dealt = selected.repartition(num_ranks).selectExpr("*", row_hash)
    return dealt.sortWithinPartitions(order).drop(order), sources


@dataclass(frozen=True)
class Spilled:
    """What a rank has on its disk."""

    url: str
    sources: tuple[SourceColumn, ...]
    result: PartitionResult


@contextlib.contextmanager
def spill(
    batches: Iterator[pa.RecordBatch],
    sources: tuple[SourceColumn, ...],
    data: Data,
    *,
    layout: Shards,
    task: int,
    folder: str,
) -> Iterator[Spilled]:
    """Writes the rows of a task to a new folder inside `folder`, which is deleted at the end. Called on a rank.

    Bad cells are not raised here but kept in the part, so that all ranks learn of them in `assemble`.
    Raises RuntimeError if the disk cannot be written to.
    """
    with _temporary_folder(folder) as path:
        umask = os.umask(0o077)
        try:
            written = write_part(batches, path, f"part-{task:05d}", sources, data, task, layout=layout)
            if written.error:
                written = dataclasses.replace(written, error=f"{written.error} (as the rows were dealt to the ranks)")
        except OSError as error:
            raise RuntimeError(
                f"cannot spill the rows of task {task} to {path}: {error}; free space there, or name other disks in "
                "spark.local.dir"
            ) from error
        finally:
            os.umask(umask)
        yield Spilled(path, sources, written)


@contextlib.contextmanager
def _temporary_folder(parent: str) -> Iterator[str]:
    """A folder with a name that nobody can foresee, mode 0700, deleted at the end, also if this process is killed.

    A process of its own deletes it: its standard input ends when this process does, however that ends.
    """
    path = tempfile.mkdtemp(prefix="spark_dl-", dir=parent)
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, path],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
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


def assemble(spilled: Spilled, gather: Gather) -> ShardSet:
    """The dataset that all ranks hold together, as this rank sees it. Collective: called on every rank.

    Raises ValueError, the same on all ranks, for bad cells on any of them, cells of unequal shape, and no rows at all.
    """
    found = (PartitionResult.from_plain(p) for p in gather("parts", asdict(spilled.result)))
    parts = sorted(found, key=lambda p: p.partition)
    own = spilled.result.partition
    assert [p.partition for p in parts] == list(range(len(parts)))
    parts[own] = spilled.result  # the files that are opened here are those that were written here
    columns = with_sizes(agreed_columns(spilled.sources, parts), parts)
    row = _first_row(spilled, columns) if spilled.result.shards else None
    if not all(p.shards for p in parts):  # a rank without rows fills its batches with a row of another one
        donor = next(p.partition for p in parts if p.shards)
        offered = gather("filler", _pack(row) if row and donor == own else None)
        row = row or _unpack(next(o for o in offered if o))
    assert row is not None
    return ShardSet(
        spilled.url,
        columns,
        ShardTable.of(s for p in parts for s in p.shards),
        placement=LocalPlacement(
            part=own,
            part_shards=tuple(len(p.shards) for p in parts),
            filler=dict(zip([c.name for c in columns], row, strict=True)),
        ),
    )


def _first_row(spilled: Spilled, columns: tuple[Column, ...]) -> list[Array]:
    """The cells of this rank's first row, of ragged columns their values."""
    out: list[Array | list[Ragged]] = [[] if c.is_ragged else np.empty((1, *c.inner), dtype=c.dtype) for c in columns]
    own = ShardSet(spilled.url, columns, ShardTable.of(spilled.result.shards))
    rows.Rows(own, columns, 0.0, 0, "all").read_into([Segment(0, 0, 1)], out)
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
    """How the rows that stream into ranks are stored and read, for `run_on_dataframe`."""

    data: Data
    shards: Shards = field(default_factory=Shards)
    loader: Loader = field(default_factory=Loader)
    """Order of rows and form of batches; the number of streams is that of the ranks."""
    validation_fraction: float = 0.0


@dataclass(frozen=True)
class RankRows:
    """The rows of a DataFrame that one rank has on its own disk; `run_on_dataframe` gives them to the function.

    Reading is not collective, and all ranks take the same number of steps.
    """

    dataset: ShardSet
    """The rows of all ranks; the files of other ranks lie elsewhere."""
    settings: RowSettings

    @property
    def shards(self) -> ShardSet:
        """This rank's own rows, as Parquet files in a local folder; they are deleted when the function returns."""
        assert self.dataset.placement is not None
        part, counts = self.dataset.placement.part, self.dataset.placement.part_shards
        first = sum(counts[:part])
        own = ShardTable.of(self.dataset.shards[first : first + counts[part]])
        return ShardSet(self.dataset.url, self.dataset.columns, own)

    def loader(self, batch_size: int, *, shuffle: bool = True, seed: int = 0, split: Split = "all") -> loaders.Loader:
        """A loader of batches of `batch_size` rows per rank.

        `for step in loader.epoch(0)` gives `step.micro_batches[0]` (columns and `weight`, 0 where a place is only
        filled) and `step.rows`, the true rows on all ranks together.

        `split` chooses the rows that train or validate where `validation_fraction` splits them.
        """
        assert self.dataset.placement is not None
        num_ranks = len(self.dataset.placement.part_shards)
        config = Config(
            data=self.settings.data,
            loader=dataclasses.replace(self.settings.loader, num_streams=num_ranks),
            train=Train(
                global_batch_size=batch_size * num_ranks,
                seed=seed,
                validation_fraction=self.settings.validation_fraction,
            ),
            launch=Launch(num_ranks=num_ranks),
        )
        own = self.dataset.placement.part
        return loaders.Loader(self.dataset, config, rank=own, world_size=num_ranks, split=split, shuffle=shuffle)

    def batches(
        self, batch_size: int, *, epoch: int = 0, shuffle: bool = True, seed: int = 0
    ) -> Iterator[dict[str, Tensor]]:
        """The batches of one epoch: columns by name, [batch_size, ...], and `weight`, [batch_size] float32.

        Ragged columns come as `loader.ragged` says: padded, with `<name>_mask`, or end to end, with `<name>_offsets`.
        """
        for step in self.loader(batch_size, shuffle=shuffle, seed=seed).epoch(epoch):
            yield step.micro_batches[0]
