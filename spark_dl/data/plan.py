"""The plan: which row is used in which step, by which rank. Pure functions, no input or output.

For a (seed, epoch) there is one order of all rows, whatever the number of ranks:

1. the row groups are permuted and laid end to end;
2. that line of rows is cut into `num_streams` ranges, equal to within one row: the canonical streams;
3. each stream is cut into windows of whole segments and its rows are shuffled inside each window;
4. global batch `t` is the next `global_batch_size / num_streams` rows of every stream.

A rank reads whole streams, so it opens only its own row groups. Only the last global batch of an epoch can be short;
its free places are filled with rows that count with weight 0.

Where the row groups lie in parts, each on the disk of one rank, steps 1 and 2 are taken part by part: a part's line of
rows is cut into its share of the streams. Parts of unequal rows end at different steps; the steps are then those of the
longest stream, and the streams that have ended are filled with weight 0. One part is the case above.
The idea of a sample order that is fixed by a canonical
number of readers is Mosaic Streaming's (`num_canonical_nodes`); the exact row ranges are ours.

NOTE: the permutations come from `numpy.random.Generator.permutation`. NumPy does not promise the same stream of random
numbers across its releases (NEP 19), so a run is resumed bit for bit under the same NumPy.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Split = Literal["all", "train", "validation"]
"""Rows that are read: all, or one side of `data.validation_fraction`."""

FILLER = -1
"""In place of a row group's number: the row that a dataset in parts holds ready for a part without rows."""


@dataclass(frozen=True)
class Segment:
    """Rows [start; stop - 1] of one row group."""

    row_group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Consecutive segments of a stream whose rows are shuffled together."""

    segments: tuple[Segment, ...]
    first: int
    """Position in the stream of the window's first row."""
    seed: tuple[int, ...] | None
    """Seed of the window's order; None keeps the rows as they lie."""

    @cached_property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)

    def order(self) -> Ints:
        """Positions, in the concatenation of the segments, in the order of use. # (rows,)"""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng(self.seed).permutation(self.rows)


@dataclass(frozen=True)
class Stream:
    """A canonical slice of the epoch's order."""

    windows: tuple[Window, ...]
    filler: Segment
    """One row that an empty stream reads in its padded places, with weight 0."""

    @cached_property
    def rows(self) -> int:
        return sum(w.rows for w in self.windows)


