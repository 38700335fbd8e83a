"""What a dataset is made of: its shards, and the `ShardSet` that says what lies where."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.policies import Changes, Rules
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.schema import Column
from spark_dl.data.parquet.filters import Filtered


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
    shards: tuple[Shard, ...]
    changes: Changes = field(default_factory=Changes)
    """What was dropped and filled when it was written."""
    rules: Rules | None = None
    """By which it was written, or, of others, is read; None in those of ours from before they were kept."""
    foreign: bool = False
    """Whether others wrote it: nulls, NaN and Inf are looked for when it is read."""
    spread: LocalPlacement | None = None
    """None where all shards lie at `url`."""
    run_starts: Array | None = field(default=None, compare=False)
    """For sequences (`data/sequences.py`), once they were looked for: the first row of each run. # (runs,) int64"""
    filtered: Filtered | None = None
    """None where all rows are read."""

    @property
    def is_checked(self) -> bool:
        """Whether NaN and Inf were looked for when it was written, as `data.nonfinite` says.

        What lies on the ranks' own disks was written by the very run that reads it.
        """
        was_checked = self.rules is not None and self.rules.nonfinite != "allow"
        return self.spread is not None or (was_checked and not self.foreign)

    @functools.cached_property
    def rows(self) -> int:
        return sum(self.group_rows)

    @functools.cached_property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each row group that are read."""
        return self.filtered.group_rows if self.filtered else tuple(rows for _, _, rows in self.row_groups)

    @functools.cached_property
    def row_groups(self) -> tuple[tuple[int, int, int], ...]:
        """(shard, row group of the shard, stored rows) of every row group, in the order of the dataset."""
        return tuple((s, g, rows) for s, shard in enumerate(self.shards) for g, rows in enumerate(shard.row_groups))

    def group_bytes(self, columns: Sequence[Column]) -> tuple[int, ...]:
        """Bytes in memory to read some columns of each row group, which is read as a whole. # (row groups,)

        They are those that are decoded (`decoded_bytes`), and of encoded cells (images, say) also what is read of them.
        """
        encoded = [c for c in columns if c.is_encoded]
        return tuple(
            decoded + math.ceil(sum(c.stored_bytes(rows, self._known(s, g, c.name, "stored")) for c in encoded))
            for decoded, (s, g, rows) in zip(self.decoded_bytes(columns), self.row_groups, strict=True)
        )

    def decoded_bytes(self, columns: Sequence[Column]) -> tuple[int, ...]:
        """Bytes in memory of some columns of each row group, decoded. # (row groups,)

        Of ragged columns what is known of each row group counts; else the mean of all rows.
        """
        ragged, fixed = [c for c in columns if c.is_ragged], sum(c.value_bytes for c in columns if not c.is_ragged)
        return tuple(
            math.ceil(rows * fixed + sum(c.group_bytes(rows, self._known(s, g, c.name, "elements")) for c in ragged))
            for s, g, rows in self.row_groups
        )

    def _known(self, shard: int, group: int, name: str, what: Literal["elements", "stored"]) -> int | None:
        counts = getattr(self.shards[shard], what).get(name)
        return counts[group] if counts else None

    @property
    def part_groups(self) -> tuple[int, ...]:
        """Row groups of each part; none where the dataset lies in one place."""
        if self.spread is None:
            return ()
        groups = iter([len(s.row_groups) for s in self.shards])
        return tuple(sum(itertools.islice(groups, n)) for n in self.spread.part_shards)

    def select(self, names: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these names. Raises ValueError for one that is missing, naming the nearest."""
        by_name = {c.name: c for c in self.columns}
        for name in names:
            if name not in by_name:
                near = suggestion(name, list(by_name))
                raise ValueError(
                    f"no column {name!r} in the dataset {self.url}{near} (data.features, data.label, data.sequence_*)"
                )
        return tuple(by_name[name] for name in names)
