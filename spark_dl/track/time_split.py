"""Where the ranks of a run spent their time, and which of them the others wait for, also while it goes on.

Pure functions over log lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
PARTS = ("data", "compute", "communication", "wait")
SLOW_FACTOR = 1.25
"""A rank is slow in an interval if it was busy for longer than this times the median of the other ranks."""
LEAST_INTERVALS = 3
"""Fewer slow intervals in a row are no straggler."""
LEAST_SHARE = 0.05
"""A straggler's surplus is more than this share of the time."""
_MANY = 16

FACTOR = 1.5
"""A slow rank is busy for longer than this times the median of the other ranks."""
INTERVALS = 4
"""It is so in this many intervals in a row."""
INTERVAL_S = 0.5
"""Shortest interval. Shorter log lines are added up, as the times of a few milliseconds say nothing."""
SHARE = 0.2
"""Its surplus is more than this share of the time."""


@dataclass(frozen=True)
class TimeSplit:
    """The parts of the time of each rank in each interval. # each [intervals, ranks], seconds"""

    last_steps: list[int]
    """Last step of each interval."""
    seconds: Floats
    """Duration of each interval. # [intervals]"""
    data: Floats
    compute: Floats
    communication: Floats
    wait: Floats

    @property
    def num_ranks(self) -> int:
        return int(self.data.shape[1])

    def totals(self, part: str) -> Floats:
        """Seconds of a part over all intervals. # [ranks]"""
        return np.asarray(getattr(self, part).sum(axis=0))


@dataclass(frozen=True)
class Straggler:
    """A rank that was busy for longer than the others in several intervals in a row."""

    rank: int
    intervals: int
    """Number of slow intervals that are part of a row of at least `LEAST_INTERVALS`."""
    of: int
    """Number of all intervals."""
    first_step: int
    last_step: int
    """Ends of the first and the last slow interval."""
    factor: float
    """Busy time in these intervals, divided by that of the other ranks."""
    data_s: float
    compute_s: float
    """Its surplus over the other ranks in these intervals."""

    @property
    def surplus_s(self) -> float:
        return self.data_s + self.compute_s

    @property
    def cause(self) -> str:
        """The part of its time that was longer: `data`, `compute`, or `data and compute`."""
        share = self.data_s / self.surplus_s
        return "data" if share > 0.75 else "compute" if share < 0.25 else "data and compute"


def split_of(steps: Sequence[Mapping[str, Any]]) -> TimeSplit | None:
    """Returns the time split of the log lines of an attempt; None if it was not measured."""
    rows = [row for line in steps if (row := _row(line)) is not None]
    if not rows:
        return None
    ranks = len(rows[-1][2])
    rows = [row for row in rows if len(row[2]) == ranks]
    data, compute, wait = (np.array([row[i] for row in rows]) for i in (2, 3, 4))
    communication = np.repeat([[row[5]] for row in rows], ranks, axis=1)
    return TimeSplit([row[0] for row in rows], np.array([row[1] for row in rows]), data, compute, communication, wait)


def _row(line: Mapping[str, Any]) -> tuple[int, float, list[float], list[float], list[float], float] | None:
    """Returns step, seconds, data, compute, wait and communication of a line; None if it has not all of them."""
    try:
        data, compute, wait = ([float(s) for s in line["ranks"][f"{part}_s"]] for part in ("data", "compute", "wait"))
        if not len(data) == len(compute) == len(wait) > 0:
            return None
        return int(line["step"]), float(line["seconds"]), data, compute, wait, float(line["communication_s"])
    except (KeyError, TypeError, ValueError):
        return None


def find_stragglers(split: TimeSplit, *, factor: float = SLOW_FACTOR) -> list[Straggler]:
    """Returns the stragglers, those with the largest surplus first.

    Args:
        factor: times the median of the other ranks, from which a rank is slow.
    """
    if split.num_ranks < 2 or len(split.last_steps) < LEAST_INTERVALS:
        return []
    busy = split.data + split.compute
    typical, data, compute = _of_others(busy), _of_others(split.data), _of_others(split.compute)
    stragglers = []
    for rank in range(split.num_ranks):
        slow = _in_a_row(busy[:, rank] > factor * typical[:, rank])
        at = np.flatnonzero(slow)
        if not len(at):
            continue
        straggler = Straggler(
            rank=rank,
            intervals=len(at),
            of=len(slow),
            first_step=split.last_steps[at[0]],
            last_step=split.last_steps[at[-1]],
            factor=float(busy[at, rank].sum() / max(typical[at, rank].sum(), 1e-9)),
            data_s=float((split.data - data)[at, rank].sum()),
            compute_s=float((split.compute - compute)[at, rank].sum()),
        )
        if straggler.surplus_s > LEAST_SHARE * split.seconds.sum():
            stragglers.append(straggler)
    return sorted(stragglers, key=lambda straggler: -straggler.surplus_s)


