"""The values of Arrow columns as NumPy numbers: booleans, integers, floats, times, decimals and looked-up strings.

A nested column is taken level by level: its lists, their elements, and the row of each. Strings are positions in a
vocabulary, or hash buckets, looked up once for each distinct string.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import NO_NULLS, BadCellsError, Shape, SourceColumn, fill_scalar

_NS = {"D": 86_400_000_000_000, "s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_LARGEST = np.iinfo(np.int64).max
_A_CELL = {"array": "an array", "vector": "a vector"}


def leaf_type(arrow: pa.DataType) -> pa.DataType:
    """The type of the innermost elements: of nested arrays, of a vector, or the type itself."""
    if pa.types.is_struct(arrow):
        return pa.float64()
    while _is_list(arrow):
        arrow = arrow.value_type
    return arrow


def levels(array: pa.Array) -> list[pa.Array]:
    """The column, the elements of its lists, their elements, and so on; for Spark ML vectors, their values."""
    if pa.types.is_struct(array.type):
        lists = array.field("values")
        return [array, lists, lists.flatten()]
    found = [array]
    while _is_list(found[-1].type):
        found.append(found[-1].flatten())
    return found


def rows_of_level(found: list[pa.Array], level: int) -> npt.NDArray[np.int64]:
    """The row of each value of one of the `levels`. # (len(found[level]),)"""
    rows = np.arange(len(found[0]))
    for lists in found[:level]:
        if _is_list(lists.type):
            rows = np.repeat(rows, pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False))
    return rows


