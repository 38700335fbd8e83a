"""Memory for decoded rows: a budget that threads take bytes of before they allocate, and arrays that are used again.

New memory takes about as long as reading into it, which is why large arrays are used again.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from spark_dl.data.columns.ragged import Array

_KEPT = 8  # maximum number of unused blocks


class ByteBudget:
    """A limit on the total bytes of several threads."""

    def __init__(self, size: int):
        self.size = size
        self._used = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until `size` bytes are free. If no bytes are taken, any size is granted.

        Raises RuntimeError after `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._used or self._used + size <= self.size)
            if self._is_closed:
                raise RuntimeError("the consumer has stopped")
            self._used += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Takes bytes for the block."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def close(self) -> None:
        """Raises RuntimeError in all waiting threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class PrefetchBudget(ByteBudget):
    """A limit on the bytes of a queue: one thread takes bytes, another releases them in the same order."""

    def __init__(self, size: int):
        super().__init__(size)
        self._held: deque[int] = deque()

    def take(self, size: int) -> None:
        super().take(size)
        self._held.append(size)

    def release_first(self) -> None:
        """Releases the bytes that were taken first."""
        self.give_back(self._held.popleft())


class BufferPool:
    """Allocates arrays of similar sizes, in the memory of released arrays. Thread-safe.

    Blocks are mapped from the system and returned to it, because the memory that malloc keeps differs from run to run.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)
        self._lent: dict[int, tuple[weakref.ref[Array], mmap.mmap]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialized array. Its memory is reused after the array and all views of it are released.

        Blocks that are too small are dropped, so that all blocks soon have the requested size.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            block = self._free.popleft()
        except IndexError:
            block = None
        if block is None or len(block) < size:
            step = max(mmap.PAGESIZE, 1 << size.bit_length() >> 4)  # pages that are not written take no memory
            block = mmap.mmap(-1, (size // step + 1) * step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Views refer to the first array that owns its memory (PyArray_SetBaseObject), which is this one.
        whole: Array = np.frombuffer(block, np.uint8, count=size)
        lent = weakref.ref(whole, self._give_back)
        self._lent[id(lent)] = lent, block
        array: Array = whole.view(dtype).reshape(shape)
        return array

    def _give_back(self, lent: weakref.ref[Array]) -> None:
        self._free.append(self._lent.pop(id(lent))[1])
