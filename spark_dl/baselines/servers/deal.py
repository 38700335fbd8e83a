"""Deals the unused mini-batches of an epoch to the trainers. Pure.

A mini-batch is a part of a global batch: part p of step t is the rows that rank p of `num_parts` ranks reads in step t.
Each trainer works through its own part. A trainer at the end of its part takes the later half of another trainer's
remaining range. So no trainer waits for a slow one at the end of an epoch, and every mini-batch is used once. This is
work stealing over ranges (theory: Blumofe and Leiserson 1999, JACM 46(5)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class MiniBatch(NamedTuple):
    """Part `part` of global batch `step` of an epoch."""

    part: int
    step: int


@dataclass
class _Range:
    """Unused steps [start; stop - 1] of a part, and the trainer that works on them."""

    part: int
    start: int
    stop: int
    trainer: int | None = None

    @property
    def left(self) -> int:
        return self.stop - self.start


class MiniBatchQueue:
    """The unused mini-batches of an epoch. `ranges` are (part, first step, end) without gaps or overlaps."""

    def __init__(self, num_parts: int, ranges: Sequence[tuple[int, int, int]]):
        self.num_parts = num_parts
        self._ranges = [_Range(*given) for given in ranges]

    @classmethod
    def whole(cls, num_parts: int, steps: int, start: int = 0) -> MiniBatchQueue:
        """Returns all mini-batches of steps [start; steps - 1], with a part for each of `num_parts` trainers."""
        return cls(num_parts, [(part, start, steps) for part in range(num_parts)])

    def of(self, trainer: int) -> MiniBatch | None:
        """Returns the mini-batch that a trainer must compute, the same until `finish`; None if none is left for it."""
        work = self._range_of(trainer) or self._free_range(trainer) or self._half_of_another()
        if work is None:
            return None
        work.trainer = trainer
        return MiniBatch(work.part, work.start)

    def finish(self, trainer: int) -> None:
        """Marks the trainer's mini-batch as used."""
        work = self._range_of(trainer)
        assert work is not None
        work.start += 1
        if not work.left:
            self._ranges.remove(work)

    @property
    def num_left(self) -> int:
        """Number of unused mini-batches."""
        return sum(r.left for r in self._ranges)

    def _range_of(self, trainer: int) -> _Range | None:
        return next((r for r in self._ranges if r.trainer == trainer), None)

    def _free_range(self, trainer: int) -> _Range | None:
        """Returns a range without a trainer: of the trainer's own part, or else the longest one."""
        free = [r for r in self._ranges if r.trainer is None]
        return max(free, key=lambda r: (r.part == trainer, r.left, -r.part), default=None)

    def _half_of_another(self) -> _Range | None:
        """Splits the longest range and returns its later half. Its trainer keeps at least the current mini-batch."""
        longest = max(self._ranges, key=lambda r: (r.left, -r.part), default=None)
        if longest is None or longest.left < 2:
            return None
        middle = longest.stop - longest.left // 2
        taken = _Range(longest.part, middle, longest.stop)
        longest.stop = middle
        self._ranges.append(taken)
        return taken

    def to_plain(self) -> dict[str, Any]:
        """Returns the unused ranges as plain data for JSON and checkpoints."""
        return {"num_parts": self.num_parts, "ranges": [[r.part, r.start, r.stop] for r in self._ranges]}


def deal_again(plain: dict[str, Any], num_trainers: int) -> MiniBatchQueue:
    """Returns the unused mini-batches of a checkpoint, for the current number of trainers.

    If all parts are at the same step, as in the mode `sync`, the rest is dealt to `num_trainers`. The global batches
    are then the same for any number of ranks. Otherwise the parts are those of the checkpoint.
    """
    ranges = [(part, start, stop) for part, start, stop in plain["ranges"]]
    bounds = {(start, stop) for _, start, stop in ranges}
    if len(bounds) == 1 and len(ranges) == plain["num_parts"]:
        start, stop = bounds.pop()
        return MiniBatchQueue.whole(num_trainers, stop, start)
    return MiniBatchQueue(plain["num_parts"], ranges)
