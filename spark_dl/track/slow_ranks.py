"""Finds a rank that the others wait for while a run goes on, from the times in its log lines. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_dl.track.time_split import Straggler, TimeSplit, find_stragglers, split_of

FACTOR = 1.5
"""A slow rank is busy for longer than this times the median of the other ranks."""
INTERVALS = 4
"""It is so in this many intervals in a row."""
INTERVAL_S = 0.5
"""Shortest interval. Shorter log lines are added up, as the times of a few milliseconds say nothing."""
SHARE = 0.2
"""Its surplus is more than this share of the time."""


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