def _of_others(seconds: Floats) -> Floats:
    """Returns, for each rank, the median of the other ranks; with many ranks that of all ranks. # [intervals, ranks]"""
    ranks = seconds.shape[1]
    if ranks > _MANY:
        return np.broadcast_to(np.median(seconds, axis=1, keepdims=True), seconds.shape)
    return np.column_stack([np.median(np.delete(seconds, rank, axis=1), axis=1) for rank in range(ranks)])


def _in_a_row(slow: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Keeps only what is true at least `LEAST_INTERVALS` times in a row."""
    kept = np.zeros_like(slow)
    start = 0
    for i in range(len(slow) + 1):
        if i == len(slow) or not slow[i]:
            if i - start >= LEAST_INTERVALS:
                kept[start:i] = True
            start = i + 1
    return kept


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for, and its times in the last intervals, beside the median of the other ranks."""

    straggler: Straggler
    seconds: float
    """Duration of the intervals."""
    own: Mapping[str, float]
    """Its `data_s`, `compute_s` and `wait_s`."""
    others: Mapping[str, float]

    def to_event(self, host: str) -> dict[str, Any]:
        """Returns the event of a run, without its time."""
        slow = self.straggler
        about = {"rank": slow.rank, "host": host, "first_step": slow.first_step, "step": slow.last_step}
        return {
            "kind": "straggler", **about, "seconds": self.seconds, "factor": slow.factor, "cause": slow.cause,
            **self.own, "others": dict(self.others),
        }  # fmt: skip

    def describe(self, host: str) -> str:
        """Returns a sentence for the log of the driver."""
        slow, own, others = self.straggler, self.own, self.others
        return (
            f"rank {slow.rank}{f' on {host}' * bool(host)} is slow, and the other ranks wait for it: in the steps "
            f"until {slow.last_step:,} ({self.seconds:.1f} s) it was busy {slow.factor:.1f} times as long as the "
            f"median of the others, because of {slow.cause}. It took {own['data_s']:.1f} s to wait for data, "
            f"{own['compute_s']:.1f} s to compute and {own['wait_s']:.1f} s to wait for other ranks; the others took "
            f"{others['data_s']:.1f} s, {others['compute_s']:.1f} s and {others['wait_s']:.1f} s"
        )


class SlowRanks:
    """Watches the log lines of one attempt. Finds nothing where times are not measured, such as on GPUs."""

    def __init__(self) -> None:
        self._lines = 0
        self._open: list[TimeSplit] = []
        """Lines of an interval that is still too short."""
        self._intervals: deque[TimeSplit] = deque(maxlen=INTERVALS)
        self._known: set[int] = set()
        """Ranks that were slow in the last interval, and have been returned."""

    def put(self, line: Mapping[str, Any]) -> list[SlowRank]:
        """Takes a log line of steps. Returns the ranks that have become slow."""
        self._lines += 1
        split = split_of([line])
        if self._lines == 1 or split is None:  # the first one has preparations
            return []
        self._open.append(split)
        if sum(float(each.seconds.sum()) for each in self._open) < INTERVAL_S:
            return []
        self._intervals.append(_added(self._open))
        self._open = []
        if len(self._intervals) < INTERVALS:
            return []
        window = _joined(list(self._intervals))
        slow = {s.rank: s for s in find_stragglers(window, factor=FACTOR) if _is_clear(s, window)}
        new = [rank for rank in slow if rank not in self._known]
        self._known = set(slow)
        return [_slow_rank(slow[rank], window) for rank in new]


def _is_clear(slow: Straggler, window: TimeSplit) -> bool:
    return slow.intervals == INTERVALS and slow.surplus_s > SHARE * window.seconds.sum()


def _slow_rank(slow: Straggler, window: TimeSplit) -> SlowRank:
    totals = {f"{part}_s": window.totals(part) for part in ("data", "compute", "wait")}
    own = {name: round(float(seconds[slow.rank]), 6) for name, seconds in totals.items()}
    others = {name: round(float(np.median(np.delete(s, slow.rank))), 6) for name, s in totals.items()}
    return SlowRank(slow, round(float(window.seconds.sum()), 6), own, others)


def _added(lines: list[TimeSplit]) -> TimeSplit:
    """Returns lines as one interval."""
    joined = _joined(lines)
    parts = (getattr(joined, name).sum(axis=0, keepdims=True) for name in ("data", "compute", "communication", "wait"))
    return TimeSplit(joined.last_steps[-1:], joined.seconds.sum(keepdims=True), *parts)


def _joined(splits: list[TimeSplit]) -> TimeSplit:
    names = ("seconds", "data", "compute", "communication", "wait")
    steps = [step for split in splits for step in split.last_steps]
    return TimeSplit(steps, *(np.concatenate([getattr(split, name) for split in splits]) for name in names))
