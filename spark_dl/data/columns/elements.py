"""The elements of nested Arrow columns: their lists level by level, the row of each element, and its number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns import types
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import NO_NULLS, BadCellsError, Shape, SourceColumn
from spark_dl.data.columns.types import Lookup, string_indices

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
    by_level = [array]
    while _is_list(by_level[-1].type):
        by_level.append(by_level[-1].flatten())
    return by_level


def rows_of_level(by_level: list[pa.Array], level: int) -> npt.NDArray[np.int64]:
    """The row of each value of one of the `levels`. # (len(found[level]),)"""
    rows = np.arange(len(by_level[0]))
    for lists in by_level[:level]:
        if _is_list(lists.type):
            rows = np.repeat(rows, pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False))
    return rows


def null_rows(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Mask of rows with a null at any depth; None if there are none. # (rows,)"""
    by_level = levels(array)
    if not any(values.null_count for values in by_level):
        return None
    bad = np.zeros(len(array), dtype=bool)
    for level, values in enumerate(by_level):
        if values.null_count:
            bad[rows_of_level(by_level, level)[values.is_null().to_numpy(zero_copy_only=False)]] = True
    return bad


def nonfinite_rows(array: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Mask of rows with NaN or Inf at any depth; None if there are none. # (rows,)"""
    by_level = levels(array)
    if not pa.types.is_floating(by_level[-1].type):
        return None
    values = by_level[-1].fill_null(0) if by_level[-1].null_count else by_level[-1]
    is_finite = np.isfinite(values.to_numpy(zero_copy_only=False))
    if is_finite.all():
        return None
    bad = np.zeros(len(array), dtype=bool)
    bad[rows_of_level(by_level, len(by_level) - 1)[~is_finite]] = True
    return bad


def _is_list(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow))


def keeps_dictionary(encoding: Encoding, arrow: pa.DataType) -> bool:
    """Whether a dictionary-encoded column is looked up through its dictionary, without decoding it."""
    return encoding.is_lookup and pa.types.is_dictionary(leaf_type(arrow))


def is_looked_up(column: SourceColumn, array: pa.Array) -> bool:
    """Whether this array is looked up through its dictionary."""
    is_dictionary = pa.types.is_dictionary(array.type) and not array.dictionary.null_count
    return is_dictionary and keeps_dictionary(column.encoding, array.type)


def numbers(column: SourceColumn, values: pa.Array, lookup: Lookup | None = None) -> Array:
    """The values as numbers of the column's dtype. # (len(values),)

    Raises BadCellsError for nulls without a fill, and for values that do not fit the dtype.
    """
    if is_looked_up(column, values) and not values.null_count:
        return string_indices(column, values, lookup or Lookup(column.encoding))
    values = types.typed(column, decoded(values))
    if values.null_count and column.fill is not None:
        values = values.fill_null(types.fill_scalar(column, column.fill, values.type))
    if values.null_count:
        raise BadCellsError(column.name, first_true(values.is_null()), f"{values.null_count} null(s)", NO_NULLS)
    return types.to_numbers(column, values, lookup)


def elements(column: SourceColumn, by_level: list[pa.Array], lookup: Lookup | None = None) -> Array:
    """The innermost elements of arrays or vectors, concatenated. A BadCellsError has the row of the cell."""
    try:
        return numbers(column, by_level[-1], lookup)
    except BadCellsError as error:
        row = int(rows_of_level(by_level, len(by_level) - 1)[error.row])
        inside = f"{error.found} inside {_A_CELL[column.kind]}"
        raise BadCellsError(column.name, row, inside, error.expected) from None


def check_inner_nulls(column: SourceColumn, by_level: list[pa.Array]) -> None:
    """Raises BadCellsError for a null inside an array or vector; with a fill, innermost elements may be null."""
    for level, values in enumerate(by_level if column.fill is None else by_level[:-1]):
        if values.null_count:
            row = int(rows_of_level(by_level, level)[first_true(values.is_null())])
            raise BadCellsError(column.name, row, f"a null inside {_A_CELL[column.kind]}", NO_NULLS)


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
