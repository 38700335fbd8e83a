"""Reads the windows of a rank's streams into an arena, in the order of use, in threads.

The arena has the rows of all open windows in one array per column, so that a batch is one gather. A slot has the rows
of one window. Each stream also has a tail. If the remaining rows of a window do not fill a batch, they are copied to
the tail. So the slot is free before the stream's next window is needed.
"""

from __future__ import annotations

import atexit
import heapq
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from spark_dl.data.columns.ragged import Array, Ragged, concatenate, copy_rows, from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.parquet.buffers import BufferPool
from spark_dl.data.plan import Ints, Stream, Window, windows_from
from spark_dl.data.read.rows import Rows
from spark_dl.data.read.sequences import SequenceRows

_EXIT_WAIT_S = 5.0
_STALLED_WAIT_S = 0.1
"""How long threads are waited for that may never come back from the storage."""
_READERS: weakref.WeakSet[WindowReader] = weakref.WeakSet()


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

    def lengths(self, positions: Ints) -> Ints:
        """Returns the length of the longest ragged cell of each row. # (rows,) -> (rows,)"""
        lengths = np.zeros(len(positions), dtype=np.int64)
        for column in self._columns:
            if isinstance(column, _Lists):
                np.maximum(lengths, column.places(positions)[1], out=lengths)
        return lengths

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
        starts, lengths, chosen = self.places(positions)
        values = memory.take((int(lengths.sum()), *self._inner), self._dtype)
        taken = from_lengths(values, lengths)
        for number, rows in chosen.items():
            copy_rows(self._block(number).values, starts[rows], lengths[rows], values, taken.offsets[rows])
        return taken

    def places(self, positions: Ints) -> tuple[Ints, Ints, dict[int, Ints]]:
        """Returns where the rows at some positions are: the start of each in the values of its block, its length, and
        which of the positions are in which block. # positions: (rows,)
        """
        blocks = np.searchsorted(self._ends, positions, side="right")
        lengths, starts = np.empty_like(positions), np.empty_like(positions)
        chosen = {int(number): np.flatnonzero(blocks == number) for number in np.unique(blocks)}
        for number, rows in chosen.items():
            offsets, places = self._block(number).offsets, positions[rows] - self._starts[number]
            starts[rows], lengths[rows] = offsets[places], offsets[places + 1] - offsets[places]
        return starts, lengths, chosen

    def _block(self, number: int) -> Ragged:
        if len(self._blocks[number]) > 1:
            joined = concatenate(self._blocks[number])
            assert isinstance(joined, Ragged)
            self._blocks[number] = [joined]
        return self._blocks[number][0]


@dataclass(frozen=True)
class Read:
    """A window that a stream uses from step `step` on, without the first `skip` rows of its order."""

    step: int
    stream: int
    """Index of the stream among the rank's streams."""
    window: Window
    skip: int


