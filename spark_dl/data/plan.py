"""The plan: which row is used in which step, by which rank. Pure functions, no input or output.

For a (seed, epoch) there is one order of all rows, whatever the number of ranks:

1. the row groups are permuted and laid end to end;
2. that line of rows is cut into `num_streams` ranges, equal to within one row: the canonical streams;
3. each stream is cut into windows of whole segments and its rows are shuffled inside each window;
4. global batch `t` is the next `global_batch_size / num_streams` rows of every stream.

A rank reads whole streams, so it opens only its own row groups. Only the last global batch of an epoch can be short;
its free places are filled with rows that count with weight 0.

What a rank pays: of the whole dataset, arrays with a number or two for each row group; the rest for its own streams
alone, and of these a window is made when it is needed.

Where the row groups lie in parts, each on the disk of one rank, steps 1 and 2 are taken part by part: a part's line of
rows is cut into its share of the streams. Parts of unequal rows end at different steps; the steps are then those of the
longest stream, and the streams that have ended are filled with weight 0. One part is the case above.
The idea of a sample order that is fixed by a canonical
number of readers is Mosaic Streaming's (`num_canonical_nodes`); the exact row ranges are ours.

NOTE: the permutations come from `numpy.random.Generator.permutation`. NumPy does not promise the same stream of random
numbers across its releases (NEP 19), so a run is resumed bit for bit under the same NumPy.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Split = Literal["all", "train", "validation"]
"""Rows that are read: all, or one side of `train.validation_fraction`."""

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


@dataclass(frozen=True, eq=False)
class Windows(Sequence[Window]):
    """The windows of a stream, as arrays; an item is made when it is asked for."""

    segments: Ints
    """Row group, start and stop of each segment of the stream. # (segments, 3)"""
    ends: Ints
    """Segments up to the end of each window. # (windows,)"""
    seed: tuple[int, ...] | None
    """Seed of the stream, to which each window adds its number; None keeps the rows as they lie."""

    @cached_property
    def row_ends(self) -> Ints:
        """Rows of the stream up to the end of each window. # (windows,)"""
        return np.cumsum(self.segments[:, 2] - self.segments[:, 1])[self.ends - 1]

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, at: int) -> Window: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Window, ...]: ...
    def __getitem__(self, at: int | slice) -> Window | tuple[Window, ...]:
        numbers = range(len(self))[at]
        if isinstance(numbers, range):
            return tuple(self[i] for i in numbers)
        segments = self.segments[self.ends[numbers - 1] if numbers else 0 : self.ends[numbers]].tolist()
        first = int(self.row_ends[numbers - 1]) if numbers else 0
        return Window(tuple(Segment(*s) for s in segments), first, None if self.seed is None else (*self.seed, numbers))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @property
    def largest_rows(self) -> int:
        """Rows of the largest window; 0 without windows."""
        return int(np.diff(self.row_ends, prepend=0).max(initial=0))

    def largest_bytes(self, row_bytes: npt.NDArray[np.float64]) -> float:
        """Bytes of the largest window, by those of a row of each row group; 0 without windows. # (row groups,)"""
        groups, starts, stops = self.segments.T
        before = np.concatenate([[0.0], np.cumsum((stops - starts) * row_bytes[groups])])
        return float(np.diff(before[self.ends], prepend=0.0).max(initial=0.0))

    def from_row(self, row: int) -> range:
        """The numbers of the windows that hold the rows of the stream from position `row` on."""
        return range(int(np.searchsorted(self.row_ends, row, side="right")), len(self))


@dataclass(frozen=True)
class Stream:
    """A canonical slice of the epoch's order."""

    windows: Windows
    filler: Segment
    """One row that an empty stream reads in its padded places, with weight 0."""

    @property
    def rows(self) -> int:
        return int(self.windows.row_ends[-1]) if self.windows else 0


