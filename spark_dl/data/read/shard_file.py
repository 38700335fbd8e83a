"""An open shard: the cells of its row groups, read whole or some rows at a time, as arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.lookup import Lookup
from spark_dl.data.columns.ragged import Array, Ragged, Stacked
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.shard_table import Shard
from spark_dl.data.external import columns as external_columns
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet import filters, pages
from spark_dl.data.parquet.buffer_pool import BufferPool
from spark_dl.data.parquet.page_index import IndexedFile
from spark_dl.data.petastorm import columns as petastorm_columns

_WHOLE_BYTES = {"PLAIN", "RLE", "BIT_PACKED"}
"""Parquet's encodings with which a page has all bytes of its cells; the other two are of levels."""
_SMALL_DICTIONARY_BYTES = 64 << 10
"""Of a dictionary that is not full, as writers end it at 1 MiB before it is compressed."""
SLICE_BYTES = 512 << 10
"""Of the values that are decoded at a time, straight to where they go."""


def is_sliced(column: Column) -> bool:
    """Whether its cells are decoded some rows at a time: all at once they take Arrow twice the memory of their values,
    and lists several times as much.
    """
    kind = column.codec.removeprefix("petastorm.").split(".")[0]
    return kind in ("list", "vector", "ndarray", "compressed_ndarray", "binary", "image")