@dataclass(frozen=True)
class Plan:
    """The order of the rows of a dataset, for every epoch.

    `group_rows` are the rows of each row group, in the order of the dataset. # (row groups,)
    `window_rows` is the size of the shuffle window over all streams together: each stream has its part of it, and at
    least one segment. `parts` are the numbers of row groups that lie on the disk of each rank; by default all lie in
    one place, which every rank can read. Where rows have unequal sizes, `row_bytes` says the mean size of a row of each
    row group, and a window is as well full with its part of `window_bytes`. # (row groups,)
    """

    group_rows: tuple[int, ...]
    global_batch_size: int
    num_streams: int
    window_rows: int = 65536
    shuffle: bool = True
    seed: int = 0
    parts: tuple[int, ...] = ()
    row_bytes: tuple[float, ...] = ()
    window_bytes: int = 0

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("the dataset has no rows; at least one is needed")
        if self.num_streams < 1 or self.global_batch_size % self.num_streams:
            raise ValueError(
                f"train.global_batch_size={self.global_batch_size} is not a multiple of data.num_streams="
                f"{self.num_streams}: every global batch takes the same number of rows from each stream"
            )

    @cached_property
    def rows(self) -> int:
        return sum(self.group_rows)

    @cached_property
    def steps(self) -> int:
        """Global batches of an epoch, the same for all ranks."""
        return -(-int(self._stream_rows.max()) // self.stream_batch)

    @property
    def stream_batch(self) -> int:
        """Rows that each stream gives to each global batch."""
        return self.global_batch_size // self.num_streams

    def batch_rows(self, step: int) -> int:
        """True rows (those with weight 1) of global batch `step`, over all ranks."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rows_before(self, step: int) -> int:
        """True rows of an epoch's global batches before `step`, over all ranks."""
        return int(np.minimum(self._stream_rows, step * self.stream_batch).sum())

    @cached_property
    def _stream_rows(self) -> Ints:
        """Rows of each stream. # (streams,)"""
        return np.diff(self._bounds)

    @cached_property
    def _bounds(self) -> Ints:
        """Where each stream begins on the line of rows, and where the last one ends. # (streams + 1,)"""
        bounds, first_row, groups = [0], 0, iter(self.group_rows)
        for part, num_groups in enumerate(self._parts):
            rows, streams = sum(itertools.islice(groups, num_groups)), len(self.streams_of_part(part))
            bounds += [first_row + i * rows // streams for i in range(1, streams + 1)]
            first_row += rows
        return np.asarray(bounds, dtype=np.int64)

    @property
    def _parts(self) -> tuple[int, ...]:
        return self.parts or (len(self.group_rows),)

    def streams_of_part(self, part: int) -> range:
        """The streams that the rows of a part make up."""
        return streams_of_rank(self.num_streams, part, len(self._parts))

    def streams(self, epoch: int) -> list[Stream]:
        """The canonical streams of an epoch."""
        groups: Ints = np.arange(len(self.group_rows))
        if self.shuffle:
            groups = np.random.default_rng((self.seed, epoch)).permutation(groups)
        part_of_group = np.repeat(np.arange(len(self._parts)), self._parts)  # (row groups,)
        groups = groups[np.argsort(part_of_group[groups], kind="stable")]  # part by part, shuffled within each
        ends = np.cumsum(np.asarray(self.group_rows, dtype=np.int64)[groups])  # (row groups,)
        starts = ends - np.asarray(self.group_rows, dtype=np.int64)[groups]
        streams: list[Stream] = []
        for part in range(len(self._parts)):
            of_part = self.streams_of_part(part)
            windows = [self._windows(self._segments(groups, starts, ends, s), epoch, s) for s in of_part]
            group = next((w[0].segments[0].row_group for w in windows if w), FILLER)
            filler = Segment(group, 0, 1)
            streams += [Stream(w, filler) for w in windows]
        return streams

    def _segments(self, groups: Ints, starts: Ints, ends: Ints, stream: int) -> list[Segment]:
        """The rows of a stream. `groups` lie end to end, each from `starts` to `ends`. # each (row groups,)"""
        lo, hi = int(self._bounds[stream]), int(self._bounds[stream + 1])
        segments = []
        for g in range(int(np.searchsorted(ends, lo, side="right")), len(groups)):
            if starts[g] >= hi:
                break
            start, stop = max(lo, int(starts[g])), min(hi, int(ends[g]))
            if stop > start:
                segments.append(Segment(int(groups[g]), start - int(starts[g]), stop - int(starts[g])))
        return segments

    def _windows(self, segments: Sequence[Segment], epoch: int, stream: int) -> tuple[Window, ...]:
        target = max(1, self.window_rows // self.num_streams)
        windows: list[Window] = []
        held: list[Segment] = []
        first, rows, size = 0, 0, 0.0
        for i, segment in enumerate(segments):
            held.append(segment)
            rows += segment.rows
            size += segment.rows * self.row_bytes[segment.row_group] if self.row_bytes else 0
            is_full = bool(self.row_bytes) and size >= self.window_bytes / self.num_streams
            if rows >= target or is_full or i == len(segments) - 1:
                seed = (self.seed, epoch, stream, len(windows)) if self.shuffle else None
                windows.append(Window(tuple(held), first, seed))
                first += rows
                held, rows, size = [], 0, 0.0
        return tuple(windows)


def streams_of_rank(num_streams: int, rank: int, world_size: int) -> range:
    """The streams that a rank reads: whole ones, dealt near-equally and in order."""
    if num_streams < world_size:
        raise ValueError(
            f"data.num_streams={num_streams} is less than launch.num_ranks={world_size}: each rank reads at least one "
            "stream; raise data.num_streams (and with it train.global_batch_size, its multiple)"
        )
    return range(rank * num_streams // world_size, (rank + 1) * num_streams // world_size)


def windows_from(stream: Stream, row: int) -> Iterator[tuple[Window, int]]:
    """The windows of a stream that hold its rows from position `row` on, each with the rows of it to skip."""
    for window in stream.windows:
        if window.first + window.rows > row:
            yield window, max(0, row - window.first)


def rows_held_out(group_rows: Sequence[int], fraction: float) -> tuple[int, ...]:
    """How many rows of each row group go to validation: in all `round(fraction * rows)`, spread evenly."""
    rows = sum(group_rows)
    total = round(fraction * rows)
    ends = itertools.accumulate(group_rows)
    cuts = [0, *(end * total // rows for end in ends)]
    return tuple(stop - start for start, stop in itertools.pairwise(cuts))


def check_held_out(rows: int, fraction: float) -> None:
    """Raises ValueError if a fraction of some rows, other than 0, leaves none to validate with, or none to train on."""
    held_out = round(fraction * rows)
    if fraction and not 0 < held_out < rows:
        use, change = ("train on", "lower") if held_out else ("validate with", "raise")
        raise ValueError(
            f"data.validation_fraction={fraction:g} of {rows} rows is {held_out} rows, which leaves none to {use}; "
            f"{change} it, or set it to 0 and pass the validation rows as a dataset of their own"
        )


def split_rows(rows: int, held_out: int, seed: int, row_group: int) -> tuple[Ints, Ints]:
    """Which rows of a row group train and which validate, drawn at random. # (rows - held_out,), (held_out,), sorted"""
    order = np.random.default_rng((seed, row_group, 0x51)).permutation(rows)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
