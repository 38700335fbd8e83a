"""Memory for large arrays that is used again: fresh memory costs about as much as reading or gathering into it does."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np

from spark_dl.data.ragged import Array

_KEPT = 8  # blocks that nobody has, at most


class Recycled:
    """Makes arrays of about one size, in memory of arrays that are gone. Any number of threads may ask.

    It comes from the system and goes back to it: what C's allocator keeps of freed arrays differs from run to run.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any values. Its memory is used again once neither it nor any view of it is left."""
        size = math.prod(shape) * dtype.itemsize
        try:
            block = self._free.popleft()
        except IndexError:
            block = None
        if block is None or len(block) < size:
            block = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A view of a view holds the first array whose memory is no other array's (PyArray_SetBaseObject): this one.
        whole = np.frombuffer(block, np.uint8, count=size)
        weakref.finalize(whole, self._free.append, block).atexit = False
        array: Array = whole.view(dtype).reshape(shape)
        return array
