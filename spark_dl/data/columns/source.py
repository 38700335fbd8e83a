"""Source columns: the Spark and Parquet types that can become tensors, and how `data.encode` encodes them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.encoding import CHOICES, Encoding

HAS_DOT = (
    "a struct field has a dot in its name, and dots separate the names of a path; rename the field, or select it as a "
    "column of its own, in Spark"
)
SUPPORTED = (
    "numbers, boolean, decimal, date, timestamp, day-time intervals, string, binary, arrays of these, Spark ML "
    "vectors, and the fields of structs by their path (user.age)"
)


Shape = tuple[int | None, ...]
"""The shape of a cell; None stands for an axis of varying length."""
NO_NULLS = "no nulls; set data.nulls to drop or fill"


@dataclass(frozen=True)
class SourceColumn:
    """A column of a DataFrame or of an external Parquet file, before the shape of its cells is known."""

    name: str
    dtype: str
    """NumPy dtype of the stored elements."""
    kind: str
    """`scalar`, `array` or `vector`."""
    depth: int = 0
    """Nesting depth of arrays; 0 for scalars."""
    ragged: bool = False
    """Whether the length of the first axis varies from row to row."""
    encoding: Encoding = Encoding()
    path: tuple[str, ...] = ()
    """Names from the outermost struct to the field; a top-level column has one."""
    fill: Any = None
    """Value of `data.fill` that replaces nulls, NaN and Inf, in the source type; None if they are not filled."""
    empty_is_null: bool = False
    """Whether an empty cell is a null: the pixels of a file that Spark's image source could not read."""
    mean_size: float | None = None
    """Mean number of elements per cell where it varies; for images, mean bytes of the file."""


@dataclass(frozen=True)
class Leaf:
    """The type of a scalar cell, or of the elements of an array."""

    family: str
    dtype: str
    unit: str | None = None
    scale: int | None = None
    source_type: str | None = None
    """Spark's type of a time or a decimal."""


class BadCellsError(ValueError):
    """Cells that cannot be stored. The writer adds the partition. # row: the first bad row"""

    def __init__(self, column: str, row: int, found: str, expected: str):
        super().__init__(f"column {column!r}: found {found}, expected {expected}")
        self.row, self.found, self.expected = row, found, expected


def check_batch_names(names: Sequence[str], ragged: Sequence[str], weight: str | None = None) -> None:
    """Raises ValueError for column names that batches reserve. # ragged: the ragged columns among the names

    A batch has the weights of its rows as `weight`, and the mask or the offsets of each ragged column.
    weight: the column of `data.weight`, which may have this name.
    """
    taken = {} if weight == "weight" else {"weight": "the weights of its rows"}
    for name in ragged:
        taken |= {f"{name}_mask": f"the mask of {name!r}", f"{name}_offsets": f"the offsets of {name!r}"}
    for name in names:
        if name in taken:
            raise ValueError(
                f"column {name!r}: a batch uses this name for {taken[name]}; rename the column, "
                f"df.withColumnRenamed({name!r}, ...), or leave it out of data.features"
            )


def check_names(key: str, settings: Iterable[str], names: Sequence[str]) -> None:
    """Raises ValueError for settings `data.<key>` of a column that is not read, with the nearest name that is."""
    for name in settings:
        if name not in names:
            raise ValueError(f"data.{key}.{name}: no such column is read{suggestion(name, list(names))}")


def arrow_source_column(name: str, arrow: pa.DataType, settings: Mapping[str, Any]) -> SourceColumn:
    """The column of an external Parquet file, from its Arrow type. Raises ValueError as `source_columns` does."""
    types = pa.types
    if _is_vector(arrow):
        return vector_column(name, settings)
    inner, depth = arrow, 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    leaf = _arrow_leaf(inner.value_type if types.is_dictionary(inner) else inner)
    if leaf is None:
        raise ValueError(f"column {name!r} has Parquet type {arrow}, which cannot become a tensor; supported are "
                         f"{SUPPORTED}; convert it with Spark")  # fmt: skip
    return encoded_column(name, leaf, depth, str(arrow), settings)


def _is_vector(arrow: pa.DataType) -> bool:
    """Whether the type is the struct of a Spark ML vector; other structs may have fields of the same names."""
    types = pa.types
    if not types.is_struct(arrow) or [f.name for f in arrow] != ["type", "size", "indices", "values"]:
        return False
    kind, size, indices, values = (f.type for f in arrow)
    are_lists = all(types.is_list(t) or types.is_large_list(t) for t in (indices, values))
    are_integers = types.is_integer(kind) and types.is_integer(size)
    return bool(
        are_lists and are_integers and types.is_integer(indices.value_type) and types.is_floating(values.value_type)
    )


def _arrow_leaf(arrow: pa.DataType) -> Leaf | None:
    types = pa.types
    if types.is_boolean(arrow):
        return Leaf("number", "bool")
    if types.is_integer(arrow) or types.is_floating(arrow):
        return Leaf("number", str(arrow.to_pandas_dtype()().dtype))
    if types.is_decimal(arrow):
        return Leaf("decimal", "int64", scale=arrow.scale)
    if types.is_date(arrow):
        return Leaf("time", "int32", unit="D")
    if types.is_timestamp(arrow):
        return Leaf("time", "int64", unit=arrow.unit)
    if types.is_duration(arrow):
        return Leaf("duration", "int64", unit=arrow.unit)
    if types.is_string(arrow) or types.is_large_string(arrow) or str(arrow) == "string_view":
        return Leaf("string", "int64")
    if types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow):
        return Leaf("binary", "uint8")
    return None


