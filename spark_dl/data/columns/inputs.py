"""From stored cells to those of a batch: the dtypes of `data.cast`, and the weights of `data.weight`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spark_dl.config import Data
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths
from spark_dl.data.columns.schema import Column


def cast_columns(columns: Sequence[Column], cast: Mapping[str, str]) -> tuple[Column, ...]:
    """Returns the columns as they are in a batch, with the dtypes of `data.cast`."""
    return tuple(dataclasses.replace(c, dtype=cast.get(c.name, c.dtype)) for c in columns)


def check_assembled(columns: Sequence[Column], data: Data) -> None:
    """Raises ValueError for a feature of varying length with `data.assemble`. # columns: the features, and others"""
    for column in columns if data.assemble is not None else ():
        if column.name in data.features and column.is_ragged:
            raise ValueError(
                f"data.assemble: column {column.name!r} has arrays of varying length, expected numbers, or arrays of "
                "one length; leave it out of data.features, or set data.assemble to null"
            )


def cast_cells(name: str, cells: Array | Ragged, dtype: str) -> Array | Ragged:
    """Returns cells in another dtype; the same cells if they have it already.

    Numbers are rounded to the nearest value of a floating-point dtype. Raises ValueError for a number that is too large
    for the dtype, for a fraction or NaN where the dtype is an integer or bool, and for different integers, such as ids
    or times, that are equal in a floating-point dtype.
    """
    values: Any = cells.values if isinstance(cells, Ragged) else cells
    if str(values.dtype) == dtype:
        return cells
    with np.errstate(all="ignore"):
        found = values.astype(dtype)
        is_same = np.isfinite(found) == np.isfinite(values) if found.dtype.kind == "f" else found == values
    if not is_same.all():
        raise ValueError(
            f"column {name!r}: found the value {values[~is_same][0]} of {values.dtype}, expected values that "
            f"{dtype} can hold (data.cast.{name}); choose another dtype, or change the values"
        )
    if found.dtype.kind == "f" and values.dtype.kind in "iu":
        _check_different(name, values.reshape(-1), found.reshape(-1))
    return Ragged(found, cells.offsets) if isinstance(cells, Ragged) else found


def _check_different(name: str, values: Array, found: Array) -> None:
    """Raises ValueError for integers that are different in `values` # (n,) and equal in `found` # (n,)"""
    whole = 2 ** (np.finfo(found.dtype).nmant + 1)  # up to which each integer is a value of the dtype
    if values.size == 0 or max(abs(int(values.max())), abs(int(values.min()))) <= whole:
        return
    order = np.argsort(values)
    ordered, rounded = values[order], found[order]
    same = (rounded[1:] == rounded[:-1]) & (ordered[1:] != ordered[:-1])
    if same.any():
        at = int(np.argmax(same))
        raise ValueError(
            f"column {name!r}: found the values {ordered[at]} and {ordered[at + 1]}, which are both {rounded[at]} in "
            f"{found.dtype} (data.cast.{name}); cast to float64, or subtract a common start, such as that of a time"
        )


def two_rows_of_zeros(column: Column, longest: int = 1) -> Array | Ragged:
    """Returns cells to try a model with, in the stored dtype. # (2, *cell)

    longest: length of the second row of a ragged column; that of the first is 1.
    """
    if column.is_ragged:
        lengths = np.array([1, longest])
        return from_lengths(np.zeros((1 + longest, *column.inner), dtype=column.dtype), lengths)
    return np.zeros((2, *column.inner), dtype=column.dtype)


def row_weights(name: str, cells: Array | Ragged, is_true_row: Array) -> Array:
    """Returns the weights of rows from a column: 0 for padding. # is_true_row: (rows,) 1 or 0; returns (rows,) float32

    Raises ValueError for a column with more than one value per row, and for negative weights, NaN and Inf.
    """
    if isinstance(cells, Ragged) or cells.ndim != 1:
        raise ValueError(f"data.weight: expected one number per row in column {name!r}, found arrays")
    weights = cells.astype(np.float32)
    if not ((weights >= 0) & np.isfinite(weights)).all():
        bad = cells[~((weights >= 0) & np.isfinite(weights))][0]
        raise ValueError(f"data.weight: expected finite weights >= 0 in column {name!r}, found {bad}")
    found: Array = weights * is_true_row
    return found
