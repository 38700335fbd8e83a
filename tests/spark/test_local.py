"""run_on_dataframe and training with shards.storage='local', in every mode."""

import dataclasses
import functools
import os
import resource
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pyspark.ml.linalg import Vectors

import spark_dl
from spark_dl import Data, RankError, Shards
from spark_dl.data.load import local
from spark_dl.launch import preflight
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank.marked import MARK, command_of, marked
from spark_dl.rundir import checkpoint
from tests.builders.models import MLP, blobs, same_bits, small_config

METRICS = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3, "average": "micro"}}
LOCAL = {"storage": "local"}


@pytest.fixture(scope="module")
def points(spark):
    rows = [(x.tolist(), int(y), f"row {i}") for i, (x, y) in enumerate(zip(*blobs(500).values(), strict=True))]
    return spark.createDataFrame(rows, "features array<float>, label bigint, name string").repartition(3)


def _rows_of_rank(rows, batch_size):
    dist.init_process_group("gloo")
    batches = list(rows.batches(batch_size))
    columns = {name: torch.cat([b[name][b["weight"] == 1] for b in batches]) for name in batches[0]}
    steps = torch.tensor([len(batches)])
    dist.all_reduce(steps)
    mode = os.stat(rows.shards.url).st_mode & 0o777
    return {"columns": columns, "steps": int(steps), "url": rows.shards.url, "own": rows.shards.rows, "mode": mode,
            "ended_with_rank": [command_of(pid) for pid in marked(os.environ[MARK].__eq__)]}  # fmt: skip


def _weights_of_rank(rows):
    return [
        pair for batch in rows.batches(4) for pair in zip(batch["x"].tolist(), batch["weight"].tolist(), strict=True)
    ]


@pytest.mark.modes("local")
def test_a_column_that_is_called_weight_has_the_weights_of_the_rows(spark):
    df = spark.range(10).selectExpr("CAST(id AS FLOAT) AS x", "id / 2 AS weight")
    found = spark_dl.run_on_dataframe(_weights_of_rank, df, num_ranks=2)
    pairs = [(x, weight) for of_rank in found for x, weight in of_rank if weight]
    assert sorted(pairs) == [(float(i), i / 2) for i in range(1, 10)]