def vector_column(name: str, settings: Mapping[str, Any]) -> SourceColumn:
    """The source column of Spark ML vectors. Raises ValueError if there are settings."""
    if settings:
        raise ValueError(f"data.encode.{name}: found {dict(settings)}, expected none for Spark ML vectors; remove them")
    return SourceColumn(name, "float64", "vector", 1)


def encoded_column(name: str, leaf: Leaf, depth: int, type_name: str, settings: Mapping[str, Any]) -> SourceColumn:
    """The source column of `depth` nested arrays of `leaf`, with the settings of `data.encode`.

    `type_name` names the type in errors. Raises ValueError for settings that do not fit the type.
    """
    choices, key = CHOICES[leaf.family], f"data.encode.{name}"
    chosen = settings.get("as")
    if chosen is None and leaf.family == "string":
        more = f" or {{{name}: {{as: bytes}}}}" if not depth else "; with ragged: true where lengths vary"
        raise ValueError(
            f"column {name!r} has type {type_name}; set data.encode to encode strings as numbers: "
            f"{{{name}: {{as: vocabulary}}}}, {{{name}: {{as: hash, buckets: 1000}}}}{more}"
        )
    if chosen is not None and chosen not in choices:
        raise ValueError(f"{key}.as: expected one of {list(choices)} for type {type_name}, found {chosen!r}")
    kind = chosen or choices[0]
    if kind == "float" and chosen is None and leaf.scale == 0:
        kind = "decimal"  # whole numbers, which int64 holds as they are
    ragged = bool(settings.get("ragged", False))
    if kind in ("bytes", "image"):
        if depth or ragged:
            raise ValueError(f"{key}: expected a column without arrays for as: {kind}, found type {type_name}")
        encoding = Encoding.of_image(settings) if kind == "image" else Encoding(kind)
        return SourceColumn(name, "uint8", "scalar", 0, kind == "bytes", encoding)
    if ragged and not depth:
        raise ValueError(f"{key}.ragged: expected an array, found type {type_name}")
    values = settings.get("values")
    unit = settings.get("unit", leaf.unit)
    encoding = Encoding(
        kind,
        unit=unit,
        scale=leaf.scale if kind == "decimal" else None,
        buckets=settings.get("buckets"),
        vocabulary=None if values is None else tuple(values),
        unknown=settings.get("unknown", "zero"),
        source_type=leaf.source_type,
    )
    dtype = "float64" if kind == "float" else leaf.dtype
    if leaf.family == "time":
        dtype = "int32" if unit == "D" else "int64"
    return SourceColumn(name, dtype, "array" if depth else "scalar", depth, ragged, encoding)


def check_fill(column: SourceColumn, fill: Any, arrow: pa.DataType) -> None:
    """Raises ValueError for a value of `data.fill` that the column cannot hold. # arrow: the type of the elements"""
    if column.encoding.kind in ("bytes", "image"):
        raise ValueError(f"data.fill.{column.name}: {column.encoding.kind} cannot be filled; set data.nulls to drop")
    fill_scalar(column, fill, arrow)


def fill_scalar(column: SourceColumn, fill: Any, arrow: pa.DataType) -> pa.Scalar:
    """The value of `data.fill` in the column's type. Raises ValueError if it does not fit.

    A number for a time is in the column's unit, and a text without a zone is in UTC, as in filters.
    """
    try:
        if pa.types.is_decimal(arrow):
            return pa.scalar(str(fill)).cast(arrow)
        if pa.types.is_temporal(arrow):
            return _time(fill, column.encoding.unit, arrow)
        if isinstance(fill, str) != (pa.types.is_string(arrow) or pa.types.is_large_string(arrow)):
            raise ValueError("a value of another type")
        if isinstance(fill, bool) != pa.types.is_boolean(arrow):
            raise ValueError("a boolean is not a number")
        found = pa.scalar(fill).cast(arrow)
        if pa.types.is_floating(arrow) and math.isfinite(fill) and not math.isfinite(found.as_py()):
            raise ValueError("out of range")
        return found
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"data.fill.{column.name}: expected a value of type {arrow}, found {fill!r} ({error})"
        ) from error


def _time(fill: Any, unit: str | None, arrow: pa.DataType) -> pa.Scalar:
    """Returns a date, a time or a duration. # unit: of numbers"""
    if isinstance(fill, str) and not pa.types.is_duration(arrow):
        if pa.types.is_timestamp(arrow) and arrow.tz:
            with contextlib.suppress(pa.ArrowInvalid):  # a text with a zone
                return pa.scalar(fill).cast(pa.timestamp(arrow.unit)).cast(arrow)
        return pa.scalar(fill).cast(arrow)
    if type(fill) is not int:
        raise ValueError("a value of another type")
    if unit == "D":
        return pa.scalar(fill, pa.date32()).cast(arrow)
    ticks = pa.duration(unit) if pa.types.is_duration(arrow) else pa.timestamp(unit, getattr(arrow, "tz", None))
    found = pa.scalar(fill, ticks).cast(arrow)
    if pa.types.is_date(arrow) and found.cast(ticks).value != fill:
        raise ValueError("not at the beginning of a day")
    return found
