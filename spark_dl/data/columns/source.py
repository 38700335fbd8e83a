"""Columns before they are tensors: the types of Spark and Parquet that are accepted, and what `data.encode` chooses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_dl.config.checks import suggestion
from spark_dl.data.columns.encoding import CHOICES, Encoding

HAS_DOT = (
    "the name of a field of a struct has a dot, which divides the names of a path; rename it, or make it a column of "
    "its own, in Spark"
)
SUPPORTED = (
    "numbers, boolean, decimal, date, timestamp, day-time intervals, string, binary, arrays of these, Spark ML "
    "vectors, and the fields of structs by their path (user.age)"
)


@dataclass(frozen=True)
class SourceColumn:
    """A column of a DataFrame or of a Parquet file of others, before the shape of its cells is known."""

    name: str
    dtype: str
    """Of the elements as they will be stored."""
    kind: str
    """`scalar`, `array` or `vector`."""
    depth: int = 0
    """Nesting of the arrays."""
    ragged: bool = False
    """Whether the first axis may have another length in each row."""
    encoding: Encoding = Encoding()
    path: tuple[str, ...] = ()
    """Where it is: the name, or the names from the outermost struct to the field."""
    fill: Any = None
    """What stands for nulls, NaN and Inf where they are filled, in terms of the source."""
    mean_size: float | None = None
    """Elements of a cell on average, where that varies; of images the bytes of the file."""


@dataclass(frozen=True)
class Leaf:
    """The type of a cell, or of an array's elements."""

    family: str
    dtype: str
    unit: str | None = None
    scale: int | None = None


class BadCellsError(ValueError):
    """Cells that cannot be stored; the writer adds where in the DataFrame they are. # row: the first bad one"""

    def __init__(self, column: str, row: int, found: str, expected: str):
        super().__init__(f"column {column!r}: found {found}, expected {expected}")
        self.row, self.found, self.expected = row, found, expected


def check_batch_names(names: Sequence[str], ragged: Sequence[str]) -> None:
    """Raises ValueError for columns of names that batches have for something else. # ragged: those among the names

    A batch has the weights of its rows as `weight`, and beside a ragged column its mask or its offsets.
    """
    taken = {"weight": "the weights of its rows"}
    for name in ragged:
        taken |= {f"{name}_mask": f"the mask of {name!r}", f"{name}_offsets": f"the offsets of {name!r}"}
    for name in names:
        if name in taken:
            raise ValueError(
                f"column {name!r}: a batch has {taken[name]} by this name; rename the column, "
                f"df.withColumnRenamed({name!r}, ...), or leave it out of data.features"
            )


def check_names(key: str, settings: Iterable[str], names: Sequence[str]) -> None:
    """Raises ValueError for settings `data.<key>` of a column that is not read, naming the nearest that is."""
    for name in settings:
        if name not in names:
            raise ValueError(f"data.{key}.{name}: no such column is read{suggestion(name, list(names))}")


def arrow_source_column(name: str, arrow: pa.DataType, settings: Mapping[str, Any]) -> SourceColumn:
    """A column of a Parquet file of others, by its Arrow type. Raises ValueError as `source_columns` does."""
    types = pa.types
    if _is_vector(arrow):
        return vector_column(name, settings)
    inner, depth = arrow, 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    leaf = _arrow_leaf(inner.value_type if types.is_dictionary(inner) else inner)
    if leaf is None:
        raise ValueError(f"column {name!r} has Parquet type {arrow}, which cannot become a tensor; supported are "
                         f"{SUPPORTED}; read it with Spark and convert it")  # fmt: skip
    return encoded_column(name, leaf, depth, str(arrow), settings)


