"""The column types: which Spark and Parquet types become tensors, and how.

`TYPES` has one record for each family of types. A new family is a record here and its tests; a new way to encode a
family is a name in its `choices`, and its settings in `config.checks.ENCODINGS`.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import BadCellsError, SourceColumn

types = pa.types
_TICK_NS = {"D": 86_400_000_000_000, "s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_LARGEST = np.iinfo(np.int64).max
_OTHER_KIND = "another kind of value"


@dataclass(frozen=True)
class Leaf:
    """The type of a scalar cell, or of the elements of an array, in one file or DataFrame."""

    dtype: str
    """NumPy dtype of the numbers, before `data.encode`."""
    unit: str | None = None
    scale: int | None = None
    source_type: str | None = None
    """Spark's type of a time or a decimal."""


@dataclass(frozen=True)
class ColumnType:
    """A family of source types whose cells become numbers in the same way.

    The functions raise ValueError for a value that does not fit. Those that take an Arrow type get one of the family.
    """

    name: str
    described: str
    """Names of the types in error messages."""
    choices: tuple[str, ...]
    """Values of `as` in `data.encode`. The first is the default."""
    of_spark: Callable[[Any], Leaf | None]
    """The leaf of a Spark `DataType`; None for types of other families."""
    of_arrow: Callable[[pa.DataType], Leaf | None]
    """The leaf of a type in a Parquet file; None for types of other families."""
    to_arrow: Callable[[SourceColumn], pa.DataType]
    """The type of cells whose file says `null`, because it has no other."""
    to_numbers: Callable[[SourceColumn, pa.Array, Lookup | None], Array]
    """Cells without nulls -> their numbers, of the column's dtype. # (rows,) -> (rows,)"""
    to_fill: Callable[[Any, pa.DataType, str | None], pa.Scalar]
    """A value of `data.fill` in the column's type. The last argument is the unit of a number that stands for a time."""
    to_compare: Callable[[Any, pa.DataType], pa.Array] | None = None
    """A value of `data.filters` in the column's type; None if cells cannot be compared. # (1,)"""
    needs_choice: bool = False
    """Whether `as` has no default."""


# Numbers and booleans


def _spark_number(data_type: Any) -> Leaf | None:
    dtype = {"boolean": "bool", "byte": "int8", "short": "int16", "integer": "int32", "long": "int64",
             "float": "float32", "double": "float64"}.get(data_type.typeName())  # fmt: skip
    return Leaf(dtype) if dtype else None


def _arrow_number(arrow: pa.DataType) -> Leaf | None:
    if types.is_boolean(arrow):
        return Leaf("bool")
    is_number = types.is_integer(arrow) or types.is_floating(arrow)
    return Leaf(str(arrow.to_pandas_dtype()().dtype)) if is_number else None


def _numbers(column: SourceColumn, values: pa.Array, _: Lookup | None = None) -> Array:
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=column.dtype)


def _fill_plain(fill: Any, arrow: pa.DataType, _: str | None) -> pa.Scalar:
    if isinstance(fill, str) != (types.is_string(arrow) or types.is_large_string(arrow)):
        raise ValueError("a value of another type")
    if isinstance(fill, bool) != types.is_boolean(arrow):
        raise ValueError("a boolean is not a number")
    filled = pa.scalar(fill).cast(arrow)
    if types.is_floating(arrow) and math.isfinite(fill) and not math.isfinite(filled.as_py()):
        raise ValueError("out of range")
    return filled


def _compare_number(value: Any, arrow: pa.DataType) -> pa.Array:
    if types.is_boolean(arrow) and isinstance(value, bool):
        return pa.array([value])
    is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
    if types.is_boolean(arrow) or types.is_float16(arrow) or not is_number:
        raise ValueError(_OTHER_KIND)
    compared = pa.array([value]).cast(arrow)
    if types.is_floating(arrow) and not np.isfinite(compared[0].as_py()):
        raise ValueError("out of its range")
    return compared


# Decimals


