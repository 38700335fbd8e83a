"""The mini-batches of an epoch that are still to be used, and which trainer has which. Pure.

A mini-batch is a part of a global batch: part p of step t are the rows that the p-th of `num_parts` ranks reads of it.
Each trainer works through a part of its own. One that has come to the end of it takes over the later half of what
another still has before it, so that nobody waits for a slow trainer at the end of an epoch, and every mini-batch is
used once. The halving is that of work stealing over ranges (Blumofe and Leiserson 1999, JACM 46(5), is the theory).
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
    """Steps [start; stop - 1] of a part that are not used yet, and who works on them."""

    part: int
    start: int
    stop: int
    trainer: int | None = None

    @property
    def left(self) -> int:
        return self.stop - self.start


class MiniBatchQueue:
    """What is left of an epoch's mini-batches. `ranges` are (part, first step, end) without gaps or overlaps."""

    def __init__(self, num_parts: int, ranges: Sequence[tuple[int, int, int]]):
        self.num_parts = num_parts
        self._ranges = [_Range(*given) for given in ranges]

    @classmethod
    def whole(cls, num_parts: int, steps: int, start: int = 0) -> MiniBatchQueue:
        """All mini-batches of the steps [start; steps - 1], a part for each of `num_parts` trainers."""
        return cls(num_parts, [(part, start, steps) for part in range(num_parts)])

    def of(self, trainer: int) -> MiniBatch | None:
        """The mini-batch that a trainer is to compute, and has until `finish`; None if there is none for it."""
        found = self._range_of(trainer) or self._free_range(trainer) or self._half_of_another()
        if found is None:
            return None
        found.trainer = trainer
        return MiniBatch(found.part, found.start)

    def finish(self, trainer: int) -> None:
        """The mini-batch that a trainer has is used."""
        found = self._range_of(trainer)
        assert found is not None
        found.start += 1
        if not found.left:
            self._ranges.remove(found)

    @property
    def num_left(self) -> int:
        """Mini-batches that are not used yet."""
        return sum(r.left for r in self._ranges)

    def _range_of(self, trainer: int) -> _Range | None:
        return next((r for r in self._ranges if r.trainer == trainer), None)

    def _free_range(self, trainer: int) -> _Range | None:
        """A range that nobody has: of the trainer's own part, or else the longest one."""
        free = [r for r in self._ranges if r.trainer is None]
        return max(free, key=lambda r: (r.part == trainer, r.left, -r.part), default=None)

    def _half_of_another(self) -> _Range | None:
        """The later half of the longest range; its owner keeps at least the mini-batch that it works on."""
        longest = max(self._ranges, key=lambda r: (r.left, -r.part), default=None)
        if longest is None or longest.left < 2:
            return None
        middle = longest.stop - longest.left // 2
        taken = _Range(longest.part, middle, longest.stop)
        longest.stop = middle
        self._ranges.append(taken)
        return taken

    def to_plain(self) -> dict[str, Any]:
        """What is left, as JSON and checkpoints hold it."""
        return {"num_parts": self.num_parts, "ranges": [[r.part, r.start, r.stop] for r in self._ranges]}


def deal_again(plain: dict[str, Any], num_trainers: int) -> MiniBatchQueue:
    """What was left when a checkpoint was made, for the trainers of now.

    Where all parts stand at the same step, as they do in the synchronous mode, the rest is dealt for `num_trainers`, so
    that these take the same global batches on any number of ranks. Else the parts are those of then.
    """
    ranges = [(part, start, stop) for part, start, stop in plain["ranges"]]
    bounds = {(start, stop) for _, start, stop in ranges}
    if len(bounds) == 1 and len(ranges) == plain["num_parts"]:
        start, stop = bounds.pop()
        return MiniBatchQueue.whole(num_trainers, stop, start)
    return MiniBatchQueue(plain["num_parts"], ranges)
