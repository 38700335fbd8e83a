"""The plan: the rows of each rank in each step. Pure functions, without input or output.

A seed and an epoch define one order of all rows, which does not depend on the number of ranks:

1. The row groups are permuted and concatenated.
2. The concatenated rows are split into `num_streams` ranges, equal to within one row: the canonical streams.
3. Each stream is split into windows of whole segments, and its rows are shuffled within each window.
4. Global batch `t` has the next `global_batch_size / num_streams` rows of every stream.
5. With `loader.group_by_length`, the rows of each stream in several steps are sorted by length, and the steps get their
   parts in a random order, which is the same for all streams. As the streams are random samples of the rows, the rows
   of a step then have similar lengths on all ranks.

A rank reads whole streams, so it opens only their row groups. Only the last global batch of an epoch can be short. It
is padded with rows of weight 0.

Costs of a rank: arrays with one or two numbers per row group of the whole dataset. All else is for its own streams, and
windows are built when they are needed.

With local storage, the row groups are in parts, each on the disk of one rank. Steps 1 and 2 are then done for each
part, which has its share of the streams. The number of steps is that of the longest stream; shorter streams are padded
with weight 0.

The idea of an order of samples that is fixed by a canonical number of readers is from Mosaic Streaming
(`num_canonical_nodes`). The exact row ranges differ.

NOTE: the permutations are of `numpy.random.Generator.permutation`. NumPy can change its random numbers between releases
(NEP 19), so a resumed run is bitwise equal only with the same NumPy.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Split = Literal["all", "train", "validation"]
"""Rows to read: all, or one side of the split by `train.validation_fraction`."""

FILLER = -1
"""Instead of the number of a row group: the row in `LocalPlacement.filler`, for parts without rows."""


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of one row group."""

    row_group: int
    start: int
    stop: int
    epoch: int = 0
    """The epoch whose draws the rows are among; 0 if all rows are used once."""

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """Consecutive segments of a stream whose rows are shuffled together."""

    segments: tuple[Segment, ...]
    first: int
    """Position of the window's first row in the stream."""
    seed: tuple[int, ...] | None
    """Seed of the window's order; None keeps the order of the dataset."""

    @cached_property
    def rows(self) -> int:
        return sum(s.rows for s in self.segments)

    def order(self) -> Ints:
        """Returns positions in the concatenated segments, in the order of use. # (rows,)"""
        if self.seed is None:
            return np.arange(self.rows)
        return np.random.default_rng(self.seed).permutation(self.rows)