class ShardFile:
    """An open shard."""

    def __init__(self, source: Any, shard: Shard, names: Sequence[str], words: Sequence[str], *, is_local: bool):
        """`names` are the columns that are read, and `words` those that look up words."""
        self._source, self._is_local = source, is_local
        self.parquet = parquet_file.open_file(
            source,
            footer_bytes=shard.footer_bytes,
            footer_crc32=shard.footer_crc32,
            dictionary_columns=names,
            buffered=is_local,
        )
        self._names, self._words = names, words
        self._leaves = {self.parquet.schema.column(i).path: i for i in range(len(self.parquet.schema))}

    @functools.cached_property
    def indexed(self) -> IndexedFile:
        """For row groups that are read in part."""
        return IndexedFile(self._source, self.parquet, dictionary_columns=self._names)

    def read(self, group: int, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        """The stored cells of some columns, whole."""
        if not names:
            return {}
        table = self.parquet.read_row_group(group, names, use_threads=False)
        return {name: parquet_file.table_column(table, name) for name in names}

    @functools.cached_property
    def _sliced(self) -> pq.ParquetFile:
        """The file with all but words as they are, not as dictionaries: of those each slice has a copy."""
        return parquet_file.reopened(
            self._source, self.parquet, before=self._names, dictionary_columns=self._words, buffered=self._is_local
        )

    def read_slices(
        self,
        group: int,
        rows: int,
        columns: Sequence[tuple[Column, Array | None]],
        memory: Mapping[str, BufferPool],
        kept: filters.Mask | None,
    ) -> dict[str, Array | Ragged]:
        """The cells of a row group, decoded some rows at a time: each column at its place, or in `memory`.

        `rows` of them are kept. # kept: (stored rows,); None where all are
        """
        if not columns:
            return {}
        targets = [
            (c, Lookup(c.encoding), _target(c, rows, self._most_values(c, group), place, memory[c.name]))
            for c, place in columns
        ]
        of_columns = [c for c, _ in columns]
        size, names = slice_rows(of_columns, sum(c.value_bytes for c in of_columns)), [c.name for c in of_columns]
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
                raise ValueError(f"found {target.rows} rows in the pages of {column.name!r}, expected {rows}")
        if kept is not None:  # slices of other sizes: Arrow's allocator (mimalloc) would keep 40 MiB of such, not 10
            pa.default_memory_pool().release_unused()
        return {column.name: target.cells() for column, _, target in targets}

    def comes_in_slices(self, column: Column, group: int) -> bool:
        """Whether a column is read some rows at a time, too: not where only a dictionary or the cells themselves tell
        how much they take, nor words of a dictionary that may have become full: each slice would have all so far.
        """
        if column.codec.startswith("petastorm.compressed"):
            return False
        chunks = self._chunks(column, group)
        are_whole = all(_WHOLE_BYTES.issuperset(chunk.encodings) for chunk in chunks)
        if column.has_stored_strings:
            return are_whole or all(0 < parquet_file.dictionary_bytes(c) <= _SMALL_DICTIONARY_BYTES for c in chunks)
        return are_whole or column.codec == "list" or not column.is_ragged

    def _chunks(self, column: Column, group: int) -> list[Any]:
        """What the footer tells of the column's leaves; of a column `x` those of another, `x.y`, may be among them."""
        metadata = self.parquet.metadata.row_group(group)
        return [
            metadata.column(leaf)
            for path, leaf in self._leaves.items()
            if parquet_file.leaf_in_column(column.name, path)
        ]

    def _most_values(self, column: Column, group: int, size: int | None = None) -> int:
        """Of the rows of a ragged column, over all axes: nulls and empty lists count, too, and each cell of bytes has
        its length. # size: of cells that are bytes, if it is known; by default what they take in the file
        """
        chunks, itemsize = self._chunks(column, group), external_columns.unit_of(column) or 1
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
        """Stored cells that were read whole. Those that may are decoded some at a time: at their place, or in `memory`.

        # size: of all of them in bytes once they are decoded, if their footer does not tell it; rows: their numbers in
        # the row group, None for all of it
        """
        if not is_sliced(column):
            return _decode(column, stored, rows)
        target = _target(column, len(stored), self._most_values(column, group, size or stored.nbytes), place, memory)
        rows, lookup = np.arange(len(stored)) if rows is None else rows, Lookup(column.encoding)
        together = slice_rows([column], max(column.value_bytes, target.room_bytes / max(1, len(stored))))
        for first in range(0, len(stored), together):
            part = slice(first, first + together)
            target.add(_decode(column, stored[part], rows[part], lookup))
        return target.cells()

    def plain(self, column: Column, group: int, rows: int, memory: BufferPool) -> Array | None:
        """The cells without a decoder, in `memory`, if they are stored as the shards of this package are."""
        if column.codec not in ("scalar", "ndarray") or column.name not in self._leaves:
            return None
        leaf = self._leaves[column.name]
        levels = self.parquet.schema.column(leaf).max_definition_level
        chunk = self.parquet.metadata.row_group(group).column(leaf)
        cells = pages.read_plain(
            self._source, chunk, levels=levels, cell_bytes=column.row_bytes, rows=rows, memory=memory
        )
        return None if cells is None else cell_codec.view(column, cells)


def _target(column: Column, rows: int, most_values: int, place: Array | None, memory: BufferPool) -> Stacked:
    """Where so many rows are decoded to: their place, or `memory`. # most_values: of a ragged column, over all axes"""
    if place is None:
        length = most_values // max(1, math.prod(column.inner)) if column.is_ragged else rows
        place = memory.take((length, *column.inner), np.dtype(column.dtype))
    return Stacked(place, is_ragged=column.is_ragged)


def slice_rows(columns: Sequence[Column], row_bytes: float) -> int:
    """Rows that are decoded at a time: at least as many words as the vocabulary has, which each slice goes through."""
    words = max(len(c.encoding.vocabulary or ()) for c in columns)
    return max(1, int(max(SLICE_BYTES, words * np.dtype(np.int64).itemsize) // max(1, row_bytes)))


def _decode(
    column: Column, stored: Any, rows: npt.NDArray[np.int64] | None, lookup: Lookup | None = None
) -> Array | Ragged:
    """The stored cells of some rows. # rows: their numbers in the row group; None for all of it"""
    if column.codec.startswith("petastorm."):
        return petastorm_columns.decode(column, stored, rows=rows, lookup=lookup)
    return cell_codec.decode(column, stored, rows=rows, lookup=lookup)