@dataclass(frozen=True, eq=False)
class Plan:
    """The order of the rows of a dataset, for every epoch.

    `group_rows` are the rows of each row group, in the order of the dataset. # (row groups,)
    `window_rows` is the size of the shuffle window over all streams together: each stream has its part of it, and at
    least one segment. `parts` are the numbers of row groups that lie on the disk of each rank; by default all lie in
    one place, which every rank can read. Where rows have unequal sizes, `row_bytes` says the mean size of a row of each
    row group, and a window is as well full with its part of `window_bytes`. # (row groups,), None where they are equal
    """

    group_rows: Ints
    global_batch_size: int
    num_streams: int
    window_rows: int = 65536
    shuffle: bool = True
    seed: int = 0
    parts: tuple[int, ...] = ()
    row_bytes: npt.NDArray[np.float64] | None = None
    window_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_rows", np.asarray(self.group_rows, dtype=np.int64))
        if self.rows < 1:
            raise ValueError("the dataset has no rows; at least one is needed")
        if self.num_streams < 1 or self.global_batch_size % self.num_streams:
            raise ValueError(
                f"train.global_batch_size={self.global_batch_size} is not a multiple of loader.num_streams="
                f"{self.num_streams}: every global batch takes the same number of rows from each stream"
            )

    @cached_property
    def rows(self) -> int:
        return int(self.group_rows.sum())

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
        bounds = [0]
        line = np.concatenate([[0], np.cumsum(self.group_rows)])[np.cumsum([0, *self._parts])].tolist()
        for part, (first_row, end) in enumerate(itertools.pairwise(line)):
            streams = len(self.streams_of_part(part))
            bounds += [first_row + i * (end - first_row) // streams for i in range(1, streams + 1)]
        return np.asarray(bounds, dtype=np.int64)

    @property
    def _parts(self) -> tuple[int, ...]:
        return self.parts or (len(self.group_rows),)

    def streams_of_part(self, part: int) -> range:
        """The streams that the rows of a part make up."""
        return streams_of_rank(self.num_streams, part, len(self._parts))

    def streams(self, epoch: int, numbers: range | None = None) -> list[Stream]:
        """The canonical streams of an epoch: those of some numbers, such as a rank's, by default all."""
        number = len(self.group_rows)
        groups = np.random.default_rng((self.seed, epoch)).permutation(number) if self.shuffle else np.arange(number)
        if len(self._parts) > 1:
            part_of_group = np.repeat(np.arange(len(self._parts)), self._parts)  # (row groups,)
            groups = groups[np.argsort(part_of_group[groups], kind="stable")]  # part by part, shuffled within each
        ends = self.group_rows[groups]  # (row groups,)
        np.cumsum(ends, out=ends)
        streams: list[Stream] = []
        for part in range(len(self._parts)):
            filler = self._filler(groups, ends, part)
            for number in self.streams_of_part(part):
                if numbers is None or number in numbers:
                    segments = self._segments(groups, ends, number)
                    seed = (self.seed, epoch, number) if self.shuffle else None
                    streams.append(Stream(Windows(segments, self._window_ends(segments), seed), filler))
        return streams

    def _filler(self, groups: Ints, ends: Ints, part: int) -> Segment:
        """The first row of a part. `groups` lie end to end, each up to `ends`. # each (row groups,)"""
        of_part = self.streams_of_part(part)
        first_row, end = self._bounds[of_part.start], self._bounds[of_part.stop]
        at = np.searchsorted(ends, first_row, side="right")
        return Segment(int(groups[at]) if first_row < end else FILLER, 0, 1)

    def _segments(self, groups: Ints, ends: Ints, stream: int) -> Ints:
        """The rows of a stream, as `Windows.segments`. `groups` lie end to end, each up to `ends`."""
        lo, hi = self._bounds[stream], self._bounds[stream + 1]
        own = slice(np.searchsorted(ends, lo, side="right"), np.searchsorted(ends, hi, side="left") + 1)
        starts = ends[own] - self.group_rows[groups[own]]
        found = np.stack([groups[own], np.maximum(lo, starts) - starts, np.minimum(hi, ends[own]) - starts], axis=1)
        return found[found[:, 2] > found[:, 1]]

    def _window_ends(self, segments: Ints) -> Ints:
        """Segments up to the end of each window of a stream. # (segments, 3) -> (windows,)"""
        target, most = max(1, self.window_rows // self.num_streams), math.inf
        segment_rows = segments[:, 2] - segments[:, 1]
        sizes = np.zeros(len(segments))
        if self.row_bytes is not None:
            sizes, most = segment_rows * self.row_bytes[segments[:, 0]], self.window_bytes / self.num_streams
        ends, rows, size = [], 0, 0.0
        # NOTE: sizes are added one after the other, as differences of their sums are rounded otherwise.
        for end, (more_rows, more) in enumerate(zip(segment_rows.tolist(), sizes.tolist(), strict=True), 1):
            rows += more_rows
            size += more
            if rows >= target or size >= most or end == len(segments):
                ends.append(end)
                rows, size = 0, 0.0
        return np.asarray(ends, dtype=np.int64)


def streams_of_rank(num_streams: int, rank: int, world_size: int) -> range:
    """The streams that a rank reads: whole ones, dealt near-equally and in order."""
    if num_streams < world_size:
        raise ValueError(
            f"loader.num_streams={num_streams} is less than launch.num_ranks={world_size}: each rank reads at least "
            "one stream; raise loader.num_streams (and with it train.global_batch_size, its multiple)"
        )
    return range(rank * num_streams // world_size, (rank + 1) * num_streams // world_size)


def windows_from(stream: Stream, row: int) -> Iterator[tuple[Window, int]]:
    """The windows of a stream that hold its rows from position `row` on, each with the rows of it to skip."""
    for number in stream.windows.from_row(row):
        window = stream.windows[number]
        yield window, max(0, row - window.first)


def rows_held_out(group_rows: npt.ArrayLike, fraction: float) -> Ints:
    """How many rows of each row group go to validation: in all `round(fraction * rows)`, spread evenly."""
    ends = np.cumsum(np.asarray(group_rows, dtype=np.int64))
    rows = int(ends[-1]) if len(ends) else 0
    total = round(fraction * rows)
    if not total:
        return np.zeros(len(ends), np.int64)
    # Python's integers where their product passes those of 64 bits.
    cuts = ends.astype(np.int64 if rows * total < 2**63 else object) * total // rows
    before = np.concatenate([[0], cuts.astype(np.int64)])
    return np.asarray(np.diff(before), np.int64)


def check_held_out(rows: int, fraction: float) -> None:
    """Raises ValueError if a fraction of some rows, other than 0, leaves none to validate with, or none to train on."""
    held_out = round(fraction * rows)
    if fraction and not 0 < held_out < rows:
        use, change = ("train on", "lower") if held_out else ("validate with", "raise")
        raise ValueError(
            f"train.validation_fraction={fraction:g} of {rows} rows is {held_out} rows, which leaves none to {use}; "
            f"{change} it, or set it to 0 and pass the validation rows as a dataset of their own"
        )


def split_rows(rows: int, held_out: int, seed: int, row_group: int) -> tuple[Ints, Ints]:
    """Which rows of a row group train and which validate, drawn at random. # (rows - held_out,), (held_out,), sorted"""
    order = np.random.default_rng((seed, row_group, 0x51)).permutation(rows)
    return np.sort(order[held_out:]), np.sort(order[:held_out])
