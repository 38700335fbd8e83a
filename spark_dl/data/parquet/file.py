"""Opens Parquet files with page checksums, which are verified on reading. pyarrow 14 has none, which is logged once.

Parquet has no checksum of the footer, and a flipped bit in it can crash the reader. Therefore the manifest of our
datasets has one, which is verified before the footer is parsed.
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

from spark_dl.data.parquet.calendar import rebased

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
) -> Any:
    """Opens a local or remote Parquet file. # source: a pyarrow file

    footer_bytes, footer_crc32: size and checksum of the end of the file, from the footer; 0 bytes if unknown.
    dictionary_columns: columns of strings and bytes that are read as Arrow dictionaries, if they are dictionary-encoded
        in the file. Their decoded size (`decoded_bytes`) is not in the footer.
    buffered: whether column chunks are read in small pieces during decoding; for files on a local disk.
    96-bit timestamps, Spark's default, are read as microseconds, as in a DataFrame. Nanoseconds overflow after 2262.
    Dates and times of the old calendar are those that Spark reads (`calendar.py`).
    Raises ValueError for another checksum of the footer. Reading a page with a wrong checksum raises OSError.
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
    found = []
    for i in range(len(file.schema)) if names else ():
        leaf = file.schema.column(i)
        if leaf.physical_type == "BYTE_ARRAY" and any(leaf_in_column(name, leaf.path) for name in names):
            groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
            if any("DICTIONARY" in encoding for group in groups for encoding in group.column(i).encodings):
                found.append(leaf.path)
    return found


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
