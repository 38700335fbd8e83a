"""The registry of column types: each source type has one record, and one record is all that a new type needs."""

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import types as t

from spark_dl import Data
from spark_dl.config.checks import ENCODINGS
from spark_dl.data.columns import types
from spark_dl.data.columns.cells import read_cells
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.columns.types import TYPES, ColumnType, Leaf, type_of_arrow, type_of_spark
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from tests.builders.settings import make_config
from tests.unit.data.external.test_dataset import columns_of

SPARK = [
    t.BooleanType(), t.ByteType(), t.ShortType(), t.IntegerType(), t.LongType(), t.FloatType(), t.DoubleType(),
    t.DecimalType(9, 2), t.DateType(), t.TimestampType(), t.TimestampNTZType(), t.DayTimeIntervalType(),
    t.StringType(), t.BinaryType(),
]  # fmt: skip
ARROW = [
    pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.decimal128(9, 2), pa.date32(), pa.date64(),
    pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.duration("ms"), pa.string(), pa.large_string(), pa.binary(),
    pa.large_binary(), pa.binary(3),
]  # fmt: skip


def test_every_supported_type_has_one_record():
    assert [sum(each.of_spark(kind) is not None for each in TYPES) for kind in SPARK] == [1] * len(SPARK)
    assert [sum(each.of_arrow(kind) is not None for each in TYPES) for kind in ARROW] == [1] * len(ARROW)
    assert {choice for each in TYPES for choice in each.choices} == {*ENCODINGS}


@pytest.mark.parametrize("kind", [t.MapType(t.StringType(), t.LongType()), t.YearMonthIntervalType(), t.NullType()])
def test_other_types_of_spark_have_none(kind):
    assert type_of_spark(kind) is None


@pytest.mark.parametrize("kind", [pa.time64("us"), pa.null(), pa.struct([("a", pa.int8())]), pa.list_(pa.int8())])
def test_other_types_of_arrow_have_none(kind):
    assert type_of_arrow(kind) is None


