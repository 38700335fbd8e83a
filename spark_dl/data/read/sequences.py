"""Sequences: samples of consecutive rows, across row groups and files, counted before any sample is read.

The rows of a dataset form runs: consecutive rows without a change of `sequences.group` and without a step of
`sequences.order` above `sequences.max_gap`. A sample is `length` rows of one run. The samples of a run begin at its
first row and every `stride` rows after it. Only the starts of the runs are read from the dataset. The rest is
arithmetic, so the plan knows the number of samples in advance, and a rank can find the rows of any sample.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from spark_dl.config import Config, Sequences
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.plan import Draws, Ints, Segment, Split
from spark_dl.data.read.rows import Limits, Rows
from spark_dl.data.read.shard_file import CurrentReads

if TYPE_CHECKING:
    from spark_dl.data.store.cache import DiskCache

_log = logging.getLogger("spark_dl")
_ROUNDING = 1e-9
"""How much a step of a floating-point order may exceed `max_gap`, relative to it: such numbers are often rounded."""

_READERS = 4
_AT_ONCE = 1024
"""Row groups that are submitted to the readers at once: each takes memory, and there can be millions."""
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class SequenceIndex:
    """The samples of a dataset, numbered in the order of its rows. Pure arithmetic, on the driver and on workers."""

    run_starts: Ints
    """The first row of each run, in the order of the dataset. # (runs,)"""
    rows: int
    length: int
    stride: int

    @property
    def samples(self) -> int:
        return int(self._ends[-1])

    @property
    def longest_run(self) -> int:
        """Rows of the longest run."""
        return int(self._run_rows.max())

    def samples_before(self, rows: Ints) -> Ints:
        """Returns the number of samples that begin before each row. # (n,) -> (n,)"""
        run = np.searchsorted(self.run_starts, rows, side="right") - 1
        before_in_run: Ints = -((self.run_starts[run] - rows) // self.stride)
        before: Ints = self._ends[run] - np.maximum(0, self._counts[run] - before_in_run)
        return before

    def first_rows(self, samples: Ints) -> Ints:
        """Returns the first row of each sample. # (n,) -> (n,)"""
        run = np.searchsorted(self._ends, samples, side="right")
        first: Ints = self.run_starts[run] + (samples - self._ends[run] + self._counts[run]) * self.stride
        return first

    @cached_property
    def _run_rows(self) -> Ints:
        return np.diff(self.run_starts, append=self.rows)

    @cached_property
    def _counts(self) -> Ints:
        """Samples of each run. # (runs,)"""
        return np.maximum(0, (self._run_rows - self.length) // self.stride + 1)

    @cached_property
    def _ends(self) -> Ints:
        """Samples up to the end of each run. # (runs,)"""
        return np.cumsum(self._counts)


class SequenceRows:
    """The samples of a dataset, with the interface of `Rows`. Any number of threads may read.

    Pieces replace row groups. A piece is the samples that begin in one row group. Large pieces are cut, as a row can be
    in many samples.
    """

    def __init__(self, rows: Rows, sequences: SequenceIndex):
        self._rows, self._sequences = rows, sequences
        self.columns = tuple(dataclasses.replace(c, shape=(sequences.length, *c.shape)) for c in rows.columns)
        self._group_ends = np.cumsum(rows.group_rows)
        self._bounds = self._cut(max(1, _PIECE_BYTES // max(1, sum(c.value_bytes for c in self.columns))))
        self.group_rows: Ints = np.diff(self._bounds)

    @property
    def reads(self) -> CurrentReads:
        """The row groups that threads read now."""
        return self._rows.reads

    def _cut(self, size: int) -> Ints:
        """Returns the first sample of each piece, of about `size` samples at most, and the end of the last piece."""
        ends = self._sequences.samples_before(self._group_ends)
        samples = np.diff(ends, prepend=0)  # (row groups,), as `parts`
        parts = -(-samples // size)
        group = np.repeat(np.arange(len(parts)), parts)  # (pieces,)
        number = np.arange(1, len(group) + 1) - (np.cumsum(parts) - parts)[group]  # within its row group, from 1
        bounds: Ints = (ends - samples)[group] + samples[group] * number // parts[group]
        return np.concatenate([[0], bounds])

    def read_into(self, segments: Sequence[Segment], out: Sequence[Array | list[Ragged]]) -> None:
        """Writes the samples of segments one after another into arrays. # out: (>= samples, length, *cell)

        Raises as `Rows.read_into` does.
        """
        done, length = 0, self._sequences.length
        for segment in segments:
            samples = int(self._bounds[segment.row_group]) + np.arange(segment.start, segment.stop)
            starts = self._sequences.first_rows(samples)
            first, stop = int(starts[0]), int(starts[-1]) + length
            rows: list[Array] = [np.empty((stop - first, *c.inner), dtype=c.dtype) for c in self._rows.columns]
            self._rows.read_into(self._segments(first, stop), rows)
            places = (starts - first)[:, None] + np.arange(length)  # (samples, length)
            for array, target in zip(rows, out, strict=True):
                assert not isinstance(target, list)
                np.take(array, places, axis=0, out=target[done : done + segment.rows], mode="clip")
            done += segment.rows

    def first_rows(self, samples: Ints) -> Ints:
        """Returns the row group and the row in it where samples begin. # (n, 2): piece, sample in it -> (n, 2)"""
        first = self._sequences.first_rows(self._bounds[samples[:, 0]] + samples[:, 1])
        group = np.searchsorted(self._group_ends, first, side="right")
        return np.stack([group, first - self._group_ends[group] + self._rows.group_rows[group]], axis=1)

    def end_thread(self) -> None:
        """Releases resources of this thread, as `Rows.end_thread`."""
        self._rows.end_thread()

    def _segments(self, first: int, stop: int) -> list[Segment]:
        """Returns rows [first; stop - 1] of the dataset as segments of row groups."""
        segments, group = [], int(np.searchsorted(self._group_ends, first, side="right"))
        while first < stop:
            end = int(self._group_ends[group])
            start, until = end - int(self._rows.group_rows[group]), min(stop, end)
            if first < until:
                segments.append(Segment(group, first - start, until - start))
                first = until
            group += 1
        return segments


def build_rows(
    shards: ShardSet, columns: Sequence[Column], config: Config, split: Split, cache: DiskCache | None, limits: Limits,
    *, draws: Draws | None = None,
) -> Rows | SequenceRows:  # fmt: skip
    """Returns the rows of a dataset, or its samples with `sequences`, for a loader. Called on a worker."""
    data, sequences = config.data, config.sequences
    rows = Rows(
        shards, columns, config.train.validation_fraction, config.train.seed, split,
        fold=config.train.validation_fold, cache=cache, nonfinite=data.nonfinite, fill=data.fill, limits=limits,
        draws=draws, drawn_by=data.sampling_weight,
    )  # fmt: skip
    if sequences is None:
        return rows
    starts = with_runs(shards, sequences, data.columns).run_starts
    assert starts is not None
    return SequenceRows(rows, SequenceIndex(starts, shards.rows, sequences.length, sequences.stride))


def with_runs(shards: ShardSet, sequences: Sequences | None, names: Sequence[str]) -> ShardSet:
    """Returns the dataset with the starts of its runs; unchanged without `sequences`, or if they are known.

    Called on the driver, or by a loader if the driver did not. Only the columns of order and group are read.

    Raises ValueError for rows that are not in order, for ragged columns, for columns without an order, and if no run is
    long enough for a sample. # names: the columns to read
    """
    if sequences is None or shards.run_starts is not None:
        return shards
    if ragged := [c.name for c in shards.select(names) if c.is_ragged]:
        raise ValueError(
            f"sequences.length: column {ragged[0]!r} is ragged, expected columns with cells of one shape; remove it "
            "from data.features, or write it with one shape"
        )
    starts = _find_runs(shards, sequences) if sequences.columns else np.zeros(1, dtype=np.int64)
    index = SequenceIndex(starts, shards.rows, sequences.length, sequences.stride)
    if not index.samples:
        raise ValueError(
            f"sequences.length={sequences.length}: {shards.url} has no sequence of this length; its {shards.rows} rows "
            f"form {len(starts)} segments, and the longest has {index.longest_run} rows; lower sequences.length, or "
            "raise sequences.max_gap (sequences.group and sequences.max_gap end a segment; rows of a group must be "
            "consecutive)"
        )
    _log.info(
        "sequences: the %d rows of %s are %d segments, of up to %d rows, and give %d samples of %d rows",
        shards.rows, shards.url, len(starts), index.longest_run, index.samples, sequences.length,
    )  # fmt: skip
    return dataclasses.replace(shards, run_starts=starts)


@dataclass(frozen=True)
class _Scan:
    """The run starts in a row group, without its first row, which depends on the row before it."""

    starts: Ints
    first: list[Array]
    """The cells of the first row, one per column. # each (1,)"""
    last: list[Array]
    """The cells of the last row, one per column. # each (1,)"""


def _find_runs(shards: ShardSet, sequences: Sequences) -> Ints:
    """Returns the first row of each run. # (runs,)"""
    columns = shards.select(sequences.columns)
    for column in columns:
        is_number = column.shape == () and (column.dtype != "bool" or column.name == sequences.group)
        if not is_number:
            raise ValueError(
                f"sequences.order, sequences.group: expected columns of one number per row, found column "
                f"{column.name!r} of dtype {column.dtype} and shape {column.shape}"
            )
        if column.name == sequences.group and column.encoding.kind == "hash":
            raise ValueError(
                f"sequences.group: column {column.name!r} is encoded as one of {column.encoding.buckets} hash buckets, "
                f"which different groups share; {_way_to_group(column.name)}"
            )
    last = columns[-1].encoding
    has_unknown = bool(sequences.group) and last.vocabulary is not None and last.unknown == "zero"
    breaks = functools.partial(_breaks, shards, sequences, has_unknown)
    rows = Rows(shards, columns, 0.0, 0, "all")

    def scan(number: int) -> _Scan:
        count = int(rows.group_rows[number])
        cells: list[Array] = [np.empty(count, dtype=c.dtype) for c in columns]
        rows.read_into([Segment(number, 0, count)], cells)
        starts = breaks(cells, number, 0)
        return _Scan(starts, [c[:1] for c in cells], [c[-1:] for c in cells])

    runs, first_row, before = [np.zeros(1, dtype=np.int64)], 0, None
    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="spark_dl sequences")
    try:
        groups = np.flatnonzero(rows.group_rows).tolist()
        for some in (groups[i : i + _AT_ONCE] for i in range(0, len(groups), _AT_ONCE)):
            for number, group in zip(some, pool.map(scan, some), strict=True):
                if before is not None:
                    border = [np.concatenate(pair) for pair in zip(before.last, group.first, strict=True)]
                    runs.append(breaks(border, number, -1) + (first_row - 1))
                runs.append(group.starts + first_row)
                first_row, before = first_row + int(rows.group_rows[number]), group
    finally:
        pool.shutdown(cancel_futures=True)
    return np.concatenate(runs)


def _breaks(
    shards: ShardSet, sequences: Sequences, has_unknown: bool, cells: Sequence[Array], number: int, first: int
) -> Ints:
    """Returns the rows that begin a run, without the first row. # each (rows,) -> (breaks,)

    Args:
        has_unknown: whether the group has the number 0 for all words that its vocabulary lacks.

    Raises:
        ValueError: If the order decreases, and for groups that cannot be told apart. For its message, the first row is
            row `first` of row group `number`.
    """
    order = cells[0] if sequences.order else None
    is_new = np.zeros(max(0, len(cells[0]) - 1), dtype=bool)
    if sequences.group:
        groups = cells[-1]
        is_new |= groups[1:] != groups[:-1]
        if has_unknown:
            _check_known(shards, sequences.group, groups, number, first)
    if order is not None:
        back = ~(order[1:] >= order[:-1]) & ~is_new
        if back.any():
            raise _order_error(shards, sequences, order, int(np.argmax(back)), number, first)
        if sequences.max_gap is not None:
            is_new |= _steps(order) > sequences.max_gap * (1 + _ROUNDING * (order.dtype.kind == "f"))
    return np.flatnonzero(is_new) + 1


def _check_known(shards: ShardSet, name: str, groups: Array, number: int, first: int) -> None:
    """Raises ValueError for consecutive rows whose group is not in the vocabulary: they can be of two groups."""
    unknown = (groups[1:] == 0) & (groups[:-1] == 0)
    if unknown.any():
        shard, group, _ = shards.shards.place_of(number)
        at = int(np.argmax(unknown))
        raise ValueError(
            f"sequences.group: column {name!r} has words that are not in its vocabulary, which all have the number 0, "
            f"so that groups cannot be told apart: in rows {first + at} and {first + at + 1} of row group {group} of "
            f"{shards.shards.name_of(shard)} in {shards.url}; {_way_to_group(name)}"
        )


def _way_to_group(name: str) -> str:
    return (
        f"group by a number that is not encoded, such as that of df.withColumn('{name}_id', F.xxhash64('{name}')), "
        f"with sequences.group: {name}_id"
    )


def _steps(order: Array) -> Array:
    """Returns the differences of consecutive rows in ascending order. uint64 has room for the whole range of int64.

    Of floating-point numbers, less one rounding error: 0.3 - 0.2 is more than 0.1.
    """
    if order.dtype.kind in "iu":
        return np.diff(order.astype(np.uint64))
    errors = np.spacing(np.maximum(np.abs(order[1:]), np.abs(order[:-1]))).astype(np.float64)
    return np.diff(order.astype(np.float64)) - np.where(np.isfinite(errors), errors, 0.0)


def _order_error(shards: ShardSet, sequences: Sequences, order: Array, at: int, number: int, first: int) -> ValueError:
    shard, group, _ = shards.shards.place_of(number)
    keys = [repr(name) for name in (sequences.group, sequences.order) if name]
    within = f" within one {sequences.group!r}" if sequences.group else ""
    return ValueError(
        f"sequences.order: column {sequences.order!r} goes from {order[at]} to {order[at + 1]}{within} in row "
        f"{first + at + 1} of row group {group} of {shards.shards.name_of(shard)} in {shards.url}; expected rows in "
        f"order: sort the DataFrame before it is written, df.orderBy({', '.join(keys)})"
    )
