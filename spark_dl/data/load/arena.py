"""The arena: the rows of all open windows in one array per column, so that a batch is one gather.

A slot has the rows of one window. Each stream also has a tail. If the remaining rows of a window do not fill a batch,
they are copied to the tail. So the slot is free before the stream's next window is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spark_dl.data.columns.ragged import Array, Ragged, concatenate, copy_rows, from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.parquet.buffer_pool import BufferPool
from spark_dl.data.plan import Ints


class Arena:
    """Memory for `num_slots` windows of at most `slot_rows` rows, and for `num_tails` tails of `tail_rows` rows."""

    def __init__(self, columns: Sequence[Column], *, num_slots: int, slot_rows: int, num_tails: int, tail_rows: int):
        self.num_slots, self.slot_rows, self.tail_rows = num_slots, slot_rows, tail_rows
        rows = num_slots * slot_rows + num_tails * tail_rows
        self._columns: list[Array | _Lists] = [
            _Lists(c, num_slots, slot_rows, num_tails, tail_rows)
            if c.is_ragged
            else np.empty((rows, *c.inner), dtype=c.dtype)
            for c in columns
        ]
        self._gathered = [BufferPool() for _ in columns]

    def slot(self, number: int) -> list[Array | list[Ragged]]:
        """The memory of a slot by column: an array, # (slot_rows, *cell), or an empty list for ragged pieces."""
        start = self.slot_start(number)
        return [c.slot(number) if isinstance(c, _Lists) else c[start : start + self.slot_rows] for c in self._columns]

    def clear(self, number: int) -> None:
        """Drops the ragged rows of a slot."""
        for column in self._columns:
            if isinstance(column, _Lists):
                column.slot(number)

    def slot_start(self, number: int) -> int:
        """Returns the position of a slot's first row."""
        return number * self.slot_rows

    def to_tail(self, number: int, positions: Ints) -> Ints:
        """Copies at most `tail_rows` rows to a tail, in this order, and returns their new positions."""
        start = self.num_slots * self.slot_rows + number * self.tail_rows
        for column in self._columns:
            if isinstance(column, _Lists):
                column.to_tail(number, positions)
            else:
                column[start : start + len(positions)] = column[positions]
        return np.arange(start, start + len(positions))

    def take(self, positions: Ints) -> list[Array | list[Ragged]]:
        """Gathers the rows of several steps: one item per column, indexed by step.

        # positions: (steps, rows) -> (steps, rows, *cell)
        """
        out: list[Array | list[Ragged]] = []
        for column, memory in zip(self._columns, self._gathered, strict=True):
            if isinstance(column, _Lists):
                rows = column.take(positions.reshape(-1), memory)
                size = positions.shape[1]
                out.append([rows[k : k + size] for k in range(0, len(rows), size)])
            else:
                target = memory.take((*positions.shape, *column.shape[1:]), column.dtype)
                np.take(column, positions, axis=0, out=target, mode="clip")  # with "raise" NumPy copies twice
                out.append(target)
        return out


class _Lists:
    """A ragged column of the arena: slots and tails are blocks of rows, each with its own values array."""

    def __init__(self, column: Column, num_slots: int, slot_rows: int, num_tails: int, tail_rows: int):
        self._dtype, self._inner = np.dtype(column.dtype), column.inner
        sizes = [slot_rows] * num_slots + [tail_rows] * num_tails
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self._num_slots = num_slots
        self._blocks: list[list[Ragged]] = [[] for _ in sizes]

    def slot(self, number: int) -> list[Ragged]:
        self._blocks[number] = []
        return self._blocks[number]

    def to_tail(self, number: int, positions: Ints) -> None:
        self._blocks[self._num_slots + number] = [self.take(positions, BufferPool())] if len(positions) else []

    def take(self, positions: Ints, memory: BufferPool) -> Ragged:
        """Gathers the rows at some positions into `memory`. # positions: (rows,)"""
        blocks = np.searchsorted(self._ends, positions, side="right")
        lengths, starts = np.empty_like(positions), np.empty_like(positions)
        chosen = {int(number): np.flatnonzero(blocks == number) for number in np.unique(blocks)}
        for number, rows in chosen.items():
            offsets, places = self._block(number).offsets, positions[rows] - self._starts[number]
            starts[rows], lengths[rows] = offsets[places], offsets[places + 1] - offsets[places]
        values = memory.take((int(lengths.sum()), *self._inner), self._dtype)
        found = from_lengths(values, lengths)
        for number, rows in chosen.items():
            copy_rows(self._block(number).values, starts[rows], lengths[rows], values, found.offsets[rows])
        return found

    def _block(self, number: int) -> Ragged:
        if len(self._blocks[number]) > 1:
            joined = concatenate(self._blocks[number])
            assert isinstance(joined, Ragged)
            self._blocks[number] = [joined]
        return self._blocks[number][0]