@pytest.mark.long_in("connect")
def test_every_row_reaches_one_rank(spark):
    df = spark.range(0, 1003, 1, 5).selectExpr("id", "array(CAST(id AS FLOAT), 1.5f) AS a")
    found = spark_dl.run_on_dataframe(_rows_of_rank, df, num_ranks=4, batch_size=16)
    assert sorted(int(x) for f in found for x in f["columns"]["id"]) == list(range(1003))
    for f in found:
        assert f["columns"]["a"].dtype == torch.float32
        assert torch.equal(f["columns"]["a"][:, 0], f["columns"]["id"].float())
        assert f["mode"] == 0o700
        assert f["ended_with_rank"] == [], "also not the process that deletes the rows after a kill"
        assert not os.path.exists(f["url"])
    own = [f["own"] for f in found]
    assert max(own) - min(own) <= 5  # the partitions of the DataFrame
    assert {f["steps"] for f in found} == {4 * -(-max(own) // 16)}
    again = spark_dl.run_on_dataframe(_rows_of_rank, df, num_ranks=4, batch_size=16)
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a["columns"]["id"], b["columns"]["id"])


@pytest.mark.long_in("connect", "local-cluster")
@pytest.mark.slow
def test_train_and_evaluate(spark, points, tmp_path):
    data = {**LOCAL, "validation_fraction": 0.2}
    config = small_config(2, train={"epochs": 6, "metrics": METRICS}, data=data)
    result = spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "run"))
    assert (result.epochs, result.rows) == (6, 2400)
    assert result.metrics["accuracy"] > 0.7
    assert result.history[0]["train_loss"] > result.train_loss
    assert "shards" not in os.listdir(tmp_path / "run")
    found = spark_dl.evaluate(points, MLP, result.run_dir)
    shared = dataclasses.replace(config, shards=Shards())
    expected = spark_dl.evaluate(points, MLP, result.run_dir, shared)
    assert found == {**expected, "loss": pytest.approx(expected["loss"], rel=1e-6)}
    assert len(spark_dl.predict(points, MLP, result.checkpoint).collect()) == 500


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.long_in("local-cluster")
def test_the_same_dataframe_gives_the_same_training_and_resumes_in_an_epoch(spark, points, tmp_path):
    config = small_config(2, data=LOCAL)
    whole = spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "whole"))
    cut = small_config(2, data=LOCAL, train={"max_steps": 7})
    spark_dl.train(points, MLP, cut, run_dir=str(tmp_path / "cut"))
    resumed = spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "cut"), resume=True)
    assert (whole.steps, whole.history) == (resumed.steps, resumed.history)
    assert same_bits(*(checkpoint.load(checkpoint.find(r.run_dir), "model.pt")["0"] for r in (whole, resumed)))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_resuming_in_an_epoch_with_other_rows_or_ranks_is_refused(spark, points, tmp_path):
    spark_dl.train(points, MLP, small_config(2, data=LOCAL, train={"max_steps": 7}), run_dir=str(tmp_path / "run"))

    def resume(df, num_ranks, **train):
        config = small_config(num_ranks, data=LOCAL, train=train)
        return spark_dl.train(df, MLP, config, run_dir=str(tmp_path / "run"), resume=True)

    with pytest.raises(ValueError, match=r"cannot resume: .* 250\] rows on the ranks, now they have \[125, .*storage"):
        resume(points, 4)
    with pytest.raises(ValueError, match="cannot resume: .* other values"):
        resume(points.selectExpr("transform(features, x -> x + 1f) AS features", "label"), 2)
    assert resume(points, 2, epochs=1).epochs == 1
    assert resume(points, 4).epochs == 2  # at the end of an epoch


@pytest.mark.modes("local")
def test_B07_dense_and_sparse_vectors(spark):
    rows = [(Vectors.dense([1, 2, 3]),), (Vectors.sparse(3, [0, 2], [5.0, 6.0]),), (Vectors.sparse(3, [], []),)] * 5
    found = spark_dl.run_on_dataframe(_rows_of_rank, spark.createDataFrame(rows, ["v"]), num_ranks=2, batch_size=4)
    vectors = np.concatenate([f["columns"]["v"] for f in found])
    assert sorted(map(tuple, vectors)) == sorted([(1, 2, 3), (5, 0, 6), (0, 0, 0)] * 5)


def _ragged_rows_of_rank(rows):
    dist.init_process_group("gloo")
    found = []
    for batch in rows.batches(4):
        ids = batch["id"]
        assert torch.equal(batch["clicks_mask"].sum(1), ids % 4)
        assert torch.equal(batch["clicks"], ids[:, None] * batch["clicks_mask"])
        assert torch.equal(batch["name_mask"].sum(1), torch.tensor([len(str(i)) for i in ids.tolist()]))
        assert torch.equal(batch["blob_mask"].sum(1), ids % 3)
        found += ids[batch["weight"] == 1].tolist()
    return found


@pytest.mark.modes("local")
@pytest.mark.parametrize("rows", [2, 45])
def test_ragged_rows(spark, rows):
    """Arrays of unequal length, text and binary cells; of two rows there is none for the third rank."""
    df = spark.range(0, rows, 1, 2).selectExpr(
        "id", "array_repeat(id, CAST(id % 4 AS INT)) AS clicks", "CAST(id AS STRING) AS name",
        "CAST(repeat('x', CAST(id % 3 AS INT)) AS BINARY) AS blob",
    )  # fmt: skip
    encode = {"clicks": {"ragged": True}, "name": {"as": "bytes"}}
    data = Data(features=("id", "clicks", "name", "blob"), label=None, encode=encode)
    found = spark_dl.run_on_dataframe(_ragged_rows_of_rank, df, num_ranks=3, data=data)
    assert sorted(i for f in found for i in f) == list(range(rows))


