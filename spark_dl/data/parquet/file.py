"""Parquet files with a checksum on every page, which is checked on reading. pyarrow 14 has none: it is said once.

Parquet has no checksum of a file's footer, and one flipped bit of it can crash the process that reads it. So our own
datasets keep one in their manifest, with which the footer is checked before it is parsed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_log = logging.getLogger("spark_dl")

_BUFFER_BYTES = 128 << 10  # of each column of a row group
HAS_CHECKSUMS = "page_checksum_verification" in inspect.signature(pq.ParquetFile).parameters


def open_file(
    source: Any,
    *,
    footer_bytes: int = 0,
    footer_crc32: int = 0,
    dictionary_columns: Sequence[str] = (),
    buffered: bool = False,
) -> pq.ParquetFile:
    """Opens a Parquet file, local or remote, to read row groups from. # source: a file of pyarrow

    footer_bytes, footer_crc32: of the end of the file from the footer on; 0 bytes where they are not known.
    as_words: columns of which texts and bytes come as Arrow's dictionaries where the file has dictionaries of them: the
    footer does not tell how much larger they are once each cell has its own (`decoded_bytes`).
    buffered: column chunks are read in small pieces, as they are decoded, not as a whole; for files on a local disk.
    Timestamps of 96 bits, as Spark writes them by default, become microseconds, as they are in a DataFrame: nanoseconds
    overflow after the year 2262.
    Raises ValueError for another footer. Reading a page whose checksum is wrong raises OSError.
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
    words = _words(file, dictionary_columns)
    return _with_dictionaries(source, file, words, buffered) if words else file


def reopened(
    source: Any,
    file: pq.ParquetFile,
    *,
    before: Sequence[str],
    dictionary_columns: Sequence[str] = (),
    buffered: bool = False,
) -> pq.ParquetFile:
    """An open file with other columns as dictionaries; itself where none of the columns `before` come so now."""
    words = _words(file, dictionary_columns)
    return file if words == _words(file, before) else _with_dictionaries(source, file, words, buffered)


def dictionary_bytes(chunk: Any) -> int:
    """Of the dictionary of a column chunk, as they are stored; 0 where it has none. # chunk: its metadata"""
    return chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)  # type: ignore[no-any-return]


def leaf_in_column(name: str, path: str) -> bool:
    """Whether a leaf of Parquet is of the column of this name."""
    return path == name or path.startswith(f"{name}.")


def _with_dictionaries(source: Any, file: pq.ParquetFile, leaves: Sequence[str], buffered: bool) -> pq.ParquetFile:
    return pq.ParquetFile(source, metadata=file.metadata, read_dictionary=leaves, **_options(buffered))


def _options(buffered: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}
    if buffered:
        options |= {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
    if _checks_pages():
        options["page_checksum_verification"] = True
    return options


def _words(file: pq.ParquetFile, names: Sequence[str]) -> list[str]:
    """The leaves of texts and bytes, among some columns, that have a dictionary in some row group."""
    found = []
    for i in range(len(file.schema)) if names else ():
        leaf = file.schema.column(i)
        if leaf.physical_type == "BYTE_ARRAY" and any(leaf_in_column(name, leaf.path) for name in names):
            groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
            if any("DICTIONARY" in encoding for group in groups for encoding in group.column(i).encodings):
                found.append(leaf.path)
    return found


def decoded_bytes(stored: pa.ChunkedArray | pa.Array) -> int:
    """What the texts or bytes of a column take once each cell has its own, if they came as dictionaries; else 0."""
    total = 0
    for leaf in chunks_of(stored):
        while pa.types.is_list(leaf.type) or pa.types.is_large_list(leaf.type):
            leaf = leaf.flatten()
        if pa.types.is_dictionary(leaf.type) and is_string_or_binary(leaf.type.value_type):
            total += pc.sum(pc.binary_length(leaf.dictionary).cast(pa.int64()).take(leaf.indices)).as_py() or 0
    return total


def chunks_of(stored: pa.ChunkedArray | pa.Array) -> list[pa.Array]:
    """A column's arrays, or the one that it is."""
    return stored.chunks if isinstance(stored, pa.ChunkedArray) else [stored]


def small_type(arrow: pa.DataType) -> pa.DataType:
    """The type of the words of a column of this type."""
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(arrow, arrow)


def is_string_or_binary(arrow: pa.DataType) -> bool:
    """Whether a type is one of texts or bytes of any length."""
    types = pa.types
    return bool(
        types.is_string(arrow) or types.is_large_string(arrow) or types.is_binary(arrow) or types.is_large_binary(arrow)
    )


def open_writer(sink: Any, schema: pa.Schema, **options: Any) -> pq.ParquetWriter:
    """Opens a Parquet file to write. # sink: a writable file; options: of `pyarrow.parquet.ParquetWriter`"""
    return pq.ParquetWriter(sink, schema, **options, **({"write_page_checksum": True} if _checks_pages() else {}))


@functools.cache
def _checks_pages() -> bool:
    if not HAS_CHECKSUMS:
        _log.warning(
            "pyarrow %s has no checksums of pages: a flipped bit in a shard goes unseen; they need pyarrow 15 or newer",
            pa.__version__,
        )
    return HAS_CHECKSUMS


def table_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of what was read, or a field of a struct by its path, for `schema.decode`."""
    if name in table.column_names:
        return table.column(name)
    first, *path = name.split(".")
    return pc.struct_field(table.column(first), path)
