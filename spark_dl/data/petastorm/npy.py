"""Petastorm's `.npy` and compressed `.npz` cells: headers, values and uncompressed sizes."""

from __future__ import annotations

import functools
import io
import struct
import threading
import zipfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.ragged import Array
from spark_dl.data.parquet.file import chunks_of

_MAX_CELL_BYTES = 1 << 31
"""Largest uncompressed size of a compressed cell."""
_ZIP_END, _ZIP_ENTRY = struct.Struct("<4s6xHI4xH"), struct.Struct("<4s20xI")
"""End record of a zip archive (signature, entries, bytes of the directory before it, bytes of the comment), and a
directory entry's signature and uncompressed size."""
_MAX_HEADER_BYTES = 10_000
"""Largest header of a `.npy` cell. NumPy has the same limit."""
_ONE_HEADER_AT_A_TIME = threading.Lock()
"""NumPy reads `.npy` headers with `ast.literal_eval`, which can raise SystemError when several threads call it
(python/cpython#106905; Python 3.11.7 has the bug)."""


def unpacked_bytes(stored: pa.ChunkedArray | pa.Array) -> int:
    """Returns the uncompressed bytes of compressed cells, from their headers. # stored: binary, or a dictionary"""
    total = 0
    for chunk in chunks_of(stored):
        is_dictionary = pa.types.is_dictionary(chunk.type)
        cells = chunk.dictionary if is_dictionary else chunk
        sizes = pa.array([_unpacked_bytes(cell.as_buffer()) if cell.is_valid else 0 for cell in cells], pa.int64())
        total += pc.sum(sizes.take(chunk.indices) if is_dictionary else sizes).as_py() or 0
    return total


def _unpacked_bytes(cell: Any) -> int:
    """Returns the uncompressed size of a zip archive, from its directory; 0 for invalid bytes, a later error."""
    content = memoryview(cell)
    end = len(content) - _ZIP_END.size
    if end >= 0:  # fast path: one file, no comment, no 64-bit end record
        magic, count, directory_bytes, comment_bytes = _ZIP_END.unpack_from(content, end)
        at = end - directory_bytes
        is_simple = magic == b"PK\5\6" and comment_bytes == 0 and bytes(content[max(0, end - 20) :][:4]) != b"PK\6\7"
        if is_simple and count == 1 and 0 <= at <= end - _ZIP_ENTRY.size:
            magic, size = _ZIP_ENTRY.unpack_from(content, at)
            if magic == b"PK\1\2" and size < 0xFFFFFFFF:
                return int(size)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except Exception:  # `zipfile` may raise any exception for invalid bytes
        return 0


def read_npy(cell: memoryview) -> Array:
    """Returns a view of the cell."""
    if bytes(cell[6:7]) == b"\3":  # version 3, for field names outside Latin-1; its parser is not public
        with _ONE_HEADER_AT_A_TIME:
            return np.lib.format.read_array(io.BytesIO(cell), allow_pickle=False)  # type: ignore[no-any-return]
    start, shape, is_fortran, dtype = header_of(cell)
    if dtype.hasobject:
        raise ValueError("Python objects, which are a pickle")
    value: Array = np.ndarray(shape, dtype, cell, start, order="F" if is_fortran else "C")
    return value


def read_npz(cell: memoryview) -> Array:
    with zipfile.ZipFile(io.BytesIO(cell)) as archive:
        entry = archive.getinfo("arr.npy")
        if entry.file_size > _MAX_CELL_BYTES:
            raise ValueError(f"an array of {entry.file_size} bytes; at most {_MAX_CELL_BYTES} are unpacked")
        with archive.open(entry) as file:  # `archive.read` may return more than the directory's size
            return read_npy(memoryview(file.read(entry.file_size)))


def header_of(cell: memoryview) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """Returns a `.npy` cell's start of the values, shape, whether it is in Fortran order, and dtype.

    Raises ValueError for bytes that are not `.npy` of version 1 or 2 (`numpy.lib.format`).
    """
    length_bytes = 2 if bytes(cell[6:7]) == b"\1" else 4  # in version 1, and in later versions
    start = 8 + length_bytes + int.from_bytes(cell[8 : 8 + length_bytes], "little")
    if start > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {start} bytes; at most {_MAX_HEADER_BYTES} are read")
    try:
        return start, *_parsed_header(bytes(cell[:start]))
    except Exception as error:  # Python's parser may raise any exception for invalid text
        raise ValueError(f"an invalid header ({type(error).__name__}: {error!s:.200})") from None


@functools.lru_cache(maxsize=4096)
def _parsed_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Cached, as parsing a header takes longer than reading a small cell, and a column has few different headers."""
    file, formats = io.BytesIO(header), np.lib.format
    version = formats.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
    with _ONE_HEADER_AT_A_TIME:
        shape, is_fortran, dtype = read(file)
    if any(n < 0 for n in shape):  # np.ndarray accepts -1
        raise ValueError(f"the shape {shape}")
    return shape, is_fortran, dtype
