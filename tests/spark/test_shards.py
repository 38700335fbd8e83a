"""write_shards: exact layout, exact values, and an error that names the column for what cannot be stored."""

import itertools
import os
import re
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F

from spark_dl import Shards, read_shards, storage, write_shards
from spark_dl.data.external.dataset import open_parquet
from tests.builders.batches import read_all

SMALL = Shards(rows_per_row_group=16, rows_per_shard=64)


@pytest.mark.sampled(3)
@pytest.mark.modes("local")
@pytest.mark.parametrize(
    ("rows", "partitions"), [(1000, 3), (64, 1), (65, 4), (1, 3), (63, 7), (128, 2), (300, 40), (199, 3)]
)
def test_shards_have_a_set_size_and_every_row_once_in_order(spark, tmp_path, rows, partitions):
    df = spark.range(0, rows, 1, partitions).selectExpr("id", "array(id, id * 2, id * 3) AS a")
    shards = write_shards(df, str(tmp_path / "d"), shards=SMALL, columns=["id", "a"])
    assert shards == read_shards(str(tmp_path / "d"))
    assert all(s.rows <= 64 and set(s.row_groups[:-1]) <= {16} and s.row_groups[-1] <= 16 for s in shards.shards)
    assert not any(a.rows < 32 and b.rows < 32 for a, b in itertools.pairwise(shards.shards))
    for shard in shards.shards:  # the manifest says what the files hold
        footer = pq.ParquetFile(tmp_path / "d" / shard.name).metadata
        assert tuple(footer.row_group(i).num_rows for i in range(footer.num_row_groups)) == shard.row_groups
    columns = read_all(shards)
    assert columns["id"].tolist() == list(range(rows))
    np.testing.assert_array_equal(columns["a"], columns["id"][:, None] * np.array([1, 2, 3]))
    assert {n for n in os.listdir(tmp_path / "d") if n[0] not in "._"} == {s.name for s in shards.shards}


@pytest.mark.long_in("local-cluster")
def test_B09_skewed_partitions_become_files_of_like_size(spark, tmp_path):
    df = spark.range(500).filter("id < 300 OR id >= 490").repartitionByRange(5, "id").union(spark.range(500, 507))
    shards = write_shards(df.select("id"), str(tmp_path / "d"), shards=SMALL, columns=["id"])
    assert all(32 <= s.rows <= 64 for s in shards.shards[:-1])
    assert sorted(read_all(shards)["id"]) == [*range(300), *range(490, 507)]


@pytest.mark.modes("local", "connect")
def test_dtypes_and_shapes_are_kept(spark, tmp_path):
    df = spark.range(0, 40, 1, 2).selectExpr(
        "id % 2 = 0 AS flag", "CAST(id AS TINYINT) AS i8", "CAST(id AS SMALLINT) AS i16", "CAST(id AS INT) AS i32",
        "id AS i64", "CAST(id AS FLOAT) AS f32", "CAST(id AS DOUBLE) AS f64", "array(CAST(id AS INT), 7) AS v",
        "array(array(1.5f, CAST(id AS FLOAT)), array(2.5f, 0f), array(9f, 8f)) AS m",
    )  # fmt: skip
    columns = read_all(write_shards(df, str(tmp_path / "d"), columns=df.columns))
    dtypes = {name: (str(array.dtype), array.shape[1:]) for name, array in columns.items()}
    assert dtypes == {
        "flag": ("bool", ()), "i8": ("int8", ()), "i16": ("int16", ()), "i32": ("int32", ()), "i64": ("int64", ()),
        "f32": ("float32", ()), "f64": ("float64", ()), "v": ("int32", (2,)), "m": ("float32", (3, 2)),
    }  # fmt: skip
    order = np.argsort(columns["i64"])
    np.testing.assert_array_equal(columns["flag"][order], np.arange(40) % 2 == 0)
    np.testing.assert_array_equal(columns["m"][order][:, 0, 1], np.arange(40))


@pytest.mark.modes("local", "connect")
def test_B07_dense_and_sparse_vectors_mixed(spark, tmp_path):
    rows = [(Vectors.dense([1, 2, 3]),), (Vectors.sparse(3, [0, 2], [5.0, 6.0]),), (Vectors.sparse(3, [], []),)] * 5
    shards = write_shards(spark.createDataFrame(rows, ["v"]).coalesce(1), str(tmp_path / "d"), columns=["v"])
    np.testing.assert_array_equal(read_all(shards)["v"], [[1, 2, 3], [5, 0, 6], [0, 0, 0]] * 5)


