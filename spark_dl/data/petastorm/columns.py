"""Columns of external Petastorm datasets: which fields become tensors, and their cells as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_dl.config.checks import ENCODINGS
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.columns.types import Lookup, arrow_source_column, string_indices
from spark_dl.data.petastorm import codecs
from spark_dl.data.petastorm.unischema import TIMES, Codec, Field

_NO_NUMBERS = ("str", "bytes", "decimal", *TIMES)


def is_string_or_time(field: Field) -> bool:
    """Returns whether a field is stored and encoded like a Parquet column of strings or times."""
    is_of_parquet = field.codec is None or field.codec.kind == "scalar"
    return is_of_parquet and (field.dtype == "str" or (field.shape == () and field.dtype in _NO_NUMBERS))


def petastorm_column(field: Field, settings: Mapping[str, Any]) -> Column:
    """Returns the column of a numeric field. Called on the driver.

    If `shape` contains None, other than for the first axis of a ragged column, the first cell gives the shape of all
    cells (`shape_of`). Raises ValueError if the field cannot become a tensor, and for settings that it does not have.
    """
    if field.dtype == "str" and field.codec is not None and "ndarray" in field.codec.kind:
        return _string_column(field, settings)
    kind = field.codec.kind if field.codec else "scalar"  # without a codec Petastorm reads what Parquet holds
    can_be_ragged, is_image = field.shape[:1] == (None,) and "ndarray" in kind, kind == "image"
    has_image_settings = is_image and settings.get("as") == "image" and settings.keys() <= {"as", *ENCODINGS["image"]}
    if settings and not (has_image_settings or (can_be_ragged and settings.keys() == {"ragged"})):
        only = (
            "{ragged: true} or {ragged: false}"
            if can_be_ragged
            else "{as: image, resize: [height, width]}"
            if is_image
            else "nothing"
        )
        raise ValueError(
            f"data.encode.{field.name}: the column has its codec from Petastorm's metadata; expected {only}"
        )
    if field.dtype in (*_NO_NUMBERS, "object"):
        raise ValueError(
            f"column {field.name!r} has dtype {field.dtype}, shape {field.shape} and the codec {kind} of Petastorm, "
            "which cannot become a tensor; leave it out, or write the dataset with Spark first"
        )
    if can_be_ragged and not settings:
        raise _ragged_not_set(field)
    image_format = f".{field.codec.image_format}" if field.codec and field.codec.image_format else ""
    column = Column(field.name, field.dtype, field.shape, f"petastorm.{kind}{image_format}")
    if not has_image_settings:
        return column
    encoding = Encoding.of_image(settings)
    channels = {"RGB": (3,), "L": ()}.get(encoding.mode or "", field.shape[2:])
    return dataclasses.replace(column, shape=(*(encoding.resize or field.shape[:2]), *channels), encoding=encoding)


def _string_column(field: Field, settings: Mapping[str, Any]) -> Column:
    """Returns the column of a field of arrays of strings, which are encoded like Spark's arrays of strings."""
    arrow = pa.string()
    for _ in field.shape:
        arrow = pa.list_(arrow)
    source = arrow_source_column(field.name, arrow, settings)
    if field.shape[:1] == (None,) and "ragged" not in settings:
        raise _ragged_not_set(field)
    if source.ragged and field.shape[:1] != (None,):
        raise ValueError(
            f"data.encode.{field.name}.ragged: found true for a column of shape {field.shape}, whose first axis does "
            "not vary; leave it out"
        )
    assert field.codec is not None
    return Column(field.name, source.dtype, field.shape, f"petastorm.{field.codec.kind}", source.encoding)


def _ragged_not_set(field: Field) -> ValueError:
    return ValueError(
        f"column {field.name!r} has the shape {field.shape}, whose first axis may vary; set whether it does, "
        f"with data.encode: {{{field.name}: {{ragged: true}}}}, or {{{field.name}: {{ragged: false}}}} if all "
        "cells have the shape of the first one"
    )