@dataclass(frozen=True)
class ReadSchedule:
    """The windows that streams use from a step on. They are made one by one, as an epoch can have millions."""

    streams: Sequence[Stream]
    batch: int
    """Rows of each stream in each global batch."""
    start_step: int

    @property
    def num_reads(self) -> tuple[int, ...]:
        """Number of windows of each stream."""
        return tuple(max(1, len(s.windows.from_row(self.start_step * self.batch))) for s in self.streams)

    def reads(self) -> Iterator[Read]:
        """Yields the windows of all streams in the order of use."""
        by_stream = [self._reads_of(i, stream) for i, stream in enumerate(self.streams)]
        return heapq.merge(*by_stream, key=lambda read: (read.step, read.stream))

    def _reads_of(self, number: int, stream: Stream) -> Iterator[Read]:
        """Yields a stream's windows. A stream without rows left has its last window, all skipped: its last row pads."""
        has_rows = False
        for window, skip in windows_from(stream, self.start_step * self.batch):
            has_rows = True
            yield Read(max(self.start_step, (window.first + skip) // self.batch), number, window, skip)
        if not has_rows:
            last = stream.windows[-1] if stream.windows else Window((stream.filler,), 0, None)
            yield Read(max(self.start_step, (last.first + last.rows) // self.batch), number, last, last.rows)


@atexit.register
def _end_readers() -> None:
    """Ends all threads: one that returns from C++ after the interpreter has ended can hang the process at exit."""
    for reader in [*_READERS]:
        reader.end(_EXIT_WAIT_S)


class WindowReader:
    """Threads that read windows into free slots of the arena, in the order of use.

    There is no deadlock. Each stream needs one window at a time, and the arena has a slot for each stream. So the next
    window has a slot, or a stream will free one. Additional slots are used as long as windows of the largest size read
    so far fit into `memory`: some footers do not give the size of a window.

    A wait for a window of more than `wait_s` seconds is an error; None waits forever.
    """

    def __init__(
        self,
        rows: Rows | SequenceRows,
        schedule: ReadSchedule,
        arena: Arena,
        threads: int,
        memory: float,
        *,
        wait_s: float | None = None,
    ):
        self._rows, self._arena, self._wait_s, self._is_stalled = rows, arena, wait_s, False
        self._memory, self._largest = memory, 0
        self._lock = threading.Lock()
        """Guards `_largest`, which all threads update."""
        self._pending = schedule.reads()
        self._next = next(self._pending, None)
        self._free = list(range(arena.num_slots))
        self._left = [*schedule.num_reads]
        self._coming: list[deque[tuple[Read, int, Future[None]]]] = [deque() for _ in self._left]
        self._asked: queue.SimpleQueue[tuple[Window, int, Future[None]] | None] = queue.SimpleQueue()
        self._has_ended = False
        self._threads: list[threading.Thread] = []
        _READERS.add(self)
        try:
            for i in range(threads):
                thread = threading.Thread(target=self._work, name=f"spark_dl reader {i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # a thread cannot be started
            self.close()
            raise
        self._submit()

    def has_more(self, stream: int) -> bool:
        """Whether the stream has windows left."""
        return self._left[stream] > 0

    def next(self, stream: int) -> tuple[Read, int]:
        """Waits for the next window of a stream, and returns it with its slot.

        Raises the errors of `Rows.read_into`, and RuntimeError if the window does not come in time.
        """
        read, slot, done = self._coming[stream].popleft()
        try:
            if not wait([done], self._wait_s).done:
                self._is_stalled = True
                reads = self._rows.reads.longest() or "none of its row groups"
                raise RuntimeError(
                    f"the storage gives no rows: a thread has read {reads}, more than launch.collective_timeout_s="
                    f"{self._wait_s:g} s; look at the storage and its mount on this host, or raise the limit"
                )
            done.result()
        finally:
            del done  # its traceback refers to this frame
        self._left[stream] -= 1
        return read, slot

    def free(self, slot: int) -> None:
        """Gives back a slot whose rows are not needed any more."""
        self._arena.clear(slot)
        self._free.append(slot)
        self._submit()

    def end(self, timeout_s: float | None = None) -> None:
        """Ends the threads after their current window, and waits up to `timeout_s` for each; None waits forever."""
        self._has_ended = True
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def close(self) -> None:
        """Ends the threads, and drops their results: the traceback of an error refers to this reader."""
        self.end(_STALLED_WAIT_S if self._is_stalled else None)
        self._coming.clear()

    def _submit(self) -> None:
        while self._free and self._next is not None:
            used = self._arena.num_slots - len(self._free)
            if used >= len(self._coming) and (used + 1) * self._largest > self._memory:
                break
            read, slot = self._next, self._free.pop()
            self._next = next(self._pending, None)
            done: Future[None] = Future()
            self._coming[read.stream].append((read, slot, done))
            self._asked.put((read.window, slot, done))

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None and not self._has_ended:
            self._answer(*asked)
            del asked  # releases the window while this thread waits for the next one
        self._rows.end_thread()

    def _answer(self, window: Window, slot: int, done: Future[None]) -> None:
        try:
            self._read_into(window, self._arena.slot(slot))
        except BaseException as error:  # raised again in the thread that waits for the window
            done.set_exception(error)
            del self, done  # the traceback refers to this frame
        else:
            done.set_result(None)

    def _read_into(self, window: Window, out: Sequence[Array | list[Ragged]]) -> None:
        self._rows.read_into(window.segments, out)
        ragged = (piece for column in out if isinstance(column, list) for piece in column)
        size = sum(piece.own_values.nbytes for piece in ragged)
        with self._lock:
            self._largest = max(self._largest, size)
