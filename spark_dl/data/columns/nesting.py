"""Nested Arrow columns level by level: the lists of a column, their elements, and the row of each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


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
