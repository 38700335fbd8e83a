"""An open shard: the cells of its row groups as arrays, read as a whole or in slices of rows.

The row group that each thread reads is known, so that a read that does not come to an end can be named.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.ragged import Array, Ragged, Stacked
from spark_dl.data.columns.schema import Column, unit_of
from spark_dl.data.columns.types import Lookup
from spark_dl.data.dataset.records import Shard, ShardSet
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet import filters
from spark_dl.data.parquet.buffers import BufferPool

if TYPE_CHECKING:
    from spark_dl.data.parquet.page_index import IndexedFile

_PLAIN_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED"}
"""Parquet's encodings without a dictionary. `PLAIN` is of values, the other two are of levels."""
_SMALL_DICTIONARY_BYTES = 64 << 10
"""Maximum size of a dictionary that is surely not full: writers stop at 1 MiB before compression."""
SLICE_BYTES = 512 << 10
"""Bytes of the values of a slice, which are decoded directly into their target."""


class CurrentReads:
    """The row groups of a dataset that threads read now."""

    def __init__(self, shards: ShardSet):
        self._shards = shards
        self._begun: dict[int, tuple[float, int]] = {}
        """Of each thread: when its read has begun, and the number of the row group."""

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Notes that this thread reads a row group in the block."""
        thread = threading.get_ident()
        self._begun[thread] = time.monotonic(), number
        try:
            yield
        finally:
            del self._begun[thread]

    def longest(self) -> str:
        """Returns the oldest read, such as `row group 3 of /data/part-0 for 12 s`; empty if no thread reads."""
        if not (begun := sorted(self._begun.copy().values())):
            return ""
        since, number = begun[0]
        shard, group, _ = self._shards.shards.place_of(number)
        url = storage.join(self._shards.url, self._shards.shards.name_of(shard))
        return f"row group {group} of {url} for {time.monotonic() - since:.0f} s"


def is_sliced(column: Column) -> bool:
    """Whether the cells of a column are decoded in slices.

    To decode all at once, Arrow needs twice the memory of the values, and for lists several times as much.
    """
    kind = column.codec.removeprefix("petastorm.").split(".")[0]
    return kind in ("list", "vector", "ndarray", "compressed_ndarray", "binary", "image")


class ShardFile:
    """An open shard."""

    def __init__(
        self, source: Any, shard: Shard, names: Sequence[str], string_columns: Sequence[str], *, is_local: bool
    ):
        """`names` are the columns to read, and `string_columns` those with looked-up strings."""
        self._source, self._is_local = source, is_local
        self.parquet = parquet_file.open_file(
            source,
            footer_bytes=shard.footer_bytes,
            footer_crc32=shard.footer_crc32,
            dictionary_columns=names,
            buffered=is_local,
        )
        self._names, self._string_columns = names, string_columns
        self._leaves = {self.parquet.schema.column(i).path: i for i in range(len(self.parquet.schema))}

    @functools.cached_property
    def indexed(self) -> IndexedFile:
        """The file with its page index, for row groups that are read in part."""
        from spark_dl.data.parquet.page_index import IndexedFile

        return IndexedFile(self._source, self.parquet, dictionary_columns=self._names)

    def read(self, group: int, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        """Reads the stored cells of some columns of a whole row group."""
        if not names:
            return {}
        table = self.parquet.read_row_group(group, names, use_threads=False)
        return {name: parquet_file.table_column(table, name) for name in names}

    @functools.cached_property
    def _sliced(self) -> pq.ParquetFile:
        """The file with dictionaries for looked-up strings only, as each slice has a copy of its dictionaries."""
        return parquet_file.reopened(
            self._source,
            self.parquet,
            before=self._names,
            dictionary_columns=self._string_columns,
            buffered=self._is_local,
        )

    def read_slices(
        self,
        group: int,
        rows: int,
        columns: Sequence[tuple[Column, Array | None]],
        memory: Mapping[str, BufferPool],
        kept: filters.Mask | None,
    ) -> dict[str, Array | Ragged]:
        """Decodes the cells of a row group in slices: each column into its place, or into `memory`.

        `rows` is the number of kept rows. # kept: (stored rows,); None if all rows are kept
        """
        if not columns:
            return {}
        targets = [
            (c, Lookup(c.encoding), _target(c, rows, self._max_values(c, group), place, memory[c.name]))
            for c, place in columns
        ]
        sliced = [c for c, _ in columns]
        size, names = slice_rows(sliced, sum(c.value_bytes for c in sliced)), [c.name for c in sliced]
        first = 0
        for batch in self._sliced.iter_batches(size, [group], names, use_threads=False):
            table = pa.Table.from_batches([batch])
            numbers = np.arange(first, first + len(batch))
            if kept is not None:
                numbers = numbers[kept[numbers]]
                table = table.take(pa.array(numbers - first))
            for column, lookup, target in targets:
                target.add(_decode(column, parquet_file.table_column(table, column.name), numbers, lookup))
            first += len(batch)
        for column, _, target in targets:
            if target.rows != rows:
                raise ValueError(f"column {column.name!r}: found {target.rows} rows in its pages, expected {rows}")
        if kept is not None:  # slices of varying size: Arrow's allocator (mimalloc) would keep 40 MiB instead of 10
            pa.default_memory_pool().release_unused()
        return {column.name: target.cells() for column, _, target in targets}

    def comes_in_slices(self, column: Column, group: int) -> bool:
        """Whether a column is also read in slices.

        False if the size of the cells is only known from a dictionary or the cells, and for strings whose dictionary
        can be full: each slice would have all strings read so far.
        """
        if column.codec.startswith("petastorm.compressed"):
            return False
        chunks = self._chunks(column, group)
        are_plain = all(_PLAIN_ENCODINGS.issuperset(chunk.encodings) for chunk in chunks)
        if column.has_stored_strings:
            return are_plain or all(0 < parquet_file.dictionary_bytes(c) <= _SMALL_DICTIONARY_BYTES for c in chunks)
        return are_plain or column.codec == "list" or not column.is_ragged

    def _chunks(self, column: Column, group: int) -> list[Any]:
        """Returns the footer's metadata of a column's leaves. Leaves of a column `x.y` can be among those of `x`."""
        metadata = self.parquet.metadata.row_group(group)
        return [
            metadata.column(leaf)
            for path, leaf in self._leaves.items()
            if parquet_file.leaf_in_column(column.name, path)
        ]

    def _max_values(self, column: Column, group: int, size: int | None = None) -> int:
        """Returns an upper bound of the values of a ragged column in a row group, over all axes.

        Nulls, empty lists and the lengths of byte cells count, too. # size: bytes of byte cells; by default their bytes
        in the file
        """
        chunks, itemsize = self._chunks(column, group), unit_of(column) or 1
        if column.codec == "list":
            return max((chunk.num_values for chunk in chunks), default=0)
        return (max(c.total_uncompressed_size for c in chunks) if size is None else size) // itemsize

    def decode(
        self,
        column: Column,
        group: int,
        stored: pa.ChunkedArray,
        size: int | None,
        place: Array | None,
        memory: BufferPool,
        rows: npt.NDArray[np.int64] | None,
    ) -> Array | Ragged:
        """Decodes stored cells that were read as a whole: in slices, into their place or `memory`, if `is_sliced`.

        # size: bytes of the decoded cells, if the footer does not give it; rows: their positions in the row group,
        # None for all rows
        """
        if not is_sliced(column):
            return _decode(column, stored, rows)
        target = _target(column, len(stored), self._max_values(column, group, size or stored.nbytes), place, memory)
        rows, lookup = np.arange(len(stored)) if rows is None else rows, Lookup(column.encoding)
        at_once = slice_rows([column], max(column.value_bytes, target.room_bytes / max(1, len(stored))))
        for first in range(0, len(stored), at_once):
            part = slice(first, first + at_once)
            target.add(_decode(column, stored[part], rows[part], lookup))
        return target.cells()

    def plain(self, column: Column, group: int, rows: int, memory: BufferPool) -> Array | None:
        """Reads the cells without a decoder into `memory`, if they are stored as in spark_dl's shards, else None."""
        if column.codec not in ("scalar", "ndarray") or column.name not in self._leaves:
            return None
        leaf = self._leaves[column.name]
        levels = self.parquet.schema.column(leaf).max_definition_level
        chunk = self.parquet.metadata.row_group(group).column(leaf)
        cells = parquet_file.read_plain(
            self._source, chunk, levels=levels, cell_bytes=column.row_bytes, rows=rows, memory=memory
        )
        return None if cells is None else cell_codec.view(column, cells)


