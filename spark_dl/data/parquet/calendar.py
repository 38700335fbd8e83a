"""Dates, times and intervals as Spark reads them.

A timestamp of 96 bits, which is Spark's default, is an instant; Arrow reads it without a time zone.

Parquet has no intervals. Spark writes integers, and the type into the footer, as JSON, where it looks for it.

Spark 2 and Hive wrote days before 1582-10-15 with the Julian calendar. Spark 3 says in a file which calendar it has,
and rebases what it reads to the proleptic Gregorian one, which Arrow, Python and Spark 3 have: a date keeps its year,
month and day. See `DataSourceUtils.datetimeRebaseSpec` and `RebaseDateTime` of Spark. In a file of the old calendar,
0001-01-01 is two days off without it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

_SPARK, _DATES, _INT96, _ZONE = (
    f"org.apache.spark.{name}".encode() for name in ("version", "legacyDateTime", "legacyINT96", "timeZone")
)
_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
_DAY_TIME, _YEAR_MONTH = pa.duration("us"), pa.month_day_nano_interval()
_STORED = {_DAY_TIME: pa.int64(), _YEAR_MONTH: pa.int32()}
_SWITCH_DAY = -141_427
"""Days from 1970-01-01 to 1582-10-15, the first day of the Gregorian calendar."""
_SAFE_S = -2_208_988_800
"""1900-01-01 in seconds: from then on, all zones have the same times in both calendars (as Spark has it)."""
_UTC = ("UTC", "Etc/UTC", "Z", "GMT", "Etc/GMT", "+00:00", "Universal", "Zulu")
_PER_SECOND = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Calendar:
    """What the footer of a file says about the calendar of its values."""

    dates: bool
    """Whether dates and 64-bit timestamps have the old calendar."""
    int96: bool
    """Whether 96-bit timestamps have it."""
    zone: str
    """The time zone of the session that wrote the file; empty if the file does not have it."""
    writer: str
    is_known: bool
    """Whether the file says which calendar it has. Spark's own files do, other files of parquet-mr do not."""


def calendar_of(metadata: pq.FileMetaData) -> Calendar | None:
    """Returns the calendar of a file whose values may need another one; None if they do not."""
    footer: Mapping[bytes, bytes] = metadata.metadata or {}
    writer, zone = metadata.created_by or "", footer.get(_ZONE, b"").decode(errors="replace")
    if _SPARK not in footer:
        if not writer.startswith("parquet-mr"):
            return None  # Arrow and others know one calendar
        return Calendar(True, True, zone, writer, is_known=False)
    version = re.match(r"(\d+)\.(\d+)", footer[_SPARK].decode(errors="replace"))
    release = tuple(map(int, version.groups())) if version else (0, 0)
    dates, int96 = release < (3, 0) or _DATES in footer, release < (3, 1) or _INT96 in footer
    name = f"Spark {footer[_SPARK].decode(errors='replace')}"
    return Calendar(dates, int96, zone, name, is_known=True) if dates or int96 else None