def _is_vector(arrow: pa.DataType) -> bool:
    """Whether it is how Spark ML stores a vector; a struct may have fields of the same names."""
    types = pa.types
    if not types.is_struct(arrow) or [f.name for f in arrow] != ["type", "size", "indices", "values"]:
        return False
    kind, size, indices, values = (f.type for f in arrow)
    are_lists = all(types.is_list(t) or types.is_large_list(t) for t in (indices, values))
    are_whole = types.is_integer(kind) and types.is_integer(size)
    return bool(
        are_lists and are_whole and types.is_integer(indices.value_type) and types.is_floating(values.value_type)
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
    if types.is_string(arrow) or types.is_large_string(arrow):
        return Leaf("string", "int64")
    if types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow):
        return Leaf("binary", "uint8")
    return None


def vector_column(name: str, settings: Mapping[str, Any]) -> SourceColumn:
    if settings:
        raise ValueError(f"data.encode.{name}: expected nothing for Spark ML vectors, found {dict(settings)}")
    return SourceColumn(name, "float64", "vector", 1)


def encoded_column(name: str, leaf: Leaf, depth: int, text: str, settings: Mapping[str, Any]) -> SourceColumn:
    choices, key = CHOICES[leaf.family], f"data.encode.{name}"
    chosen = settings.get("as")
    if chosen is None and leaf.family == "string":
        more = f" or {{{name}: {{as: bytes}}}}" if not depth else "; with ragged: true where lengths vary"
        raise ValueError(
            f"column {name!r} has type {text}; say with data.encode how it becomes numbers: "
            f"{{{name}: {{as: vocabulary}}}}, {{{name}: {{as: hash, buckets: 1000}}}}{more}"
        )
    if chosen is not None and chosen not in choices:
        raise ValueError(f"{key}.as: expected one of {list(choices)} for type {text}, found {chosen!r}")
    kind = chosen or choices[0]
    ragged = bool(settings.get("ragged", False))
    if kind in ("bytes", "image"):
        if depth or ragged:
            raise ValueError(f"{key}: expected a column of single cells for as: {kind}, found type {text}")
        size = settings.get("resize")
        resize = None if size is None else (size[0], size[1])
        return SourceColumn(name, "uint8", "scalar", 0, kind == "bytes", Encoding(kind, resize=resize))
    if ragged and not depth:
        raise ValueError(f"{key}.ragged: expected an array, found type {text}")
    words = settings.get("values")
    unit = settings.get("unit", leaf.unit)
    encoding = Encoding(
        kind,
        unit=unit,
        scale=leaf.scale if kind == "decimal" else None,
        buckets=settings.get("buckets"),
        vocabulary=None if words is None else tuple(words),
        unknown=settings.get("unknown", "zero"),
    )
    dtype = "float64" if kind == "float" else leaf.dtype
    if leaf.family == "time":
        dtype = "int32" if unit == "D" else "int64"
    return SourceColumn(name, dtype, "array" if depth else "scalar", depth, ragged, encoding)


def check_fill(column: SourceColumn, fill: Any, arrow: pa.DataType) -> None:
    """Raises ValueError for a value of `data.fill` that the column cannot hold. # arrow: the type of its elements"""
    if column.encoding.kind in ("bytes", "image"):
        raise ValueError(f"data.fill.{column.name}: {column.encoding.kind} cannot be filled; set data.nulls to drop")
    fill_scalar(column, fill, arrow)


def fill_scalar(column: SourceColumn, fill: Any, arrow: pa.DataType) -> pa.Scalar:
    """The value of `data.fill` as one of the column's type. Raises ValueError where it is none."""
    try:
        if pa.types.is_decimal(arrow):
            return pa.scalar(str(fill)).cast(arrow)
        if isinstance(fill, str) != (pa.types.is_string(arrow) or pa.types.is_large_string(arrow)) and not (
            isinstance(fill, str) and pa.types.is_temporal(arrow)
        ):
            raise ValueError("another kind of value")
        if isinstance(fill, bool) != pa.types.is_boolean(arrow):
            raise ValueError("a boolean is no number")
        found = pa.scalar(fill).cast(arrow)
        if pa.types.is_floating(arrow) and math.isfinite(fill) and not math.isfinite(found.as_py()):
            raise ValueError("out of its range")
        return found
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"data.fill.{column.name}: expected a value of type {arrow}, found {fill!r} ({error})"
        ) from error
