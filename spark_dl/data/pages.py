"""Parquet pages without a decoder: the values of an uncompressed, plain page are a view of its bytes.

That is how our own shards are written: PLAIN encoding, no compression, no dictionary, no nulls. One read brings a whole
column chunk, its pages' checksums are verified, and what remains is a view. The page header is Thrift's compact
protocol; https://github.com/apache/parquet-format (parquet.thrift, PageHeader; Encodings.md, PLAIN).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from isal.isal_zlib import crc32  # the same function, six times as fast
except ImportError:  # no wheel for this kind of processor
    crc32 = zlib.crc32

Bytes = npt.NDArray[np.uint8]

_DATA_PAGE, _PLAIN = 0, 0
_WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_LENGTH_BYTES = 4


class Scratch:
    """Memory of a thread that is used again for each row group: fresh memory costs more than reading into it does."""

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []
        self._used = 0

    def clear(self) -> None:
        """All of it may be used again: what was read before is not needed any more."""
        self._used = 0

    def take(self, size: int) -> memoryview:
        """Bytes that nothing else has until `clear`."""
        if self._used == len(self._blocks):
            self._blocks.append(bytearray(size))
        if len(self._blocks[self._used]) < size:
            self._blocks[self._used] = bytearray(size)
        self._used += 1
        return memoryview(self._blocks[self._used - 1])[:size]


def read_plain(
    source: Any, chunk: Any, *, levels: int, cell_bytes: int, rows: int, scratch: Scratch | None = None
) -> Bytes | None:
    """The cells of a column chunk as they lie in the file, or None if it is not stored plainly. # (rows, cell_bytes)

    `source` is a pyarrow file, `chunk` the metadata of the column chunk, `levels` its highest definition level (0 for a
    required column, 1 for an optional one), `cell_bytes` the size that every cell must have; strings of bytes come
    without their lengths. With `scratch` they lie in it, and `source` is no other thread's.
    Raises ValueError if a page's checksum does not match its bytes.
    """
    is_binary = chunk.physical_type == "BYTE_ARRAY"
    is_plain = levels <= 1 and chunk.compression == "UNCOMPRESSED" and chunk.dictionary_page_offset is None
    if not is_plain or not (is_binary or _WIDTHS.get(chunk.physical_type) == cell_bytes):
        return None
    content = _read(source, chunk.total_compressed_size, chunk.data_page_offset, scratch)
    if len(content) != chunk.total_compressed_size:
        raise ValueError(f"the file ends {chunk.total_compressed_size - len(content)} bytes early")
    stored = cell_bytes + (_LENGTH_BYTES if is_binary else 0)
    pages: list[Bytes] = []
    start = 0
    while start < len(content):
        header, body_start = _struct(content, start)
        page = header.get(5)  # of a data page of version 1: 1 is its number of values, 2 their encoding
        if header.get(1) != _DATA_PAGE or not isinstance(page, dict) or page.get(2) != _PLAIN:
            return None
        size, count, crc = header.get(3), page.get(1), header.get(4, 0)
        if not (isinstance(size, int) and isinstance(count, int) and isinstance(crc, int)):
            return None
        start = body_start + size
        body = content[body_start:start]
        if len(body) != size:
            return None
        if 4 in header and crc32(body) != crc & 0xFFFFFFFF:
            raise ValueError("a page's checksum does not match its bytes; the file was changed after it was written")
        values = np.frombuffer(body, dtype=np.uint8)
        if levels:  # a null has a level and no value: without any, the values have their full size
            values = values[_LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little") :]
        if len(values) != count * stored:
            return None
        pages.append(values.reshape(-1, stored))
    if sum(map(len, pages)) != rows:
        return None
    cells = pages[0] if len(pages) == 1 else np.concatenate(pages)
    if not is_binary:
        return cells
    lengths = np.ndarray((rows,), "<u4", cells, 0, (stored,))
    return cells[:, _LENGTH_BYTES:] if (lengths == cell_bytes).all() else None


def _read(source: Any, size: int, offset: int, scratch: Scratch | None) -> memoryview:
    """The bytes there; fewer at the end of the file."""
    if scratch is None:
        return memoryview(source.read_at(size, offset))
    content = scratch.take(size)
    source.seek(offset)
    return content[: source.readinto(content)]


def _struct(content: memoryview, position: int) -> tuple[dict[int, Any], int]:
    """The fields of a Thrift struct by number, without its strings, and the position after it."""
    fields: dict[int, Any] = {}
    number = 0
    while (byte := content[position]) != 0:
        kind = byte & 0xF
        number, position = (number + (byte >> 4), position + 1) if byte >> 4 else _zigzag(content, position + 1)
        if kind in (1, 2):  # true, false
            fields[number] = kind == 1
        elif kind in (4, 5, 6):  # i16, i32, i64
            fields[number], position = _zigzag(content, position)
        elif kind == 8:  # binary
            length, position = _varint(content, position)
            position += length
        elif kind == 12:
            fields[number], position = _struct(content, position)
        else:
            raise ValueError(f"a page header with a field of Thrift type {kind}")
    return fields, position + 1


def _varint(content: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := content[position]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift, position = shift + 7, position + 1
    return value | byte << shift, position + 1


def _zigzag(content: memoryview, position: int) -> tuple[int, int]:
    value, position = _varint(content, position)
    return (value >> 1) ^ -(value & 1), position
