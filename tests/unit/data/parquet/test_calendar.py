"""Days of the Julian calendar with the year, month and day that they have there."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl.data.parquet.calendar import RebasedFile, calendar_of, gregorian_days, rebased

EPOCH = datetime.date(1970, 1, 1)


@pytest.mark.parametrize(
    ("julian", "expected"),  # days since 1970-01-01, from RebaseDateTimeSuite of Spark
    [(-719164, "0001-01-01"), (-719163, "0001-01-02"), (-354280, "1000-01-01"), (-141428, "1582-10-04"),
     (-682945, "0100-03-01"), (-682946, "0100-03-01")],
)  # fmt: skip
def test_a_day_keeps_its_name(julian, expected):
    (found,) = gregorian_days(np.array([julian]))
    assert str(EPOCH + datetime.timedelta(days=int(found))) == expected


def test_each_day_of_the_old_calendar_keeps_its_name():
    """Day by day, from the first one to the last one before the calendar changed."""
    lengths = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    names = [
        (year, month, day) for year in range(1, 1583) for month, length in enumerate(lengths, 1)
        for day in range(1, length + (month == 2 and year % 4 == 0) + 1) if (year, month, day) <= (1582, 10, 4)
    ]  # fmt: skip
    found = gregorian_days(np.arange(-719164, -719164 + len(names)))
    has_no_day = [(month, day) == (2, 29) and year % 100 == 0 and year % 400 > 0 for year, month, day in names]
    expected = [
        (datetime.date(year, 3, 1) if is_none else datetime.date(year, month, day)) - EPOCH
        for (year, month, day), is_none in zip(names, has_no_day, strict=True)
    ]
    assert -719164 + len(names) - 1 == -141428
    assert found.tolist() == [each.days for each in expected]


def file_of(tmp_path, writer=None, **metadata):
    table = pa.table({"day": pa.array([-719164, None, 0], pa.int32()).cast(pa.date32()), "n": [1, 2, 3]})
    metadata = {f"org.apache.spark.{key}": value for key, value in metadata.items()}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    return pq.ParquetFile(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("metadata", "dates", "int96"),
    [
        ({}, False, False), ({"version": "3.5.0"}, False, False), ({"version": "2.4.8"}, True, True),
        ({"version": "3.0.3"}, False, True), ({"version": "4.0.0", "legacyDateTime": ""}, True, False),
        ({"version": "4.0.0", "legacyINT96": ""}, False, True), ({"version": "what"}, True, True),
    ],
)  # fmt: skip
def test_what_a_footer_says_of_its_calendar(tmp_path, metadata, dates, int96):
    found = calendar_of(file_of(tmp_path, **metadata).metadata)
    assert (found.dates, found.int96) == (dates, int96) if dates or int96 else found is None


def test_dates_are_rebased_in_row_groups_and_batches_and_in_lists_and_structs(tmp_path):
    dates = pa.array([-719164, None, 0], pa.int32()).cast(pa.date32())
    table = pa.table({
        "day": dates, "list": pa.array([[0], None, [1, None]], pa.list_(pa.int32())).cast(pa.list_(pa.date32())),
        "old": pa.ListArray.from_arrays(pa.array([0, 1, None, 2], pa.int32()), dates),
        "inner": pa.StructArray.from_arrays([dates], names=["x"]), "n": pa.array([1, 2, 3]),
    })  # fmt: skip
    metadata = {"org.apache.spark.version": "2.4.8"}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    file = rebased(pq.ParquetFile(tmp_path / "a.parquet"))
    assert isinstance(file, RebasedFile)
    first = datetime.date(1, 1, 1)
    for found in (file.read_row_group(0), pa.Table.from_batches(list(file.iter_batches(2)))):
        assert found.column("day").to_pylist() == [first, None, EPOCH]
        assert found.column("old").to_pylist() == [[first], [None], None]
        assert found.column("inner").to_pylist() == [{"x": first}, {"x": None}, {"x": EPOCH}]
        assert found.column("list").to_pylist() == table.column("list").to_pylist()
        assert found.column("n").to_pylist() == [1, 2, 3]


def test_the_first_day_of_the_new_calendar_stays(tmp_path):
    days = pa.array([-141428, -141427, -141426], pa.int32()).cast(pa.date32())
    metadata = {"org.apache.spark.version": "2.4.8"}
    pq.write_table(pa.table({"day": days}).replace_schema_metadata(metadata), tmp_path / "a.parquet")
    found = rebased(pq.ParquetFile(tmp_path / "a.parquet")).read_row_group(0).column("day").to_pylist()
    assert list(map(str, found)) == ["1582-10-04", "1582-10-15", "1582-10-16"]


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_timestamps_keep_their_day_and_their_time_of_day(tmp_path, unit):
    """Of a file in UTC; nanoseconds begin in 1677, where only the new calendar is."""
    second = {"ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    days = [-719164, -141428, -141427, 0] if unit != "ns" else [-106751, 0, 7]
    ticks = [day * 86_400 * second + 12_345 * second + 7 for day in days]
    metadata = {"org.apache.spark.version": "2.4.8", "org.apache.spark.timeZone": "UTC"}
    table = pa.table({"at": pa.array([*ticks, None], pa.int64()).cast(pa.timestamp(unit))})
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet", version="2.6")
    found = rebased(pq.ParquetFile(tmp_path / "a.parquet")).read_row_group(0).column("at").cast(pa.int64()).to_pylist()
    moved = [int(gregorian_days(np.array([day]))[0]) if day < -141427 else day for day in days]
    expected = [day * 86_400 * second + 12_345 * second + 7 for day in moved]
    assert found == [*expected, None]


def test_lists_of_96_bit_timestamps_with_nulls_are_instants(tmp_path):
    times = pa.array([[5], None, [None, 7]], pa.list_(pa.timestamp("us")))
    pq.write_table(pa.table({"a": times}), tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    file = rebased(pq.ParquetFile(tmp_path / "a.parquet", coerce_int96_timestamp_unit="us"))
    found = file.read_row_group(0).column("a")
    assert found.type.value_type == pa.timestamp("us", "UTC")
    assert found.type == pa.list_(pa.field("element", pa.timestamp("us", "UTC")))
    assert found.cast(times.type).to_pylist() == times.to_pylist()


def test_intervals_have_the_types_that_spark_has_written_into_the_footer(tmp_path):
    ticks = pa.array([5, None, -7])
    table = pa.table({
        "took": ticks, "list": pa.array([[5], None, [None, 2]]), "months": pa.array([1, 2, 3], pa.int32()),
        "inner": pa.StructArray.from_arrays([ticks, ticks], names=["x", "n"]), "n": ticks, "day": pa.array([0, 1, 2]),
    })  # fmt: skip
    fields = {
        "took": "interval day to second", "list": {"type": "array", "elementType": "interval hour"}, "n": "long",
        "months": "interval year to month", "day": "date",
        "inner": {"type": "struct", "fields": [{"name": "x", "type": "interval day"}, {"name": "n", "type": "long"}]},
    }  # fmt: skip
    schema = {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}
    metadata = {"org.apache.spark.version": "4.0.0", "org.apache.spark.sql.parquet.row.metadata": json.dumps(schema)}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    file = rebased(pq.ParquetFile(tmp_path / "a.parquet"))
    interval = pa.duration("us")
    read = ["took", "list", "inner", "n", "day"]
    for found in (
        file.read_row_group(0, columns=read),
        pa.Table.from_batches(list(file.iter_batches(2, columns=read))),
    ):
        assert found.schema.field("took").type == interval
        assert found.column("took").cast(pa.int64()).to_pylist() == ticks.to_pylist()
        assert found.column("list").type.value_type == interval
        assert found.column("list").cast(pa.list_(pa.int64())).to_pylist() == table.column("list").to_pylist()
        assert found.schema.field("inner").type.field("x").type == interval
        assert found.select(["n", "day"]).equals(table.select(["n", "day"]))
    assert file.schema_arrow.field("months").type == pa.month_day_nano_interval()
    with pytest.raises(ValueError, match="column 'months' has intervals of months"):
        file.read_row_group(0)


def test_times_before_1900_in_a_zone_are_refused_and_later_ones_are_not(tmp_path):
    times = pa.array([-3_000_000_000, 0], pa.int64()).cast(pa.timestamp("s")).cast(pa.timestamp("us", "UTC"))
    for zone, is_refused in (("UTC", False), ("Europe/Berlin", True), (None, True)):
        metadata = {"org.apache.spark.version": "2.4.8", **({"org.apache.spark.timeZone": zone} if zone else {})}
        pq.write_table(pa.table({"at": times}).replace_schema_metadata(metadata), tmp_path / "a.parquet")
        file = rebased(pq.ParquetFile(tmp_path / "a.parquet"))
        if is_refused:
            with pytest.raises(
                ValueError, match=r"column 'at': found values before 1900-01-01 in a file of Spark 2.4.8"
            ):
                file.read_row_group(0)
        else:
            assert file.read_row_group(0).column("at").to_pylist() == times.to_pylist()  # after 1582


def test_a_file_of_parquet_mr_that_does_not_say_its_calendar_is_refused_if_it_matters(tmp_path, monkeypatch):
    import spark_dl.data.parquet.calendar as calendar

    file = file_of(tmp_path)
    known = calendar.Calendar(True, True, "", "parquet-mr version 1.8.1", is_known=False)
    monkeypatch.setattr(calendar, "calendar_of", lambda metadata: known)
    with pytest.raises(
        ValueError, match=r"column 'day': found values before 1582-10-15 in a file of parquet-mr version"
    ):
        rebased(file).read_row_group(0)
    assert rebased(file).read_row_group(0, ["n"]).num_rows == 3
