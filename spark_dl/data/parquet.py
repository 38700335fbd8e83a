"""Parquet files with a checksum on every page, which is checked on reading. pyarrow 14 has none: it is said once.

Parquet has no checksum of a file's footer, and one flipped bit of it can crash the process that reads it. So our own
datasets keep one in their manifest, with which the footer is checked before it is parsed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import zlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_log = logging.getLogger("spark_dl")

HAS_CHECKSUMS = "page_checksum_verification" in inspect.signature(pq.ParquetFile).parameters


def open_file(source: Any, *, footer_bytes: int = 0, footer_crc32: int = 0) -> pq.ParquetFile:
    """Opens a Parquet file, local or remote, to read row groups from. # source: a file of pyarrow

    footer_bytes, footer_crc32: of the end of the file from the footer on; 0 bytes where they are not known.
    Timestamps of 96 bits, as Spark writes them by default, become microseconds, as they are in a DataFrame: nanoseconds
    overflow after the year 2262.
    Raises ValueError for another footer. Reading a page whose checksum is wrong raises OSError.
    """
    options: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}
    if _checks_pages():
        options["page_checksum_verification"] = True
    if footer_bytes:
        end = source.read_at(footer_bytes, source.size() - footer_bytes)
        if zlib.crc32(end) != footer_crc32:
            raise ValueError(
                "the footer's checksum does not match its bytes; the file was changed after it was written"
            )
        options["metadata"] = pq.read_metadata(pa.BufferReader(end))
    return pq.ParquetFile(source, **options)


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