def fails_and_leaves_nothing(df, tmp_path, *parts):
    """The message begins with the first part, and has all parts in their order."""
    with pytest.raises(ValueError, match="^" + ".*".join(map(re.escape, parts))):
        write_shards(df, str(tmp_path / "d"), columns=["label"])
    assert not (tmp_path / "d").exists() or os.listdir(tmp_path / "d") == []


@pytest.mark.modes("local")
@pytest.mark.parametrize("found", ["lable", "LABEL"])
def test_B01_a_missing_column_suggests_the_nearest(spark, tmp_path, found):
    message = f"no column 'label' in the DataFrame; did you mean '{found}'?; its columns are ['{found}'] (data.features"
    fails_and_leaves_nothing(spark.range(3).toDF(found), tmp_path, message)


SUPPORTED = (
    "which cannot become a tensor; supported are numbers, boolean, decimal, date, timestamp, day-time intervals, "
    "string, binary, arrays of these, Spark ML vectors, and the fields of structs by their path (user.age); "
)
STRINGS = "set data.encode to encode strings as numbers: {label: {as: vocabulary}}, {label: {as: hash, buckets: 1000}}"


@pytest.mark.modes("local")
@pytest.mark.parametrize(("select", "kind", "change"), [
    ("map(id, id)", "map<bigint,bigint>, ", SUPPORTED + "convert it in the DataFrame"),
    ("array(map(id, id))", "array<map<bigint,bigint>>, ", SUPPORTED + "convert it in the DataFrame"),
    ("INTERVAL '1' YEAR", "interval year, ", SUPPORTED + "convert it in the DataFrame"),
    ("NULL", "void, ", SUPPORTED + "convert it in the DataFrame"),
    ("named_struct('a', id)", "struct<a:bigint>, ", SUPPORTED + "read its fields: ['label.a']"),
    ("'a'", "string; ", STRINGS + " or {label: {as: bytes}}"),
])  # fmt: skip
def test_B02_an_unsupported_type_is_named_with_what_can_be_done(spark, tmp_path, select, kind, change):
    df = spark.range(3).selectExpr(f"{select} AS label")
    fails_and_leaves_nothing(df, tmp_path, f"column 'label' has type {kind}{change}")


@pytest.mark.modes("local")
@pytest.mark.parametrize("select", ["nullif(id, 9)", "array(id, nullif(id, 9))"])
def test_B03_nulls_are_named_with_their_number_and_place(spark, tmp_path, select):
    df = spark.range(0, 14, 1, 2).selectExpr(f"{select} AS label")
    found = "column 'label': found null(s) in 1 row(s) of a batch of 7, expected none; set data.nulls to drop or fill"
    fails_and_leaves_nothing(df, tmp_path, found, "first in partition 1, row 2")


@pytest.mark.modes("local")
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_B04_nan_and_inf_are_named_with_their_number_and_place(spark, tmp_path, value):
    df = spark.range(0, 14, 1, 2).selectExpr(f"IF(id = 9, double('{value}'), 1.0D) AS label")
    found = "column 'label': found NaN or Inf in 1 row(s) of a batch of 7, expected none; set data.nonfinite to drop"
    fails_and_leaves_nothing(df, tmp_path, found, "first in partition 1, row 2")


@pytest.mark.modes("local")
@pytest.mark.parametrize(("select", "found", "row"), [
    ("sequence(0, IF(id = 9, 1, 2))", "[2, 3], expected one length; the first cell has 3", 2),
    ("IF(id = 9, array(), array(id))", "[0, 1], expected one length; the first cell has 1", 2),
    ("array(array(id), array(id, id))", "[1, 2], expected one length; the first cell has 1", 0),
])  # fmt: skip
def test_B05_arrays_of_other_lengths_are_named_with_the_first_of_them(spark, tmp_path, select, found, row):
    df = spark.range(0, 14, 1, 2).selectExpr(f"{select} AS label")
    parts = (f"column 'label': found arrays of lengths {found}", "first in partition ", f"row {row}")
    fails_and_leaves_nothing(df, tmp_path, *parts)