class RebasedFile:
    """A Parquet file whose dates, times and intervals are those that Spark reads. All else is as in `pyarrow.parquet`.

    Args:
        int96: leaves of 96-bit timestamps.
        intervals: types of intervals, by path without the levels of lists.
    """

    def __init__(
        self,
        file: pq.ParquetFile,
        calendar: Calendar | None,
        int96: Collection[str],
        intervals: Mapping[str, pa.DataType] | None = None,
    ):
        self._file, self._calendar, self._int96, self._intervals = file, calendar, int96, intervals or {}
        self.schema_arrow = pa.schema(map(self._as_in_spark, file.schema_arrow), file.schema_arrow.metadata)

    def _as_in_spark(self, field: pa.Field) -> pa.Field:
        return field.with_type(self._type(field.name, field.type))

    def _type(self, path: str, arrow: pa.DataType) -> pa.DataType:
        """Returns the type of a column, or of values in it, that Spark has."""
        types = pa.types
        if types.is_struct(arrow):
            return pa.struct([f.with_type(self._type(f"{path}.{f.name}", f.type)) for f in arrow])
        if types.is_list(arrow) or types.is_large_list(arrow):
            inner = arrow.value_field.with_type(self._type(path, arrow.value_type))
            return pa.large_list(inner) if types.is_large_list(arrow) else pa.list_(inner)
        if (interval := self._intervals.get(path)) is not None and arrow == _STORED[interval]:
            return interval
        return pa.timestamp(arrow.unit, "UTC") if types.is_timestamp(arrow) and self._is_int96(path) else arrow

    def _is_int96(self, path: str) -> bool:
        # Spark and Hive name the levels of a list differently; a timestamp of 96 bits is of one kind in a column.
        return any(leaf == path or leaf.startswith(f"{path}.") for leaf in self._int96)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read_row_group(self, *args: Any, **kwargs: Any) -> pa.Table:
        """As in pyarrow. Raises ValueError for values that cannot be rebased, with the column and the reason."""
        table = self._file.read_row_group(*args, **kwargs)
        columns = {name: self._rebased(name, name, table.column(name)) for name in table.column_names}
        return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(map(self._as_in_spark, table.schema)))

    def iter_batches(self, *args: Any, **kwargs: Any) -> Iterator[pa.RecordBatch]:
        """As in pyarrow. Raises as `read_row_group` does."""
        for batch in self._file.iter_batches(*args, **kwargs):
            arrays = [self._rebased(name, name, batch.column(i)) for i, name in enumerate(batch.schema.names)]
            yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(map(self._as_in_spark, batch.schema)))

    def _rebased(self, column: str, path: str, values: Any) -> Any:
        types, arrow = pa.types, self._type(path, values.type)
        if isinstance(values, pa.ChunkedArray):
            return pa.chunked_array([self._rebased(column, path, chunk) for chunk in values.chunks], arrow)
        if arrow == _YEAR_MONTH:
            raise ValueError(f"column {column!r} has intervals of months, which cannot be read; convert it with Spark")
        if not may_change(arrow):
            return values
        if types.is_struct(arrow):
            inner = [
                self._rebased(column, f"{path}.{arrow.field(i).name}", values.field(i)) for i in range(arrow.num_fields)
            ]
            return pa.StructArray.from_arrays(inner, fields=list(arrow), mask=values.is_null())
        if types.is_list(arrow) or types.is_large_list(arrow):
            inner_values = self._rebased(column, path, values.values)
            kind = pa.LargeListArray if types.is_large_list(arrow) else pa.ListArray
            rebased = kind.from_arrays(values.offsets, inner_values, type=arrow)
            return rebased if not values.null_count else _with_nulls(rebased, values, kind)
        calendar = None if arrow == _DAY_TIME else self._calendar
        rebased = values if calendar is None else self._rebased_leaf(column, path, values, calendar)
        return rebased if rebased.type == arrow else rebased.view(arrow)

    def _rebased_leaf(self, column: str, path: str, values: pa.Array, calendar: Calendar) -> pa.Array:
        if not (calendar.int96 if self._is_int96(path) else calendar.dates):
            return values
        is_date = pa.types.is_date32(values.type)
        ticks = np.asarray(values.cast(pa.int32() if is_date else pa.int64()).fill_null(0))
        if is_date:
            old = ticks < _SWITCH_DAY
            if not old.any():
                return values
            _check(column, "1582-10-15", calendar, needs_zone=False)
            ticks = np.where(old, gregorian_days(ticks), ticks).astype(np.int32)
        else:
            second = _PER_SECOND[values.type.unit]
            if not (ticks < _SAFE_S * second).any():
                return values
            day, old = 86_400 * second, ticks < _SWITCH_DAY * 86_400 * second
            _check(column, "1900-01-01", calendar, needs_zone=True)
            days = np.floor_divide(ticks, day)
            ticks = np.where(old, gregorian_days(days) * day + (ticks - days * day), ticks)
        mask = np.asarray(values.is_null().to_numpy(zero_copy_only=False)) if values.null_count else None
        return pa.array(ticks, mask=mask).cast(values.type)


