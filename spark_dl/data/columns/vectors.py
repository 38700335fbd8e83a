"""Spark ML vectors as one array of float64."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from spark_dl.data.columns.elements import check_inner_nulls, elements, levels, null_rows, one_length, shape_source
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import BadCellsError, Shape, SourceColumn


def vectors(column: SourceColumn, array: pa.Array, known: Shape | None) -> Array:
    """Dense and sparse Spark ML vectors in any mixture, as one array. # (rows, size)

    The Arrow type is a struct of type (1 dense, 0 sparse), size and indices (sparse only), and values.
    Raises BadCellsError for malformed vectors, nulls, and vectors of unequal sizes.
    """
    by_level = levels(array)
    check_inner_nulls(column, by_level)
    types = array.field("type").cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    counts = array.field("values").value_lengths().to_numpy(zero_copy_only=False)
    _check_form(column, array, types, counts)
    dense = types == 1
    sizes = np.where(dense, counts, array.field("size").fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int64)
    size, bad = one_length(sizes, known[0] if known else None)
    if bad is not None:
        unequal = f"vectors of sizes {sorted({int(n) for n in np.unique(sizes)})[:8]}"
        raise BadCellsError(column.name, bad, unequal, f"one size; {shape_source(known)} {size}")
    values = elements(column, by_level)
    if dense.all():
        return values.reshape(len(array), size)
    out = np.zeros((len(array), size))
    row_of_value = np.repeat(np.arange(len(array)), counts)
    is_dense = dense[row_of_value]
    starts = np.cumsum(counts) - counts
    column_of_value = np.arange(len(values)) - starts[row_of_value]
    column_of_value[~is_dense] = array.field("indices").flatten().to_numpy(zero_copy_only=False)
    if (outside := np.flatnonzero((column_of_value < 0) | (column_of_value >= size))).size:
        index = f"the index {int(column_of_value[outside[0]])} in a sparse vector"
        raise BadCellsError(column.name, int(row_of_value[outside[0]]), index, f"indices from 0 to {size - 1}")
    out[row_of_value, column_of_value] = values
    return out


def _check_form(column: SourceColumn, array: pa.Array, types: Array, counts: Array) -> None:
    """Raises BadCellsError for structs that are not valid Spark ML vectors. # types, counts: (rows,)"""
    is_sparse, has_size = types == 0, array.field("size").is_valid().to_numpy(zero_copy_only=False)
    indices = array.field("indices")
    num_indices = indices.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    nulls, has_indices = null_rows(indices), indices.is_valid().to_numpy(zero_copy_only=False)
    for is_bad, found in (
        ((types != 0) & (types != 1), "a vector of unknown type"),
        (is_sparse & ~has_size, "a sparse vector without a size"),
        (num_indices != np.where(is_sparse, counts, 0), "a vector with another number of indices than of values"),
        (has_indices & (nulls if nulls is not None else False), "a null among the indices of a vector"),
    ):
        if is_bad.any():
            expected = "Spark ML vectors: type 1 (dense), or type 0 with a size and an index for each value"
            raise BadCellsError(column.name, int(np.argmax(is_bad)), found, expected)