def _spark_decimal(data_type: Any) -> Leaf | None:
    if data_type.typeName() != "decimal":
        return None
    return Leaf("int64", scale=data_type.scale, source_type=data_type.simpleString())


def _compare_decimal(value: Any, arrow: pa.DataType) -> pa.Array:
    return pa.array([to_decimal(value)], arrow)


def to_decimal(value: Any) -> Decimal:
    """A number or a text of `data.filters`, exactly. Raises ValueError for other values."""
    if isinstance(value, bool):
        raise ValueError(_OTHER_KIND)
    return Decimal(str(value))


def _decimals(column: SourceColumn, values: pa.Array, _: Lookup | None = None) -> Array:
    """Unscaled values as int64, or the nearest float64. Raises BadCellsError if 64 bits are not enough."""
    if column.encoding.kind == "float":
        # Through strings: Arrow's cast multiplies by a power of ten, rounds twice and can be off by one bit.
        return np.asarray(values.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False))
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    wide = values.cast(pa.decimal256(76, column.encoding.scale or 0))
    # 256 bits, little-endian: the lowest 64 hold the value if all higher bits repeat its sign
    words = np.frombuffer(wide.buffers()[1], dtype="<i8").reshape(-1, 4)[wide.offset : wide.offset + len(wide)]
    overflows = (words[:, 1:] != (words[:, :1] >> 63)).any(axis=1)
    if overflows.any():
        row = int(np.argmax(overflows))
        expected = (
            f"unscaled values within 64 bits; set data.encode.{column.name}: {{as: float}}, or CAST to DECIMAL(18, s)"
        )
        raise BadCellsError(column.name, row, str(values[row].as_py()), expected)
    return words[:, 0].astype(np.int64)


# Dates, times and durations


def _spark_time(data_type: Any) -> Leaf | None:
    name = data_type.typeName()
    if name == "date":
        return Leaf("int32", unit="D", source_type=name)
    return Leaf("int64", unit="us", source_type=name) if name in ("timestamp", "timestamp_ntz") else None


def _arrow_time(arrow: pa.DataType) -> Leaf | None:
    if types.is_date(arrow):
        return Leaf("int32", unit="D")
    return Leaf("int64", unit=arrow.unit) if types.is_timestamp(arrow) else None


def _arrow_of_ticks(column: SourceColumn) -> pa.DataType:
    unit = column.encoding.unit
    if column.encoding.kind == "duration":
        return pa.duration(unit)
    return pa.date32() if unit == "D" else pa.timestamp(unit)


