"""Headers of NumPy's `.npy` format, as they stand in the cells of Petastorm."""

from __future__ import annotations

import functools
import io
import threading
from typing import Any

import numpy as np

_MAX_HEADER_BYTES = 10_000
"""Of a `.npy` cell: NumPy refuses longer ones, too."""


ONE_HEADER_AT_A_TIME = threading.Lock()
"""NumPy reads the header of a `.npy` cell with `ast.literal_eval`, which raises SystemError now and then where several
threads are in it (python/cpython#106905; Python 3.11.7 has the fault)."""


def header_of(cell: memoryview) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """Of a `.npy` cell: where the values start, their shape, whether they lie in Fortran's order, and their dtype.

    Raises ValueError for what is none of version 1 or 2 (`numpy.lib.format`).
    """
    length_bytes = 2 if bytes(cell[6:7]) == b"\1" else 4  # in version 1, and in others
    start = 8 + length_bytes + int.from_bytes(cell[8 : 8 + length_bytes], "little")
    if start > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {start} bytes; at most {_MAX_HEADER_BYTES} are read")
    try:
        return start, *_parsed_header(bytes(cell[:start]))
    except Exception as error:  # what Python's parser raises for texts that are no header is not defined
        raise ValueError(f"no header ({type(error).__name__}: {error!s:.200})") from None


@functools.lru_cache(maxsize=4096)
def _parsed_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parsing one takes longer than reading the values of a small cell, and those of a column are much alike."""
    file, formats = io.BytesIO(header), np.lib.format
    version = formats.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
    with ONE_HEADER_AT_A_TIME:
        shape, is_fortran, dtype = read(file)
    if any(n < 0 for n in shape):  # np.ndarray takes -1 for what is there
        raise ValueError(f"the shape {shape}")
    return shape, is_fortran, dtype