@pytest.mark.modes("local")
@pytest.mark.parametrize(("select", "parts"), [
    ("array('a')", ["column 'label' has type array<string>; " + STRINGS, "ragged: true where lengths vary"]),
    ("array()", ["column 'label' has type array<void>, " + SUPPORTED + "convert it in the DataFrame"]),
    ("CAST(array() AS array<bigint>)",
     ["column 'label': the first cell of partition 0 is empty", "set data.encode.label: {ragged: true}; otherwise"]),
])  # fmt: skip
def test_B06_arrays_of_other_elements_or_of_none_are_named(spark, tmp_path, select, parts):
    fails_and_leaves_nothing(spark.range(0, 3, 1, 1).selectExpr(f"{select} AS label"), tmp_path, *parts)


@pytest.mark.modes("local")
def test_B08_no_rows_are_an_error(spark, tmp_path):
    df = spark.range(3).filter("id > 5").toDF("label")
    fails_and_leaves_nothing(df, tmp_path, "the DataFrame has no rows; training needs at least one")


@pytest.mark.modes("local")
def test_an_error_of_the_dataframe_itself_is_not_swallowed(spark, tmp_path):
    df = spark.range(9).select(F.raise_error(F.lit("from the plan")).alias("label"))
    with pytest.raises(Exception, match="from the plan|VOID|void"):
        write_shards(df.select(F.col("label").cast("int")), str(tmp_path / "d"), columns=["label"])
    assert os.listdir(tmp_path / "d") == []


@pytest.mark.modes("local")
def test_a_folder_in_use_is_not_overwritten_unasked(spark, tmp_path):
    df = spark.range(5)
    write_shards(df, str(tmp_path / "d"), columns=["id"])
    with pytest.raises(ValueError, match="already has a dataset"):
        write_shards(df, str(tmp_path / "d"), columns=["id"])
    assert write_shards(df.limit(3), str(tmp_path / "d"), columns=["id"], overwrite=True).rows == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not empty and has no dataset of spark_dl, but \['thesis.txt'\]"):
        write_shards(df, str(tmp_path / "other"), columns=["id"], overwrite=True)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


@pytest.mark.modes("local", "connect")
def test_a_dataset_is_replaced_by_rows_that_are_read_from_it(spark, tmp_path):
    url = str(tmp_path / "d")
    write_shards(spark.range(0, 300, 1, 3), url, shards=SMALL, columns=["id"])
    before = {*os.listdir(tmp_path / "d")}
    shards = write_shards(
        spark.read.parquet(url).where("id % 3 = 0"), url, shards=SMALL, columns=["id"], overwrite=True
    )
    assert sorted(read_all(shards)["id"].tolist()) == [*range(0, 300, 3)]
    assert read_shards(url) == shards
    names = {n for n in os.listdir(tmp_path / "d") if not n.startswith(".")}
    assert names == {"_manifest.json", "_common_metadata", *(s.name for s in shards.shards)}
    assert names & before == {"_manifest.json", "_common_metadata"}
    assert spark.read.parquet(url).count() == 100


@pytest.mark.modes("local")
@pytest.mark.parametrize("bad", ["nullif(id, 99)", "IF(id = 99, double('NaN'), id)", "raise_error('from the plan')"])
def test_a_dataset_stays_as_it_was_where_the_rows_that_replace_it_are_bad(spark, tmp_path, bad):
    url = str(tmp_path / "d")
    before = write_shards(spark.range(0, 40, 1, 2), url, shards=SMALL, columns=["id"])
    files = {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()}
    df = spark.range(0, 200, 1, 2).selectExpr(f"CAST({bad} AS DOUBLE) AS id")
    with pytest.raises(Exception, match="column 'id': found|from the plan"):
        write_shards(df, url, shards=SMALL, columns=["id"], overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()} == files
    assert read_shards(url) == before


@pytest.mark.modes("local")
def test_a_dataset_is_read_until_the_one_that_replaces_it_is_whole(spark, tmp_path):
    url = str(tmp_path / "d")
    before = write_shards(spark.range(40), url, shards=SMALL, columns=["id"])
    df = spark.range(0, 300, 1, 2).mapInArrow(partial(_reads_meanwhile, url, before.shards[0].name), "id long")
    assert write_shards(df, url, shards=SMALL, columns=["id"], overwrite=True).rows == 300


