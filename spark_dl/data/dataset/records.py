"""`ShardSet`, the description of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.policies import Changes, Rules
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.shard_table import ShardTable, known_or_mean
from spark_dl.data.parquet.filters import Filtered
from spark_dl.data.plan import Ints


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
    rules: Rules | None = None
    """Cleaning rules of writing, or, for an external dataset, of reading; None for datasets of earlier versions."""
    external: bool = False
    """Whether it was not written by spark_dl: nulls, NaN and Inf are then detected when it is read."""
    placement: LocalPlacement | None = None
    """None if all shards are at `url`."""
    run_starts: Array | None = field(default=None, compare=False)
    """For sequences (`data/read/sequences.py`): the first row of each run of consecutive rows. # (runs,) int64"""
    filtered: Filtered | None = None
    """The rows that pass `data.filters`; None if all rows are read."""
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
