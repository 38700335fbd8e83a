"""Writes rows as shards: Parquet files of row groups of an exact row count. Runs in Spark tasks, or without Spark."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.config import Data
from spark_dl.data import parquet, schema
from spark_dl.data.schema import Array, Column

_ROW_GROUP_BYTES = 4 << 20
_SHARD_BYTES = 64 << 20
_PAGE_BYTES = 1 << 30
"""One page for each column of a row group, which is then read without a decoder."""


@dataclass(frozen=True)
class Shard:
    """One data file."""

    name: str
    row_groups: tuple[int, ...]
    """Rows of each row group."""
    bytes: int
    sha256: str = ""
    """Of the whole file; empty in datasets of others."""
    partition: tuple[tuple[str, str], ...] = ()
    """Column names and values from the names of its folders (hive), in datasets of others."""

    @property
    def rows(self) -> int:
        return sum(self.row_groups)


def layout(columns: Iterable[Column], data: Data) -> tuple[int, int]:
    """Rows of a row group and of a shard: as configured, else by size."""
    row_bytes = max(1, sum(c.row_bytes for c in columns))
    group = data.rows_per_row_group or max(1, min(1 << 16, 1 << (_ROW_GROUP_BYTES // row_bytes).bit_length() >> 1))
    shard = data.rows_per_shard or max(1, _SHARD_BYTES // row_bytes)
    return group, -(-shard // group) * group


class ShardWriter:
    """Cuts a sequence of rows into shards of `shard_rows` rows and row groups of `group_rows` rows."""

    def __init__(self, url: str, prefix: str, columns: tuple[Column, ...], group_rows: int, shard_rows: int):
        self.columns = columns
        self._url, self._prefix = url, prefix
        self._group_rows, self._shard_rows = group_rows, shard_rows
        self._held: list[list[Array]] = []
        self._held_rows = 0
        self._shards: list[Shard] = []
        self._groups: list[int] = []
        self._file: pq.ParquetWriter | None = None
        self._sink: _HashingSink | None = None

    def append(self, arrays: list[Array]) -> None:
        for column, array in zip(self.columns, arrays, strict=True):
            if array.shape[1:] != column.shape:
                raise ValueError(
                    f"column {column.name!r}: found cells of shape {array.shape[1:]} after cells of shape "
                    f"{column.shape} in the same partition; all cells of a column need one shape"
                )
        self._held.append(arrays)
        self._held_rows += len(arrays[0])
        if self._held_rows >= self._group_rows:
            self._write_groups(whole_only=True)

    def close(self) -> list[Shard]:
        self._write_groups(whole_only=False)
        self._end_shard()
        return self._shards

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write_groups(self, whole_only: bool) -> None:
        arrays = [np.concatenate([h[i] for h in self._held]) for i in range(len(self.columns))] if self._held else []
        start, rows = 0, self._held_rows
        while rows - start >= self._group_rows or (start < rows and not whole_only):
            stop = min(rows, start + self._group_rows)
            self._write_group([a[start:stop] for a in arrays])
            start = stop
        self._held = [[a[start:] for a in arrays]] if start < rows else []
        self._held_rows = rows - start

    def _write_group(self, arrays: list[Array]) -> None:
        cells = [schema.encode(c, a) for c, a in zip(self.columns, arrays, strict=True)]
        table = pa.Table.from_arrays(cells, names=[c.name for c in self.columns])
        if self._file is None:
            self._sink = _HashingSink(storage.join(self._url, self._next_name()))
            scalars = [c.name for c in self.columns if c.codec == "scalar"]
            self._file = parquet.open_writer(
                self._sink, table.schema, compression="none", use_dictionary=False, write_statistics=scalars,
                data_page_size=_PAGE_BYTES,
            )  # fmt: skip
        self._file.write_table(table, row_group_size=len(arrays[0]))
        self._groups.append(len(arrays[0]))
        if sum(self._groups) >= self._shard_rows:
            self._end_shard()

    def _next_name(self) -> str:
        return f"{self._prefix}-{len(self._shards):04d}.parquet"

    def _end_shard(self) -> None:
        if self._file is None or self._sink is None:
            return
        self._file.close()
        size, digest = self._sink.finish()
        self._shards.append(Shard(self._next_name(), tuple(self._groups), size, digest))
        self._file, self._sink, self._groups = None, None, []


class _HashingSink:
    """A file that is hashed while it is written, so that the manifest's checksum costs no second read."""

    def __init__(self, url: str):
        self._stream = storage.open_output(url)
        self._hash = hashlib.sha256()
        self._size = 0
        self.closed = False

    def write(self, content: Any) -> int:
        self._hash.update(content)
        self._stream.write(content)
        self._size += len(content)
        return len(content)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> tuple[int, str]:
        self._stream.close()
        self.closed = True
        return self._size, self._hash.hexdigest()
