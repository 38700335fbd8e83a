"""Whole runs whose folder and dataset are on S3: train, a cut, resume, evaluate, predict; and a server that goes."""

import logging
import threading
import time

import pytest
import torch

import spark_dl
from spark_dl import Checkpoint, ModelSpec, RankError, Shards, storage
from spark_dl.rundir import checkpoint
from tests.builders.models import MLP, blobs, build_mlp, same_bits, small_config
from tests.builders.s3 import ENV, S3Server, sessions_server

pytestmark = pytest.mark.modes("local")

s3 = pytest.fixture(scope="module")(sessions_server)


@pytest.fixture(scope="module")
def points(spark):
    rows = [(x.tolist(), int(y)) for x, y in zip(*blobs(500).values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(3).cache()


@pytest.fixture
def own_s3(s3):
    server = S3Server()
    yield server
    server.kill()


def weights(result):
    return checkpoint.load(checkpoint.open_checkpoint(result.checkpoint), "model.pt")["0"]


@pytest.mark.slow
def test_a_run_on_s3_is_cut_resumed_evaluated_and_predicts(spark, points, s3, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    config = small_config(2, train={"max_steps": 7}, checkpoint=Checkpoint(every_steps=3))
    whole = small_config(2, checkpoint=Checkpoint(every_steps=3))
    run_dir = s3.url("runs/a b#1")
    cut = spark_dl.train(points, MLP, config, run_dir=run_dir)
    assert (cut.steps, cut.run_dir) == (7, storage.absolute(run_dir))
    result = spark_dl.train(points, MLP, whole, run_dir=run_dir, resume=True)
    local = spark_dl.train(points, MLP, whole, run_dir=str(tmp_path / "run"))
    assert (result.steps, result.rows) == (local.steps, local.rows) == (22, 1000)
    assert same_bits(weights(result), weights(local))
    assert spark_dl.evaluate(points, MLP, result.run_dir) == spark_dl.evaluate(points, MLP, local.run_dir)
    assert not [key for key in s3.keys("runs/a b#1/shards/") if "evaluate" in key]
    predicted = spark_dl.predict(points, ModelSpec(build=build_mlp), result.checkpoint).collect()
    with torch.no_grad():
        expected = local.load_model(MLP)(torch.tensor([row["features"] for row in predicted]))
    assert torch.allclose(torch.tensor([row["prediction"] for row in predicted]), expected, atol=1e-5)
    written = b"".join(s3.client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in s3.keys("runs/"))
    assert ENV["AWS_SECRET_ACCESS_KEY"].encode() not in written
    assert ENV["AWS_SECRET_ACCESS_KEY"] not in caplog.text

    dataset = storage.join(result.run_dir, "shards", "train")
    again = spark_dl.train(dataset, MLP, whole, run_dir=str(tmp_path / "from s3"))
    assert same_bits(weights(again), weights(local))


def test_no_such_bucket_is_an_error_before_anything_starts(spark, points, s3):
    with pytest.raises(ValueError, match=r"cannot write to the run_dir s3://nowhere.*does not exist"):
        spark_dl.train(points, MLP, small_config(2), run_dir=s3.url("run", bucket="nowhere"))


def test_wrong_credentials_are_one_clear_error(spark, points, own_s3):
    own_s3.check_credentials()
    match = r"cannot read the run_dir s3://bucket/run.*no access to s3://bucket/run.*AWS_ACCESS_KEY_ID"
    with pytest.raises(ValueError, match=match) as caught:
        spark_dl.train(points, MLP, small_config(2), run_dir=own_s3.url("run"))
    assert ENV["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


@pytest.mark.long
@pytest.mark.slow
def test_a_server_that_goes_while_ranks_train_is_one_error_in_bounded_time(spark, points, own_s3, tmp_path):
    dataset = spark_dl.write_shards(points, own_s3.url("set"), shards=Shards(rows_per_row_group=8, rows_per_shard=16))
    config = small_config(2, train={"epochs": 10_000})
    run_dir = tmp_path / "run"

    def kill_server():
        end = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").is_file() and time.monotonic() < end:
            time.sleep(0.1)
        own_s3.kill()

    killer = threading.Thread(target=kill_server)
    killer.start()
    start = time.monotonic()
    try:
        with pytest.raises(RankError, match=r"cannot read row group \d+ of s3://bucket/set/part-"):
            spark_dl.train(dataset, MLP, config, run_dir=str(run_dir))
    finally:
        killer.join()
    assert time.monotonic() - start < 100