def shape_of(column: Column, cell: pa.Array) -> tuple[int, ...] | None:
    """Returns the shape of a cell; None for a null. # cell: (1,), stored"""
    (value,) = codecs.decode(_field(column, is_nullable=True), cell, column.encoding)
    return None if value is None else value.shape


def decode(
    column: Column,
    stored: pa.ChunkedArray,
    *,
    rows: npt.NDArray[np.int64] | None = None,
    lookup: Lookup | None = None,
) -> Array | Ragged:
    """Decodes a stored column of a Petastorm dataset to an array (rows, *shape), or to ragged rows.

    If the column has a fill, a null becomes an array of the fill, or an empty array in a ragged column.
    Raises ValueError, with the row, for other nulls, and for a cell without the column's dtype and shape.
    # rows: row numbers in the row group, for messages; by default 0, 1, ...
    # lookup: for a column of strings that is decoded in several calls
    """
    lookup = lookup or Lookup(column.encoding)
    field = _field(column, is_nullable=column.fill is not None)
    try:
        cells = codecs.decode(field, stored, column.encoding)
        if column.encoding.is_lookup:
            cells = _looked_up(column, list(cells), lookup)
    except codecs.CellError as found:
        error = found if rows is None else found.in_row(int(rows[found.row]))
        if not isinstance(error, codecs.OtherShapeError):
            raise error from found.__cause__
        settings = "as: image, resize: [height, width]" if "image" in column.codec else "ragged: true"
        instead = (
            "" if column.is_ragged else f"; data.encode.{column.name}: {{{settings}}} reads cells of different shapes"
        )
        raise ValueError(f"{error}{instead}") from None
    if isinstance(cells, np.ndarray):
        return cells
    if column.is_ragged:
        lengths = np.array([0 if cell is None else len(cell) for cell in cells], dtype=np.int64)
        values, start = np.empty((int(lengths.sum()), *column.inner), dtype=column.dtype), 0
        for row, length in enumerate(lengths.tolist()):
            if length:
                values[start : start + length] = cells[row]
            start, cells[row] = start + length, None  # it is not needed twice
        return from_lengths(values, lengths)
    fill = column.fill
    if column.encoding.is_lookup and fill is not None:
        (fill,) = _looked_up(column, [np.array(fill)], lookup)
    filled = np.empty((len(cells), *column.inner), dtype=column.dtype)
    for row, cell in enumerate(cells):
        filled[row] = fill if cell is None else cell
    return filled


def _looked_up(column: Column, cells: Sequence[Array | None], lookup: Lookup) -> list[Array | None]:
    """Returns the vocabulary ids or hashes of cells of one shape. # cells: NumPy arrays of strings; None is a null"""
    ends = np.cumsum([0 if cell is None else cell.size for cell in cells])
    strings = [_strings(column, row, cell) for row, cell in enumerate(cells) if cell is not None]
    source = SourceColumn(column.name, column.dtype, "array", encoding=column.encoding)
    try:
        numbers = string_indices(source, pa.concat_arrays([pa.array([], pa.string()), *strings]), lookup)
    except BadCellsError as error:
        row = int(np.searchsorted(ends, error.row, side="right"))
        raise codecs.CellError(column.name, row, error.found, error.expected) from None
    of_cells = np.split(numbers, ends[:-1])
    return [None if cell is None else n.reshape(cell.shape) for cell, n in zip(cells, of_cells, strict=True)]


def _strings(column: Column, row: int, cell: Array) -> pa.Array:
    try:
        return pa.array(cell.ravel().tolist(), pa.string())
    except (ValueError, SystemError) as error:  # four bytes that are not a character, or a surrogate
        raise codecs.CellError(column.name, row, f"an invalid string ({error})", "strings of Unicode") from error


def _field(column: Column, *, is_nullable: bool) -> Field:
    kind, _, image_format = column.codec.removeprefix("petastorm.").partition(".")
    spark_type = "LongType" if kind == "scalar" else None  # either format is decoded in the same way
    codec = Codec(kind, image_format or None, spark_type=spark_type)  # type: ignore[arg-type]
    dtype = "str" if column.encoding.is_lookup else column.dtype
    return Field(column.name, dtype, column.shape, codec, is_nullable)