def _ticks(column: SourceColumn, values: pa.Array, _: Lookup | None = None) -> Array:
    """Dates, timestamps and durations as integer ticks of the column's unit; a coarser unit rounds down."""
    stored = "D" if types.is_date32(values.type) else "ms" if types.is_date64(values.type) else values.type.unit
    plain = values.cast(pa.int32()) if types.is_date32(values.type) else values.cast(pa.int64())
    ticks = np.asarray(plain.to_numpy(zero_copy_only=False), dtype=np.int64)
    assert column.encoding.unit is not None
    here, there = _TICK_NS[stored], _TICK_NS[column.encoding.unit]
    if here < there:
        ticks = np.floor_divide(ticks, there // here)
    elif here > there:
        _check_range(column, (ticks > _LARGEST // (here // there)) | (ticks < -(_LARGEST // (here // there))), values)
        ticks = ticks * (here // there)
    bounds = np.iinfo(column.dtype)
    _check_range(column, (ticks < bounds.min) | (ticks > bounds.max), values)
    return ticks.astype(column.dtype, copy=False)


def _check_range(column: SourceColumn, is_bad: Array, values: pa.Array) -> None:
    if is_bad.any():
        row = int(np.argmax(is_bad))
        found = f"{values[row].cast(pa.string()).as_py()}, outside {column.dtype} in {column.encoding.unit}"
        raise BadCellsError(column.name, row, found, f"a coarser data.encode.{column.name}.unit")


def _fill_time(fill: Any, arrow: pa.DataType, unit: str | None) -> pa.Scalar:
    if isinstance(fill, str) and not types.is_duration(arrow):
        if types.is_timestamp(arrow) and arrow.tz:
            with contextlib.suppress(pa.ArrowInvalid):  # a text with a zone
                return pa.scalar(fill).cast(pa.timestamp(arrow.unit)).cast(arrow)
        return pa.scalar(fill).cast(arrow)
    if type(fill) is not int:
        raise ValueError("a value of another type")
    if unit == "D":
        return pa.scalar(fill, pa.date32()).cast(arrow)
    ticks = pa.duration(unit) if types.is_duration(arrow) else pa.timestamp(unit, getattr(arrow, "tz", None))
    filled = pa.scalar(fill, ticks).cast(arrow)
    if types.is_date(arrow) and filled.cast(ticks).value != fill:
        raise ValueError("not at the beginning of a day")
    return filled


def compare_time(value: Any, arrow: pa.DataType) -> pa.Array:
    """A text of `data.filters` in ISO 8601 as a date or a time; without a zone, it is UTC in a column with a zone."""
    if not isinstance(value, str):
        raise ValueError(_OTHER_KIND)
    if types.is_date(arrow):
        return pa.array([date.fromisoformat(value)], arrow)
    time = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if arrow.tz is None and time.tzinfo is not None:
        raise ValueError("the column has no time zone; write the local time, without one")
    if arrow.tz is None:
        return pa.array([time], pa.timestamp("us")).cast(arrow)
    utc = time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time.astimezone(timezone.utc)
    return pa.array([utc], pa.timestamp("us", "UTC")).cast(arrow)


# Strings and bytes


class Lookup:
    """Looks up the strings of one column as integers, those of the previous batch once only. Not thread-safe."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._strings: pa.Array | None = None
        self._index: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self, strings: pa.Array) -> npt.NDArray[np.int64]:
        """Vocabulary index of each string (unknown: -1, or 0 with known strings shifted by one), or its hash bucket.

        If the strings begin with those of the previous call, only the others are looked up.
        # distinct strings -> (len(strings),)
        """
        known = len(self._index)
        if self._strings is None or not self._strings.equals(strings[:known]):
            known = 0
        if known and known == len(strings):
            return self._index
        self._index = np.concatenate([self._index[:known], self._look_up(strings[known:])])
        self._strings = strings
        return self._index

    def _look_up(self, strings: pa.Array) -> npt.NDArray[np.int64]:
        encoding = self._encoding
        if encoding.kind == "hash":
            assert encoding.buckets is not None
            words = strings.cast(pa.large_binary()).to_pylist()  # Spark's strings can be other bytes than UTF-8
            return np.array([zlib.crc32(word) % encoding.buckets for word in words], dtype=np.int64)
        assert encoding.vocabulary is not None
        known = pa.array(encoding.vocabulary, strings.type)
        index = pc.index_in(strings, value_set=known).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return index + (encoding.unknown == "zero")  # type: ignore[no-any-return]


def string_indices(column: SourceColumn, strings: pa.Array, lookup: Lookup) -> Array:
    """Vocabulary index or hash bucket of each string; each distinct string is looked up once.

    # strings: without nulls, or dictionary-encoded; the dictionary may hold strings that no row has
    Raises BadCellsError for an unknown string if the encoding does not map unknown strings to 0.
    """
    unique = strings if pa.types.is_dictionary(strings.type) else strings.dictionary_encode()
    rows = unique.indices.to_numpy(zero_copy_only=False)
    distinct: pa.Array = unique.dictionary
    indices: Array = lookup(distinct)[rows]
    if column.encoding.kind == "vocabulary" and (is_bad := indices < 0).any():
        row = int(np.argmax(is_bad))
        expected = (
            f"one of {len(column.encoding.vocabulary or ())} known strings; data.encode.{column.name}.unknown: zero "
            "maps all others to 0"
        )
        word = distinct.cast(pa.large_binary())[int(rows[row])].as_py().decode(errors="backslashreplace")
        raise BadCellsError(column.name, row, f"{word!r:.80}", expected)
    return indices


def _strings(column: SourceColumn, values: pa.Array, lookup: Lookup | None) -> Array:
    return string_indices(column, values, lookup or Lookup(column.encoding))


def _arrow_string(arrow: pa.DataType) -> Leaf | None:
    is_string = types.is_string(arrow) or types.is_large_string(arrow) or str(arrow) == "string_view"
    return Leaf("int64") if is_string else None


def _compare_string(value: Any, arrow: pa.DataType) -> pa.Array:
    if not isinstance(value, str):
        raise ValueError(_OTHER_KIND)
    return pa.array([value], arrow)


def _arrow_binary(arrow: pa.DataType) -> Leaf | None:
    is_binary = types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow)
    return Leaf("uint8") if is_binary else None


def _leaf_of(dtype: str, *names: str, unit: str | None = None) -> Callable[[Any], Leaf | None]:
    """The leaf of Spark types of these names."""
    return lambda data_type: Leaf(dtype, unit=unit) if data_type.typeName() in names else None


NUMBER = ColumnType(
    "number", "numbers, boolean", ("number",), of_spark=_spark_number, of_arrow=_arrow_number,
    to_arrow=lambda column: (
        pa.bool_() if column.dtype == "bool" else pa.from_numpy_dtype(np.dtype(column.dtype))
    ),
    to_numbers=_numbers, to_fill=_fill_plain, to_compare=_compare_number,
)  # fmt: skip
DECIMAL = ColumnType(
    "decimal", "decimal", ("float", "decimal"), of_spark=_spark_decimal,
    of_arrow=lambda arrow: Leaf("int64", scale=arrow.scale) if types.is_decimal(arrow) else None,
    to_arrow=NUMBER.to_arrow, to_numbers=_decimals,
    to_fill=lambda fill, arrow, _: pa.scalar(str(fill)).cast(arrow), to_compare=_compare_decimal,
)  # fmt: skip
TIME = ColumnType(
    "time", "date, timestamp", ("timestamp",), of_spark=_spark_time, of_arrow=_arrow_time,
    to_arrow=_arrow_of_ticks, to_numbers=_ticks, to_fill=_fill_time, to_compare=compare_time,
)  # fmt: skip
DURATION = ColumnType(
    "duration", "day-time intervals", ("duration",), of_spark=_leaf_of("int64", "daytimeinterval", unit="us"),
    of_arrow=lambda arrow: Leaf("int64", unit=arrow.unit) if types.is_duration(arrow) else None,
    to_arrow=_arrow_of_ticks, to_numbers=_ticks, to_fill=_fill_time,
)  # fmt: skip
STRING = ColumnType(
    "string", "string", ("vocabulary", "hash", "bytes"), of_spark=_leaf_of("int64", "string", "char", "varchar"),
    of_arrow=_arrow_string, to_arrow=lambda column: pa.string(), to_numbers=_strings, to_fill=_fill_plain,
    to_compare=_compare_string, needs_choice=True,
)  # fmt: skip
BINARY = ColumnType(
    "binary", "binary", ("bytes", "image"), of_spark=_leaf_of("uint8", "binary"), of_arrow=_arrow_binary,
    to_arrow=lambda column: pa.binary(), to_numbers=_numbers, to_fill=_fill_plain,
)  # fmt: skip
TYPES = (NUMBER, DECIMAL, TIME, DURATION, STRING, BINARY)
SUPPORTED = (
    f"{', '.join(t.described for t in TYPES)}, arrays of these, Spark ML vectors, and the fields of structs by their "
    "path (user.age)"
)


def type_of_spark(data_type: Any) -> tuple[ColumnType, Leaf] | None:
    """The column type of a Spark `DataType` that is no array; None if it cannot become a tensor."""
    return next(((t, leaf) for t in TYPES if (leaf := t.of_spark(data_type)) is not None), None)


def type_of_arrow(arrow: pa.DataType) -> tuple[ColumnType, Leaf] | None:
    """The column type of an Arrow type that is no list; None if it cannot become a tensor."""
    return next(((t, leaf) for t in TYPES if (leaf := t.of_arrow(arrow)) is not None), None)


def to_numbers(column: SourceColumn, values: pa.Array, lookup: Lookup | None = None) -> Array:
    """Cells without nulls as numbers of the column's dtype. # (rows,) -> (rows,)

    Raises BadCellsError for values that do not fit the dtype.
    """
    known = type_of_arrow(values.type)
    return (known[0] if known else NUMBER).to_numbers(column, values, lookup)


def typed(column: SourceColumn, values: pa.Array) -> pa.Array:
    """Returns values of a type that all files have: nulls whose writer knew no type, strings that are views."""
    if str(values.type) == "string_view":
        return values.cast(pa.string())
    if not types.is_null(values.type):
        return values
    column_type = next(t for t in TYPES if column.encoding.kind in t.choices)
    return values.cast(column_type.to_arrow(column))


def compared(value: Any, arrow: pa.DataType) -> pa.Array:
    """A value of `data.filters` in the type of the column. Raises ValueError if it does not fit. # (1,)"""
    known = type_of_arrow(arrow)
    if known is None or known[0].to_compare is None or str(arrow) == "string_view":
        raise ValueError("cells of this type cannot be compared")
    return known[0].to_compare(value, arrow)


def arrow_source_column(name: str, arrow: pa.DataType, settings: Mapping[str, Any]) -> SourceColumn:
    """The column of an external Parquet file, from its Arrow type. Raises ValueError as `source_columns` does."""
    if _is_vector(arrow):
        return vector_column(name, settings)
    inner, depth = arrow, 0
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner, depth = inner.value_type, depth + 1
    known = type_of_arrow(inner.value_type if types.is_dictionary(inner) else inner)
    if known is None:
        raise ValueError(f"column {name!r} has Parquet type {arrow}, which cannot become a tensor; supported are "
                         f"{SUPPORTED}; convert it with Spark")  # fmt: skip
    return encoded_column(name, known, depth, str(arrow), settings)


def _is_vector(arrow: pa.DataType) -> bool:
    """Whether the type is the struct of a Spark ML vector; other structs may have fields of the same names."""
    if not types.is_struct(arrow) or [f.name for f in arrow] != ["type", "size", "indices", "values"]:
        return False
    kind, size, indices, values = (f.type for f in arrow)
    are_lists = all(types.is_list(t) or types.is_large_list(t) for t in (indices, values))
    are_integers = types.is_integer(kind) and types.is_integer(size)
    return bool(
        are_lists and are_integers and types.is_integer(indices.value_type) and types.is_floating(values.value_type)
    )


def vector_column(name: str, settings: Mapping[str, Any]) -> SourceColumn:
    """The source column of Spark ML vectors. Raises ValueError if there are settings."""
    if settings:
        raise ValueError(f"data.encode.{name}: found {dict(settings)}, expected none for Spark ML vectors; remove them")
    return SourceColumn(name, "float64", "vector", 1)


def encoded_column(
    name: str, known: tuple[ColumnType, Leaf], depth: int, type_name: str, settings: Mapping[str, Any]
) -> SourceColumn:
    """The source column of `depth` nested arrays of a column type, with the settings of `data.encode`.

    `type_name` names the type in errors. Raises ValueError for settings that do not fit the type.
    """
    column_type, leaf = known
    choices, key = column_type.choices, f"data.encode.{name}"
    chosen = settings.get("as")
    if chosen is None and column_type.needs_choice:
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
    if column_type is TIME:
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
    known = type_of_arrow(arrow)
    try:
        return (known[0] if known else NUMBER).to_fill(fill, arrow, column.encoding.unit)
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"data.fill.{column.name}: expected a value of type {arrow}, found {fill!r} ({error})"
        ) from error
