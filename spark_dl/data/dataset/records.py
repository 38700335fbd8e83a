"""`ShardSet`, the description of a dataset, and its shards as columns.

A dataset of 100,000 files is a few arrays, not as many objects. The driver reads and checks the manifest once, and
sends these columns, compressed, to the ranks. A `Shard` is built on access, for example to open a file.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import pyarrow as pa

from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.data.columns.policies import Changes, CleaningRules
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.schema import Column
from spark_dl.data.parquet.filters import Filtered
from spark_dl.data.plan import Ints

_FILES = pa.schema(
    [
        ("name", pa.string()),
        ("bytes", pa.int64()),
        ("sha256", pa.string()),
        ("footer_bytes", pa.int64()),
        ("footer_crc32", pa.int64()),
        ("partition", pa.map_(pa.string(), pa.string())),
    ]
)
NOT_KNOWN = -1


@dataclass(frozen=True)
class Shard:
    """One data file."""

    name: str
    row_groups: tuple[int, ...]
    """Rows of each row group."""
    bytes: int
    sha256: str = ""
    """Checksum of the whole file; empty for external datasets."""
    footer_bytes: int = 0
    """Size of the end of the file, from the Parquet footer; 0 if unknown."""
    footer_crc32: int = 0
    partition: tuple[tuple[str, str], ...] = ()
    """Column names and values of its Hive partition, for external datasets."""
    elements: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Number of elements in each row group, over all axes, by ragged column; empty if unknown."""
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Bytes of encoded cells, such as images, in each row group, by column; empty if unknown."""

    @property
    def rows(self) -> int:
        return sum(self.row_groups)


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[Shard]):
    """The shards of a dataset, in order."""

    files: pa.RecordBatch
    """The fields of each file, except those of its row groups. # (shards,)"""
    first_groups: Ints
    """The first row group of each shard, and the total number of row groups. # (shards + 1,)"""
    group_rows: Ints
    """Stored rows of each row group of the dataset. # (row groups,)"""
    elements: Mapping[str, Ints]
    """`Shard.elements` by column; -1 if unknown. # each (row groups,)"""
    stored: Mapping[str, Ints]
    """`Shard.stored` by column; -1 if unknown. # each (row groups,)"""

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> ShardTable:
        """Returns the table of shards; a table is returned unchanged."""
        if isinstance(shards, ShardTable):
            return shards
        shards = [*shards]
        columns = [pa.array([getattr(s, field.name) for s in shards], field.type) for field in _FILES]
        counts = [len(s.row_groups) for s in shards]
        rows = itertools.chain.from_iterable(s.row_groups for s in shards)
        return cls(
            pa.RecordBatch.from_arrays(columns, schema=_FILES),
            np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            np.fromiter(rows, np.int64, sum(counts)),
            _counted(shards, lambda s: s.elements),
            _counted(shards, lambda s: s.stored),
        )

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, at: int | slice) -> Shard | tuple[Shard, ...]:
        number = range(len(self))[at]
        return tuple(self._made(number)) if isinstance(number, range) else next(self._made(range(number, number + 1)))

    def __iter__(self) -> Iterator[Shard]:
        return self._made(range(len(self)))

    def _made(self, numbers: range) -> Iterator[Shard]:
        files = self.files.slice(numbers.start, len(numbers))
        if numbers.step != 1:
            files = self.files.take(pa.array(numbers, pa.int64()))
        names = [field.name for field in _FILES]
        for number, *values in zip(numbers, *(column.to_pylist() for column in files.columns), strict=True):
            groups = slice(*self.first_groups[number : number + 2].tolist())
            counted = [
                {n: tuple(c[groups].tolist()) for n, c in counts.items() if (c[groups] != NOT_KNOWN).any()}
                for counts in (self.elements, self.stored)
            ]
            file: dict[str, Any] = dict(zip(names, values, strict=True))
            file["partition"] = tuple(file["partition"])
            rows = tuple(self.group_rows[groups].tolist())
            yield Shard(**file, row_groups=rows, elements=counted[0], stored=counted[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def column(self, name: str) -> list[Any]:
        """Returns a field of all files."""
        cells: list[Any] = self.files.column(name).to_pylist()
        return cells

    def name_of(self, shard: int) -> str:
        """Returns the file name of a shard."""
        return str(self.files.column("name")[shard].as_py())

    def partition_of(self, shard: int) -> tuple[tuple[str, str], ...]:
        """Returns column names and values of a shard's Hive partition."""
        return tuple(self.files.column("partition")[shard].as_py())

    def place_of(self, group: int) -> tuple[int, int, int]:
        """Returns (shard, row group in the shard, stored rows) of a row group of the dataset."""
        shard = int(np.searchsorted(self.first_groups, group, side="right")) - 1
        return shard, group - int(self.first_groups[shard]), int(self.group_rows[group])

    def for_columns(self, names: Sequence[str], *, checksums: bool) -> ShardTable:
        """Returns the table with the counts of some columns only, with or without checksums of files."""
        files = self.files
        if not checksums:
            columns = [*files.columns[:2], pa.array([""] * len(files), pa.string()), *files.columns[3:]]
            files = pa.RecordBatch.from_arrays(columns, schema=_FILES)
        elements, stored = (
            {name: c for name, c in counts.items() if name in names} for counts in (self.elements, self.stored)
        )
        return dataclasses.replace(self, files=files, elements=elements, stored=stored)


def _counted(shards: Sequence[Shard], counts_of: Callable[[Shard], Mapping[str, Sequence[int]]]) -> dict[str, Ints]:
    """Returns the counts of the row groups of all shards, by column."""
    by_column = {}
    for name in dict.fromkeys(name for s in shards for name in counts_of(s)):
        counts = (counts_of(s).get(name) or (NOT_KNOWN,) * len(s.row_groups) for s in shards)
        by_column[name] = np.fromiter(itertools.chain.from_iterable(counts), np.int64)
    return by_column


def known_or_mean(known: Ints | None, bytes_of: Callable[..., Any], rows: Ints) -> Any:
    """Returns the bytes of row groups, by their counts if they are known. # known, rows: (row groups,)"""
    mean = bytes_of(rows)
    return mean if known is None else np.where(known == NOT_KNOWN, mean, bytes_of(rows, known))


@dataclass(frozen=True)
class LocalPlacement:
    """The placement of a dataset on the local disks of ranks, for one rank, which can read its own part only."""

    part: int
    """The part of this rank: the number of its barrier task."""
    part_shards: tuple[int, ...]
    """Number of shards of each part, in the order of the dataset."""
    filler: Mapping[str, Array]
    """One row by column, each (*cell,), or (length, *inner) for ragged columns. It pads the batches of ranks without
    rows, with weight 0."""


@dataclass(frozen=True)
class ShardSet:
    """A committed dataset, as described by its manifest."""

    url: str
    columns: tuple[Column, ...]
    shards: ShardTable
    """The data files. The constructor accepts any sequence of `Shard`."""
    changes: Changes = field(default_factory=Changes)
    """Numbers of dropped rows and filled cells, when it was written."""
    rules: CleaningRules | None = None
    """Cleaning rules of writing, or, for an external dataset, of reading; None for datasets of earlier versions."""
    external: bool = False
    """Whether it was not written by spark_dl: nulls, NaN and Inf are then detected when it is read."""
    placement: LocalPlacement | None = None
    """None if all shards are at `url`."""
    run_starts: Array | None = field(default=None, compare=False)
    """For sequences (`data/read/sequences.py`): the first row of each run of consecutive rows. # (runs,) int64"""
    filtered: Filtered | None = None
    """The rows that pass `data.filters`; None if all rows are read."""
    group_weights: Array | None = field(default=None, compare=False)
    """Sums of `data.sampling_weight` of the training rows of each row group; None if they are not known. # (groups,)"""
    digest: Mapping[str, Any] | None = field(default=None, compare=False)
    """Digest of its rows (`data/load/resume_check.py`), on ranks, which do not have all data to compute it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", ShardTable.of(self.shards))

    @property
    def is_checked(self) -> bool:
        """Whether NaN and Inf were detected when it was written, according to `data.nonfinite`.

        True with local storage, as the same run has written the rows.
        """
        was_checked = self.rules is not None and self.rules.nonfinite != "allow"
        return self.placement is not None or (was_checked and not self.external)

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    @property
    def rows(self) -> int:
        return int(self.group_rows.sum())

    @property
    def group_rows(self) -> Ints:
        """Number of rows to read of each row group. # (row groups,)"""
        return self.filtered.group_rows if self.filtered else self.shards.group_rows

    def group_bytes(self, columns: Sequence[Column]) -> Ints:
        """Returns the bytes in memory to read columns of each row group. # (row groups,)

        This is `decoded_bytes`, and for encoded cells, such as images, also their encoded size.
        """
        rows, stored = self.shards.group_rows, np.zeros(len(self.shards.group_rows))
        for column in (c for c in columns if c.is_encoded):
            stored += known_or_mean(self.shards.stored.get(column.name), column.stored_bytes, rows)
        return self.decoded_bytes(columns) + np.ceil(stored).astype(np.int64)

    def decoded_bytes(self, columns: Sequence[Column]) -> Ints:
        """Returns the bytes in memory of decoded columns of each row group. # (row groups,)

        For ragged columns with the counts of each row group, if they are known, or with the mean of all rows.
        """
        rows = self.shards.group_rows
        decoded: Ints = rows * sum(c.value_bytes for c in columns if not c.is_ragged)
        for column in (c for c in columns if c.is_ragged):
            decoded += known_or_mean(self.shards.elements.get(column.name), column.group_bytes, rows)
        return decoded

    @property
    def part_groups(self) -> tuple[int, ...]:
        """Number of row groups of each part; empty without parts."""
        if self.placement is None:
            return ()
        ends = np.cumsum([0, *self.placement.part_shards])
        return tuple(np.diff(self.shards.first_groups[ends]).tolist())

    def select(self, names: Sequence[str]) -> tuple[Column, ...]:
        """Returns the columns of these names. Raises ValueError, with the closest name, for a missing column."""
        by_name = {c.name: c for c in self.columns}
        for name in names:
            if name not in by_name:
                near = suggestion(name, list(by_name))
                raise ValueError(
                    f"no column {name!r} in the dataset {self.url}{near} (data.features, data.label, sequences.*)"
                )
        return tuple(by_name[name] for name in names)


def leaves_out_rows(shards: ShardSet, config: Config) -> bool:
    """Returns whether some rows of a dataset may be skipped, so that its rows must be counted first."""
    return bool(config.data.filters or any(columns_that_drop(shards, config)))


def columns_that_drop(shards: ShardSet, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the columns in which a null drops its row, also inside an array, and those in which NaN or Inf does.

    For external datasets only: spark_dl drops such rows when it writes shards.
    """
    no_nulls: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    if shards.external and config.data.nulls == "drop":
        no_nulls = config.stored_columns
    if shards.external and config.data.nonfinite == "drop":
        finite = tuple(c.name for c in shards.select(config.stored_columns) if np.dtype(c.dtype).kind in "fc")
    return no_nulls, finite