@dataclass(frozen=True, eq=False)
class Windows(Sequence[Window]):
    """The windows of a stream, stored as arrays. Items are built on access."""

    segments: Ints
    """Row group, start and stop of each segment of the stream. # (segments, 3)"""
    ends: Ints
    """Number of segments up to the end of each window. # (windows,)"""
    seed: tuple[int, ...] | None
    """Seed of the stream; each window adds its number. None keeps the order of the dataset."""
    epoch: int = 0
    """`Segment.epoch`."""

    @cached_property
    def row_ends(self) -> Ints:
        """Number of rows of the stream up to the end of each window. # (windows,)"""
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
        seed = None if self.seed is None else (*self.seed, numbers)
        return Window(tuple(Segment(s[0], s[1], s[2], self.epoch) for s in segments), first, seed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @property
    def largest_rows(self) -> int:
        """Rows of the largest window; 0 without windows."""
        return int(np.diff(self.row_ends, prepend=0).max(initial=0))

    def largest_bytes(self, row_bytes: npt.NDArray[np.float64]) -> float:
        """Bytes of the largest window; 0 without windows. row_bytes: bytes per row of each row group # (row groups,)"""
        groups, starts, stops = self.segments.T
        before = np.concatenate([[0.0], np.cumsum((stops - starts) * row_bytes[groups])])
        return float(np.diff(before[self.ends], prepend=0.0).max(initial=0.0))

    def from_row(self, row: int) -> range:
        """Returns the numbers of the windows with rows at or after position `row` of the stream."""
        return range(int(np.searchsorted(self.row_ends, row, side="right")), len(self))


@dataclass(frozen=True)
class Stream:
    """A canonical stream: a range of rows in the order of an epoch."""

    windows: Windows
    filler: Segment
    """The row that pads batches of an empty stream, with weight 0."""

    @property
    def rows(self) -> int:
        return int(self.windows.row_ends[-1]) if self.windows else 0


@dataclass(frozen=True, eq=False)
class Draws:
    """Rows that are drawn by weight. Systematic sampling of a fixed number of rows in each epoch.

    The expected numbers of draws of all rows are laid on a line, one after another, and a comb of teeth at a distance
    of 1, with a random start in each epoch, is laid over it: a row is drawn once for each tooth. The rows of a row
    group are in a random order there, so that neighbors are not drawn together.
    Source: Madow and Madow 1944, "On the theory of systematic sampling", Annals of Mathematical Statistics 15.
    """

    group_weights: npt.NDArray[np.float64]
    """Sum of the weights of each row group. # (row groups,)"""
    rows: int
    """Number of draws of an epoch."""
    seed: int

    @cached_property
    def _ends(self) -> npt.NDArray[np.float64]:
        """Expected draws up to the end of each row group. # (row groups + 1,)"""
        sums = np.concatenate([[0.0], np.cumsum(self.group_weights)])
        ends: npt.NDArray[np.float64] = sums / sums[-1] * self.rows
        ends[sums == sums[-1]] = self.rows  # exactly, also of row groups of weight 0 at the end
        return ends

    def _start(self, epoch: int) -> float:
        return float(np.random.default_rng((self.seed, epoch, 0, 0, 0x5A)).random())

    def group_rows(self, epoch: int) -> Ints:
        """Returns the draws of each row group in an epoch. # (row groups,)"""
        teeth: Ints = np.floor(self._ends + self._start(epoch)).astype(np.int64)
        return teeth[1:] - teeth[:-1]

    def rows_of(self, epoch: int, group: int, weights: npt.NDArray[Any]) -> Ints:
        """Returns the rows of a row group that are drawn in an epoch, sorted, each as often as it is drawn. # (draws,)

        Args:
            weights: of the rows. # (rows,)
        """
        if not len(weights):
            return np.zeros(0, np.int64)
        order = np.random.default_rng((self.seed, epoch, group, 0, 0x5A)).permutation(len(weights))
        first, last = self._ends[group : group + 2]
        sums = np.cumsum(weights[order], dtype=np.float64)
        total = self.group_weights[group]
        ends = first + sums / total * (last - first) if total else np.full(len(sums), first)
        ends[sums == sums[-1]] = last  # exactly the draws of the group, whatever is rounded
        teeth = np.floor(np.concatenate([[first], np.minimum(ends, last)]) + self._start(epoch)).astype(np.int64)
        found: Ints = np.sort(np.repeat(order, np.diff(teeth)))
        return found


@dataclass(frozen=True, eq=False)
class Plan:
    """The order of the rows of a dataset, for all epochs.

    Args:
        group_rows: rows of each row group, in the order of the dataset. # (row groups,)
        window_rows: size of the shuffle window over all streams. Each stream has an equal share of it, and at least one
            segment.
        parts: number of row groups on the disk of each rank, with local storage; by default every rank can read all.
        row_bytes: mean size of a row in each row group, if rows have different sizes. # (row groups,)
        window_bytes: with `row_bytes`, maximum size of the shuffle window over all streams.
        sorts_by_length: whether the rows of several steps are sorted by length.
        draws: the rows that an epoch draws, instead of each row once.
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
    sorts_by_length: bool = False
    draws: Draws | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_rows", np.asarray(self.group_rows, dtype=np.int64))
        if self.rows < 1:
            raise ValueError("the dataset has no rows, expected at least one")
        if self.num_streams < 1 or self.global_batch_size % self.num_streams:
            raise ValueError(
                f"train.global_batch_size={self.global_batch_size} is not a multiple of loader.num_streams="
                f"{self.num_streams}: every global batch has the same number of rows of each stream; change one of them"
            )

    @cached_property
    def rows(self) -> int:
        return int(self.group_rows.sum()) if self.draws is None else self.draws.rows

    @cached_property
    def steps(self) -> int:
        """Number of global batches of an epoch, the same for all ranks."""
        return -(-int(self._stream_rows.max()) // self.stream_batch)

    @property
    def stream_batch(self) -> int:
        """Rows of each stream in each global batch."""
        return self.global_batch_size // self.num_streams

    def batch_rows(self, step: int, epoch: int = 0) -> int:
        """Returns the true rows (with weight 1) of global batch `step`, over all ranks."""
        return self.rows_before(step + 1) - self.rows_before(step)

    def rows_before(self, step: int, epoch: int = 0) -> int:
        """Returns the true rows of the global batches before `step`, over all ranks."""
        return int(np.minimum(self._stream_rows, step * self.stream_batch).sum())

    @cached_property
    def length_steps(self) -> int:
        """Steps whose rows are sorted by length together: a quarter of the shuffle window. 1 if rows are not sorted.

        Half of an epoch at most: otherwise the longest rows of all would be together in every epoch.
        """
        if not self.sorts_by_length:
            return 1
        return max(1, min(self.window_rows // 4 // self.global_batch_size, self.steps // (1 + self.shuffle)))

    def places_by_length(self, epoch: int, first_step: int) -> Ints:
        """Returns the place by length of each of the steps that are sorted together. # (steps,)

        Args:
            first_step: a multiple of `length_steps`.
        """
        steps = min(self.length_steps, self.steps - first_step)
        if not self.shuffle:
            return np.arange(steps)
        return np.random.default_rng((self.seed, epoch, first_step, 0, 0x1E)).permutation(steps)

    @cached_property
    def _stream_rows(self) -> Ints:
        """Rows of each stream. # (streams,)"""
        return np.diff(self._bounds)

    @cached_property
    def _bounds(self) -> Ints:
        """Start of each stream in the concatenated rows, and end of the last one. # (streams + 1,)"""
        bounds = [0]
        part_bounds = np.concatenate([[0], np.cumsum(self._group_rows(0))])[np.cumsum([0, *self._parts])].tolist()
        for part, (first_row, end) in enumerate(itertools.pairwise(part_bounds)):
            streams = len(self.streams_of_part(part))
            bounds += [first_row + i * (end - first_row) // streams for i in range(1, streams + 1)]
        return np.asarray(bounds, dtype=np.int64)

    def _group_rows(self, epoch: int) -> Ints:
        """Returns the rows of each row group that an epoch uses. # (row groups,)"""
        return self.group_rows if self.draws is None else self.draws.group_rows(epoch)

    @property
    def _parts(self) -> tuple[int, ...]:
        return self.parts or (len(self.group_rows),)

    def streams_of_part(self, part: int) -> range:
        """Returns the streams of a part."""
        return streams_of_rank(self.num_streams, part, len(self._parts))

    def streams(self, epoch: int, numbers: range | None = None) -> list[Stream]:
        """Returns the canonical streams of an epoch. numbers: the streams to return, by default all."""
        number = len(self.group_rows)
        groups = np.random.default_rng((self.seed, epoch)).permutation(number) if self.shuffle else np.arange(number)
        if len(self._parts) > 1:
            part_of_group = np.repeat(np.arange(len(self._parts)), self._parts)  # (row groups,)
            groups = groups[np.argsort(part_of_group[groups], kind="stable")]  # part by part, shuffled within each
        rows = self._group_rows(epoch)[groups]  # (row groups,)
        ends = np.cumsum(rows)
        drawn_in = 0 if self.draws is None else epoch
        streams: list[Stream] = []
        for part in range(len(self._parts)):
            filler = self._filler(groups, ends, part, drawn_in)
            for number in self.streams_of_part(part):
                if numbers is None or number in numbers:
                    segments = self._segments(groups, rows, ends, number)
                    seed = (self.seed, epoch, number) if self.shuffle else None
                    windows = Windows(segments, self._window_ends(segments), seed, drawn_in)
                    streams.append(Stream(windows, filler))
        return streams

    def _filler(self, groups: Ints, ends: Ints, part: int, drawn_in: int) -> Segment:
        """Returns the first row of a part. groups, ends: concatenated row groups, their ends. # each (row groups,)"""
        of_part = self.streams_of_part(part)
        first_row, end = self._bounds[of_part.start], self._bounds[of_part.stop]
        at = np.searchsorted(ends, first_row, side="right")
        return Segment(int(groups[at]) if first_row < end else FILLER, 0, 1, drawn_in)

    def _segments(self, groups: Ints, rows: Ints, ends: Ints, stream: int) -> Ints:
        """Returns the rows of a stream, as `Windows.segments`. groups, rows, ends: concatenated row groups."""
        lo, hi = self._bounds[stream], self._bounds[stream + 1]
        overlapping = slice(np.searchsorted(ends, lo, side="right"), np.searchsorted(ends, hi, side="left") + 1)
        starts = ends[overlapping] - rows[overlapping]
        segments = np.stack(
            [groups[overlapping], np.maximum(lo, starts) - starts, np.minimum(hi, ends[overlapping]) - starts], axis=1
        )
        return segments[segments[:, 2] > segments[:, 1]]

    def _window_ends(self, segments: Ints) -> Ints:
        """Returns the number of segments up to the end of each window. # (segments, 3) -> (windows,)"""
        target, max_bytes = max(1, self.window_rows // self.num_streams), math.inf
        segment_rows = segments[:, 2] - segments[:, 1]
        sizes = np.zeros(len(segments))
        if self.row_bytes is not None:
            sizes, max_bytes = segment_rows * self.row_bytes[segments[:, 0]], self.window_bytes / self.num_streams
        ends, rows, size = [], 0, 0.0
        # NOTE: sizes are added one by one, because differences of cumulative sums have other rounding errors.
        for end, (more_rows, more_bytes) in enumerate(zip(segment_rows.tolist(), sizes.tolist(), strict=True), 1):
            rows += more_rows
            size += more_bytes
            if rows >= target or size >= max_bytes or end == len(segments):
                ends.append(end)
                rows, size = 0, 0.0
        return np.asarray(ends, dtype=np.int64)


def streams_of_rank(num_streams: int, rank: int, world_size: int) -> range:
    """Returns the streams of a rank: consecutive, in near-equal numbers. Raises ValueError if there are too few."""
    if num_streams < world_size:
        raise ValueError(
            f"loader.num_streams={num_streams} is less than launch.num_ranks={world_size}: each rank reads at least "
            "one stream; raise loader.num_streams (and train.global_batch_size, which must be a multiple of it)"
        )
    return range(rank * num_streams // world_size, (rank + 1) * num_streams // world_size)


def order_by_length(lengths: Ints, stream_batch: int, places: Ints) -> Ints:
    """Returns the order of rows of a stream in which each step has rows of similar lengths. # (rows,) -> (rows,)

    Rows of the same length keep their order. The last steps may have fewer rows, or none.

    Args:
        places: place of each step by the length of its rows. # (steps,)
    """
    step_of = np.arange(len(lengths)) // stream_batch
    order = np.empty(len(lengths), dtype=np.int64)
    order[np.argsort(places[step_of], kind="stable")] = np.argsort(lengths, kind="stable")
    return order


def windows_from(stream: Stream, row: int) -> Iterator[tuple[Window, int]]:
    """Yields the windows with rows at or after position `row` of a stream, with the number of rows to skip in each."""
    for number in stream.windows.from_row(row):
        window = stream.windows[number]
        yield window, max(0, row - window.first)


def rows_held_out(group_rows: npt.ArrayLike, fraction: float, fold: int | None = None) -> Ints:
    """Returns the number of validation rows of each row group: `round(fraction * rows)` in total, spread evenly.

    Args:
        fold: with a fraction of 1/k, the fold of k folds: the rows at the positions `fold`, `fold + k` and so on.
    """
    ends = np.concatenate([[0], np.cumsum(np.asarray(group_rows, dtype=np.int64))])
    rows, total = int(ends[-1]), round(fraction * int(ends[-1]))
    if fold is not None:
        folds = round(1 / fraction)
        return np.asarray(np.diff((ends - fold + folds - 1) // folds), np.int64)
    if not total:
        return np.zeros(len(ends) - 1, np.int64)
    # Python integers if the product does not fit into 64 bits.
    cuts = ends.astype(np.int64 if rows * total < 2**63 else object) * total // rows
    return np.asarray(np.diff(cuts.astype(np.int64)), np.int64)


def check_held_out(rows: int, fraction: float, fold: int | None = None) -> None:
    """Raises ValueError if a fraction other than 0 leaves no rows for validation, or none for training."""
    held_out = int(rows_held_out([rows], fraction, fold)[0])
    if fraction and not 0 < held_out < rows:
        use, change = ("train on", "lower") if held_out else ("validate with", "raise")
        raise ValueError(
            f"train.validation_fraction={fraction:g} of {rows} rows is {held_out} rows, which leaves none to {use}; "
            f"{change} it, or set it to 0 and pass the validation rows as a separate dataset"
        )


def split_rows(rows: int, held_out: slice, seed: int, row_group: int) -> tuple[Ints, Ints]:
    """Returns the training and the validation rows of a row group, chosen at random.

    Args:
        held_out: the validation rows, in a random order of the rows. # two arrays, both sorted, together (rows,)
    """
    order = np.random.default_rng((seed, row_group, 0x51)).permutation(rows)
    return np.sort(np.delete(order, held_out)), np.sort(order[held_out])
