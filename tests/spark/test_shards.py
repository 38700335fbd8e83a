"""write_shards: exact layout, exact values, and an error that names the column for what cannot be stored."""

import itertools
import os
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


def test_skewed_partitions_become_files_of_like_size(spark, tmp_path):
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
def test_dense_and_sparse_vectors_mixed(spark, tmp_path):
    rows = [(Vectors.dense([1, 2, 3]),), (Vectors.sparse(3, [0, 2], [5.0, 6.0]),), (Vectors.sparse(3, [], []),)] * 5
    shards = write_shards(spark.createDataFrame(rows, ["v"]).coalesce(1), str(tmp_path / "d"), columns=["v"])
    np.testing.assert_array_equal(read_all(shards)["v"], [[1, 2, 3], [5, 0, 6], [0, 0, 0]] * 5)


BAD = {
    "missing column": (lambda s: s.range(3).toDF("lable"), "no column 'label' .* did you mean 'lable'"),
    "string": (lambda s: s.range(3).selectExpr("'a' AS label"), "column 'label' has type string"),
    "wrong case": (lambda s: s.range(3).toDF("LABEL"), "no column 'label' .* did you mean 'LABEL'"),
    "map": (
        lambda s: s.range(3).selectExpr("map(id, id) AS label"),
        "column 'label' has type map<.*supported are numbers",
    ),
    "array of maps": (lambda s: s.range(3).selectExpr("array(map(id, id)) AS label"), "'label' has type array<map<"),
    "array of strings": (
        lambda s: s.range(3).selectExpr("array('a') AS label"),
        "'label' has type array<string>; set data.encode",
    ),
    "some empty arrays": (
        lambda s: s.range(0, 9, 1, 2).selectExpr("IF(id = 5, array(), array(id)) AS label"),
        "'label': .*(lengths|shape)",
    ),
    "null": (
        lambda s: s.range(30).selectExpr("nullif(id, 7) AS label"),
        r"column 'label': found null\(s\) in 1 row.*data.nulls .*first in partition 1, row 0",
    ),
    "null in an array": (
        lambda s: s.range(9).selectExpr("array(id, nullif(id, 7)) AS label"),
        r"found null\(s\) in 1 row.*row 1",
    ),
    "nan": (lambda s: s.range(9).selectExpr("IF(id = 5, double('NaN'), 1.0D) AS label"), "'label': found NaN or Inf"),
    "ragged": (lambda s: s.range(9).selectExpr("sequence(0, IF(id = 5, 1, 2)) AS label"), "'label': .*(lengths|shape)"),
    "empty": (lambda s: s.range(3).filter("id > 5").toDF("label"), "the DataFrame has no rows"),
}


@pytest.mark.modes("local")
@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_error_and_leaves_nothing(spark, tmp_path, case):
    build, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        write_shards(build(spark), str(tmp_path / "d"), columns=["label"])
    assert not (tmp_path / "d").exists() or os.listdir(tmp_path / "d") == []


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
def test_a_disk_that_takes_no_more_is_one_error_that_names_the_host(spark, tmp_path):
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
def test_a_folder_that_cannot_be_written_to_is_an_error_before_any_task_starts(spark, tmp_path):
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
