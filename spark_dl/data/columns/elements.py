"""The values of Arrow columns as NumPy numbers: booleans, integers, floats, times, decimals and looked-up strings."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from spark_dl.data.columns.lookup import Lookup, is_looked_up, string_indices
from spark_dl.data.columns.nesting import rows_of_level
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import NO_NULLS, BadCellsError, Shape, SourceColumn, fill_scalar

_NS = {"D": 86_400_000_000_000, "s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_LARGEST = np.iinfo(np.int64).max
_A_CELL = {"array": "an array", "vector": "a vector"}


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