UNITS = {"D": 86_400 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DAY = datetime.date(1969, 12, 30)  # before 1970, so that rounding down is not towards 0


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("stored", ["date32", "date64", "s", "ms", "us", "ns"])
def test_times_are_ticks_of_the_unit_of_their_column_rounded_down(stored, unit):
    if stored.startswith("date"):
        values, nanoseconds = pa.array([DAY, None], getattr(pa, stored)()).drop_null(), -2 * UNITS["D"]
    else:
        values = pa.array([-2 * UNITS["D"] // UNITS[stored] + 1], pa.timestamp(stored))
        nanoseconds = -2 * UNITS["D"] + UNITS[stored]
    column = SourceColumn("c", "int64", "scalar", encoding=Encoding("timestamp", unit=unit))
    assert read_cells(column, values).tolist() == [nanoseconds // UNITS[unit]]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_are_ticks_of_the_unit_of_their_column(unit):
    column = SourceColumn("c", "int64", "scalar", encoding=Encoding("duration", unit=unit))
    assert read_cells(column, pa.array([3_000_000], pa.duration("us"))).tolist() == [3 * 10**9 // UNITS[unit]]


@pytest.mark.parametrize(("value", "arrow", "compared"), [
    (True, pa.bool_(), True), (3, pa.int8(), 3), (3.0, pa.int8(), 3), (2, pa.float32(), 2.0),
    (Decimal("2.5"), pa.float64(), 2.5), ("2.50", pa.decimal128(9, 2), Decimal("2.50")), (3, pa.decimal128(9, 2), 3),
    ("word", pa.string(), "word"),
])  # fmt: skip
def test_values_of_filters_are_compared_in_the_type_of_their_column(value, arrow, compared):
    found = type_of_arrow(arrow)[0].to_compare(value, arrow)
    assert (found.type, found.to_pylist()) == (arrow, [compared])


@pytest.mark.parametrize(("value", "arrow"), [
    (1, pa.bool_()), (True, pa.int8()), ("1", pa.int8()), (1.0, pa.float16()), (1e300, pa.float32()), (300, pa.int8()),
    (True, pa.decimal128(9, 2)), (1, pa.string()),
])  # fmt: skip
def test_values_of_filters_of_another_type_are_an_error(value, arrow):
    with pytest.raises((ValueError, pa.ArrowException)):
        type_of_arrow(arrow)[0].to_compare(value, arrow)


@pytest.mark.parametrize(("kind", "unit", "arrow"), [
    ("duration", "ms", pa.duration("ms")), ("timestamp", "D", pa.date32()), ("timestamp", "us", pa.timestamp("us")),
    ("vocabulary", None, pa.string()), ("hash", None, pa.string()),
])  # fmt: skip
def test_nulls_whose_writer_knew_no_type_have_that_of_their_column(kind, unit, arrow):
    words = {"vocabulary": ("a",)} if kind == "vocabulary" else {}
    encoding = Encoding(kind, unit=unit, **words)
    found = types.typed(SourceColumn("c", "int64", "scalar", encoding=encoding), pa.nulls(2))
    assert (found.type, found.null_count) == (arrow, 2)


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="views came with pyarrow 16")
def test_strings_that_are_views_are_read_as_strings():
    column = SourceColumn("c", "int64", "scalar", encoding=Encoding("hash", buckets=3))
    found = types.typed(column, pa.array(["a", None]).cast(pa.string_view()))
    assert (found.type, found.to_pylist()) == (pa.string(), ["a", None])
    numbers = pa.array([1, None])
    assert types.typed(column, numbers) is numbers


@pytest.mark.parametrize(("unit", "dtype"), [("D", "int32"), ("s", "int64"), ("ns", "int64")])
def test_days_have_32_bits_and_other_ticks_64(tmp_path, unit, dtype):
    for name, arrow in (("day", pa.date32()), ("time", pa.timestamp("us"))):
        pq.write_table(pa.table({name: pa.array([DAY]).cast(arrow)}), tmp_path / f"{name}.parquet")
        how = Data(features=(name,), label=None, encode={name: {"as": "timestamp", "unit": unit}})
        (column,) = open_parquet(str(tmp_path / f"{name}.parquet"), [name], data=how).columns
        assert column.dtype == dtype


CLOCK = ColumnType(
    "clock", "time of day", ("duration",), of_spark=lambda data_type: None,
    of_arrow=lambda arrow: Leaf("int64", unit="us") if arrow == pa.time64("us") else None,
    to_arrow=lambda column: pa.time64("us"),
    to_numbers=lambda column, values, _: values.cast(pa.int64()).to_numpy(),
    to_fill=lambda fill, arrow, unit: pa.scalar(datetime.time.fromisoformat(fill), arrow),
    to_compare=lambda value, arrow: pa.array([datetime.time.fromisoformat(value)], arrow),
)  # fmt: skip


def test_one_record_is_enough_for_a_new_type(tmp_path, monkeypatch):
    """Read, in arrays too, filtered and filled, and named among the types that are supported."""
    times = [datetime.time(hour, 30) if hour % 3 else None for hour in range(24)]
    pairs = [[datetime.time(hour), datetime.time(hour, 59)] for hour in range(24)]
    columns = {"at": pa.array(times, pa.time64("us")), "pair": pa.array(pairs, pa.list_(pa.time64("us")))}
    pq.write_table(pa.table({**columns, "id": np.arange(24)}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'pair' has Parquet type list<.*time64.*, which cannot become a tensor"):
        open_parquet(str(tmp_path), ["pair"])

    monkeypatch.setattr(types, "TYPES", (*TYPES, CLOCK))
    data = Data(features=("at", "pair", "id"), label=None, nulls="fill", fill={"at": "00:00:01"})
    shards = open_parquet(str(tmp_path), data.columns, data=data)
    rows = columns_of(shards, *data.columns)
    order = np.argsort(rows["id"])
    hour_us = 3600 * 10**6
    assert rows["at"][order].tolist() == [int((hour + 0.5) * hour_us) if hour % 3 else 10**6 for hour in range(24)]
    assert rows["pair"][order][5].tolist() == [5 * hour_us, 5 * hour_us + 59 * 60 * 10**6]
    assert shards.columns[0].encoding.kind == "duration"
    late = make_config(features=data.columns, label=None, filters=[("at", ">", "20:00")])
    assert filter_rows(open_parquet(str(tmp_path), ["id"]), make_config(filters=[("id", ">", 20)])).rows == 3
    assert filter_rows(shards, late).rows == 3  # 20, 22 and 23; nulls pass no filter
