"""Memory for large arrays that is used again: fresh memory costs about as much as reading or gathering into it does."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np

from spark_dl.data.columns.ragged import Array

_KEPT = 8  # blocks that nobody has, at most


class BufferPool:
    """Makes arrays of about one size, in memory of arrays that are gone. Any number of threads may ask.

    It comes from the system and goes back to it: what C's allocator keeps of freed arrays differs from run to run.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)
        self._lent: dict[int, tuple[weakref.ref[Array], mmap.mmap]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of any values. Its memory is used again once neither it nor any view of it is left.

        Memory that is too small is given up, so that soon all of it is as large as is asked for.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            block = self._free.popleft()
        except IndexError:
            block = None
        if block is None or len(block) < size:
            step = max(mmap.PAGESIZE, 1 << size.bit_length() >> 4)  # what is not written to takes no memory
            block = mmap.mmap(-1, (size // step + 1) * step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A view of a view holds the first array whose memory is no other array's (PyArray_SetBaseObject): this one.
        whole: Array = np.frombuffer(block, np.uint8, count=size)
        lent = weakref.ref(whole, self._give_back)
        self._lent[id(lent)] = lent, block
        array: Array = whole.view(dtype).reshape(shape)
        return array

    def _give_back(self, lent: weakref.ref[Array]) -> None:
        self._free.append(self._lent.pop(id(lent))[1])
