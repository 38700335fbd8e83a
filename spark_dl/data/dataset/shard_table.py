"""The shards of a dataset as columns, so that a dataset of a hundred thousand files is some arrays, not objects.

The driver reads the manifest once, and checks it. To the ranks go these columns, of which little is left once they are
compressed; no rank parses a manifest. A `Shard` is made of them where one is asked for, such as a file that is opened.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import pyarrow as pa

from spark_dl.data.plan import Ints


@dataclass(frozen=True)
class Shard:
    """One data file."""

    name: str
    row_groups: tuple[int, ...]
    """Rows of each row group."""
    bytes: int
    sha256: str = ""
    """Of the whole file; empty in datasets of others."""
    footer_bytes: int = 0
    """Of the end of the file, from Parquet's footer on; 0 where it is not known."""
    footer_crc32: int = 0
    partition: tuple[tuple[str, str], ...] = ()
    """Column names and values from the names of its folders (hive), in datasets of others."""
    elements: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each ragged column the elements in each row group, over all axes; empty where they are not known."""
    stored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each column of encoded cells (images, say) their bytes in each row group; empty where they are not known."""

    @property
    def rows(self) -> int:
        return sum(self.row_groups)


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


@dataclass(frozen=True, eq=False)
class ShardTable(Sequence[Shard]):
    """The shards of a dataset, in its order."""

    files: pa.RecordBatch
    """What is known of each file, but for its row groups. # (shards,)"""
    first_groups: Ints
    """The first row group of each shard, and at the end their number. # (shards + 1,)"""
    group_rows: Ints
    """Stored rows of each row group of the dataset. # (row groups,)"""
    elements: Mapping[str, Ints]
    """`Shard.elements` by column, -1 where they are not known. # each (row groups,)"""
    stored: Mapping[str, Ints]
    """`Shard.stored` by column, -1 where they are not known. # each (row groups,)"""

    @classmethod
    def of(cls, shards: Iterable[Shard]) -> ShardTable:
        """The table of some shards; one that is a table stays as it is."""
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
        files = self.files if len(numbers) == len(self) else self.files.take(pa.array(numbers, pa.int64()))
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
        """One of the fields of all files."""
        found: list[Any] = self.files.column(name).to_pylist()
        return found

    def place_of(self, group: int) -> tuple[int, int, int]:
        """(Shard, row group of the shard, stored rows) of a row group of the dataset."""
        shard = int(np.searchsorted(self.first_groups, group, side="right")) - 1
        return shard, group - int(self.first_groups[shard]), int(self.group_rows[group])

    def without(self, *, checksums: bool, counts_but_of: Sequence[str]) -> ShardTable:
        """What a rank needs that reads some columns: the counts of these alone, and `checksums` of files or not."""
        files = self.files
        if not checksums:
            columns = [*files.columns[:2], pa.array([""] * len(files), pa.string()), *files.columns[3:]]
            files = pa.RecordBatch.from_arrays(columns, schema=_FILES)
        elements, stored = (
            {name: c for name, c in counts.items() if name in counts_but_of} for counts in (self.elements, self.stored)
        )
        return dataclasses.replace(self, files=files, elements=elements, stored=stored)


def _counted(shards: Sequence[Shard], counts_of: Callable[[Shard], Mapping[str, Sequence[int]]]) -> dict[str, Ints]:
    """Counts of the row groups of all shards, by column."""
    found = {}
    for name in dict.fromkeys(name for s in shards for name in counts_of(s)):
        counts = (counts_of(s).get(name) or (NOT_KNOWN,) * len(s.row_groups) for s in shards)
        found[name] = np.fromiter(itertools.chain.from_iterable(counts), np.int64)
    return found


def known_or_mean(known: Ints | None, bytes_of: Callable[..., Any], rows: Ints) -> Any:
    """The bytes of row groups, by their counts where they are known. # known, rows: (row groups,)"""
    mean = bytes_of(rows)
    return mean if known is None else np.where(known == NOT_KNOWN, mean, bytes_of(rows, known))