def _target(column: Column, rows: int, max_values: int, place: Array | None, memory: BufferPool) -> Stacked:
    """Returns the target to decode rows into: their place, or `memory`. # max_values: if ragged, over all axes"""
    if place is None:
        length = max_values // max(1, math.prod(column.inner)) if column.is_ragged else rows
        place = memory.take((length, *column.inner), np.dtype(column.dtype))
    return Stacked(place, is_ragged=column.is_ragged)


def slice_rows(columns: Sequence[Column], row_bytes: float) -> int:
    """Returns the rows of a slice. It is larger for a large vocabulary, which each slice searches as a whole."""
    entries = max(len(c.encoding.vocabulary or ()) for c in columns)
    return max(1, int(max(SLICE_BYTES, entries * np.dtype(np.int64).itemsize) // max(1, row_bytes)))


def _decode(
    column: Column, stored: Any, rows: npt.NDArray[np.int64] | None, lookup: Lookup | None = None
) -> Array | Ragged:
    """Decodes the stored cells of some rows. # rows: positions in the row group; None for all rows"""
    if column.codec.startswith("petastorm."):
        from spark_dl.data.petastorm import columns as petastorm_columns

        return petastorm_columns.decode(column, stored, rows=rows, lookup=lookup)
    return cell_codec.decode(column, stored, rows=rows, lookup=lookup)
