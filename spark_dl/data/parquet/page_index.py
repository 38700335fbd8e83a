"""Reads only the pages with rows that can pass filters, by Parquet's page index.

pyarrow and Spark write page indexes, but pyarrow reads whole column chunks (apache/arrow#45284). Therefore this module
builds files in memory with the chosen pages for pyarrow. Format: https://github.com/apache/parquet-format
(PageIndex.md; field numbers from parquet.thrift).
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet.calendar import RebasedFile, may_change
from spark_dl.data.parquet.file import table_column
from spark_dl.data.parquet.filters import AnyOf, Bounds, Condition, Mask, columns_of, holds_within, passing_rows
from spark_dl.data.parquet.thrift import (
    I64,
    LIST,
    STRUCT,
    Many,
    Struct,
    TField,
    read_struct,
    value_of,
    write_struct,
)

Ints = npt.NDArray[np.int64]

_MAGIC = b"PAR1"
_ROW_GROUPS, _NUM_ROWS = 4, 3  # of FileMetaData
_COLUMNS, _GROUP_ROWS = 1, 3  # of RowGroup
_METADATA, _OFFSET_INDEX, _COLUMN_INDEX = 3, (4, 5), (6, 7)  # of ColumnChunk; (offset, length) of the indexes
_COMPRESSED_BYTES, _DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11  # of ColumnMetaData
_KEPT_METADATA = (1, 2, 3, 4, 5, 6, 7, 9)  # the required fields; others describe all pages
_SHARE = 0.5  # of a column's bytes; above it the column is read as a whole
_NUMBERS = {"INT32": "<i4", "INT64": "<i8", "FLOAT": "<f4", "DOUBLE": "<f8"}
_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}
_END_BYTES = 8  # the footer's length, and the magic
_MIN_CHUNK_BYTES = 64 << 10  # smaller column chunks are read as a whole
_MAX_FOOTER_BYTES = 256 << 10  # parsing a larger footer takes longer than skipped pages save
_MAX_INDEX_BYTES = 1 << 20  # of all indexes of a file; above it they are read one by one
_GAP_BYTES = 1 << 20  # between pages; on object stores a request costs as much as reading these bytes


@dataclass(frozen=True)
class _Pages:
    """The data pages of a column in a row group."""

    offsets: Ints
    sizes: Ints
    """Sizes in bytes, including headers."""
    starts: Ints
    """The first row of each page, and the number of rows of the row group. # (pages + 1,)"""

    @property
    def rows(self) -> Ints:
        """Number of rows of each page. # (pages,)"""
        return np.diff(self.starts)

    @property
    def ends(self) -> Ints:
        """End offset of each page in the file. # (pages,)"""
        return self.offsets + self.sizes

    def spans(self, chosen: Mask) -> list[Ints]:
        """Groups the chosen pages, by number, into reads of pages with small gaps between them."""
        numbers = np.flatnonzero(chosen)
        gaps = self.offsets[numbers[1:]] - self.ends[numbers[:-1]]
        return np.split(numbers, np.flatnonzero(gaps > _GAP_BYTES) + 1) if len(numbers) else []