def null_rows(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Mask of rows with a null at any depth; None if there are none. # (rows,)"""
    found = levels(array)
    if not any(values.null_count for values in found):
        return None
    bad = np.zeros(len(array), dtype=bool)
    for level, values in enumerate(found):
        if values.null_count:
            bad[rows_of_level(found, level)[values.is_null().to_numpy(zero_copy_only=False)]] = True
    return bad


def nonfinite_rows(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Mask of rows with NaN or Inf at any depth; None if there are none. # (rows,)"""
    found = levels(array)
    if not pa.types.is_floating(found[-1].type):
        return None
    values = found[-1].fill_null(0) if found[-1].null_count else found[-1]
    is_finite = np.isfinite(values.to_numpy(zero_copy_only=False))
    if is_finite.all():
        return None
    bad = np.zeros(len(array), dtype=bool)
    bad[rows_of_level(found, len(found) - 1)[~is_finite]] = True
    return bad


def _is_list(arrow: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow))


class Lookup:
    """Looks up the strings of one column as integers, those of the previous batch once only. Not thread-safe."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._strings: pa.Array | None = None
        self._index: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self, strings: pa.Array) -> npt.NDArray[np.int64]:
        """Vocabulary index of each string (unknown: -1, or 0 with known strings shifted by one), or its hash bucket.

        If the strings begin with those of the previous call, only the others are looked up.
        # distinct strings -> (len(strings),)
        """
        known = len(self._index)
        if self._strings is None or not self._strings.equals(strings[:known]):
            known = 0
        if known and known == len(strings):
            return self._index
        self._index = np.concatenate([self._index[:known], self._look_up(strings[known:])])
        self._strings = strings
        return self._index

    def _look_up(self, strings: pa.Array) -> npt.NDArray[np.int64]:
        encoding = self._encoding
        if encoding.kind == "hash":
            assert encoding.buckets is not None
            words = strings.cast(pa.large_binary()).to_pylist()  # Spark's strings can be other bytes than UTF-8
            return np.array([zlib.crc32(word) % encoding.buckets for word in words], dtype=np.int64)
        assert encoding.vocabulary is not None
        known = pa.array(encoding.vocabulary, strings.type)
        index = pc.index_in(strings, value_set=known).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return index + (encoding.unknown == "zero")  # type: ignore[no-any-return]


def keeps_dictionary(encoding: Encoding, arrow: pa.DataType) -> bool:
    """Whether a dictionary-encoded column is looked up through its dictionary, without decoding it."""
    return encoding.is_lookup and pa.types.is_dictionary(leaf_type(arrow))


def is_looked_up(column: SourceColumn, array: pa.Array) -> bool:
    """Whether this array is looked up through its dictionary."""
    is_dictionary = pa.types.is_dictionary(array.type) and not array.dictionary.null_count
    return is_dictionary and keeps_dictionary(column.encoding, array.type)


def string_indices(column: SourceColumn, strings: pa.Array, lookup: Lookup) -> Array:
    """Vocabulary index or hash bucket of each string; each distinct string is looked up once.

    # strings: without nulls, or dictionary-encoded; the dictionary may hold strings that no row has
    Raises BadCellsError for an unknown string if the encoding does not map unknown strings to 0.
    """
    unique = strings if pa.types.is_dictionary(strings.type) else strings.dictionary_encode()
    rows = unique.indices.to_numpy(zero_copy_only=False)
    distinct: pa.Array = unique.dictionary
    indices: Array = lookup(distinct)[rows]
    if column.encoding.kind == "vocabulary" and (is_bad := indices < 0).any():
        row = int(np.argmax(is_bad))
        expected = (
            f"one of {len(column.encoding.vocabulary or ())} known strings; data.encode.{column.name}.unknown: zero "
            "maps all others to 0"
        )
        word = distinct.cast(pa.large_binary())[int(rows[row])].as_py().decode(errors="backslashreplace")
        raise BadCellsError(column.name, row, f"{word!r:.80}", expected)
    return indices


def numbers(column: SourceColumn, values: pa.Array, lookup: Lookup | None = None) -> Array:
    """The values as numbers of the column's dtype. # (len(values),)

    Raises BadCellsError for nulls without a fill, and for values that do not fit the dtype.
    """
    if is_looked_up(column, values) and not values.null_count:
        return string_indices(column, values, lookup or Lookup(column.encoding))
    values = _typed(column, decoded(values))
    if values.null_count and column.fill is not None:
        values = values.fill_null(fill_scalar(column, column.fill, values.type))
    if values.null_count:
        raise BadCellsError(column.name, first_true(values.is_null()), f"{values.null_count} null(s)", NO_NULLS)
    types = pa.types
    if types.is_temporal(values.type):
        return _ticks(column, values)
    if types.is_decimal(values.type):
        return _decimals(column, values)
    if types.is_string(values.type) or types.is_large_string(values.type):
        return string_indices(column, values, lookup or Lookup(column.encoding))
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=column.dtype)


def _typed(column: SourceColumn, values: pa.Array) -> pa.Array:
    """Returns values of a type that all files have: nulls whose writer knew no type, strings that are views."""
    if str(values.type) == "string_view":
        return values.cast(pa.string())
    if not pa.types.is_null(values.type):
        return values
    encoding = column.encoding
    if encoding.is_lookup:
        return values.cast(pa.string())
    if encoding.kind in ("timestamp", "duration"):
        kind = pa.timestamp if encoding.kind == "timestamp" else pa.duration
        return values.cast(pa.date32() if encoding.unit == "D" else kind(encoding.unit))
    return values.cast(pa.bool_() if column.dtype == "bool" else pa.from_numpy_dtype(np.dtype(column.dtype)))


def elements(column: SourceColumn, found: list[pa.Array], lookup: Lookup | None = None) -> Array:
    """The innermost elements of arrays or vectors, concatenated. A BadCellsError has the row of the cell."""
    try:
        return numbers(column, found[-1], lookup)
    except BadCellsError as error:
        row = int(rows_of_level(found, len(found) - 1)[error.row])
        inside = f"{error.found} inside {_A_CELL[column.kind]}"
        raise BadCellsError(column.name, row, inside, error.expected) from None


def check_inner_nulls(column: SourceColumn, found: list[pa.Array]) -> None:
    """Raises BadCellsError for a null inside an array or vector; with a fill, innermost elements may be null."""
    for level, values in enumerate(found if column.fill is None else found[:-1]):
        if values.null_count:
            row = int(rows_of_level(found, level)[first_true(values.is_null())])
            raise BadCellsError(column.name, row, f"a null inside {_A_CELL[column.kind]}", NO_NULLS)


def _ticks(column: SourceColumn, values: pa.Array) -> Array:
    """Dates, timestamps and durations as integer ticks of the column's unit; a coarser unit rounds down."""
    types = pa.types
    stored = "D" if types.is_date32(values.type) else "ms" if types.is_date64(values.type) else values.type.unit
    plain = values.cast(pa.int32()) if types.is_date32(values.type) else values.cast(pa.int64())
    ticks = np.asarray(plain.to_numpy(zero_copy_only=False), dtype=np.int64)
    assert column.encoding.unit is not None
    here, there = _NS[stored], _NS[column.encoding.unit]
    if here < there:
        ticks = np.floor_divide(ticks, there // here)
    elif here > there:
        _check_range(column, (ticks > _LARGEST // (here // there)) | (ticks < -(_LARGEST // (here // there))), values)
        ticks = ticks * (here // there)
    bounds = np.iinfo(column.dtype)
    _check_range(column, (ticks < bounds.min) | (ticks > bounds.max), values)
    return ticks.astype(column.dtype, copy=False)


def _check_range(column: SourceColumn, is_bad: Array, values: pa.Array) -> None:
    if is_bad.any():
        row = int(np.argmax(is_bad))
        found = f"{values[row].cast(pa.string()).as_py()}, outside {column.dtype} in {column.encoding.unit}"
        raise BadCellsError(column.name, row, found, f"a coarser data.encode.{column.name}.unit")


def _decimals(column: SourceColumn, values: pa.Array) -> Array:
    """Unscaled values as int64, or the nearest float64. Raises BadCellsError if 64 bits are not enough."""
    if column.encoding.kind == "float":
        # Through strings: Arrow's cast multiplies by a power of ten, rounds twice and can be off by one bit.
        return np.asarray(values.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False))
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    wide = values.cast(pa.decimal256(76, column.encoding.scale or 0))
    # 256 bits, little-endian: the lowest 64 hold the value if all higher bits repeat its sign
    words = np.frombuffer(wide.buffers()[1], dtype="<i8").reshape(-1, 4)[wide.offset : wide.offset + len(wide)]
    overflows = (words[:, 1:] != (words[:, :1] >> 63)).any(axis=1)
    if overflows.any():
        row = int(np.argmax(overflows))
        expected = (
            f"unscaled values within 64 bits; set data.encode.{column.name}: {{as: float}}, or CAST to DECIMAL(18, s)"
        )
        raise BadCellsError(column.name, row, str(values[row].as_py()), expected)
    return words[:, 0].astype(np.int64)


def decoded(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def first_true(mask: pa.Array) -> int:
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])


def one_length(lengths: Array, known: int | None) -> tuple[int, int | None]:
    """The expected length (default: the first) and the position of the first length that differs, or None."""
    length = known if known is not None else int(lengths[0]) if len(lengths) else 0
    others = np.flatnonzero(lengths != length)
    return length, int(others[0]) if others.size else None


def shape_source(known: Shape | None) -> str:
    """Where the expected shape comes from, for error messages."""
    return "the first cell has" if known is None else "the other cells have"