BAD = {
    "null": (
        "nullif(id, 77) AS id",
        r"column 'id': found null\(s\) in 1 row.*\(after rows were distributed to ranks\)",
    ),
    "nan": ("IF(id = 5, double('NaN'), 1.0D) AS id", "column 'id': found NaN or Inf"),
    "ragged": ("sequence(0, IF(id = 5, 1, 2)) AS id", "column 'id': .*(lengths|shape)"),
    "ragged between ranks": ("sequence(0, IF(id < 50, 1, 2)) AS id", "column 'id': .*(lengths|shape)"),
    "string": ("'a' AS id", "column 'id' has type string"),
}


@pytest.mark.parametrize("case", [
    "null",
    *(pytest.param(case, marks=pytest.mark.modes("local")) for case in BAD if case != "null"),
])  # fmt: skip
def test_bad_rows_are_one_error(spark, case):
    select, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        spark_dl.run_on_dataframe(_rows_of_rank, spark.range(100).selectExpr(select), num_ranks=3, batch_size=4)


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_B10_fewer_rows_than_ranks(spark, rows):
    cached = spark.range(100).filter(f"id < {rows}").cache()
    for df in (cached, spark.range(100).limit(rows)):
        if rows == 0:
            with pytest.raises(ValueError, match="the DataFrame has no rows"):
                spark_dl.run_on_dataframe(_rows_of_rank, df, num_ranks=4, batch_size=2)
        else:
            found = spark_dl.run_on_dataframe(_rows_of_rank, df, num_ranks=4, batch_size=2)
            assert sum(f["own"] for f in found) == rows
            assert len({f["steps"] for f in found}) == 1