def _reads_meanwhile(url, old, batches):
    """The second partition looks at the folder once the first one's shards are there."""
    from pyspark import TaskContext

    yield from batches
    if TaskContext.get().partitionId() == 0:
        return
    end = time.monotonic() + 60
    while {p.name for p in _whole_shards(url)} <= {old} and time.monotonic() < end:
        time.sleep(0.05)
    assert {p.name for p in _whole_shards(url)} > {old}
    assert read_shards(url).rows == 40
    with pytest.raises(ValueError, match="is incomplete: found .*, expected no such file"):
        open_parquet(url, ["id"])  # as Petastorm's own reader has it


@pytest.mark.modes("local")
def test_a_manifest_that_cannot_be_written_leaves_the_old_dataset(spark, tmp_path, monkeypatch):
    url = str(tmp_path / "d")
    before = write_shards(spark.range(40), url, shards=SMALL, columns=["id"])
    files = {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()}
    write_bytes = storage.write_bytes

    def fail(path, content):
        if path.endswith("_manifest.json"):
            raise OSError("no space")
        write_bytes(path, content)

    monkeypatch.setattr(storage, "write_bytes", fail)
    with pytest.raises(OSError, match="no space"):
        write_shards(spark.range(30), url, shards=SMALL, columns=["id"], overwrite=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "d").iterdir()} == files
    assert read_shards(url) == before


@pytest.mark.modes("local")
def test_spark_reads_a_dataset_as_plain_parquet(spark, tmp_path):
    write_shards(spark.range(100), str(tmp_path / "d"), shards=SMALL, columns=["id"])
    assert spark.read.parquet(str(tmp_path / "d")).selectExpr("sum(id)").first()[0] == 4950


@pytest.mark.modes("local", "connect")
def test_B16_a_disk_that_takes_no_more_is_one_error_that_names_the_host(spark, tmp_path):
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path / "small")]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        df = spark.range(0, 500_000, 1, 2)
        match = (
            rf"^cannot write to {tmp_path}/small/d on host \S+: .*No space left on device.*; all executors must reach"
        )
        with pytest.raises(RuntimeError, match=match):
            write_shards(df, str(tmp_path / "small" / "d"), columns=["id"])
        assert os.listdir(tmp_path / "small" / "d") == []
        assert write_shards(df.limit(100), str(tmp_path / "small" / "d"), columns=["id"]).rows == 100
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


@pytest.mark.modes("local")
def test_B16_a_folder_that_cannot_be_written_to_is_an_error_before_any_task_starts(spark, tmp_path):
    (tmp_path / "file").write_text("")
    df = spark.range(9).mapInArrow(_must_not_run, "id long")
    with pytest.raises(ValueError, match=rf"cannot write to {tmp_path}/file/d: "):
        write_shards(df, str(tmp_path / "file" / "d"), columns=["id"])


def _must_not_run(batches):
    raise AssertionError("a task was started")
    yield from batches


@pytest.mark.slow
@pytest.mark.modes("local")
def test_what_the_driver_does_not_see_is_not_committed(spark, tmp_path):
    """As where executors write to disks of their own under the same path."""
    df = spark.range(0, 100, 1, 2).mapInArrow(partial(_without_shards, str(tmp_path / "d")), "id long")
    with pytest.raises(ValueError, match=r"is incomplete: found nothing at part-.*; use storage that the driver"):
        write_shards(df, str(tmp_path / "d"), shards=SMALL, columns=["id"])
    assert os.listdir(tmp_path / "d") == []


def _without_shards(folder, batches):
    """The second partition's rows come once the first one's full shard is there, and is gone again."""
    from pyspark import TaskContext

    if TaskContext.get().partitionId() == 0:
        yield pa.RecordBatch.from_pydict({"id": list(range(64))})
        return
    end = time.monotonic() + 20
    while not (written := _whole_shards(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    for path in written:
        path.unlink()
    yield from batches


def _whole_shards(folder):
    """Files that have their last bytes."""
    return [
        p for p in Path(folder).glob("part-*.parquet") if p.read_bytes().endswith(b"PAR1") and p.stat().st_size > 99
    ]
