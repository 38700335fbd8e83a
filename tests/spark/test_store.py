"""Which DataFrames share their shards: those whose rows are surely the same, and no others."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import time

import pyspark.sql.functions as F
import pytest

import spark_dl
from spark_dl import Data, Shards, storage
from spark_dl.data.write.key import NoKeyError, store_key
from tests.builders.models import MLP, small_config
from tests.builders.s3 import sessions_server
from tests.builders.settings import make_config
from tests.spark.conftest import REPOSITORY

s3 = pytest.fixture(scope="module")(sessions_server)
local = pytest.mark.modes("local")


@pytest.fixture
def source(spark, tmp_path):
    """Two Parquet files of points."""
    path = str(tmp_path / "source")
    df = spark.range(0, 400, 1, 2).selectExpr(
        "transform(sequence(0, 3), i -> cast((id * (i + 3)) % 7 - 3 as float)) as features", "id % 3 as label", "id"
    )
    df.write.parquet(path)
    return path


def key(df, **fields):
    config = make_config(**fields)
    return store_key(df, config.data, config.shards)


def stored(store):
    """Manifests in the store."""
    names = [(k, n) for k in storage.list_names(store) for n in storage.list_names(storage.join(store, k))]
    return [storage.join(store, k, n) for k, n in names if n != "leases"]


FRESH = """
import sys
from pyspark.sql import SparkSession
from spark_dl import Data, Shards
from spark_dl.data.write.key import store_key
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(5).count()  # ids of columns are others here
print("key", store_key(spark.read.parquet(sys.argv[1]).where("id >= 100").drop("id"), Data(), Shards()))
"""


@local
@pytest.mark.slow
def test_a_second_run_finds_the_shards_and_any_change_does_not(spark, source, tmp_path, caplog):
    caplog.set_level(logging.INFO, "spark_dl")
    store = str(tmp_path / "store")

    def train(run, where="id >= 100", **data):
        df = spark.newSession().read.parquet(source).where(where).drop("id")
        run_dir = str(tmp_path / run)
        config = small_config(1, train={"epochs": 1}, data={"store": store, **data})
        return spark_dl.train(df, MLP, config, run_dir=run_dir), df

    first, df = train("first")
    assert first.rows == 300
    (url,) = stored(store)
    caplog.clear()
    second, _ = train("second")
    assert stored(store) == [url]
    assert second.history == first.history
    assert "shards found in the store, written" in caplog.text
    assert sorted(os.listdir(tmp_path / "second" / "shards" / "train")) == ["_source.json", "part-stored.json"]
    assert spark_dl.evaluate(df, MLP, second.checkpoint)["rows"] == 300
    assert stored(store) == [url]

    fresh = subprocess.run([sys.executable, "-c", FRESH, source], capture_output=True, text=True, timeout=100)
    assert re.findall("key (.*)", fresh.stdout) == [storage.name(storage.dirname(url))], fresh.stderr[-2000:]
    away = {**os.environ, "TZ": "Asia/Tokyo"}  # a reader of text makes other times there, and its plan is the same
    abroad = subprocess.run(
        [sys.executable, "-c", FRESH, source], capture_output=True, text=True, timeout=100, env=away
    )
    assert re.findall("key (.*)", abroad.stdout) not in ([], re.findall("key (.*)", fresh.stdout)), abroad.stderr[
        -2000:
    ]

    more = small_config(1, train={"epochs": 2}, data={"store": store})
    resumed = spark_dl.train(df, MLP, more, run_dir=str(tmp_path / "second"), resume=True)
    assert (resumed.epochs, stored(store)) == (2, [url])

    train("other filter", where="id >= 101")
    train("other layout", rows_per_row_group=50)
    assert len(stored(store)) == 3
    assert train("other order", num_streams=12)[0].rows == 300  # the shards are the same
    assert len(stored(store)) == 3
    name = next(n for n in sorted(os.listdir(source)) if n.endswith(".parquet"))
    os.utime(os.path.join(source, name))
    train("other files")
    assert len(stored(store)) == 4

    assert spark_dl.clean_store(store, ttl_days=0)["deleted"] == 4
    with pytest.raises(ValueError, match="no longer in the store"):
        spark_dl.train(df, MLP, more, run_dir=str(tmp_path / "second"), resume=True)


@pytest.mark.slow
@local
def test_a_store_on_s3(spark, source, s3, tmp_path):
    store = s3.url("a store")
    for run in ("1", "2"):
        df = spark.read.parquet(source).drop("id")
        config = small_config(2, train={"epochs": 1}, data={"store": store})
        assert spark_dl.train(df, MLP, config, run_dir=str(tmp_path / run)).rows == 400
    assert len(stored(store)) == 1
    time.sleep(1.1)  # S3 has whole seconds
    assert spark_dl.clean_store(store, ttl_days=0)["deleted"] == 1


@pytest.mark.slow
@local
def test_equal_plans_have_equal_keys_and_others_do_not(spark, source, tmp_path):
    def read(**options):
        return spark.read.options(**options).parquet(source)

    read().createOrReplaceTempView("points")
    spark.read.parquet(source).write.option("header", True).mode("overwrite").json(str(tmp_path / "json"))

    def json_of(**options):
        return spark.read.schema("label int").options(**options).json(str(tmp_path / "json"))

    many = [(F.col("id") + i).alias(f"c{i}") for i in range(60)]
    plans = [
        lambda: read(),
        lambda: read().where("id > 3"),
        lambda: read().where("id > 4"),
        lambda: read().where(F.col("id").cast("string").isin("1,2")),
        lambda: read().where(F.col("id").cast("string").isin("1", "2")),
        lambda: read().withColumn("s", F.lit("C#1")),
        lambda: read().withColumn("s", F.lit("C#2")),
        lambda: read().select("*", *many),
        lambda: read().select("*", *many[:-1], F.col("label").alias("c59")),
        lambda: read().select("*", *many[:-1], F.expr("try_cast(id as int)").cast("long").alias("c59")),
        lambda: read().select("*", *many[:-1], F.expr("cast(id as int)").cast("long").alias("c59")),
        lambda: spark.table("points").groupBy("label").agg(F.sum("id").alias("id")),
        lambda: spark.sql("SELECT *, CASE WHEN id > 7 THEN 'a' ELSE 'b' END c FROM points WHERE id > 3"),
        lambda: read().join(read().select("id", F.col("label").alias("other")), "id"),
        lambda: read().union(read()),
        lambda: read().orderBy("id"),
        lambda: read().orderBy(F.desc("id")),
        lambda: read(mergeSchema=True),
        lambda: json_of(),
        lambda: json_of(timeZone="Asia/Tokyo"),
        lambda: spark.range(10),
        lambda: spark.range(11),
    ]
    keys = [key(plan()) for plan in plans]
    assert keys == [key(plan()) for plan in plans]
    assert len(set(keys)) == len(keys)
    df = read()
    before = key(df)
    for name, value in (
        ("spark.sql.session.timeZone", "Asia/Tokyo"), ("spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY"),
        ("spark.sql.parquet.int96RebaseModeInRead", "LEGACY"), ("spark.sql.parquet.int96TimestampConversion", "true"),
        ("spark.sql.csv.parser.columnPruning.enabled", "false"), ("spark.sql.json.enablePartialResults", "false"),
        ("spark.sql.legacy.castComplexTypesToString.enabled", "true"), ("spark.sql.of.another.version", "1"),
    ):  # fmt: skip
        with setting(spark, name, value):
            assert key(df) != before, name
    harmless = {
        "spark.sql.adaptive.enabled": "false", "spark.sql.shuffle.partitions": "3", "spark.sql.catalog.a": "x.y",
        "spark.sql.json.enablePartialResults": "true",  # the default
    }  # fmt: skip
    for name, value in harmless.items():
        with setting(spark, name, value):
            assert key(df) == before, name
    assert spark.conf.get("spark.sql.debug.maxToStringFields") == "25"
    with another_active_session(spark) as other:  # as createDataFrame of a second session leaves it
        assert keys == [key(plan()) for plan in plans]
        assert other.conf.get("spark.sql.debug.maxToStringFields") == "25"


@contextlib.contextmanager
def setting(spark, name, value):
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name) if before is None else spark.conf.set(name, before)


@local
def test_a_table_whose_partitions_swap_their_folders_has_another_key(spark, tmp_path):
    """The files stay as they are, and the rows do not."""
    for name, rows in (("a", 2), ("b", 3)):
        spark.range(rows).write.parquet(str(tmp_path / name))
    spark.sql("CREATE TABLE swapped (id BIGINT, p INT) USING parquet PARTITIONED BY (p)")
    try:
        for p, name in ((1, "a"), (2, "b")):
            spark.sql(f"ALTER TABLE swapped ADD PARTITION (p={p}) LOCATION '{tmp_path / name}'")
        before, again = (key(spark.table("swapped"), features=("p",), label=None) for _ in range(2))
        assert before == again
        for p, name in ((1, "b"), (2, "a")):
            spark.sql(f"ALTER TABLE swapped PARTITION (p={p}) SET LOCATION '{tmp_path / name}'")
        assert spark.table("swapped").filter("p = 1").count() == 3
        assert key(spark.table("swapped"), features=("p",), label=None) != before
    finally:
        spark.sql("DROP TABLE swapped")


@contextlib.contextmanager
def another_active_session(spark):
    other = spark.newSession()
    other.createDataFrame([(1,)], "a int")
    try:
        yield other
    finally:
        spark.createDataFrame([(1,)], "a int")


IN_KEY = [
    {"features": ("id",)}, {"label": None}, {"encode": {"label": {"as": "hash", "buckets": 3}}}, {"nulls": "fill"},
    {"nulls": "fill", "fill": {"label": 1}}, {"nonfinite": "allow"}, {"filters": [["id", ">", 3]]},
    {"require_success": False}, {"rows_per_row_group": 7}, {"rows_per_shard": 7}, {"labels": ("id",)},
    {"features": ("label",), "label": None, "weight": "id"}, {"sampling_weight": "id"},
]  # fmt: skip
NOT_IN_KEY = [
    {"storage": "local"}, {"store": "x"}, {"trusted_writers": ("x",)},
    {"cache_dir": "/c", "cache_mib": 1},
    {"cast": {"label": "float32"}}, {"assemble": "float32"},
    {"shuffle": False, "num_streams": 32, "ragged": "offsets"}, {"seed": 3, "validation_fraction": 0.1},
]  # fmt: skip


@local
def test_a_key_changes_with_what_shards_hold_and_with_no_other_setting(spark, source):
    df = spark.read.parquet(source)
    keys = [key(df, **fields) for fields in ({}, *IN_KEY)]
    assert len({*keys}) == len(keys)
    assert {key(df, **fields) for fields in NOT_IN_KEY} == {key(df)}
    tried = {name for fields in IN_KEY for name in fields}
    weighted = {"weight": "id"}
    assert key(df, **weighted, weight_mean="weights") == key(df, **weighted)
    only_of_batches = {"cast", "assemble", "weight_mean"}
    assert tried | only_of_batches == {f.name for f in dataclasses.fields(Data)} | {
        "rows_per_row_group",
        "rows_per_shard",
    }
    assert {f.name for f in dataclasses.fields(Shards)} <= tried | {name for fields in NOT_IN_KEY for name in fields}


@pytest.mark.slow
@local
def test_a_plan_whose_rows_cannot_be_told_has_no_key(spark, source):
    def read():
        return spark.read.parquet(source)

    read().createOrReplaceTempView("points")
    cases = [
        (read().withColumn("r", F.rand(3)), "not deterministic"),
        (read().withColumn("r", F.expr("uuid()")), "not deterministic"),
        (read().withColumn("r", F.current_timestamp()), "CurrentTimestamp"),
        (read().withColumn("r", F.current_date()), "CurrentDate"),
        (read().withColumn("r", F.unix_timestamp()), "CurrentTimestamp"),
        (read().where("date_add(DATE'2024-01-01', CAST(id AS INT)) < 'today'"), "'today'"),
        (read().sample(0.5, 1), "Sample"),
        (read().withColumn("r", F.udf(lambda x: x + 1, "long")("id")), "PythonUDF"),
        (read().mapInArrow(lambda batches: batches, "id long"), "MapInArrow"),
        (spark.createDataFrame([(1, 2)], "a int, b int"), "LogicalRDD"),
        (spark.sql("SELECT * FROM VALUES (1, 2) AS t(a, b)"), "LocalRelation"),
        (read().rdd.toDF(), "LogicalRDD"),
        (spark.sql("SELECT * FROM points WHERE id > (SELECT avg(id) FROM points)"), "ScalarSubquery"),
        (spark.sql("SELECT * FROM points WHERE id IN (SELECT max(id) FROM points)"), "InSubquery|ListQuery"),
    ]
    for df, reason in cases:
        with pytest.raises(NoKeyError, match=reason):
            key(df)
    cached = read().cache()
    try:
        with pytest.raises(NoKeyError, match="cached in Spark's memory"):
            key(cached.where("id > 1"))
    finally:
        cached.unpersist()
    gone = read()
    for name in os.listdir(source):
        os.unlink(os.path.join(source, name))
    with pytest.raises(NoKeyError, match="modification time of its source file"):
        key(gone)


@local
def test_spark_s_own_file_formats_have_keys_and_others_have_none(spark, source, tmp_path):
    rows = spark.read.parquet(source).selectExpr("id", "CAST(id AS string) AS value")
    for form in ("orc", "csv", "json", "text"):
        (rows.select("value") if form == "text" else rows).write.format(form).save(str(tmp_path / form))
        assert key(spark.read.format(form).load(str(tmp_path / form)).selectExpr("1 AS label", "2 AS features"))
    images = spark.read.format("image").load(source).selectExpr("image.height AS label", "image.width AS features")
    with pytest.raises(NoKeyError, match="ImageFileFormat, which is not one of Spark's own file formats"):
        key(images)


@pytest.mark.modes("local", "connect")
def test_without_a_key_the_shards_are_written_to_the_run_and_the_log_says_why(spark, mode, tmp_path, caplog):
    caplog.set_level(logging.INFO, "spark_dl")
    rows = [([float(i), 1.0, 2.0, 3.0], i % 3) for i in range(60)]
    df = spark.createDataFrame(rows, "features array<float>, label bigint")
    config = small_config(1, train={"epochs": 1}, data={"store": str(tmp_path / "store")})
    assert spark_dl.train(df, MLP, config, run_dir=str(tmp_path / "run")).rows == 60
    reason = "over Spark Connect" if mode == "connect" else "its plan (has|reads from) LogicalRDD"
    assert re.search(f"the store cannot be used for this DataFrame: {reason}", caplog.text)
    assert "_manifest.json" in os.listdir(tmp_path / "run" / "shards" / "train")
    assert not os.path.exists(tmp_path / "store")
    with pytest.raises(ValueError, match="no folder to write the shards to, and the store cannot be used"):
        spark_dl.store_shards(df, config.data, shards=config.shards)


@local
def test_where_no_lease_can_be_written_the_shards_are_written_to_the_run(spark, source, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    df, settings = spark.read.parquet(source), Shards(store=str(tmp_path / "file" / "store"))
    shards, lease = spark_dl.store_shards(df, Data(), str(tmp_path / "run"), shards=settings)
    assert (shards.url, shards.rows, lease) == (str(tmp_path / "run"), 400, None)
    assert "the shards are written to the run: shards.store: cannot write the lease" in caplog.text
    with pytest.raises(ValueError, match=r"no folder to write the shards to, and shards.store: cannot write the lease"):
        spark_dl.store_shards(df, Data(), shards=settings)


@local
def test_source_files_that_change_meanwhile_are_an_error(spark, source, tmp_path, monkeypatch):
    df = spark.read.parquet(source)
    real = spark_dl.data.store.store.write_shards

    def write_and_change(*args, **kwargs):
        shards = real(*args, **kwargs)
        os.utime(os.path.join(source, next(n for n in os.listdir(source) if n.endswith(".parquet"))))
        return shards

    monkeypatch.setattr(spark_dl.data.store.store, "write_shards", write_and_change)
    with pytest.raises(RuntimeError, match="changed while its shards were written"):
        spark_dl.store_shards(df, Data(), shards=Shards(store=str(tmp_path / "store")))
    assert stored(str(tmp_path / "store")) == []


@local
@pytest.mark.slow
@pytest.mark.long
def test_the_job_stores_and_cleans(spark, source, tmp_path):
    store = str(tmp_path / "store")

    def run(*command):
        command = [sys.executable, "-m", "spark_dl", *command]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    options = ["--master", "local[2]", "--input.path", source, "--key", "points"]
    first, _ = run("prepare", "--shards.store", store, *options)
    assert first["datasets"]["train"]["rows"] == 400
    os.utime(os.path.join(source, next(n for n in os.listdir(source) if n.endswith(".parquet"))))
    again, log = run("prepare", "--shards.store", store, *options)
    assert again["datasets"] == first["datasets"]
    assert "shards found in the store, written" in log, "the name tells, not the time of the files"
    assert run("clean", store, "--older-than", "30d")[0] == {"would_delete": 0, "bytes": 0, "urls": []}
    old, log = run("clean", store, "--older-than", "0d")
    assert (old["would_delete"], old["urls"]) == (1, [first["datasets"]["train"]["url"]])
    assert "nothing was deleted; pass --delete to delete these" in log
    cleaned, _ = run("clean", store, "--older-than", "0d", "--delete")
    assert cleaned == {"deleted": 1, "bytes": old["bytes"], "urls": old["urls"]}
    assert cleaned["bytes"] > 1000
    assert run("clean", store, "--older-than", "0d")[0]["urls"] == []


@pytest.mark.slow
@pytest.mark.modes("local", "connect")
def test_rows_that_the_user_names_are_found_by_their_name(spark, source, tmp_path):
    def store(name, df, **fields):
        config = make_config(store=str(tmp_path / "store"), **fields)
        shards, lease = spark_dl.store_shards(df, config.data, shards=config.shards, key=name)
        lease.release()
        return shards

    def read():
        return spark.read.parquet(source).drop("id")

    shards = store("points 1", read().where("rand() >= 0"))  # the user knows better than the plan
    assert shards.rows == 400
    assert store("points 1", read()).url == shards.url, "the name tells, not the plan"
    others = [store("points 2", read().limit(7)), store("points 1", spark.read.parquet(source)),
              store("points 1", read(), label=None), store("points 1", read(), rows_per_row_group=50)]  # fmt: skip
    assert len({shards.url, *(other.url for other in others)}) == 5
    assert others[0].rows == 7
    config = small_config(1, train={"epochs": 1})
    assert spark_dl.train(shards, MLP, config, run_dir=str(tmp_path / "run")).rows == 400


@pytest.mark.modes("connect")
def test_over_connect_only_rows_with_a_name_are_found_again(spark, source, tmp_path, caplog):
    caplog.set_level(logging.INFO, "spark_dl")
    config = small_config(1, train={"epochs": 1}, data={"store": str(tmp_path / "store")})
    df = spark.read.parquet(source).drop("id")
    assert spark_dl.train(df, MLP, config, run_dir=str(tmp_path / "run")).rows == 400
    assert re.search(r"the store cannot be used for this DataFrame: over Spark Connect .*key=", caplog.text)
    assert "_manifest.json" in os.listdir(tmp_path / "run" / "shards" / "train")
    assert not os.path.exists(tmp_path / "store")


@local
def test_S22_the_store_of_a_resumed_run_is_that_of_the_settings(spark, source, tmp_path):
    points = spark.read.parquet(source)
    config = small_config(2, data={"store": str(tmp_path / "store"), "epochs": 1})
    spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "run"))
    pointer = tmp_path / "run" / "shards" / "train" / "part-stored.json"
    good = pointer.read_text()
    more = small_config(2, data={"store": str(tmp_path / "store"), "epochs": 2})
    for url in (str(tmp_path / "other" / "key" / "set"), "s3://other/x/y?endpoint_override=other&scheme=http"):
        pointer.write_text(json.dumps({"url": url}))
        with pytest.raises(ValueError, match=r"shards.store: found .*/store', but .* are at .*other.*if you trust it"):
            spark_dl.train(points, MLP, more, run_dir=str(tmp_path / "run"), resume=True)
    assert not (tmp_path / "other").exists()
    pointer.write_text(good)
    assert spark_dl.train(points, MLP, more, run_dir=str(tmp_path / "run"), resume=True).epochs == 2


@local
def test_a_table_of_a_database_has_no_key(spark, tmp_path):
    """Which rows it has is not visible in the plan."""
    spark.sparkContext._jvm.System.setProperty("derby.stream.error.file", str(tmp_path / "derby.log"))
    table = {"url": "jdbc:derby:memory:rows;create=true", "dbtable": "numbers",
             "driver": "org.apache.derby.jdbc.EmbeddedDriver"}  # fmt: skip
    spark.range(3).selectExpr("id AS label", "id AS features").write.format("jdbc").options(**table).save()
    rows = spark.read.format("jdbc").options(**table).load()
    assert rows.count() == 3
    with pytest.raises(NoKeyError, match="its plan reads from JDBCRelation, whose versions are not visible"):
        key(rows)
