"""Columns of Petastorm datasets that others wrote: which fields become tensors, and their cells as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from spark_dl.data import codecs
from spark_dl.data.ragged import Array, Ragged, from_lengths
from spark_dl.data.schema import Column
from spark_dl.data.unischema import TIMES, Codec, Field


def is_text_or_time(field: Field) -> bool:
    """Whether a field is one that becomes numbers as the column of a plain Parquet file does: its cells are alike."""
    is_scalar = field.shape == () and (field.codec is None or field.codec.kind == "scalar")
    return is_scalar and field.dtype in ("str", "bytes", "decimal", *TIMES)


def petastorm_column(field: Field, settings: Mapping[str, Any]) -> Column:
    """The column of a field of numbers, of one shape or, where `data.encode` says so, ragged. Called on the driver.

    Raises ValueError for what makes no tensor, and for settings that the field does not have.
    """
    kind = field.codec.kind if field.codec else "scalar"  # without a codec Petastorm reads what Parquet holds
    can_be_ragged = field.shape[:1] == (None,) and None not in field.shape[1:] and "ndarray" in kind
    if settings and not (can_be_ragged and settings == {"ragged": True}):
        only = "{ragged: true}" if can_be_ragged else "nothing"
        raise ValueError(
            f"data.encode.{field.name}: the column has its codec from Petastorm's metadata; expected {only}"
        )
    is_number = field.dtype not in ("str", "bytes", "decimal", "object", *TIMES)
    if not is_number or (field.fixed_shape is None and not settings):
        instead = f"; set data.encode.{field.name}: {{ragged: true}}" if can_be_ragged and is_number else ""
        raise ValueError(
            f"column {field.name!r} has dtype {field.dtype}, shape {field.shape} and codec {field.codec}, which do not "
            f"make a tensor of one shape{instead}"
        )
    image_format = f".{field.codec.image_format}" if field.codec and field.codec.image_format else ""
    return Column(field.name, field.dtype, field.shape, f"petastorm.{kind}{image_format}")


def decode(column: Column, stored: pa.ChunkedArray) -> Array | Ragged:
    """A stored column of a Petastorm dataset as an array # (rows, *shape), or as ragged rows.

    Raises ValueError for a null, and for a cell that is not of the column's dtype and shape, with its row.
    """
    kind, _, image_format = column.codec.removeprefix("petastorm.").partition(".")
    spark_type = "LongType" if kind == "scalar" else None  # which one it is does not matter for reading
    codec = Codec(kind, image_format or None, spark_type=spark_type)  # type: ignore[arg-type]
    cells = codecs.decode(Field(column.name, column.dtype, column.shape, codec), stored)
    if isinstance(cells, np.ndarray):
        return cells
    present = [cell for cell in cells if cell is not None]
    assert column.is_ragged
    assert len(present) == len(cells), "a null is an error of the codec"
    values = np.concatenate(present) if present else np.empty((0, *column.inner), dtype=column.dtype)
    return from_lengths(values, np.array([len(cell) for cell in present], dtype=np.int64))
