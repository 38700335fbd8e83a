"""Rows of a row group by the pages that hold them, as Parquet's page index tells: what filters leave out is not read.

pyarrow writes page indexes, and Spark does, but pyarrow reads whole column chunks (apache/arrow#45284). So it is handed
files in memory that have the pages in question, and no others. Format: https://github.com/apache/parquet-format
(PageIndex.md; parquet.thrift, whose numbers of fields stand here).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl.data import parquet
from spark_dl.data.filters import AnyOf, Bounds, Condition, Mask, columns_of, holds_within, passing_rows
from spark_dl.data.foreign_files import is_of, stored_column
from spark_dl.data.thrift import I64, LIST, STRUCT, Field, Many, Struct, read_struct, value_of, write_struct

Ints = npt.NDArray[np.int64]

_MAGIC = b"PAR1"
_ROW_GROUPS, _NUM_ROWS = 4, 3  # of FileMetaData
_COLUMNS, _GROUP_ROWS = 1, 3  # of RowGroup
_METADATA, _OFFSET_INDEX, _COLUMN_INDEX = 3, (4, 5), (6, 7)  # of ColumnChunk; (offset, length) of the indexes
_NUM_VALUES, _COMPRESSED_BYTES, _DATA_PAGE, _DICTIONARY_PAGE = 5, 7, 9, 11  # of ColumnMetaData
_KEPT_METADATA = (1, 2, 3, 4, 5, 6, 7, 9)  # all that is required; the rest tells of all pages
_SHARE = 0.5  # of a column's bytes: where more are needed, it is read as a whole
_NUMBERS = {"INT32": "<i4", "INT64": "<i8", "FLOAT": "<f4", "DOUBLE": "<f8"}
_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
_END_BYTES = 8  # the footer's length, and the magic
_MAX_INDEX_BYTES = 16 << 20  # of a file's indexes: more are read one by one


@dataclass(frozen=True)
class _Pages:
    """The data pages of a column in a row group."""

    offsets: Ints
    sizes: Ints
    """With their headers, in bytes."""
    starts: Ints
    """The first row of each, and at the end the rows of the row group. # (pages + 1,)"""

    @property
    def rows(self) -> Ints:
        """Rows of each page. # (pages,)"""
        return np.diff(self.starts)

    def runs(self, chosen: Mask) -> list[tuple[int, int]]:
        """(First, stop) of pages among the chosen ones that lie together in the file."""
        follows = chosen[1:] & chosen[:-1] & (self.offsets[1:] == self.offsets[:-1] + self.sizes[:-1])
        firsts = np.flatnonzero(chosen & ~np.append(False, follows))
        stops = np.flatnonzero(chosen & ~np.append(follows, False)) + 1
        return list(zip(firsts.tolist(), stops.tolist(), strict=True))


