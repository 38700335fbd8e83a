"""Key columns of a dataset: read from its files as they are, with the types that they have in Spark."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.config.checks import suggestion
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.dataset.records import Shard, ShardSet
from spark_dl.data.parquet.calendar import intervals_of
from spark_dl.data.parquet.file import open_file
from spark_dl.data.parquet.filters import NULL_PARTITION

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


_TICKS_PER_DAY = {"D": 1, "s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_EXACT_DIGITS = 15
"""Decimals of as many digits differ as float64, too."""


@dataclass(frozen=True)
class Key:
    """A key column."""

    name: str
    arrow: pa.DataType
    """The type that it has in Spark."""
    encoding: Encoding | None = None
    """How its values are stored in a dataset of spark_dl; None for an external dataset."""
    is_partition: bool = False

    def spark_type(self) -> DataType:
        """Returns the type of the column in Spark. Called on the driver."""
        from pyspark.sql.pandas.types import from_arrow_type

        return from_arrow_type(self.arrow, prefer_timestamp_ntz=True)  # not the default of Spark 3.5

    def restore(self, stored: pa.Array) -> pa.Array:
        """Returns stored values as they were before they were encoded."""
        encoding = self.encoding
        if encoding is None or encoding.kind == "number":
            return stored.cast(self.arrow)
        if encoding.vocabulary is not None:
            words = [None, *encoding.vocabulary] if encoding.unknown == "zero" else [*encoding.vocabulary]
            return pc.take(pa.array(words, pa.string()), stored)
        if pa.types.is_decimal(self.arrow):
            return _decimals(stored, self.arrow, is_float=encoding.kind == "float")
        assert encoding.unit is not None
        ticks = stored.cast(pa.int64()).to_numpy()
        if pa.types.is_date(self.arrow):
            return pa.array((ticks // _TICKS_PER_DAY[encoding.unit]).astype(np.int32)).view(self.arrow)
        return pa.array(ticks // 1000 if encoding.unit == "ns" else ticks).view(self.arrow)


def find_keys(shards: ShardSet, names: Sequence[str]) -> tuple[Key, ...]:
    """Returns the key columns of a dataset. Called on the driver.

    Raises ValueError for a column that is missing, has several values per row, or cannot be restored.
    """
    if isinstance(names, str):
        raise ValueError(f"keys: expected a list of columns, found {names!r}")
    if not names:
        return ()
    return tuple(_external_keys(shards, names) if shards.external else [_own_key(shards, name) for name in names])


class KeyReader:
    """Reads the key columns of row groups. Used by one thread."""

    def __init__(self, shards: ShardSet, found: Sequence[Key]):
        self._shards, self._keys = shards, found
        self._opened: tuple[int, pq.ParquetFile] | None = None

    def read(self, group: int) -> dict[str, pa.Array]:
        """Returns the key columns of a row group, by name."""
        shard, number, rows = self._shards.shards.place_of(group)
        stored = [key.name for key in self._keys if not key.is_partition]
        table = self._read(shard, number, stored) if stored else None
        partition = dict(self._shards.shards.partition_of(shard))
        columns: dict[str, pa.Array] = {}
        for key in self._keys:
            if key.is_partition:
                columns[key.name] = pa.repeat(
                    pa.scalar(_partition_value(partition[key.name], key.arrow), key.arrow), rows
                )
            else:
                assert table is not None
                columns[key.name] = key.restore(_one_array(table.column(key.name)))
        return columns

    def _read(self, shard: int, number: int, names: list[str]) -> pa.Table:
        found = self._shards.shards[shard]
        url = storage.join(self._shards.url, found.name)
        try:
            if self._opened is None or self._opened[0] != shard:
                self._opened = shard, _open_file(url, found)
            return self._opened[1].read_row_group(number, names, use_threads=False)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"cannot read the keys of row group {number} of {url}: {error}") from error


def _external_keys(shards: ShardSet, names: Sequence[str]) -> list[Key]:
    first = shards.shards[0]
    file = _open_file(storage.join(shards.url, first.name), first)
    schema, intervals = file.schema_arrow, intervals_of(file.metadata)
    partitions = dict(first.partition)
    external = []
    for name in names:
        if name in partitions:
            values = [dict(shard.partition)[name] for shard in shards.shards]
            external.append(Key(name, _partition_type(values), is_partition=True))
            continue
        if name not in schema.names:
            raise _missing(name, shards, [*schema.names, *partitions])
        arrow = _as_in_spark(schema.field(name).type)
        if arrow is None:
            raise ValueError(f"keys: column {name!r} has type {schema.field(name).type}, expected one value per row")
        if pa.types.is_duration(arrow) and name not in intervals:
            arrow = pa.int64()  # Arrow's own type, which Spark does not know
        external.append(Key(name, arrow))
    return external


def _own_key(shards: ShardSet, name: str) -> Key:
    columns = {c.name: c for c in shards.columns}
    if name not in columns:
        raise _missing(name, shards, list(columns))
    column, encoding = columns[name], columns[name].encoding
    if column.shape or column.codec != "scalar":
        raise ValueError(f"keys: column {name!r} has several values per row, expected one")
    if encoding.kind == "number":
        return Key(name, pa.from_numpy_dtype(np.dtype(column.dtype)), encoding)
    if encoding.vocabulary is not None:
        return Key(name, pa.string(), encoding)
    if encoding.kind in ("timestamp", "duration"):
        return Key(name, _time_type(name, encoding), encoding)
    if (match := re.fullmatch(r"decimal\(([0-9]+),([0-9]+)\)", encoding.source_type or "")) is not None:
        precision, scale = map(int, match.groups())
        if encoding.kind == "decimal" or precision <= _EXACT_DIGITS:
            return Key(name, pa.decimal128(precision, scale), encoding)
    raise ValueError(
        f"keys: column {name!r} is stored as {encoding.kind}, from which its values cannot be restored; choose a "
        "column of numbers, times, decimals (as: decimal, or up to 15 digits), or strings with a vocabulary; datasets "
        "that earlier versions wrote do not have the types of decimals"
    )


def _time_type(name: str, encoding: Encoding) -> pa.DataType:
    """Returns the type of a time in Spark. Raises ValueError if its unit has cut off what Spark's type has."""
    if encoding.source_type == "date" or (encoding.source_type is None and encoding.unit == "D"):
        return pa.date32()
    if encoding.unit not in ("us", "ns"):
        raise ValueError(
            f"keys: column {name!r} is stored in the unit {encoding.unit}, which cuts off fractions, so that its "
            f"values would not be the table's; write the dataset without data.encode.{name}.unit, and let the model "
            "divide"
        )
    if encoding.kind == "duration":
        return pa.duration("us")
    return pa.timestamp("us", None if encoding.source_type == "timestamp_ntz" else "UTC")


