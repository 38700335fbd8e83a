"""Cells of Arrow columns, from Spark or Parquet files, as NumPy arrays or ragged arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.elements import (
    check_inner_nulls,
    decoded,
    elements,
    first_true,
    is_looked_up,
    leaf_type,
    levels,
    numbers,
    one_length,
    rows_of_level,
    shape_source,
)
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths
from spark_dl.data.columns.source import NO_NULLS, BadCellsError, Shape, SourceColumn
from spark_dl.data.columns.types import Lookup, fill_scalar
from spark_dl.data.columns.vectors import vectors


def read_cells(
    column: SourceColumn, array: pa.Array, shape: Shape | None = None, lookup: Lookup | None = None
) -> Array | Ragged:
    """Reads the cells of a column as one array # (rows, *shape), or as a ragged array.

    `shape` is the expected shape of array and vector cells; by default the first row gives it. `lookup` keeps looked-up
    strings between the batches of one column. Bytes and images are ragged: the bytes of each cell. If the column has a
    fill, null elements become the fill, and a null array becomes an array of the fill, or an empty one in a ragged
    column.
    Raises BadCellsError, with the column and the first bad row, for nulls, cells of unequal shape, and numbers that do
    not fit the dtype.
    """
    if not is_looked_up(column, array):
        array = decoded(array)
    if array.null_count == 0:
        return _read_present(column, array, shape, lookup)
    if column.fill is None or column.encoding.kind in ("bytes", "image"):
        raise BadCellsError(column.name, first_true(array.is_null()), f"{array.null_count} null(s)", NO_NULLS)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    if not present.any() and column.kind != "scalar" and not column.ragged and shape is None:
        expected = "at least one array, which gives the length of filled arrays; set data.nulls to drop"
        raise BadCellsError(column.name, 0, f"only nulls in {len(array)} rows", expected)
    try:
        cells = _read_present(column, array.drop_null(), shape, lookup)
    except BadCellsError as error:
        error.row = int(np.flatnonzero(present)[error.row])
        raise
    return _with_nulls_filled(column, cells, present, _plain_type(leaf_type(array.type)))


def _with_nulls_filled(
    column: SourceColumn, values: Array | Ragged, present: Array, leaf: pa.DataType
) -> Array | Ragged:
    """The cells of all rows: `values` where present, the fill elsewhere. # present: (rows,) bool"""
    if isinstance(values, Ragged):
        lengths = np.zeros(len(present), dtype=np.int64)
        lengths[present] = values.lengths
        return from_lengths(values.own_values, lengths)
    fill = numbers(column, pa.array([fill_scalar(column, column.fill, leaf).as_py()], leaf))[0]
    out = np.full((len(present), *values.shape[1:]), fill, dtype=column.dtype)
    out[present] = values
    return out


def _read_present(column: SourceColumn, array: pa.Array, known: Shape | None, lookup: Lookup | None) -> Array | Ragged:
    if column.kind == "vector":
        return vectors(column, array, known)
    if column.encoding.kind in ("bytes", "image"):
        return _bytes(array)
    if column.kind == "scalar":
        return numbers(column, array, lookup)
    by_level = levels(array)
    check_inner_nulls(column, by_level)
    first = 1 if column.ragged else 0
    shape = [_fixed_length(column, by_level, level, known) for level in range(first, len(by_level) - 1)]
    flat = elements(column, by_level, lookup)
    if not column.ragged:
        return flat.reshape(len(array), *shape)
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    return from_lengths(flat.reshape(int(lengths.sum()), *shape), lengths)


def _fixed_length(column: SourceColumn, by_level: list[pa.Array], level: int, known: Shape | None) -> int:
    lengths = pc.list_value_length(by_level[level]).to_numpy(zero_copy_only=False)
    length, bad = one_length(lengths, known[level] if known else None)
    if bad is not None:
        unequal = f"arrays of lengths {sorted({int(n) for n in np.unique(lengths)})[:8]}"
        ask = "; only the first axis of a ragged column can vary" if column.ragged else ""
        ask = ask if level else f", or set data.encode.{column.name}: {{ragged: true}}"
        expected = f"one length; {shape_source(known)} {length}{ask}"
        raise BadCellsError(column.name, int(rows_of_level(by_level, level)[bad]), unequal, expected)
    return length


def _bytes(array: pa.Array) -> Ragged:
    """Strings (as UTF-8) and binary cells, as views of the Arrow buffer."""
    types = pa.types
    if types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    is_large = types.is_large_binary(array.type) or types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return Ragged(np.empty(0, dtype=np.uint8), np.zeros(len(array) + 1, dtype=np.int64))
    kind = np.dtype(np.int64 if is_large else np.int32)
    starts = np.frombuffer(offsets, kind, count=len(array) + 1, offset=kind.itemsize * array.offset).astype(np.int64)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, dtype=np.uint8)
    return Ragged(values[starts[0] : starts[-1]], starts - starts[0])


def _plain_type(arrow: pa.DataType) -> pa.DataType:
    return arrow.value_type if pa.types.is_dictionary(arrow) else arrow
