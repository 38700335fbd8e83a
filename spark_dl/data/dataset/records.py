"""What a dataset is made of: the `ShardSet` that says what is where."""

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
    """How a dataset lies on the disks of the ranks, as one of them sees it: it can read its own part only."""

    part: int
    """This rank's part: the number of its barrier task."""
    part_shards: tuple[int, ...]
    """Shards of each part, in the order of the dataset."""
    filler: Mapping[str, Array]
    """One row by column, each (*cell,), of ragged columns its values, (length, *inner), for places of batches that
    count with weight 0 on a rank without rows."""


@dataclass(frozen=True)
class ShardSet:
    """A committed dataset: what its manifest says."""

    url: str
    columns: tuple[Column, ...]
    shards: ShardTable
    """Made of any sequence of them."""
    changes: Changes = field(default_factory=Changes)
    """What was dropped and filled when it was written."""
    rules: Rules | None = None
    """By which it was written, or, of others, is read; None in those of ours from before they were kept."""
    external: bool = False
    """Whether others wrote it: nulls, NaN and Inf are looked for when it is read."""
    placement: LocalPlacement | None = None
    """None where all shards lie at `url`."""
    run_starts: Array | None = field(default=None, compare=False)
    """For sequences (`data/sequences.py`), once they were looked for: the first row of each run. # (runs,) int64"""
    filtered: Filtered | None = None
    """None where all rows are read."""
    digest: Mapping[str, Any] | None = field(default=None, compare=False)
    """What `same_rows.fingerprint` made of it, where that of which it was made has not come along, as on the ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", ShardTable.of(self.shards))

    @property
    def is_checked(self) -> bool:
        """Whether NaN and Inf were looked for when it was written, as `data.nonfinite` says.

        What lies on the ranks' own disks was written by the very run that reads it.
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
        """Rows of each row group that are read. # (row groups,)"""
        return self.filtered.group_rows if self.filtered else self.shards.group_rows

    def group_bytes(self, columns: Sequence[Column]) -> Ints:
        """Bytes in memory to read some columns of each row group, which is read as a whole. # (row groups,)

        They are those that are decoded (`decoded_bytes`), and of encoded cells (images, say) also what is read of them.
        """
        rows, stored = self.shards.group_rows, np.zeros(len(self.shards.group_rows))
        for column in (c for c in columns if c.is_encoded):
            stored += known_or_mean(self.shards.stored.get(column.name), column.stored_bytes, rows)
        return self.decoded_bytes(columns) + np.ceil(stored).astype(np.int64)

    def decoded_bytes(self, columns: Sequence[Column]) -> Ints:
        """Bytes in memory of some columns of each row group, decoded. # (row groups,)

        Of ragged columns what is known of each row group counts; else the mean of all rows.
        """
        rows = self.shards.group_rows
        decoded: Ints = rows * sum(c.value_bytes for c in columns if not c.is_ragged)
        for column in (c for c in columns if c.is_ragged):
            decoded += known_or_mean(self.shards.elements.get(column.name), column.group_bytes, rows)
        return decoded

    @property
    def part_groups(self) -> tuple[int, ...]:
        """Row groups of each part; none where the dataset lies in one place."""
        if self.placement is None:
            return ()
        ends = np.cumsum([0, *self.placement.part_shards])
        return tuple(np.diff(self.shards.first_groups[ends]).tolist())

    def select(self, names: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these names. Raises ValueError for one that is missing, naming the nearest."""
        by_name = {c.name: c for c in self.columns}
        for name in names:
            if name not in by_name:
                near = suggestion(name, list(by_name))
                raise ValueError(
                    f"no column {name!r} in the dataset {self.url}{near} (data.features, data.label, sequences.*)"
                )
        return tuple(by_name[name] for name in names)