def _decimals(stored: pa.Array, arrow: pa.DataType, *, is_float: bool) -> pa.Array:
    """Returns the decimals that are stored as unscaled integers, or as the nearest float64 of at most 15 digits."""
    numbers = stored.to_numpy()
    low = np.rint(numbers * 10.0**arrow.scale).astype(np.int64) if is_float else numbers
    words = np.stack([low, low >> 63], axis=1)  # Arrow's decimals are integers of 128 bits
    return pa.Array.from_buffers(arrow, len(low), [None, pa.py_buffer(words.tobytes())])


def _as_in_spark(arrow: pa.DataType) -> pa.DataType | None:
    """Returns the type in which Spark holds such values; None for values that are no keys."""
    if pa.types.is_timestamp(arrow):
        return pa.timestamp("us", arrow.tz and "UTC")
    if pa.types.is_dictionary(arrow):
        return _as_in_spark(arrow.value_type)
    unsigned: Mapping[pa.DataType, pa.DataType] = {
        pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0),
        pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.float16(): pa.float32(),
    }  # fmt: skip
    return None if pa.types.is_nested(arrow) else unsigned.get(arrow, arrow)


def _open_file(url: str, shard: Shard) -> Any:
    return open_file(storage.open_input(url), footer_bytes=shard.footer_bytes, footer_crc32=shard.footer_crc32)


def _partition_type(values: Sequence[str]) -> pa.DataType:
    """Returns the type that Spark infers for the values of a partition: a number, a date, or else a string.

    Spark reads times as timestamps of the session's time zone, which a dataset does not know; they stay strings.
    """
    texts = [text for text in values if text != NULL_PARTITION]
    if texts and all(re.fullmatch(r"[+-]?[0-9]+", text) for text in texts):
        largest = max(abs(int(text)) for text in texts)
        if largest < 2**63:
            return pa.int32() if largest < 2**31 else pa.int64()
    elif texts and all(re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) for text in texts):
        return pa.float64()
    elif texts and all(map(_is_date, texts)):
        return pa.date32()
    return pa.string()


def _is_date(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(datetime.date.fromisoformat(text) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text))
    return False


def _partition_value(text: str, arrow: pa.DataType) -> Any:
    if text == NULL_PARTITION:
        return None
    if pa.types.is_date(arrow):
        return datetime.date.fromisoformat(text)
    return int(text) if pa.types.is_integer(arrow) else float(text) if pa.types.is_floating(arrow) else text


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _missing(name: Any, shards: ShardSet, known: list[str]) -> ValueError:
    return ValueError(f"keys: no column {name!r} in the dataset {shards.url}{suggestion(str(name), known)}")
