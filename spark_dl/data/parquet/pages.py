"""Reads Parquet pages without a decoder: the values of uncompressed, plain pages are a view of their bytes.

Our shards are written in this form: PLAIN encoding, no compression, no dictionary, no nulls. A column chunk is read as
a whole, and the checksums of its pages are verified. Format:
https://github.com/apache/parquet-format (parquet.thrift, PageHeader; Encodings.md, PLAIN).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_dl.data.parquet.buffer_pool import BufferPool
from spark_dl.data.parquet.thrift import read_struct, value_of

try:
    from isal.isal_zlib import crc32  # the same function, six times as fast
except ImportError:  # no wheel for this processor
    crc32 = zlib.crc32

Bytes = npt.NDArray[np.uint8]

_DATA_PAGE, _PLAIN = 0, 0
_WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_LENGTH_BYTES = 4


def read_plain(source: Any, chunk: Any, *, levels: int, cell_bytes: int, rows: int, memory: BufferPool) -> Bytes | None:
    """Returns the stored cells of a column chunk, or None if it has another encoding. # (rows, cell_bytes)

    source: a pyarrow file, not shared between threads. chunk: metadata of the column chunk. levels: its maximum
    definition level (0 for a required column, 1 for an optional one). cell_bytes: the size of every cell; lengths of
    byte arrays are removed. memory: pool of the returned array.
    Raises ValueError if a page's checksum does not match its bytes.
    """
    is_binary = chunk.physical_type == "BYTE_ARRAY"
    is_plain = levels <= 1 and chunk.compression == "UNCOMPRESSED" and chunk.dictionary_page_offset is None
    if not is_plain or not (is_binary or _WIDTHS.get(chunk.physical_type) == cell_bytes):
        return None
    block = memory.take((chunk.total_compressed_size,), np.dtype(np.uint8))
    source.seek(chunk.data_page_offset)
    content = block.data[: source.readinto(block.data)]
    if len(content) != chunk.total_compressed_size:
        raise ValueError(f"the file ends {chunk.total_compressed_size - len(content)} bytes early")
    stored = cell_bytes + (_LENGTH_BYTES if is_binary else 0)
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(content):
        header, body_start = read_struct(content, start)
        page = value_of(header, 5)  # data page of version 1; field 1 is the number of values, 2 the encoding
        if value_of(header, 1) != _DATA_PAGE or not isinstance(page, dict) or value_of(page, 2) != _PLAIN:
            return None
        size, count, crc = value_of(header, 3), value_of(page, 1), value_of(header, 4, 0)
        if not (isinstance(size, int) and isinstance(count, int) and isinstance(crc, int)):
            return None
        start = body_start + size
        body = content[body_start:start]
        if len(body) != size:
            return None
        if 4 in header and crc32(body) != crc & 0xFFFFFFFF:
            raise ValueError("a page's checksum does not match its bytes; the file was changed after it was written")
        if levels:  # nulls have a level but no value, so the size of values shows that there are none
            body_start += _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        if count < 0 or start - body_start != count * stored:
            return None
        spans.append((body_start, start))
    if sum(stop - first for first, stop in spans) != rows * stored:
        return None
    first, end = spans[0] if spans else (0, 0)
    for start, stop in spans[1:]:  # concatenates the values of pages
        content[end : end + stop - start] = content[start:stop]
        end += stop - start
    cells = block[first:end].reshape(rows, stored)
    if not is_binary:
        return cells
    lengths = np.ndarray((rows,), "<u4", cells, 0, (stored,))
    return cells[:, _LENGTH_BYTES:] if (lengths == cell_bytes).all() else None