class IndexedFile:
    """An open Parquet file, of which parts of row groups are read; all of them where it has no page index."""

    def __init__(self, source: Any, file: pq.ParquetFile):
        """`source` is the file of pyarrow that `file` reads."""
        self._source, self._file = source, file
        self._leaves = [file.schema.column(i) for i in range(len(file.schema))]
        self._footer: Struct | None = None
        self._indexes = 0, b""  # where they are in the file, and their bytes

    def read_passing(self, group: int, names: Sequence[str], any_of: AnyOf) -> tuple[dict[str, pa.ChunkedArray], Mask]:
        """The stored cells of some columns in the rows that pass, and which rows of the row group those are.

        Raises OSError for a page index that does not fit the pages, and pyarrow's errors for damaged pages.
        """
        passes = self.rows_that_may_pass(group, any_of)
        asked = self.read(group, columns_of(any_of), passes)
        held = passing_rows(any_of, asked.__getitem__, int(np.count_nonzero(passes)))
        passes[passes] = held
        found = self.read(group, [name for name in names if name not in asked], passes)
        return {name: found[name] if name in found else asked[name].filter(pa.array(held)) for name in names}, passes

    def rows_that_may_pass(self, group: int, any_of: AnyOf) -> Mask:
        """Those that the bounds of their pages do not rule out. # (rows,)"""
        rows = self._file.metadata.row_group(group).num_rows
        may = np.zeros(rows, dtype=np.bool_)
        for all_of in any_of:
            each = np.ones(rows, dtype=np.bool_)
            for condition in all_of:
                if (held := self._may_hold(group, condition)) is not None:
                    each &= held
            may |= each
        return may

    def read(self, group: int, names: Sequence[str], rows: Mask) -> dict[str, pa.ChunkedArray]:
        """The stored cells of some columns in some rows of a row group. # rows: (rows,)"""
        needed: dict[str, tuple[int, _Pages, Mask]] = {}
        for name in names:
            if (found := self._pages_of(group, name)) is not None:
                leaf, pages = found
                chosen = np.logical_or.reduceat(rows, pages.starts[:-1])
                if pages.sizes[chosen].sum() <= _SHARE * pages.sizes.sum():
                    needed[name] = leaf, pages, chosen
        cells = {}
        if whole := [name for name in names if name not in needed]:
            table = self._file.read_row_group(group, whole, use_threads=False)
            table = table if rows.all() else table.filter(pa.array(rows))
            cells = {name: stored_column(table, name) for name in whole}
        if needed:
            part = parquet.open_file(pa.BufferReader(self._file_of(group, needed)))
            for i, (name, (_, pages, chosen)) in enumerate(needed.items()):
                column = stored_column(part.read_row_group(i, [name], use_threads=False), name)
                cells[name] = column.filter(pa.array(rows[np.repeat(chosen, pages.rows)]))
        return cells

    def _file_of(self, group: int, needed: Mapping[str, tuple[int, _Pages, Mask]]) -> bytes:
        """A Parquet file with a row group for each column, which has the chosen pages of that one."""
        row_group = self._row_group(group)
        columns = value_of(row_group, _COLUMNS)
        out, groups = bytearray(_MAGIC), []
        for leaf, pages, chosen in needed.values():
            metadata = value_of(columns[leaf], _METADATA)
            part = {number: metadata[number] for number in _KEPT_METADATA}
            start = len(out)
            chunk = min(filter(None, (value_of(metadata, _DICTIONARY_PAGE), value_of(metadata, _DATA_PAGE))))
            if chunk < pages.offsets[0]:
                part[_DICTIONARY_PAGE] = Field(I64, start)
                out += self._read(chunk, int(pages.offsets[0]) - chunk)
            part[_DATA_PAGE] = Field(I64, len(out))
            num_values = np.zeros(len(chosen), np.int64)
            for first, stop in pages.runs(chosen):
                offset = int(pages.offsets[first])
                run = memoryview(self._read(offset, int(pages.offsets[stop - 1] + pages.sizes[stop - 1]) - offset))
                for i in range(first, stop):
                    num_values[i] = _num_values(run[pages.offsets[i] - offset :][: pages.sizes[i]])
                out += run
            if not self._leaves[leaf].max_repetition_level and (num_values != pages.rows * chosen).any():
                raise OSError(f"pages have {num_values[chosen]} rows, and by the page index {pages.rows[chosen]}")
            part[_NUM_VALUES] = Field(I64, int(num_values.sum()))
            part[_COMPRESSED_BYTES] = Field(I64, len(out) - start)
            own = [*columns[:leaf], {2: Field(I64, start), _METADATA: Field(STRUCT, part)}, *columns[leaf + 1 :]]
            num_rows = Field(I64, int(pages.rows[chosen].sum()))
            groups.append({_COLUMNS: Field(LIST, Many(STRUCT, own)), 2: row_group[2], _GROUP_ROWS: num_rows})
        num_rows = Field(I64, sum(value_of(g, _GROUP_ROWS) for g in groups))
        footer = {**self._read_footer(), _NUM_ROWS: num_rows, _ROW_GROUPS: Field(LIST, Many(STRUCT, groups))}
        end = write_struct(footer)
        return bytes(out + end + len(end).to_bytes(4, "little") + _MAGIC)

    def _may_hold(self, group: int, condition: Condition) -> Mask | None:
        """Which rows may fulfil a condition, by the bounds of their pages; None where there are none. # (rows,)"""
        found = self._pages_of(group, condition.column)
        if found is None:
            return None
        leaf, pages = found
        described = self._leaves[leaf]
        if described.path != condition.column:  # a list or a struct
            return None
        offset, length = (value_of(value_of(self._row_group(group), _COLUMNS)[leaf], n) for n in _COLUMN_INDEX)
        if not offset:
            return None
        with _damage_explained():
            index = self._struct(offset, length)
            nulls, lows, highs = (value_of(index, number) for number in (1, 2, 3))
            counts = value_of(index, 5) or [1] * len(nulls)
            arrow = condition.values.type
            bounds = [
                Bounds(only_nulls=True)
                if only_nulls
                else Bounds(_bound(low, described, arrow), _bound(high, described, arrow), has_nulls=count > 0)
                for only_nulls, low, high, count in zip(nulls, lows, highs, counts, strict=True)
            ]
            each = np.array([holds_within(condition, of_page) is not False for of_page in bounds], np.bool_)
            if len(each) != len(pages.rows):
                raise ValueError(f"bounds of {len(each)} pages, expected {len(pages.rows)}")
        return np.repeat(each, pages.rows)

    def _pages_of(self, group: int, name: str) -> tuple[int, _Pages] | None:
        """The leaf of a column that has one, and its pages, where there is an index of them."""
        leaves = [i for i, leaf in enumerate(self._leaves) if is_of(name, leaf.path)]
        metadata = self._file.metadata.row_group(group)
        if len(leaves) != 1 or not getattr(metadata.column(leaves[0]), "has_offset_index", False):
            return None
        offset, length = (value_of(value_of(self._row_group(group), _COLUMNS)[leaves[0]], n) for n in _OFFSET_INDEX)
        with _damage_explained():
            locations = value_of(self._struct(offset, length), 1)
            offsets, sizes, starts = (np.array([value_of(page, n) for page in locations], np.int64) for n in (1, 2, 3))
            starts = np.append(starts, metadata.num_rows)
            if starts[0] != 0 or (np.diff(starts) < 0).any() or (sizes <= 0).any():
                raise ValueError(f"pages of {sizes[:9]} bytes that begin in rows {starts[:9]}")
        pages = _Pages(offsets, sizes, starts)
        return (leaves[0], pages) if pages.rows.all() else None  # pyarrow writes pages without a row, too

    def _row_group(self, group: int) -> Struct:
        found: Struct = value_of(self._read_footer(), _ROW_GROUPS)[group]
        return found

    def _read_footer(self) -> Struct:
        """With the page indexes, which lie before it, in one more read: over a network each takes its time."""
        if self._footer is None:
            size = self._source.size()
            footer_at = size - _END_BYTES - int.from_bytes(self._read(size - _END_BYTES, 4), "little")
            with _damage_explained():
                self._footer = self._struct(footer_at, size - _END_BYTES - footer_at)
                columns = [c for g in value_of(self._footer, _ROW_GROUPS) for c in value_of(g, _COLUMNS)]
                first = min(value_of(c, offset, size) for c in columns for offset, _ in (_OFFSET_INDEX, _COLUMN_INDEX))
            if footer_at - first <= _MAX_INDEX_BYTES:
                self._indexes = first, self._read(first, footer_at - first)
        return self._footer

    def _struct(self, offset: int, length: int) -> Struct:
        return read_struct(self._read(offset, length))[0]

    def _read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._source.size():
            raise OSError(f"the file has {self._source.size()} bytes, and its page index tells of more")
        first, held = self._indexes
        if first <= offset and offset + length <= first + len(held):
            return held[offset - first :][:length]
        found: bytes = self._source.read_at(length, offset)
        return found


