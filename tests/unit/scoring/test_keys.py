"""Key columns of a dataset: their types in Spark, and their values as they were in the table."""

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet, ShardTable
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.parquet.filters import NULL_PARTITION
from spark_dl.scoring import keys
from spark_dl.scoring.keys import Key, KeyReader, find_keys
from tests.builders.datasets import write_dataset


def own(*columns):
    return ShardSet("/data", columns, ShardTable.of(()))


def of(dtype, kind, shape=(), codec="scalar", **encoding):
    return Column("k", dtype, shape, codec, Encoding(kind, **encoding))


@pytest.mark.parametrize(("column", "arrow"), [
    (of("int16", "number"), pa.int16()), (of("float32", "number"), pa.float32()), (of("bool", "number"), pa.bool_()),
    (of("int64", "vocabulary", vocabulary=("a",)), pa.string()),
    (of("int64", "timestamp", unit="us"), pa.timestamp("us", "UTC")),
    (of("int64", "timestamp", unit="ns", source_type="timestamp_ntz"), pa.timestamp("us")),
    (of("int32", "timestamp", unit="D"), pa.date32()),
    (of("int64", "timestamp", unit="ms", source_type="date"), pa.date32()),
    (of("int64", "duration", unit="us"), pa.duration("us")),
    (of("int64", "decimal", source_type="decimal(18,2)", scale=2), pa.decimal128(18, 2)),
    (of("float64", "float", source_type="decimal(15,2)"), pa.decimal128(15, 2)),
])  # fmt: skip
def test_a_column_of_our_datasets_has_the_type_that_it_has_in_spark(column, arrow):
    (key,) = find_keys(own(column), ["k"])
    assert (key.name, key.arrow, key.is_partition) == ("k", arrow, False)
    assert key.spark_type() is not None


@pytest.mark.parametrize(("column", "message"), [
    (of("int64", "number", (2,), "list"), "column 'k' has several values per row, expected one"),
    (of("uint8", "bytes", (None,), "binary"), "column 'k' has several values per row, expected one"),
    (of("int64", "hash", buckets=3), "column 'k' is stored as hash, from which its values cannot be restored"),
    (of("float64", "float", source_type="decimal(16,2)"), "column 'k' is stored as float, from which"),
    (of("float64", "float"), "column 'k' is stored as float, from which"),
    (of("int64", "timestamp", unit="s"), "column 'k' is stored in the unit s, which cuts off fractions"),
    (of("int64", "duration", unit="s"), "column 'k' is stored in the unit s, which cuts off fractions"),
    (Column("other", "int64"), "keys: no column 'k' in the dataset /data"),
])  # fmt: skip
def test_a_column_whose_values_cannot_be_restored_is_an_error(column, message):
    with pytest.raises(ValueError, match=message):
        find_keys(own(column), ["k"])


def test_names_are_a_list():
    assert find_keys(own(), []) == ()
    with pytest.raises(ValueError, match="keys: expected a list of columns, found 'k'"):
        find_keys(own(), "k")


BEFORE = datetime.datetime(1969, 12, 31, 23, 59, 58, 500_000)


@pytest.mark.parametrize(("arrow", "encoding", "stored", "values"), [
    (pa.int8(), None, [1, 2], [1, 2]), (pa.int16(), Encoding("number"), [1, 2], [1, 2]),
    (pa.string(), Encoding("vocabulary", vocabulary=("a", "b")), [0, 2, 1], [None, "b", "a"]),
    (pa.string(), Encoding("vocabulary", vocabulary=("a", "b"), unknown="error"), [0, 1], ["a", "b"]),
    (pa.decimal128(18, 2), Encoding("decimal"), [-150, 275], [Decimal("-1.50"), Decimal("2.75")]),
    (pa.decimal128(15, 2), Encoding("float"), [-1.5, 0.07], [Decimal("-1.50"), Decimal("0.07")]),
    (pa.date32(), Encoding("timestamp", unit="D"), [-1, 1], [datetime.date(1969, 12, 31), datetime.date(1970, 1, 2)]),
    (pa.date32(), Encoding("timestamp", unit="s"), [-86_400, 86_400],
     [datetime.date(1969, 12, 31), datetime.date(1970, 1, 2)]),
    (pa.timestamp("us"), Encoding("timestamp", unit="us"), [-1_500_000], [BEFORE]),
    (pa.timestamp("us"), Encoding("timestamp", unit="ns"), [-1_500_000_000], [BEFORE]),
    (pa.duration("us"), Encoding("duration", unit="us"), [1_000_001], [datetime.timedelta(0, 1, 1)]),
])  # fmt: skip
def test_values_are_those_of_the_table(arrow, encoding, stored, values):
    assert Key("k", arrow, encoding).restore(pa.array(stored)).to_pylist() == values


