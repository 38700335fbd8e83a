"""The arena: the rows of all open windows side by side, one array per column, so that a batch is one gather.

It has slots, each for the rows of one window, and a tail for each stream: where what is left of a window does not fill
a batch, it moves to the tail, so that the slot is free before the stream's next window is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spark_dl.data.plan import Ints
from spark_dl.data.schema import Array, Column


class Arena:
    """Memory for `num_slots` windows of at most `slot_rows` rows, and for `num_tails` tails of `tail_rows` rows."""

    def __init__(self, columns: Sequence[Column], *, num_slots: int, slot_rows: int, num_tails: int, tail_rows: int):
        self.num_slots, self.slot_rows, self.tail_rows = num_slots, slot_rows, tail_rows
        rows = num_slots * slot_rows + num_tails * tail_rows
        self._arrays = [np.empty((rows, *c.inner), dtype=c.dtype) for c in columns]

    def slot(self, number: int) -> list[Array]:
        """The memory of a slot, one array per column. # (slot_rows, *cell)"""
        start = self.slot_start(number)
        return [a[start : start + self.slot_rows] for a in self._arrays]

    def slot_start(self, number: int) -> int:
        """Position of a slot's first row."""
        return number * self.slot_rows

    def to_tail(self, number: int, positions: Ints) -> Ints:
        """Copies rows, at most `tail_rows`, to a tail, in this order, and returns where they are now."""
        start = self.num_slots * self.slot_rows + number * self.tail_rows
        for array in self._arrays:
            array[start : start + len(positions)] = array[positions]
        return np.arange(start, start + len(positions))

    def take(self, positions: Ints) -> list[Array]:
        """The rows at some positions, one array per column. # positions: any shape -> (*shape of positions, *cell)"""
        out = [np.empty((*positions.shape, *a.shape[1:]), dtype=a.dtype) for a in self._arrays]
        for array, target in zip(self._arrays, out, strict=True):
            np.take(array, positions, axis=0, out=target, mode="clip")  # with "raise" NumPy would copy twice
        return out
