"""Columns before they are tensors: the types of Spark and Parquet that are accepted, and what `data.encode` chooses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_dl.checks import suggestion

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Settings = Mapping[str, Mapping[str, Any]]
"""`data.encode`: settings by column."""

_NUMBERS = {
    "boolean": "bool",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
}
HAS_DOT = (
    "the name of a field of a struct has a dot, which divides the names of a path; rename it, or make it a column of "
    "its own, in Spark"
)
_SUPPORTED = (
    "numbers, boolean, decimal, date, timestamp, day-time intervals, string, binary, arrays of these, Spark ML "
    "vectors, and the fields of structs by their path (user.age)"
)
_CHOICES = {
    "number": ("number",),
    "time": ("timestamp",),
    "duration": ("duration",),
    "decimal": ("decimal", "float"),
    "string": ("vocabulary", "hash", "bytes"),
    "binary": ("bytes", "image"),
}
"""What `as` may be for each family of types; the first is the default, save for strings, which have none."""


@dataclass(frozen=True)
class Encoding:
    """What the numbers of a column mean. It goes with the column: into manifests, checkpoints and predictions."""

    kind: str = "number"
    """`number`, as it is; `timestamp`, ticks since 1970-01-01 (UTC, or local where the type has no time zone);
    `duration`, ticks; `decimal`, its unscaled value; `float`, a decimal's nearest float64; `vocabulary`, the position
    of a word; `hash`, the bucket of a string; `bytes`, UTF-8 or binary; `image`, pixels of a PNG or JPEG file."""
    unit: str | None = None
    """Of ticks: `D`, `s`, `ms`, `us` or `ns`."""
    scale: int | None = None
    """Of decimals: the value is the number / 10**scale."""
    buckets: int | None = None
    """Of hashes: the bucket is CRC-32 (as in zlib, or `crc32` in Spark SQL) of the UTF-8 bytes modulo `buckets`."""
    vocabulary: tuple[str, ...] | None = None
    """The words, most frequent first; None until they are known."""
    unknown: str = "zero"
    """`zero`: words that are not in the vocabulary become 0, and its first word 1; `error`: they are an error, and its
    first word becomes 0."""
    resize: tuple[int, int] | None = None
    """Height and width that images are scaled to; None where all have one shape."""

    @property
    def has_words(self) -> bool:
        """Whether its numbers are those of words, which are looked up."""
        return self.kind in ("vocabulary", "hash")

    @property
    def num_values(self) -> int | None:
        """How many numbers an embedding of this column needs; None where they are not indices."""
        if self.vocabulary is not None:
            return len(self.vocabulary) + (self.unknown == "zero")
        return self.buckets

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Encoding:
        """From the dict that `dataclasses.asdict` made of it, after a way through JSON.

        Raises ValueError for values that no encoding has, TypeError for other keys.
        """
        is_value = {
            "kind": lambda v: v in [choice for choices in _CHOICES.values() for choice in choices],
            "unit": lambda v: v in (None, "D", "s", "ms", "us", "ns"),
            "scale": lambda v: v is None or (type(v) is int and abs(v) < 2**31),
            "buckets": lambda v: v is None or (type(v) is int and 0 < v < 2**63),
            "vocabulary": lambda v: v is None or (isinstance(v, list) and all(type(word) is str for word in v)),
            "unknown": lambda v: v in ("zero", "error"),
            "resize": lambda v: (
                v is None or (isinstance(v, list) and [type(n) is int and n > 0 for n in v] == [True] * 2)
            ),
        }
        for key, value in plain.items():
            if key in is_value and not is_value[key](value):
                raise ValueError(f"encoding.{key}: found {value!r:.200}")
        lists = {key: tuple(value) for key, value in plain.items() if isinstance(value, list)}
        return cls(**{**plain, **lists})


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
class _Leaf:
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


def source_columns(
    schema: StructType, names: Sequence[str], encode: Settings | None = None, fill: Mapping[str, Any] | None = None
) -> tuple[SourceColumn, ...]:
    """The asked columns of a DataFrame, as `data.encode` and `data.fill` say. Called on the driver.

    Raises ValueError for a column that is missing, naming the nearest one, for a type that no model can read, and for
    settings that do not fit the type.
    """
    check_names("encode", encode or {}, names)
    check_names("fill", fill or {}, names)
    columns = []
    for name in names:
        path, found = _spark_type_at(schema, name)
        column = _spark_column(name, found, (encode or {}).get(name, {}))
        value = (fill or {}).get(name)
        if value is not None:
            _check_spark_fill(column, value, found)
        columns.append(dataclasses.replace(column, path=path, fill=value))
    check_batch_names(names, [c.name for c in columns if c.ragged])
    return tuple(columns)


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


def _spark_type_at(schema: StructType, name: str) -> tuple[tuple[str, ...], DataType]:
    top = {f.name: f.dataType for f in schema.fields}
    if name in top:
        return (name,), top[name]
    path = tuple(name.split("."))
    found: Any = schema
    for part in path:
        fields = {f.name: f.dataType for f in getattr(found, "fields", ())}
        if part not in fields:
            known = [*top, *(p for f in schema.fields for p in _fields_below(f.name, f.dataType))]
            if name in known:
                raise ValueError(f"column {name!r}: {HAS_DOT}")
            raise ValueError(
                f"no column {name!r} in the DataFrame{suggestion(name, known)}; its columns are {list(top)} "
                "(data.features and data.label say which are read)"
            )
        found = fields[part]
    return path, found


def _fields_below(prefix: str, data_type: DataType) -> list[str]:
    found = []
    for field in getattr(data_type, "fields", ()):
        found += [f"{prefix}.{field.name}", *_fields_below(f"{prefix}.{field.name}", field.dataType)]
    return found


def _spark_column(name: str, data_type: DataType, settings: Mapping[str, Any]) -> SourceColumn:
    if type(data_type).__name__ == "VectorUDT":
        return _vector_column(name, settings)
    inner: Any = data_type
    depth = 0
    while inner.typeName() == "array":
        inner, depth = inner.elementType, depth + 1
    leaf = _spark_leaf(inner)
    if leaf is None:
        below = _fields_below(name, inner)
        convert = f"read its fields: {below}" if below and not depth else "convert it in the DataFrame"
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}, which cannot become a tensor; supported are "
            f"{_SUPPORTED}; {convert}"
        )
    return _encoded_column(name, leaf, depth, data_type.simpleString(), settings)


def _spark_leaf(data_type: Any) -> _Leaf | None:
    kind = data_type.typeName()
    if kind in _NUMBERS:
        return _Leaf("number", _NUMBERS[kind])
    if kind == "decimal":
        return _Leaf("decimal", "int64", scale=data_type.scale)
    return {
        "date": _Leaf("time", "int32", unit="D"),
        "timestamp": _Leaf("time", "int64", unit="us"),
        "timestamp_ntz": _Leaf("time", "int64", unit="us"),
        "daytimeinterval": _Leaf("duration", "int64", unit="us"),
        "string": _Leaf("string", "int64"),
        "char": _Leaf("string", "int64"),
        "varchar": _Leaf("string", "int64"),
        "binary": _Leaf("binary", "uint8"),
    }.get(kind)


def arrow_source_column(name: str, arrow: pa.DataType, settings: Mapping[str, Any]) -> SourceColumn:
    """A column of a Parquet file of others, by its Arrow type. Raises ValueError as `source_columns` does."""
    types = pa.types
    if _is_vector(arrow):
        return _vector_column(name, settings)
    inner, depth = arrow, 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    leaf = _arrow_leaf(inner.value_type if types.is_dictionary(inner) else inner)
    if leaf is None:
        raise ValueError(f"column {name!r} has Parquet type {arrow}, which cannot become a tensor; supported are "
                         f"{_SUPPORTED}; read it with Spark and convert it")  # fmt: skip
    return _encoded_column(name, leaf, depth, str(arrow), settings)


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


def _arrow_leaf(arrow: pa.DataType) -> _Leaf | None:
    types = pa.types
    if types.is_boolean(arrow):
        return _Leaf("number", "bool")
    if types.is_integer(arrow) or types.is_floating(arrow):
        return _Leaf("number", str(arrow.to_pandas_dtype()().dtype))
    if types.is_decimal(arrow):
        return _Leaf("decimal", "int64", scale=arrow.scale)
    if types.is_date(arrow):
        return _Leaf("time", "int32", unit="D")
    if types.is_timestamp(arrow):
        return _Leaf("time", "int64", unit=arrow.unit)
    if types.is_duration(arrow):
        return _Leaf("duration", "int64", unit=arrow.unit)
    if types.is_string(arrow) or types.is_large_string(arrow):
        return _Leaf("string", "int64")
    if types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow):
        return _Leaf("binary", "uint8")
    return None


def _vector_column(name: str, settings: Mapping[str, Any]) -> SourceColumn:
    if settings:
        raise ValueError(f"data.encode.{name}: expected nothing for Spark ML vectors, found {dict(settings)}")
    return SourceColumn(name, "float64", "vector", 1)


def _encoded_column(name: str, leaf: _Leaf, depth: int, text: str, settings: Mapping[str, Any]) -> SourceColumn:
    choices, key = _CHOICES[leaf.family], f"data.encode.{name}"
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


def _check_spark_fill(column: SourceColumn, fill: Any, data_type: DataType) -> None:
    from pyspark.sql.pandas.types import to_arrow_type

    inner: Any = data_type
    while inner.typeName() == "array":
        inner = inner.elementType
    if column.kind == "vector":
        arrow = pa.float64()
    elif inner.typeName() == "timestamp":  # for which to_arrow_type asks for a time zone, in some versions
        arrow = pa.timestamp("us", "UTC")
    else:
        arrow = to_arrow_type(inner)
    check_fill(column, fill, arrow)


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