def _check(column: str, before: str, calendar: Calendar, *, needs_zone: bool) -> None:
    if not calendar.is_known:
        why = "does not say which calendar it has"
    elif needs_zone and calendar.zone not in _UTC:
        why = f"has the old calendar in the time zone {calendar.zone or 'of its writer, which it does not name'}"
    else:
        return
    raise ValueError(
        f"column {column!r}: found values before {before} in a file of {calendar.writer}, which {why}; read the "
        "files with Spark, and pass the DataFrame"
    )


def _with_nulls(found: Any, values: Any, kind: Any) -> Any:
    offsets = np.asarray(values.offsets).astype(object)
    offsets[:-1][np.asarray(values.is_null().to_numpy(zero_copy_only=False))] = None
    return kind.from_arrays(pa.array(offsets.tolist(), values.offsets.type), found.values, type=found.type)


def may_change(arrow: pa.DataType) -> bool:
    """Whether there are dates, timestamps or intervals in a type, at any depth."""
    if pa.types.is_date32(arrow) or pa.types.is_timestamp(arrow) or arrow in _STORED:
        return True
    if pa.types.is_struct(arrow):
        return any(may_change(arrow.field(i).type) for i in range(arrow.num_fields))
    return (pa.types.is_list(arrow) or pa.types.is_large_list(arrow)) and may_change(arrow.value_type)


def rebased(file: pq.ParquetFile) -> Any:
    """Returns a file that reads dates, times and intervals as Spark does; the same file if nothing has to change."""
    intervals = intervals_of(file.metadata)
    if not intervals and not any(may_change(field.type) for field in file.schema_arrow):
        return file
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    int96 = {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}
    calendar = calendar_of(file.metadata)
    has_change = calendar is not None or int96 or intervals
    return RebasedFile(file, calendar, int96, intervals) if has_change else file


def intervals_of(metadata: pq.FileMetaData) -> dict[str, pa.DataType]:
    """Returns path and type of each interval in the schema that Spark has written into a footer."""
    text = (metadata.metadata or {}).get(_SCHEMA, b"")
    with contextlib.suppress(ValueError):  # a schema that Spark cannot read either, and does without
        return dict(_intervals_in("", json.loads(text))) if b"interval" in text else {}
    return {}


def _intervals_in(path: str, spark: Any) -> Iterator[tuple[str, pa.DataType]]:
    if isinstance(spark, str) and spark.startswith("interval "):
        yield path, _YEAR_MONTH if re.search("year|month", spark) else _DAY_TIME
    elif isinstance(spark, dict) and spark.get("type") == "array":
        yield from _intervals_in(path, spark.get("elementType"))
    elif isinstance(spark, dict) and spark.get("type") == "struct":
        for field in spark.get("fields", ()):
            yield from _intervals_in(f"{path}.{field['name']}" if path else field["name"], field.get("type"))


def gregorian_days(days: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Returns the day of the proleptic Gregorian calendar with the year, month and day that a day has in the Julian
    one.

    February 29 of a year such as 1000, which only the Julian calendar has, becomes March 1. # days: since 1970-01-01

    Fliegel and Van Flandern's conversion of day numbers (Richards 2013, Explanatory Supplement, chapter 15).
    """
    number = days.astype(np.int64) + 2_440_588 + 32_082
    of_cycle = (4 * number + 3) // 1461
    rest = number - 1461 * of_cycle // 4
    month_from_march = (5 * rest + 2) // 153
    day = rest - (153 * month_from_march + 2) // 5
    month = month_from_march + 3 - 12 * (month_from_march // 10)
    year = of_cycle - 4800 + month_from_march // 10
    first: npt.NDArray[np.int64] = ((year - 1970) * 12 + month - 1).astype("M8[M]").astype("M8[D]").astype(np.int64)
    return first + day
