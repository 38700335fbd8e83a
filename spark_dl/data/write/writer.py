"""Writes rows as shards: Parquet files with row groups of an exact row count. Used in Spark tasks and without Spark."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.config import Shards
from spark_dl.data.columns import cell_codec, ragged, schema
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError
from spark_dl.data.dataset.records import Shard
from spark_dl.data.parquet import file as parquet_file

_ROW_GROUP_BYTES = 4 << 20
_DECODED_BYTES = 64 << 20
"""Bytes of a row group in memory, of which a reader has several. Images can be much smaller in their files."""
_SHARD_BYTES = 64 << 20
_ROWS = "spark_dl.rows"
"""The checksum of the rows in the footer: shards of equal sizes have other footers, so that one in the place of another
is found, and a dataset that is written again has the same bytes."""
_PAGE_BYTES = 1 << 30
"""Page size that makes each column of a row group one page, which is read without a decoder."""


def rows_per_file(columns: Iterable[Column], layout: Shards) -> tuple[int, int]:
    """Rows of a row group and of a shard: the configured numbers, or numbers from the size of a row."""
    columns = [*columns]
    row_bytes = max(1, sum(c.row_bytes for c in columns))
    most = min(1 << 16, _ROW_GROUP_BYTES // row_bytes, _DECODED_BYTES // max(1, sum(c.value_bytes for c in columns)))
    group = layout.rows_per_row_group or max(1, 1 << most.bit_length() >> 1)
    shard = layout.rows_per_shard or max(1, _SHARD_BYTES // row_bytes)
    return group, -(-shard // group) * group


class ShardWriter:
    """Writes a sequence of rows as shards of `shard_rows` rows with row groups of `group_rows` rows."""

    def __init__(self, url: str, prefix: str, columns: tuple[Column, ...], group_rows: int, shard_rows: int):
        self.columns = columns
        self._url, self._prefix = url, prefix
        self._group_rows, self._shard_rows = group_rows, shard_rows
        self.sizes = [0] * len(columns)
        """Number of elements written of each column."""
        self._filled: set[int] = set()
        """Ragged columns that had values so far; their inner shape is known."""
        self._held: list[list[Array | Ragged]] = []
        self._held_rows = 0
        self._shards: list[Shard] = []
        self._groups: list[int] = []
        self._elements: dict[str, list[int]] = {}
        self._stored: dict[str, list[int]] = {}
        self._file: pq.ParquetWriter | None = None
        self._sink: _HashingSink | None = None

    def append(self, arrays: Sequence[Array | Ragged]) -> None:
        """Adds rows (images as the bytes of their files). Raises BadCellsError for cells of another shape."""
        for i, array in enumerate(arrays):
            self._check_shape(i, array)
            self.sizes[i] += array.own_values.size if isinstance(array, Ragged) else array.size
        self._held.append(list(arrays))
        self._held_rows += len(arrays[0])
        if self._held_rows >= self._group_rows:
            self._write_groups(full_only=True)

    def _check_shape(self, i: int, array: Array | Ragged) -> None:
        column = self.columns[i]
        shape = schema.cell_shape(column.codec, array, column.encoding)
        if isinstance(array, Ragged) and column.is_ragged:
            if len(array.own_values) == 0:  # rows without values have no inner shape
                return
            if i not in self._filled:
                self._filled.add(i)
                self.columns = (*self.columns[:i], replace(column, shape=shape), *self.columns[i + 1 :])
                return
        if shape == column.shape:
            return
        hint = f", or set data.encode.{column.name}: {{ragged: true}}" if column.codec == "ndarray" else ""
        raise BadCellsError(column.name, 0, f"cells of shape {shape}", f"{column.shape} as in the rows before{hint}")

    def known_shapes(self) -> tuple[tuple[int | None, ...] | None, ...]:
        """Shape of the cells of each column; None (unknown) if all rows of a ragged column are empty."""
        is_known = [not c.is_ragged or i in self._filled for i, c in enumerate(self.columns)]
        return tuple(c.shape if k else None for c, k in zip(self.columns, is_known, strict=True))

    def close(self) -> list[Shard]:
        """Writes the remaining rows and returns all shards."""
        self._write_groups(full_only=False)
        self._end_shard()
        return self._shards

    def abort(self) -> None:
        """Closes the open file, after an error."""
        if self._file is not None:
            self._file.close()

    def _write_groups(self, full_only: bool) -> None:
        arrays = (
            [ragged.concatenate([h[i] for h in self._held]) for i in range(len(self.columns))] if self._held else []
        )
        start, rows = 0, self._held_rows
        while rows - start >= self._group_rows or (start < rows and not full_only):
            stop = min(rows, start + self._group_rows)
            self._write_group([a[start:stop] for a in arrays])
            start = stop
        self._held = [[a[start:] for a in arrays]] if start < rows else []
        self._held_rows = rows - start

    def _write_group(self, arrays: list[Array | Ragged]) -> None:
        cells = [cell_codec.encode(c, a) for c, a in zip(self.columns, arrays, strict=True)]
        table = pa.Table.from_arrays(cells, schema=pa.schema([cell_codec.arrow_field(c) for c in self.columns]))
        if self._file is None:
            self._sink = _HashingSink(storage.join(self._url, self._next_name()))
            scalars = [c.name for c in self.columns if c.codec == "scalar"]
            self._file = parquet_file.open_writer(
                self._sink, table.schema, compression="none", use_dictionary=False, write_statistics=scalars,
                data_page_size=_PAGE_BYTES,
            )  # fmt: skip
        self._file.write_table(table, row_group_size=len(arrays[0]))
        self._groups.append(len(arrays[0]))
        for column, array in zip(self.columns, arrays, strict=True):
            if isinstance(array, Ragged):
                counts = self._elements if column.is_ragged else self._stored
                counts.setdefault(column.name, []).append(array.own_values.size)
        if sum(self._groups) >= self._shard_rows:
            self._end_shard()

    def _next_name(self) -> str:
        return f"{self._prefix}-{len(self._shards):04d}.parquet"

    def _end_shard(self) -> None:
        if self._file is None or self._sink is None:
            return
        if hasattr(self._file, "add_key_value_metadata"):  # not in pyarrow 14
            self._file.add_key_value_metadata({_ROWS: self._sink.digest})
        footer_start = self._sink.begin_footer()
        self._file.close()
        size, digest, crc32 = self._sink.finish()
        counted = [{name: tuple(n) for name, n in counts.items()} for counts in (self._elements, self._stored)]
        shard = Shard(
            self._next_name(), tuple(self._groups), size, digest, size - footer_start, crc32,
            elements=counted[0], stored=counted[1],
        )  # fmt: skip
        self._shards.append(shard)
        self._file, self._sink, self._groups, self._elements, self._stored = None, None, [], {}, {}


class _HashingSink:
    """A file that is hashed while it is written, so the checksum in the manifest needs no second read."""

    def __init__(self, url: str):
        self._stream = storage.open_output(url)
        self._hash = hashlib.sha256()
        self._size = 0
        self._crc32, self._in_footer = 0, False
        self.closed = False

    def write(self, content: Any) -> int:
        self._hash.update(content)
        if self._in_footer:
            self._crc32 = zlib.crc32(content, self._crc32)
        self._stream.write(content)
        self._size += len(content)
        return len(content)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    @property
    def digest(self) -> str:
        """The checksum of what was written so far."""
        return self._hash.hexdigest()

    def begin_footer(self) -> int:
        """Marks the beginning of the footer and returns its position. Called before the footer is written."""
        self._in_footer = True
        return self._size

    def finish(self) -> tuple[int, str, int]:
        """Closes the file; returns its size in bytes, its SHA-256, and the CRC-32 of its footer."""
        self._stream.close()
        self.closed = True
        return self._size, self._hash.hexdigest(), self._crc32