def _fails_on_rank_1(rows, how, folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with open(f"{folder}/{rank}", "w") as file:
        file.write(rows.shards.url)
    dist.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("the culprit")
    dist.barrier()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize(("how", "message"), [
    ("raise", "rank 1 on .* failed: KeyError: 'the culprit'"), ("kill", "was killed.*: its .*process ended without"),
])  # fmt: skip
def test_a_rank_that_fails_leaves_no_rows_behind(spark, tmp_path, how, message):
    """Neither on its own disk nor on those of the others, whose processes Spark kills."""
    with pytest.raises(RankError, match=message):
        spark_dl.run_on_dataframe(_fails_on_rank_1, spark.range(100), num_ranks=3, how=how, folder=str(tmp_path))
    folders = {(tmp_path / name).read_text() for name in os.listdir(tmp_path)}
    assert len(folders) == 3
    end = time.monotonic() + 20
    while any(map(os.path.exists, folders)) and time.monotonic() < end:
        time.sleep(0.1)
    assert [f for f in folders if os.path.exists(f)] == []
    found = spark_dl.run_on_dataframe(_rows_of_rank, spark.range(100), num_ranks=3, batch_size=4)
    assert sum(f["own"] for f in found) == 100


@pytest.mark.modes("local")
def test_rows_are_not_put_on_disks_that_are_to_be_encrypted(spark, monkeypatch):
    conf = {"spark.io.encryption.enabled": "true"}
    monkeypatch.setattr(preflight, "_conf", lambda spark, key: conf.get(key))
    with pytest.raises(ValueError, match=r"spark.io.encryption.enabled: found true, .* shards.storage to 'shared'"):
        spark_dl.run_on_dataframe(_rows_of_rank, spark.range(9), num_ranks=2, batch_size=4)


@pytest.mark.modes("local")
def test_an_error_of_the_dataframe_itself_is_not_swallowed(spark):
    df = spark.range(9).selectExpr("IF(id < 100, CAST(raise_error('from the plan') AS INT), 1) AS id")
    with pytest.raises(Exception, match="from the plan"):
        spark_dl.run_on_dataframe(_rows_of_rank, df, num_ranks=2, batch_size=4)


@pytest.mark.modes("local")
def test_B20_too_few_slots(spark):
    with pytest.raises(RuntimeError, match="9 ranks need 9 task slots"):
        spark_dl.run_on_dataframe(_rows_of_rank, spark.range(9), num_ranks=9, batch_size=4)


def _slowly(batches):
    time.sleep(9)
    yield from batches


@pytest.mark.long
@pytest.mark.long_in("connect")
@pytest.mark.slow
@pytest.mark.modes("local", "connect")
def test_a_dataframe_may_take_longer_than_the_start_of_the_ranks(spark):
    df = spark.range(0, 40, 1, 4).mapInArrow(_slowly, "id long")
    settings = spark_dl.Launch(start_timeout_s=5)
    found = spark_dl.run_on_dataframe(_rows_of_rank, df, num_ranks=2, settings=settings, batch_size=4)
    assert sum(f["own"] for f in found) == 40


def _peak(rows):
    return {
        "bytes": sum(s.bytes for s in rows.shards.shards),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


@pytest.mark.modes("local")
@pytest.mark.long
@pytest.mark.slow
def test_the_memory_of_a_rank_does_not_grow_with_its_rows(spark):
    small, big = (
        spark_dl.run_on_dataframe(
            _peak, spark.range(0, n, 1, 4).selectExpr("array_repeat(CAST(id AS FLOAT), 784) AS x")
        )[0]
        for n in (20_000, 140_000)
    )  # 66 MB, five batches of Spark's, and 457 MB
    assert big["bytes"] - small["bytes"] > 370e6
    assert (big["peak"] - small["peak"]) * 1024 < 150e6


@pytest.mark.modes("local")
def test_a_source_that_was_not_dealt_is_an_error(spark):
    launch, data = spark_dl.Launch(num_ranks=3), Data(features=("id",), label=None)
    wrong = pytest.raises(RankError, match="Spark started 2 tasks for 3 ranks")
    with local.dealt_rows(spark.range(9), data, Shards(), 2) as (dealt, columns), wrong:
        settings = local.RowSettings(data=data)
        call = functools.partial(
            spark_dl.worker.call, _rows_of_rank, (), {}, launch, columns=columns, settings=settings
        )
        run_barrier(spark, call, launch=launch, source=dealt)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_what_local_storage_cannot_do_is_said_before_anything_starts(spark, points, tmp_path):
    config = small_config(2, data=LOCAL)
    for data, validation, message in [
        (str(tmp_path), None, "shards.storage: 'local' is for DataFrames, found a dataset"),
        (points, points, "shards.storage: 'local' supports one DataFrame, found a second one for validation"),
    ]:
        with pytest.raises(ValueError, match=message):
            spark_dl.train(data, MLP, config, validation=validation, run_dir=str(tmp_path / "run"))
    shards = spark_dl.write_shards(points, str(tmp_path / "data"))
    result = spark_dl.train(points, MLP, config, validation=shards, run_dir=str(tmp_path / "run"))
    assert result.metrics["loss"] > 0


@pytest.mark.slow
@pytest.mark.modes("local")
def test_overwrite_removes_the_shards_of_a_run_that_had_them(spark, points, tmp_path):
    run_dir = str(tmp_path / "run")
    spark_dl.train(points, MLP, small_config(2, train={"epochs": 1}), run_dir=run_dir)
    assert os.listdir(tmp_path / "run" / "shards") == ["train"]
    spark_dl.train(points, MLP, small_config(2, train={"epochs": 1}, data=LOCAL), run_dir=run_dir, overwrite=True)
    assert os.listdir(tmp_path / "run" / "shards") == []