class IndexedFile:
    """An open Parquet file that reads parts of row groups; whole row groups without a page index."""

    def __init__(self, source: Any, file: pq.ParquetFile, *, dictionary_columns: Sequence[str] = ()):
        """source: the pyarrow file of `file`, which was opened with `dictionary_columns`."""
        self._source, self._file, self._as_words = source, file, dictionary_columns
        self._leaves = [file.schema.column(i) for i in range(len(file.schema))]
        self._numbers: dict[str, list[int]] = {}
        """Numbers of the leaves of a column or a struct field, by path."""
        for i, leaf in enumerate(self._leaves):
            for path in itertools.accumulate(leaf.path.split("."), "{}.{}".format):
                self._numbers.setdefault(path, []).append(i)
        self._footer: Struct | None = None
        self._indexes = 0, b""  # offset in the file, bytes

    def read_passing(self, group: int, names: Sequence[str], any_of: AnyOf) -> tuple[dict[str, pa.ChunkedArray], Mask]:
        """Reads the stored cells of passing rows, and returns them with the mask of these rows in the row group.

        Raises OSError for a page index that does not match the pages, and pyarrow's errors for damaged pages.
        """
        passes = self.rows_that_may_pass(group, any_of)
        asked = self.read(group, columns_of(any_of), passes)
        held = passing_rows(any_of, asked.__getitem__, int(np.count_nonzero(passes)))
        passes[passes] = held
        columns = self.read(group, [name for name in names if name not in asked], passes)
        return {
            name: columns[name] if name in columns else asked[name].filter(pa.array(held)) for name in names
        }, passes

    def rows_that_may_pass(self, group: int, any_of: AnyOf) -> Mask:
        """Returns the rows that can pass, by the bounds of their pages. # (rows,)"""
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
            if (column_pages := self._pages_of(group, name)) is not None:
                leaf, pages = column_pages
                chosen = np.logical_or.reduceat(rows, pages.starts[:-1])
                if pages.sizes[chosen].sum() <= _SHARE * pages.sizes.sum():
                    needed[name] = leaf, pages, chosen
        cells = {}
        if whole := [name for name in names if name not in needed]:
            table = self._file.read_row_group(group, whole, use_threads=False)
            table = table if rows.all() else table.filter(pa.array(rows))
            cells = {name: table_column(table, name) for name in whole}
        if needed:
            part = parquet_file.open_file(
                pa.BufferReader(self._file_of(group, needed)), dictionary_columns=self._as_words
            )
            for name, (_, pages, chosen) in needed.items():
                column = table_column(part.read_row_group(0, [name], use_threads=False), name)
                of_pages = rows[np.repeat(chosen, pages.rows)]
                _check_rows(name, len(column), len(of_pages))
                cells[name] = column.filter(pa.array(of_pages))
        return cells

    def _file_of(self, group: int, needed: Mapping[str, tuple[int, _Pages, Mask]]) -> bytes:
        """A Parquet file of one row group, in which these columns have the chosen pages, and no others.

        Its numbers of rows and values stay those of all pages: pyarrow reads a column to the end of its last page.
        """
        row_group = self._row_group(group)
        columns = [*value_of(row_group, _COLUMNS)]
        out = bytearray(_MAGIC)
        for name, (leaf, pages, chosen) in needed.items():
            metadata = value_of(columns[leaf], _METADATA)
            part = {number: metadata[number] for number in _KEPT_METADATA}
            start, chunk = len(out), self._chunk(group, leaf)[0]
            if chunk < pages.offsets[0]:
                part[_DICTIONARY_PAGE] = TField(I64, start)
                out += self._read(chunk, int(pages.offsets[0]) - chunk)
            part[_DATA_PAGE] = TField(I64, len(out))
            for span in pages.spans(chosen):
                offset = int(pages.offsets[span[0]])
                content = memoryview(self._read(offset, int(pages.ends[span[-1]]) - offset))
                for i in span:
                    page = content[pages.offsets[i] - offset : pages.ends[i] - offset]
                    if not self._leaves[leaf].max_repetition_level:
                        _check_rows(name, _num_values(page), int(pages.rows[i]))
                    out += page
            part[_COMPRESSED_BYTES] = TField(I64, len(out) - start)
            columns[leaf] = {2: TField(I64, start), _METADATA: TField(STRUCT, part)}
        groups = TField(LIST, Many(STRUCT, [{**row_group, _COLUMNS: TField(LIST, Many(STRUCT, columns))}]))
        end = write_struct({**self._read_footer(), _NUM_ROWS: row_group[_GROUP_ROWS], _ROW_GROUPS: groups})
        return bytes(out + end + len(end).to_bytes(4, "little") + _MAGIC)

    def _may_hold(self, group: int, condition: Condition) -> Mask | None:
        """Which rows may fulfil a condition, by the bounds of their pages; None where there are none. # (rows,)"""
        column_pages = self._pages_of(group, condition.column)
        if column_pages is None:
            return None
        leaf, pages = column_pages
        described = self._leaves[leaf]
        if described.path != condition.column or described.max_repetition_level:  # a struct or a list
            return None
        if isinstance(self._file, RebasedFile) and may_change(condition.values.type):  # bounds of the old calendar
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
        """Returns the leaf of a column and its pages; None without a page index or with several leaves."""
        leaves = self._numbers.get(name, [])
        metadata = self._file.metadata.row_group(group)
        has_index = len(leaves) == 1 and getattr(metadata.column(leaves[0]), "has_offset_index", False)
        if not has_index or self._file.metadata.serialized_size > _MAX_FOOTER_BYTES:
            return None
        chunk, end = self._chunk(group, leaves[0])
        if end - chunk < _MIN_CHUNK_BYTES:
            return None
        offset, length = (value_of(value_of(self._row_group(group), _COLUMNS)[leaves[0]], n) for n in _OFFSET_INDEX)
        with _damage_explained():
            locations = value_of(self._struct(offset, length), 1)
            offsets, sizes, starts = (np.array([value_of(page, n) for page in locations], np.int64) for n in (1, 2, 3))
            pages = _Pages(offsets, sizes, np.append(starts, metadata.num_rows))
            # NOTE: pyarrow also writes pages without rows, which are not supported here.
            fits = starts[0] == 0 and (pages.rows > 0).all() and (sizes > 0).all() and offsets[0] >= chunk
            return (leaves[0], pages) if fits and (pages.ends == np.append(offsets[1:], end)).all() else None

    def _chunk(self, group: int, leaf: int) -> tuple[int, int]:
        """Returns the start and end offset of a column chunk in the file."""
        chunk = self._file.metadata.row_group(group).column(leaf)
        start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
        return start, start + chunk.total_compressed_size

    def _row_group(self, group: int) -> Struct:
        row_group: Struct = value_of(self._read_footer(), _ROW_GROUPS)[group]
        return row_group

    def _read_footer(self) -> Struct:
        """Reads the footer, and the page indexes before it in one read, to save requests."""
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
            raise OSError(f"the file has {self._source.size()} bytes, and its page index refers to more")
        first, held = self._indexes
        if first <= offset and offset + length <= first + len(held):
            return held[offset - first :][:length]
        content: bytes = self._source.read_at(length, offset)
        return content


def _check_rows(name: str, found: int, expected: int) -> None:
    if found != expected:
        raise OSError(f"pages of column {name!r} have {found} rows, expected {expected} by the page index")


def _num_values(page: memoryview) -> int:
    """Returns the number of values of a data page of version 1 or 2, including nulls."""
    with _damage_explained():
        header, _ = read_struct(page)
        data = value_of(header, 5) or value_of(header, 8)
        return int(value_of(data, 1))


@contextlib.contextmanager
def _damage_explained() -> Iterator[None]:
    """Raises OSError for invalid structs."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise OSError(f"the page index or a page header is damaged: {error}") from error


def _bound(stored: bytes, leaf: Any, arrow: pa.DataType) -> pa.Scalar | None:
    """Converts a page's bound to the type of the column; None if it cannot. # leaf: its schema"""
    types = pa.types
    try:
        if types.is_string(arrow) or types.is_large_string(arrow):
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
    return None  # for example, of decimals: rows are evaluated
