"""Reuses the memory of large arrays. New memory takes about as long as reading or gathering into it."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np

from spark_dl.data.columns.ragged import Array

_KEPT = 8  # maximum number of unused blocks


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
