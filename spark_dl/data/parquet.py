"""Parquet files with a checksum on every page, which is checked on reading. pyarrow 14 has none: it is said once."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_log = logging.getLogger("spark_dl")

HAS_CHECKSUMS = "page_checksum_verification" in inspect.signature(pq.ParquetFile).parameters


def open_file(source: Any) -> pq.ParquetFile:
    """Opens a Parquet file, local or remote, to read row groups from. # source: a file of pyarrow

    Reading a page whose checksum is wrong raises OSError.
    """
    return pq.ParquetFile(source, **({"page_checksum_verification": True} if _checks_pages() else {}))


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