def _num_values(page: memoryview) -> int:
    """Of a data page of version 1 or 2, with its nulls."""
    with _damage_explained():
        header, _ = read_struct(page)
        data = value_of(header, 5) or value_of(header, 8)
        return int(value_of(data, 1))


@contextlib.contextmanager
def _damage_explained() -> Iterator[None]:
    """Raises OSError for structs that are not what Parquet says."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise OSError(f"the page index or a page header is damaged: {error}") from error


def _bound(stored: bytes, leaf: Any, arrow: pa.DataType) -> pa.Scalar | None:
    """A bound of a page's values as a value of the column's type; None where it cannot be told. # leaf: its schema"""
    types = pa.types
    try:
        if leaf.physical_type == "BYTE_ARRAY":
            return pa.array([stored], pa.binary()).cast(arrow)[0]
        value = np.frombuffer(stored, _NUMBERS[leaf.physical_type])
        if value.dtype.kind == "f" and np.isnan(value).any():
            return None
        if types.is_timestamp(arrow):
            unit = _UNITS[json.loads(leaf.logical_type.to_json())["timeUnit"]]
            return pa.array(value).view(pa.timestamp(unit, arrow.tz)).cast(arrow)[0]
        if types.is_date32(arrow):
            return pa.array(value).view(arrow)[0]
        if types.is_unsigned_integer(arrow):
            value = value.view(f"<u{value.dtype.itemsize}")
        if types.is_integer(arrow) or types.is_floating(arrow):
            return pa.array(value).cast(arrow)[0]
    except (pa.ArrowException, ValueError, KeyError, IndexError):
        pass
    return None  # such as of decimals: the rows themselves decide
