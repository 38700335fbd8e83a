"""Source columns of a DataFrame, from its Spark types and the settings of `data.encode` and `data.fill`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_dl.config.checks import listed, suggestion
from spark_dl.data.columns.encoding import Settings
from spark_dl.data.columns.source import HAS_DOT, SourceColumn, check_batch_names, check_names
from spark_dl.data.columns.types import SUPPORTED, check_fill, encoded_column, type_of_spark, vector_column

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

TOKENIZER = "spark_dl.tokenizer"
"""The key of the digest of a tokenizer in the metadata of a column of tokens."""
_IMAGE = ["origin", "height", "width", "nChannels", "mode", "data"]


def source_columns(
    schema: StructType,
    names: Sequence[str],
    encode: Settings | None = None,
    fill: Mapping[str, Any] | None = None,
    *,
    weight: str | None = None,
) -> tuple[SourceColumn, ...]:
    """The source columns of a DataFrame, with `data.encode` and `data.fill` applied. Called on the driver.

    Args:
        weight: the column of `data.weight`.

    Raises:
        ValueError: For a missing column, with the nearest name, for a type that cannot become a tensor, and for
            settings that do not fit the type.
    """
    check_names("encode", encode or {}, names)
    check_names("fill", fill or {}, names)
    columns = []
    for name in names:
        path, data_type = _spark_type_at(schema, name)
        column = _spark_column(name, data_type, (encode or {}).get(name, {}))
        value = (fill or {}).get(name)
        if value is not None:
            _check_spark_fill(column, value, data_type)
        known = schema[name].metadata.get(TOKENIZER) if len(path) == 1 else None
        encoding = dataclasses.replace(column.encoding, tokenizer=known)
        is_pixels = _has_pixels(schema, path)
        columns.append(dataclasses.replace(column, path=path, fill=value, empty_is_null=is_pixels, encoding=encoding))
    check_batch_names(names, [c.name for c in columns if c.ragged], weight)
    return tuple(columns)


def _spark_type_at(schema: StructType, name: str) -> tuple[tuple[str, ...], DataType]:
    top = {f.name: f.dataType for f in schema.fields}
    if name in top:
        return (name,), top[name]
    path = tuple(name.split("."))
    at: Any = schema
    for part in path:
        fields = {f.name: f.dataType for f in getattr(at, "fields", ())}
        if part not in fields:
            known = [*top, *(p for f in schema.fields for p in _fields_below(f.name, f.dataType))]
            if name in known:
                raise ValueError(f"column {name!r}: {HAS_DOT}")
            raise ValueError(
                f"no column {name!r} in the DataFrame{suggestion(name, known)}; its columns are [{listed(list(top))}] "
                "(data.features and data.label choose the columns)"
            )
        at = fields[part]
    return path, at


def _has_pixels(schema: StructType, path: Sequence[str]) -> bool:
    """Whether a field has the pixels of Spark's image source. See `ImageSchema` of Spark."""
    if len(path) < 2 or path[-1] != "data":
        return False
    return _spark_type_at(schema, ".".join(path[:-1]))[1].fieldNames() == _IMAGE  # type: ignore[attr-defined, no-any-return]


def _fields_below(prefix: str, data_type: DataType) -> list[str]:
    paths = []
    for field in getattr(data_type, "fields", ()):
        paths += [f"{prefix}.{field.name}", *_fields_below(f"{prefix}.{field.name}", field.dataType)]
    return paths


def _spark_column(name: str, data_type: DataType, settings: Mapping[str, Any]) -> SourceColumn:
    if type(data_type).__name__ == "VectorUDT":
        return vector_column(name, settings)
    inner: Any = data_type
    depth = 0
    while inner.typeName() == "array":
        inner, depth = inner.elementType, depth + 1
    known = type_of_spark(inner)
    if known is None:
        below = _fields_below(name, inner)
        convert = f"read its fields: {below}" if below and not depth else "convert it in the DataFrame"
        raise ValueError(
            f"column {name!r} has type {data_type.simpleString()}, which cannot become a tensor; supported are "
            f"{SUPPORTED}; {convert}"
        )
    return encoded_column(name, known, depth, data_type.simpleString(), settings)


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
