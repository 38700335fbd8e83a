"""Opens Parquet files with page checksums, which are verified on reading, and reads plain pages without a decoder.

pyarrow 14 has no page checksums, which is logged once. Parquet has no checksum of the footer, and a flipped bit in it
can crash the reader. Therefore the manifest of our datasets has one, which is verified before the footer is parsed.

Our shards are written in this form: PLAIN encoding, no compression, no dictionary, no nulls. The values of such pages
are a view of their bytes. A column chunk is read as a whole. Format: https://github.com/apache/parquet-format
(parquet.thrift, PageHeader; Encodings.md, PLAIN).
"""

from __future__ import annotations

import functools
import inspect
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_dl.data.parquet.buffers import BufferPool
from spark_dl.data.parquet.calendar import rebased
from spark_dl.data.parquet.thrift import read_struct, value_of

_log = logging.getLogger("spark_dl")

_BUFFER_BYTES = 128 << 10  # of each column of a row group
HAS_CHECKSUMS = "page_checksum_verification" in inspect.signature(pq.ParquetFile).parameters

Bytes = npt.NDArray[np.uint8]

_DATA_PAGE, _PLAIN = 0, 0
_WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_LENGTH_BYTES = 4


def open_file(
    source: Any,
    *,
    footer_bytes: int = 0,
    footer_crc32: int = 0,
    dictionary_columns: Sequence[str] = (),
    buffered: bool = False,
) -> Any:
    """Opens a local or remote Parquet file. # source: a pyarrow file

    96-bit timestamps, Spark's default, are read as microseconds, as in a DataFrame. Nanoseconds overflow after 2262.
    Dates and times of the old calendar are those that Spark reads (`calendar.py`).

    Args:
        footer_bytes, footer_crc32: size and checksum of the end of the file, from the footer; 0 bytes if unknown.
        dictionary_columns: columns of strings and bytes that are read as Arrow dictionaries, if they are
            dictionary-encoded in the file. Their decoded size (`decoded_bytes`) is not in the footer.
        buffered: whether column chunks are read in small pieces during decoding; for files on a local disk.

    Raises:
        ValueError: For another checksum of the footer. Reading a page with a wrong checksum raises OSError.
    """
    options = _options(buffered)
    if footer_bytes:
        end = source.read_at(footer_bytes, source.size() - footer_bytes)
        if zlib.crc32(end) != footer_crc32:
            raise ValueError(
                "the footer's checksum does not match its bytes; the file was changed after it was written"
            )
        options["metadata"] = pq.read_metadata(pa.BufferReader(end))
    file = pq.ParquetFile(source, **options)
    leaves = _dictionary_leaves(file, dictionary_columns)
    return _with_dictionaries(source, file, leaves, buffered) if leaves else rebased(file)


def reopened(
    source: Any,
    file: pq.ParquetFile,
    *,
    before: Sequence[str],
    dictionary_columns: Sequence[str] = (),
    buffered: bool = False,
) -> Any:
    """Returns an open file with other dictionary columns; the same file if they are the same as `before`."""
    leaves = _dictionary_leaves(file, dictionary_columns)
    if leaves == _dictionary_leaves(file, before):
        return file
    return _with_dictionaries(source, file, leaves, buffered)


def dictionary_bytes(chunk: Any) -> int:
    """Returns the stored bytes of a column chunk's dictionary; 0 without one. # chunk: its metadata"""
    return chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)  # type: ignore[no-any-return]


def leaf_in_column(name: str, path: str) -> bool:
    """Whether a Parquet leaf belongs to the column of this name."""
    return path == name or path.startswith(f"{name}.")


def _with_dictionaries(source: Any, file: pq.ParquetFile, leaves: Sequence[str], buffered: bool) -> Any:
    return rebased(pq.ParquetFile(source, metadata=file.metadata, read_dictionary=leaves, **_options(buffered)))


def _options(buffered: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}
    if buffered:
        options |= {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
    if _checks_pages():
        options["page_checksum_verification"] = True
    return options


def _dictionary_leaves(file: pq.ParquetFile, names: Sequence[str]) -> list[str]:
    """Returns the leaves of strings and bytes that are dictionary-encoded in any row group."""
    leaves = []
    for i in range(len(file.schema)) if names else ():
        leaf = file.schema.column(i)
        if leaf.physical_type == "BYTE_ARRAY" and any(leaf_in_column(name, leaf.path) for name in names):
            groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
            if any("DICTIONARY" in encoding for group in groups for encoding in group.column(i).encodings):
                leaves.append(leaf.path)
    return leaves


def decoded_bytes(stored: pa.ChunkedArray | pa.Array) -> int:
    """Returns the bytes of a dictionary column of strings or bytes after decoding; 0 for other columns."""
    total = 0
    for leaf in chunks_of(stored):
        while pa.types.is_list(leaf.type) or pa.types.is_large_list(leaf.type):
            leaf = leaf.flatten()
        if pa.types.is_dictionary(leaf.type) and is_string_or_binary(leaf.type.value_type):
            total += pc.sum(pc.binary_length(leaf.dictionary).cast(pa.int64()).take(leaf.indices)).as_py() or 0
    return total


def chunks_of(stored: pa.ChunkedArray | pa.Array) -> list[pa.Array]:
    """Returns the chunks of a column, or the array itself."""
    return stored.chunks if isinstance(stored, pa.ChunkedArray) else [stored]


def small_type(arrow: pa.DataType) -> pa.DataType:
    """Returns the type with 32-bit offsets of a string or binary type."""
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(arrow, arrow)


def is_string_or_binary(arrow: pa.DataType) -> bool:
    """Whether this is a type of strings or bytes of variable length."""
    types = pa.types
    return bool(
        types.is_string(arrow) or types.is_large_string(arrow) or types.is_binary(arrow) or types.is_large_binary(arrow)
    )


def open_writer(sink: Any, schema: pa.Schema, **options: Any) -> pq.ParquetWriter:
    """Opens a Parquet file for writing. # sink: a writable file; options: of `pyarrow.parquet.ParquetWriter`"""
    return pq.ParquetWriter(sink, schema, **options, **({"write_page_checksum": True} if _checks_pages() else {}))


@functools.cache
def _checks_pages() -> bool:
    if not HAS_CHECKSUMS:
        _log.warning(
            "pyarrow %s has no page checksums, so flipped bits in shards are not detected; use pyarrow 15 or newer",
            pa.__version__,
        )
    return HAS_CHECKSUMS


def table_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Returns a column, or a field of a struct by its path."""
    if name in table.column_names:
        return table.column(name)
    first, *path = name.split(".")
    return pc.struct_field(table.column(first), path)


try:
    from isal.isal_zlib import crc32  # the same function, six times as fast
except ImportError:  # no wheel for this processor
    crc32 = zlib.crc32


def read_plain(source: Any, chunk: Any, *, levels: int, cell_bytes: int, rows: int, memory: BufferPool) -> Bytes | None:
    """Returns the stored cells of a column chunk, or None if it has another encoding. # (rows, cell_bytes)

    Args:
        source: a pyarrow file, not shared between threads.
        chunk: metadata of the column chunk.
        levels: its maximum definition level (0 for a required column, 1 for an optional one).
        cell_bytes: the size of every cell; lengths of byte arrays are removed.
        memory: pool of the returned array.

    Raises:
        ValueError: If a page's checksum does not match its bytes.
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