def test_the_keys_of_our_dataset_are_read_by_row_group(tmp_path):
    ids = np.arange(50)
    shards = write_dataset(str(tmp_path / "d"), {"id": ids, "x": np.ones((50, 2), np.float32)}, 7, 21)
    reader = KeyReader(shards, find_keys(shards, ["id"]))
    groups = len(shards.shards.group_rows)
    order = [*range(groups)][::-1]
    found = {group: reader.read(group)["id"].to_pylist() for group in order}
    assert [number for group in range(groups) for number in found[group]] == ids.tolist()
    with pytest.raises(ValueError, match=r"no column 'ib' in the dataset .*; expected one of id, x"):
        find_keys(shards, ["ib"])


@pytest.mark.parametrize(("values", "arrow", "expected"), [
    (["1", "-7", NULL_PARTITION], pa.int32(), [1, -7, None]), (["1", str(2**31)], pa.int64(), [1, 2**31]),
    (["1", str(2**31 - 1)], pa.int32(), [1, 2**31 - 1]), (["1", str(2**63)], pa.string(), ["1", str(2**63)]),
    (["1", "2.5", "1e3", ".5", "3."], pa.float64(), [1, 2.5, 1000, 0.5, 3]), (["1", "x"], pa.string(), ["1", "x"]),
    (["2024-02-29", "1969-12-31"], pa.date32(), [datetime.date(2024, 2, 29), datetime.date(1969, 12, 31)]),
    (["2024-02-30"], pa.string(), ["2024-02-30"]), (["20240229"], pa.int32(), [20240229]),
    (["2024-W01-1"], pa.string(), ["2024-W01-1"]), ([NULL_PARTITION], pa.string(), [None]),
])  # fmt: skip
def test_partitions_have_the_types_that_spark_infers(tmp_path, values, arrow, expected):
    for i, value in enumerate(values):
        (tmp_path / f"k={value}").mkdir()
        pq.write_table(pa.table({"id": [i, i]}), tmp_path / f"k={value}" / "a.parquet")
    shards = open_parquet(str(tmp_path), ["id"])
    found = find_keys(shards, ["k", "id"])
    assert [(key.name, key.arrow, key.is_partition) for key in found] == [("k", arrow, True), ("id", pa.int64(), False)]
    reader = KeyReader(shards, found)
    rows = [reader.read(group) for group in range(len(values))]
    by_id = {row["id"][0].as_py(): row["k"].to_pylist() for row in rows}
    assert [by_id[i] for i in range(len(values))] == [[value] * 2 for value in expected]


@pytest.mark.parametrize(("stored", "arrow"), [
    (pa.array([1], pa.uint8()), pa.int16()), (pa.array([1], pa.uint16()), pa.int32()),
    (pa.array([1], pa.uint32()), pa.int64()), (pa.array([1], pa.uint64()), pa.decimal128(20, 0)),
    (pa.array(["a"], pa.large_string()), pa.string()), (pa.array(["a"]).dictionary_encode(), pa.string()),
    (pa.array([BEFORE], pa.timestamp("ms")), pa.timestamp("us")),
    (pa.array([BEFORE], pa.timestamp("us", "UTC")), pa.timestamp("us", "UTC")),
    (pa.array([1], pa.duration("us")), pa.int64()), (pa.array([1.5]), pa.float64()),
])  # fmt: skip
def test_columns_of_others_have_the_types_in_which_spark_reads_them(tmp_path, stored, arrow):
    pq.write_table(pa.table({"id": [1], "k": stored}), tmp_path / "a.parquet")
    shards = open_parquet(str(tmp_path), ["id"])
    (key,) = find_keys(shards, ["k"])
    assert (key.arrow, KeyReader(shards, [key]).read(0)["k"].type) == (arrow, arrow)


def test_columns_of_others_with_several_values_or_that_are_not_there_are_errors(tmp_path):
    pq.write_table(pa.table({"id": [1], "k": [[1]]}), tmp_path / "a.parquet")
    shards = open_parquet(str(tmp_path), ["id"])
    with pytest.raises(ValueError, match=r"keys: column 'k' has type list<.*, expected one value per row"):
        find_keys(shards, ["k"])
    with pytest.raises(ValueError, match="keys: no column 'kk' in the dataset"):
        find_keys(shards, ["kk"])


def test_a_file_that_cannot_be_read_is_named_with_its_row_group(tmp_path):
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    shards = open_parquet(str(tmp_path), ["id"])
    reader = KeyReader(shards, find_keys(shards, ["id"]))
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(RuntimeError, match=r"cannot read the keys of row group 0 of .*a.parquet: "):
        reader.read(0)
    assert keys._one_array(pa.chunked_array([[1], [2]])).to_pylist() == [1, 2]
