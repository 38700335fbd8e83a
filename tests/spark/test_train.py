"""train, evaluate and predict from a DataFrame, in every mode."""

import concurrent.futures
import dataclasses
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch.nn import functional

import spark_dl
from spark_dl import Data, ModelSpec, RankError, cli, prepare, storage
from spark_dl.commands import predict as predict_job
from spark_dl.config.load import build_config
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet import page_index
from spark_dl.data.parquet.filters import typed_conditions
from spark_dl.data.parquet.page_index import IndexedFile
from spark_dl.rundir import checkpoint, checkpoint_files, environment
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, build_mlp, same_bits, small_config

METRICS = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3, "average": "micro"}}


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(500)
    rows = [(x.tolist(), int(y), f"row {i}") for i, (x, y) in enumerate(zip(*columns.values(), strict=True))]
    return spark.createDataFrame(rows, "features array<float>, label bigint, name string").repartition(3).cache()


def _columns(output):
    return {"prediction": output.argmax(1), "probability": output.softmax(1)}


@pytest.mark.long_in("local-cluster")
@pytest.mark.modes("local-cluster", "connect")
def test_train_evaluate_predict(spark, mode, points, tmp_path):
    config = small_config(2, train={"epochs": 6, "metrics": METRICS}, data={"validation_fraction": 0.2})
    spec = ModelSpec(build=build_mlp, predict=_columns)
    result = spark_dl.train(points, spec, config, run_dir=str(tmp_path / "run"))
    assert (result.epochs, result.steps, result.rows) == (6, 54, 2400)
    assert result.metrics["accuracy"] > 0.7
    assert result.history[0]["train_loss"] > result.train_loss
    assert sorted(os.listdir(tmp_path / "run")) == [
        "checkpoints",
        "config.yaml",
        "environment",
        "generations",
        *(["logs"] if mode == "connect" else []),  # of ranks that cannot reach the driver
        "metrics.jsonl",
        "shards",
    ]
    assert spark_dl.load_config(str(tmp_path / "run" / "config.yaml")) == config
    (attempt,), _ = environment.read(result.run_dir)
    assert (attempt.driver["outcome"], attempt.driver["steps"]) == (environment.FINISHED, 54)
    assert spark.version in attempt.driver["spark"]["version"]
    assert all(attempt.driver["spark"].values())
    assert [rank["device"] for rank in attempt.ranks["ranks"]] == ["cpu", "cpu"]

    found = spark_dl.evaluate(points, spec, result.run_dir)
    assert os.listdir(tmp_path / "run" / "shards") == ["train"]
    model = result.load_model(spec)
    rows = points.collect()
    with torch.no_grad():
        expected = model(torch.tensor([row["features"] for row in rows])).softmax(1)
    right = sum(int(p.argmax()) == row["label"] for p, row in zip(expected, rows, strict=True))
    assert found["rows"] == 500
    assert round(found["accuracy"] * 500) == right

    predicted = {row["name"]: row for row in spark_dl.predict(points, spec, result.checkpoint).collect()}
    assert len(predicted) == 500
    for row, probability in zip(rows, expected, strict=True):
        assert predicted[row["name"]]["probability"] == pytest.approx(probability.tolist(), abs=1e-5)
        assert predicted[row["name"]]["label"] == row["label"]
    types = dict(spark_dl.predict(points, spec, result.checkpoint).dtypes)
    assert (types["prediction"], types["probability"]) == ("bigint", "array<float>")


def _theirs(url, **sections):
    """Changes the settings of a checkpoint, with its checksum, as who can write to its folder can."""
    path = os.path.join(url, "MANIFEST.json")
    with open(path) as file:
        manifest = json.load(file)
    for name, values in sections.items():
        manifest["config"][name].update(values)
    manifest["sha256"] = checkpoint_files.digest(manifest)
    with open(path, "w") as file:
        json.dump(manifest, file)


@pytest.fixture
def of_somebody_else(spark, points, tmp_path):
    """A run in the folder of another user, whose checkpoint has settings that write elsewhere; and that place."""
    result = spark_dl.train(points, MLP, small_config(2), run_dir=str(tmp_path / "run"))
    other = tmp_path / "other"
    _theirs(
        result.checkpoint, shards={"store": str(other / "store")}, launch={"log_dir": str(other / "logs")},
        track={"mlflow": True},
    )  # fmt: skip
    return result, other


@pytest.mark.long_in("local-cluster")
@pytest.mark.modes("local", "local-cluster")
def test_S22_a_checkpoint_does_not_say_where_the_rows_of_an_evaluation_go(spark, points, of_somebody_else):
    result, other = of_somebody_else
    assert spark_dl.evaluate(points, MLP, result.checkpoint)["rows"] == 500
    spark_dl.predict(points, MLP, result.checkpoint).collect()
    assert not other.exists()


@pytest.mark.long_in("local-cluster")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize("place", ["temporary", "disks of the ranks", "named"])
def test_S22_an_evaluation_writes_nothing_to_the_run_folder_of_somebody_else(
    spark, mode, points, tmp_path, of_somebody_else, monkeypatch, place
):
    result, _ = of_somebody_else
    expected = spark_dl.evaluate(points, MLP, result.checkpoint)
    for folder, _, files in os.walk(result.run_dir):
        for name in (".", *files):
            os.chown(os.path.join(folder, name), 65534, 65534)
    if mode.startswith("local[") and place == "disks of the ranks":  # as on a cluster
        monkeypatch.setattr(prepare, "is_local_master", lambda master: False)
    written, resolve = [], storage.make_folder
    monkeypatch.setattr(storage, "make_folder", lambda url, **more: [written.append(str(url)), resolve(url, **more)][1])
    before = sorted(str(path) for path in Path(result.run_dir).rglob("*"))
    more = {"run_dir": tmp_path / "mine"} if place == "named" else {}
    found = spark_dl.evaluate(points, MLP, result.checkpoint, **more)
    assert found["rows"] == expected["rows"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert sorted(str(path) for path in Path(result.run_dir).rglob("*")) == before
    assert not any(url.startswith(result.run_dir) for url in written)
    own = [url for url in written if "evaluate-" in url]
    assert bool(own) == (place == "named" or (place == "temporary" and mode.startswith("local[")))
    assert all(url.startswith(str(tmp_path / "mine") if place == "named" else tempfile.gettempdir()) for url in own)
    assert not any(os.path.exists(url) for url in own)


@pytest.mark.modes("local")
def test_a_dataset_by_its_url_is_used_as_it_is(spark, points, tmp_path):
    shards = spark_dl.write_shards(points, str(tmp_path / "data"))
    before = sorted(os.listdir(tmp_path / "data"))
    config = small_config(2, train={"epochs": 1})
    by_url = spark_dl.train(shards.url, MLP, config, run_dir=str(tmp_path / "a"))
    by_set = spark_dl.train(shards, MLP, config, run_dir=str(tmp_path / "b"), validation=shards)
    assert "shards" not in os.listdir(tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "data")) == before
    weights = [checkpoint.load(checkpoint.find(r.run_dir), "model.pt")["0"] for r in (by_url, by_set)]
    assert same_bits(*weights)
    assert by_set.metrics["loss"] > 0


@pytest.mark.slow
@pytest.mark.modes("local")
def test_rows_that_pass_filters_are_trained_on_and_evaluated(spark, points, tmp_path):
    path = str(tmp_path / "data")
    points.write.partitionBy("label").option("parquet.page.row.count.limit", 8).parquet(path)
    passing = points.where("label != 1 and name < 'row 4'").count()
    filters = [["label", "!=", 1], ["name", "<", "row 4"]]
    config = small_config(2, train={"epochs": 2}, data={"filters": filters})
    run = str(tmp_path / "run")
    assert spark_dl.train(path, MLP, config, run_dir=run).rows == 2 * passing
    assert spark_dl.evaluate(path, MLP, run)["rows"] == passing
    assert spark_dl.evaluate(points, MLP, run)["rows"] == points.count(), "a DataFrame has the rows that are meant"
    other = small_config(2, train={"epochs": 3}, data={"filters": filters[:1]})
    with pytest.raises(ValueError, match="cannot resume.*data.filters"):
        spark_dl.train(path, MLP, other, run_dir=run, resume=True)
    more = small_config(2, train={"epochs": 3}, data={"filters": filters})
    assert spark_dl.train(path, MLP, more, run_dir=run, resume=True).rows == 3 * passing
    mixed = small_config(2, train={"epochs": 1}, data={"filters": filters, "proportions": {"a": 1, "b": 1}})
    assert spark_dl.train({"a": path, "b": path}, MLP, mixed, run_dir=run, overwrite=True).rows == 2 * passing
    for call in (
        lambda: spark_dl.train(points, MLP, config, run_dir=run, overwrite=True),
        lambda: spark_dl.train({"a": path, "b": points}, MLP, mixed, run_dir=run, overwrite=True),
        lambda: spark_dl.evaluate(points, MLP, run, config),
        lambda: spark_dl.run_on_dataframe(len, points, data=config.data),
    ):
        with pytest.raises(ValueError, match=r"data.filters: .*df.filter"):
            call()


@pytest.mark.modes("local")
def test_only_pages_with_rows_that_pass_are_read_of_what_spark_wrote(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(page_index, "_MIN_CHUNK_BYTES", 0)
    path = str(tmp_path / "data")
    columns = ["id", "array(id, id + 1) AS cells", "concat('row ', lpad(id, 6, '0')) AS name"]
    spark.range(0, 20_000, 1, 1).selectExpr(*columns).write.option("parquet.page.row.count.limit", 500).parquet(path)
    (file,) = Path(path).glob("part-*")
    types = {"name": pa.string(), "id": pa.int64()}
    conditions = typed_conditions([[("name", ">=", "row 007000"), ("id", "<", 7100)]], types)
    with pa.OSFile(str(file)) as source:
        indexed = IndexedFile(source, parquet_file.open_file(source))
        assert indexed.rows_that_may_pass(0, conditions).sum() == 500
        found, passes = indexed.read_passing(0, ["id", "cells"], conditions)
    assert np.flatnonzero(passes).tolist() == found["id"].to_pylist() == list(range(7000, 7100))
    assert found["cells"].to_pylist() == [[i, i + 1] for i in range(7000, 7100)]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_nulls_of_a_dataset_of_others_are_dropped_or_filled_when_it_is_read(spark, points, tmp_path):
    path = str(tmp_path / "data")
    with_nulls = points.withColumn("label", F.expr("IF(label = 1, NULL, label)"))
    with_nulls.write.parquet(path)
    rows, present = points.count(), points.where("label != 1").count()
    assert 0 < present < rows
    run = str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"column 'label': found \d+ null.*set data.nulls to drop or fill"):
        spark_dl.train(path, MLP, small_config(2), run_dir=run)
    config = small_config(2, train={"epochs": 1}, data={"nulls": "drop"})
    assert spark_dl.train(path, MLP, config, run_dir=run).rows == present
    assert spark_dl.evaluate(path, MLP, run)["rows"] == present, "the rule of the training dataset holds"
    own = spark_dl.write_shards(points, str(tmp_path / "own"), Data(features=config.data.features))
    assert spark_dl.evaluate(own.url, MLP, run)["rows"] == rows, "it is read as it was written"
    filled = small_config(2, train={"epochs": 1}, data={"nulls": "fill", "fill": {"label": 0}})
    assert spark_dl.train(path, MLP, filled, run_dir=run, overwrite=True).rows == rows


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("rows", [1, 3])
def test_B10_fewer_rows_than_ranks_train(spark, points, tmp_path, rows):
    result = spark_dl.train(points.limit(rows), MLP, small_config(4), run_dir=str(tmp_path / "run"))
    assert (result.rows, result.steps) == (2 * rows, 2)


class LossOnceSeen:
    """From the sixth call on (an epoch has eleven) waits until the driver has seen a step, of which `mark` tells."""

    def __init__(self, mark):
        self.mark, self.calls = mark, 0

    def __call__(self, output, label):
        end = time.monotonic() + 60
        while self.calls >= 5 and not os.path.exists(self.mark):
            assert time.monotonic() < end, "the driver sees no step of a run that goes on"
            time.sleep(0.02)
        self.calls += 1
        return functional.cross_entropy(output, label, reduction="none")


def test_events_reach_the_driver_while_ranks_train(spark, mode, points, tmp_path):
    seen, mark = [], tmp_path / "seen"

    def touch(event):
        if event["kind"] == "step":
            mark.touch()

    spec = ModelSpec(build=build_mlp, loss=LossOnceSeen(str(mark)))
    config = small_config(2, train={"epochs": 3})
    result = spark_dl.train(points, spec, config, run_dir=str(tmp_path / "run"), on_event=[seen.append, touch])
    steps = [event for event in seen if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 34))
    assert all(event["steps"] == 33 for event in steps)
    epochs = [event["train_loss"] for event in seen if event["kind"] == "epoch"]
    assert epochs == [entry["train_loss"] for entry in result.history]
    assert [event["url"] for event in seen if event["kind"] == "checkpoint"][-1] == result.checkpoint
    joined = {event["rank"] for event in seen if event["kind"] == "joined"}
    assert joined == (set() if mode == "connect" else {0, 1})


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", [spark_dl.DDP(), spark_dl.TreeReduce()], ids=lambda s: s.strategy)
def test_B34_a_function_for_events_that_raises_ends_the_run_and_the_next_run_works(points, tmp_path, strategy):
    def stop_at_3(event):
        if event["kind"] == "step" and event["step"] >= 3:
            raise LookupError("enough")

    config = small_config(2, train={"epochs": 50}, parallel=strategy)
    with pytest.raises(LookupError, match="enough"):
        spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "run"), on_event=stop_at_3)
    assert spark_dl.train(points, MLP, small_config(4), run_dir=str(tmp_path / "next")).epochs == 2
    with pytest.raises(ValueError, match=r"on_event: expected a function or a list of functions, found 'print'"):
        spark_dl.train(points, MLP, config, on_event=["print"])


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B34_while_a_function_for_events_blocks_the_other_ranks_end_and_the_error_comes_after_it(spark, tmp_path):
    shards, pids, left = write_dataset(str(tmp_path / "data"), blobs(96)), {}, []

    def kill_and_wait(event):
        if event["kind"] == "joined":
            pids[event["rank"]] = event["pid"]
        if event["kind"] == "step" and event["step"] == 3:
            os.kill(pids[1], signal.SIGKILL)
            end = time.monotonic() + 15
            while Path(f"/proc/{pids[0]}").exists() and time.monotonic() < end:
                time.sleep(0.1)
            left.append(Path(f"/proc/{pids[0]}").exists())
            time.sleep(1.0)

    config = small_config(2, train={"epochs": 200, "log_every": 1}, launch={"max_restarts": 0})
    with pytest.raises(RankError, match=r"^rank 1 on .* was killed"):
        spark_dl.train(shards.url, MLP, config, run_dir=str(tmp_path / "run"), on_event=kill_and_wait, spark=spark)
    assert left == [False]


@pytest.mark.modes("local", "connect")
def test_B35_train_and_evaluate_work_in_any_thread_and_take_a_session(spark, points, tmp_path):
    shards = spark_dl.write_shards(points, str(tmp_path / "data"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        args = (shards.url, MLP, small_config(2))
        result = pool.submit(spark_dl.train, *args, run_dir=str(tmp_path / "run"), spark=spark).result(60)
        found = pool.submit(spark_dl.evaluate, shards.url, MLP, result.checkpoint).result(60)
    assert found["rows"] == 500
    with pytest.raises(ValueError, match="spark: expected a SparkSession, found str"):
        spark_dl.train(shards.url, MLP, small_config(2), spark="local[2]")


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("storage", ["shared", "local"])
def test_a_vector_of_doubles_and_a_double_label_are_an_error_that_names_them_and_can_be_cast(spark, tmp_path, storage):
    rows = [(Vectors.dense(x), float(y)) for x, y in zip(*map(np.ndarray.tolist, blobs(200).values()), strict=True)]
    df = spark.createDataFrame(rows, ["features", "label"])
    cast = "{features: float32, label: int64}"
    with pytest.raises(ValueError, match=rf"'features' is float64, 'label' is float64; set data.cast: {cast}"):
        spark_dl.train(df, MLP, small_config(2, storage=storage), run_dir=str(tmp_path / "run"))
    config = small_config(2, storage=storage, data={"cast": {"features": "float32", "label": "int64"}})
    result = spark_dl.train(df, MLP, config, run_dir=str(tmp_path / "cast"))
    assert spark_dl.evaluate(df, MLP, result.checkpoint)["rows"] == 200
    assert spark_dl.predict(df, MLP, result.checkpoint).select("prediction").count() == 200


@pytest.mark.modes("local")
def test_predict_does_not_ask_for_labels_and_weights(spark, points, tmp_path):
    df = points.withColumn("w", F.lit(1.0)).withColumn("kind", F.col("label"))
    data = {"label": None, "labels": ("label", "kind"), "weight": "w"}
    spec = ModelSpec(build=build_mlp, loss=CrossEntropyOfKind())
    result = spark_dl.train(df, spec, small_config(2, data=data), run_dir=str(tmp_path / "run"))
    predicted = spark_dl.predict(points.select("features"), spec, result.checkpoint)
    assert predicted.columns == ["features", "prediction"]
    assert predicted.count() == 500


class CrossEntropyOfKind:
    def __call__(self, output, batch):
        assert torch.equal(batch["kind"], batch["label"])
        return functional.cross_entropy(output, batch["kind"], reduction="none")


def build_and_print():
    print("built by", os.environ["RANK"])
    return build_mlp()


@pytest.mark.modes("local", "connect")
def test_the_output_of_ranks_that_train_comes_to_the_driver_and_over_connect_by_files(spark, mode, tmp_path, capfd):
    columns = blobs(96)
    rows = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    df = spark.createDataFrame(rows, "features array<float>, label bigint")
    config, run = small_config(2, train={"epochs": 1}), tmp_path / "run"
    for _ in range(2):  # the second run deletes the files of the first one
        spark_dl.train(df, ModelSpec(build=build_and_print), config, run_dir=str(run), overwrite=True)
        lines = [line for line in capfd.readouterr().out.splitlines() if "built" in line]
        assert sorted(lines) == ["[rank 0] built by 0", "[rank 1] built by 1"]
    if mode == "connect":
        assert (run / "logs" / "rank-1.log").read_text().count("stdout: built by 1\n") == 1
    else:
        assert not (run / "logs").exists()


@pytest.mark.long_in("local-cluster")
@pytest.mark.slow
def test_an_interrupt_ends_the_job_that_writes_shards_and_frees_its_slots(spark, tmp_path):
    """As in a notebook, whose cells are interrupted by a KeyboardInterrupt in the main thread."""
    started = tmp_path / "started"

    def wait(batches):
        for batch in batches:
            started.touch()
            time.sleep(600)
            yield batch

    df = spark.range(0, 100, 1, 40).selectExpr("CAST(id AS FLOAT) AS features", "id AS label")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # not PySpark's, which cancels all jobs
    thread = threading.Thread(target=interrupt_once, args=(started,))
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            spark_dl.train(df.mapInArrow(wait, df.schema), MLP, small_config(2), run_dir=str(tmp_path / "run"))
    finally:
        signal.signal(signal.SIGINT, handler)
        thread.join()
    assert list((tmp_path / "run").rglob("*.parquet")) == []
    assert spark_dl.launch(os.getpid, num_ranks=4, settings=spark_dl.Launch(start_timeout_s=30))  # all slots


def interrupt_once(started):
    end = time.monotonic() + 60
    while not started.exists() and time.monotonic() < end:
        time.sleep(0.05)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.modes("local")
def test_resume_goes_on_and_overwrite_starts_anew(spark, points, tmp_path, caplog):
    run_dir = str(tmp_path / "run")
    config = small_config(2, train={"epochs": 1})
    spark_dl.train(points, MLP, config, run_dir=run_dir, resume=True)  # nothing to resume from: starts
    with pytest.raises(ValueError, match=r"already has checkpoints \(the last one of step 11\); set resume"):
        spark_dl.train(points, MLP, config, run_dir=run_dir)
    more = small_config(2, train={"epochs": 2})
    assert "the rows of the DataFrame" not in caplog.text
    resumed = spark_dl.train(points, MLP, more, run_dir=run_dir, resume=True)
    assert f"the rows of the DataFrame are not known to be the {points.count()}" in caplog.text
    assert (resumed.epochs, resumed.steps) == (2, 22)
    other = small_config(2, train={"epochs": 2, "lr": 0.2})
    with pytest.raises(ValueError, match=r"other settings \(train.lr: was 0.1, now 0.2\)"):
        spark_dl.train(points, MLP, other, run_dir=run_dir, resume=True)
    misspelt = small_config(2, data={"features": ("featurs",)})
    with pytest.raises(ValueError, match=r"no column 'featurs'"):
        spark_dl.train(points, MLP, misspelt, run_dir=run_dir, overwrite=True)
    assert checkpoint.find(run_dir).url == resumed.checkpoint, "what does not fit deletes nothing"
    assert spark_dl.load_config(f"{run_dir}/config.yaml") == more, "nor replaces the settings"
    first = checkpoint.list_checkpoints(run_dir)[0].url
    chosen = spark_dl.train(points, MLP, more, run_dir=run_dir, resume=first)
    assert (chosen.history, chosen.steps) == (resumed.history, 22)
    assert chosen.checkpoint != resumed.checkpoint
    with pytest.raises(ValueError, match=r"resume: no checkpoint at .*step-00000099"):
        spark_dl.train(points, MLP, more, run_dir=run_dir, resume=f"{run_dir}/checkpoints/step-00000099.gen-0001")
    with pytest.raises(ValueError, match=r"resume: expected a checkpoint of the run_dir .*found .*train.init_from"):
        spark_dl.train(points, MLP, more, run_dir=str(tmp_path / "another"), resume=chosen.checkpoint)
    whole = spark_dl.train(points, MLP, more, run_dir=run_dir, overwrite=True)
    assert whole.history == resumed.history
    own = spark_dl.train(f"{run_dir}/shards/train", MLP, config, run_dir=run_dir, overwrite=True)
    assert own.rows == points.count(), "the data that are trained on stay"
    assert [saved.step for saved in checkpoint.list_checkpoints(run_dir)] == [11]
    spark_dl.train(spark_dl.write_shards(points, str(tmp_path / "other")), MLP, config, run_dir=run_dir, overwrite=True)
    assert os.listdir(f"{run_dir}/shards") == [], "and nobody's are deleted"


@pytest.mark.modes("local")
def test_the_best_checkpoint_is_kept_and_found_and_signatures_are_asked_for(spark, points, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    settings = {"epochs": 4, "keep": 1, "keep_best": 1, "asynchronous": True, "signing_key_file": str(key)}
    config = small_config(2, train={**settings, "validation_fraction": 0.2, "early_stop_mode": "max"})
    result = spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "run"))
    losses = [entry["metrics"]["loss"] for entry in result.history]
    assert losses[0] == max(losses), "a loss that falls, so that the first one is the highest"
    assert [saved.step for saved in checkpoint.list_checkpoints(result.run_dir)] == [result.steps // 4, result.steps]
    assert result.best_checkpoint == checkpoint.list_checkpoints(result.run_dir)[0].url
    assert spark_dl.evaluate(points, MLP, result.best_checkpoint, config)["rows"] == 500
    key.write_bytes(os.urandom(32))
    with pytest.raises(ValueError, match="its signature is not of the key"):
        spark_dl.evaluate(points, MLP, result.best_checkpoint, config)
    with pytest.raises(ValueError, match="no valid checkpoint: .*its signature is not of the key"):
        spark_dl.train(points, MLP, config, run_dir=result.run_dir, resume=True)
    without = small_config(2, train={"keep_best": 1})
    with pytest.raises(ValueError, match="checkpoint.keep_best: needs validation rows"):
        spark_dl.train(points, MLP, without, run_dir=str(tmp_path / "other"))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_damaged_checkpoint_is_passed_by_when_a_run_is_resumed_and_used(spark, points, tmp_path, caplog):
    run_dir, config = str(tmp_path / "run"), small_config(2, train={"epochs": 2})
    whole = spark_dl.train(points, MLP, config, run_dir=run_dir)
    first = checkpoint.list_checkpoints(run_dir)[0].url
    damaged = os.path.join(whole.checkpoint, "model.pt")
    os.truncate(damaged, os.path.getsize(damaged) // 2)
    for use in (spark_dl.evaluate, spark_dl.predict):
        with pytest.raises(ValueError, match=f"{damaged} is damaged: found"):
            use(points, MLP, whole.checkpoint)
    with pytest.raises(ValueError, match=f"{damaged} is damaged: found"):
        whole.load_model(MLP)
    assert spark_dl.evaluate(points, MLP, run_dir) == spark_dl.evaluate(points, MLP, first)
    assert f"{damaged} is damaged" in caplog.text
    assert f"using the checkpoint {first}" in caplog.text
    resumed = spark_dl.train(points, MLP, config, run_dir=run_dir, resume=True)
    assert resumed.history == whole.history
    assert resumed.checkpoint != whole.checkpoint
    assert same_bits(*(checkpoint.load(checkpoint.find(u), "model.pt")["0"] for u in (run_dir, resumed.checkpoint)))


@pytest.mark.modes("local")
def test_without_a_checkpoint_the_shards_of_an_earlier_run_are_not_used(spark, points, tmp_path):
    run_dir, config = str(tmp_path / "run"), small_config(1, train={"epochs": 1})
    with pytest.raises(RankError, match="in build"):
        spark_dl.train(points, ModelSpec(build=_fails_to_build), config, run_dir=run_dir)
    assert spark_dl.read_shards(os.path.join(run_dir, "shards", "train")).rows == 500
    assert spark_dl.train(points.limit(40), MLP, config, run_dir=run_dir, resume=True).rows == 40


def _fails_to_build():
    raise ZeroDivisionError("in build")


@pytest.mark.modes("local")
def test_B32_a_run_goes_on_in_an_epoch_only_with_the_dataset_that_it_was_trained_on(spark, points, tmp_path):
    path, run_dir = str(tmp_path / "data"), str(tmp_path / "run")
    points.drop("name").write.parquet(path)
    stopped = small_config(2, train={"epochs": 2, "max_steps": 3})
    assert spark_dl.train(path, MLP, stopped, run_dir=run_dir).steps == 3
    points.drop("name").limit(40).coalesce(1).write.mode("append").parquet(path)
    more = small_config(2, train={"epochs": 2})
    with pytest.raises(ValueError, match=r"found 540 rows in 4 files .*expected 500 rows in 3 files"):
        spark_dl.train(path, MLP, more, run_dir=run_dir, resume=True)
    points.drop("name").write.mode("overwrite").parquet(path)  # the same rows in files of other names
    with pytest.raises(ValueError, match=r"the dataset has changed since the checkpoint was saved"):
        spark_dl.train(path, MLP, more, run_dir=run_dir, resume=True)


def _squared(output, label):
    return functional.cross_entropy(output, label, reduction="none") ** 2


@pytest.mark.modes("local")
def test_B32_a_loss_whose_code_has_changed_is_noticed_on_resume(spark, tmp_path, caplog):
    write_dataset(str(tmp_path / "data"), blobs(48))

    def train(epochs, **how):
        spec, config = ModelSpec(build=build_mlp, loss=how.pop("loss")), small_config(1, train={"epochs": epochs})
        return spark_dl.train(str(tmp_path / "data"), spec, config, run_dir=str(tmp_path / "run"), spark=spark, **how)

    train(1, loss="CrossEntropyLoss")
    train(2, loss="CrossEntropyLoss", resume=True)
    assert "have changed since the checkpoint" not in caplog.text
    train(3, loss=_squared, resume=True)
    assert f"the code or the variables of spec.loss have changed since the checkpoint {tmp_path}/run/" in caplog.text


def _raises_on_a_rank():
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("in build")
    return build_mlp()


@pytest.mark.modes("local")
def test_errors_before_any_rank_starts(spark, points, tmp_path):
    run_dir = str(tmp_path / "run")

    def fails(match, data=points, spec=MLP, config=None, error=ValueError, **kwargs):
        with pytest.raises(error, match=match):
            spark_dl.train(data, spec, config or small_config(2), run_dir=run_dir, **kwargs)

    fails("no column 'label' .* did you mean 'labels'", data=points.withColumnRenamed("label", "labels"))
    nulls = points.selectExpr("IF(label = 1, NULL, features) AS features", "label")
    fails(r"column 'features': found null\(s\) in \d+ row.* in partition \d+, row \d+", data=nulls)
    fails("no dataset at .*/nowhere: found nothing", data=str(tmp_path / "nowhere"))
    fails("the DataFrame has no rows", data=points.limit(0))
    wrong = {"accuracy": {"class": "MulticlassAcuracy"}}
    fails(
        "no class 'MulticlassAcuracy' in torchmetrics; did you mean", config=small_config(2, train={"metrics": wrong})
    )
    few = small_config(2, data={"validation_fraction": 0.0009})
    fails("train.validation_fraction=0.0009 of 500 rows is 0 rows, which leaves none to validate with", config=few)
    shards = spark_dl.write_shards(points.drop("name"), str(tmp_path / "data"))
    large = small_config(2, train={"global_batch_size": 96_000}, data={"memory_mib": 1})
    match = "/data: each rank has 48000 rows of 24 bytes in a global batch, 1 MiB, and loader.memory_mib="
    fails(f"{match}1; lower train.global_batch_size", data=shards, config=large)
    shares = {"memory_mib": 2, "proportions": {"a": 1, "b": 1}}
    mixed = small_config(2, train={"global_batch_size": 192_000}, data=shares)
    fails(f"{match}2 .1 for each of 2 datasets.; lower", data={"a": shards, "b": shards}, config=mixed)
    fails("9 ranks need 9 task slots", config=small_config(9), error=RuntimeError)
    lock = threading.Lock()
    fails(
        r"the variable `lock` of `spec\.build` is a _thread\.lock", spec=ModelSpec(build=lambda: lock and build_mlp())
    )
    assert checkpoint.latest(run_dir) is None


@pytest.mark.modes("local")
def test_a_validation_without_rows_is_an_error_that_says_which_rows_are_missing(spark, points, tmp_path):
    with pytest.raises(ValueError, match=r"^validation: .* pass at least one row, or no validation"):
        spark_dl.train(points, MLP, small_config(1), validation=points.limit(0), run_dir=str(tmp_path / "run"))


def test_B16_an_unwritable_run_dir(spark, points, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to the run_dir"):
        spark_dl.train(points, MLP, small_config(2), run_dir=str(tmp_path / "file" / "run"))


@pytest.mark.modes("local", "connect")
def test_a_rank_that_raises_while_it_builds_the_model(spark, points, tmp_path):
    spec = ModelSpec(build=_raises_on_a_rank)
    with pytest.raises(RankError, match="rank 1 on .* failed: ZeroDivisionError: in build"):
        spark_dl.train(points, spec, small_config(2), run_dir=str(tmp_path / "run"))


@pytest.mark.modes("local")
def test_B27_a_model_that_does_not_fit_the_features(spark, points, tmp_path):
    wrong = points.selectExpr("slice(features, 1, 3) AS features", "label")
    with pytest.raises(RankError, match=r"mat1 and mat2 shapes cannot be multiplied \(24x3 and 4x16\)") as error:
        spark_dl.train(wrong, MLP, small_config(2), run_dir=str(tmp_path / "run"))
    assert "The batch has the columns 'features' (24, 3) float32, 'label' (24,) int64" in error.value.reason
    assert (error.value.step, error.value.is_retryable, error.value.earlier) == (1, False, ())
    assert "return F.linear(" in error.value.rank_traceback  # torch's own, too


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_damaged_shard_is_an_error_that_names_the_file(spark, points, tmp_path):
    shards = spark_dl.write_shards(points, str(tmp_path / "data"))
    path = tmp_path / "data" / shards.shards[0].name
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(RankError, match=f"cannot read row group 0 of .*{path.name}"):
        spark_dl.train(shards, MLP, small_config(2), run_dir=str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_predict_refuses_what_does_not_fit(spark, points, tmp_path):
    result = spark_dl.train(points, MLP, small_config(1, train={"epochs": 1}), run_dir=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="no column 'features'"):
        spark_dl.predict(points.drop("features"), MLP, result.run_dir)
    with pytest.raises(ValueError, match="already has a column 'prediction'"):
        spark_dl.predict(points.withColumnRenamed("name", "prediction"), MLP, result.run_dir)
    with pytest.raises(ValueError, match="do not fit the model"):
        spark_dl.predict(points, ModelSpec(build=lambda: torch.nn.Linear(4, 3)), result.run_dir)
    with pytest.raises(ValueError, match="no checkpoint at"):
        spark_dl.predict(points, MLP, str(tmp_path / "nowhere"))
    other = small_config(1, data={"features": ["featurs"]})
    with pytest.raises(
        ValueError, match=r"data\.features: .* no column 'featurs', its columns are \['features', 'label'\]"
    ):
        spark_dl.predict(points, MLP, result.run_dir, other)
    wrong = points.selectExpr("slice(features, 1, 3) AS features")
    with pytest.raises(Exception, match=r"found cells of shape \(3,\), the model was trained on \(4,\)"):
        spark_dl.predict(wrong, MLP, result.run_dir).collect()


@pytest.mark.long_in("connect")
@pytest.mark.slow
@pytest.mark.modes("local", "connect")
def test_the_job_predict_counts_the_rows_that_it_wrote(spark, points, tmp_path, monkeypatch):
    trained = spark_dl.train(points, MLP, small_config(1, train={"epochs": 1}), run_dir=str(tmp_path / "run"))
    points.write.parquet(str(tmp_path / "points"))
    modes = ["append", "append", "ignore", "overwrite"]
    job = cli.Job(
        {
            **{name: option.default for name, option in predict_job.OPTIONS.items()},
            "checkpoint_path": trained.checkpoint,
            "dataset": "train",
            "output": str(tmp_path / "out"),
        },
        build_config(checkpoint.find(trained.checkpoint).manifest["config"]),
        cli.Input(path=str(tmp_path / "points")),
        cli.Model(build="tests.builders.models:build_mlp"),
    )
    monkeypatch.setattr(cli.Job, "session", lambda self, name: spark)
    found = [predict_job.predict(dataclasses.replace(job, args={**job.args, "mode": mode}))["rows"] for mode in modes]
    assert found == [500, 500, 0, 500]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_predict_treats_nulls_nan_and_inf_as_training_did(spark, points, tmp_path):
    def trained(name, **data):
        config = small_config(1, train={"epochs": 1}, data=data)
        return spark_dl.train(points, MLP, config, run_dir=str(tmp_path / name)).checkpoint

    def predictions(df, checkpoint, config=None):
        return [row["prediction"] for row in spark_dl.predict(df.coalesce(1), MLP, checkpoint, config).collect()]

    parts = {"nan": "float('NaN')", "inf": "float('-Infinity')", "null": "NULL", "seven": "7"}
    rows = {
        name: spark.range(3).selectExpr(f"IF(id = 1, array(0f, {value}, 1f, 2f), array(1f, 1f, 1f, 1f)) AS features")
        for name, value in parts.items()
    }
    filled = trained("fill", nonfinite="fill", fill={"features": 7})
    assert predictions(rows["nan"], filled) == predictions(rows["seven"], filled) == predictions(rows["inf"], filled)
    with pytest.raises(Exception, match=r"column 'features': found null\(s\) in 1 row.*partition 0, row 1"):
        predictions(rows["null"], filled)
    refused = trained("drop", nonfinite="drop", nulls="drop")
    for name, key in (("nan", "nonfinite to allow or fill"), ("null", "nulls to fill")):
        with pytest.raises(Exception, match=rf"column 'features': found .* set data.{key}, or .*partition 0, row 1"):
            predictions(rows[name], refused)
    allowed = small_config(1, data={"nonfinite": "allow"})
    assert np.isnan(predictions(rows["nan"], refused, allowed)[1]).all()


def _build_city():
    return torch.nn.Sequential(torch.nn.Embedding(4, 3))  # three words, and all others


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("storage", ["shared", pytest.param("local", marks=pytest.mark.slow)])
def test_a_run_on_new_rows_begins_with_the_weights_and_the_words_of_another(spark, tmp_path, storage):
    """Of the new rows' own words, the most frequent one would have the index of another word of the first run."""
    data = {"features": ("city",), "encode": {"city": {"as": "vocabulary"}}, "storage": storage}
    schema = "city string, label bigint"
    old = spark.createDataFrame([("Rome", 0)] * 60 + [("Oslo", 1)] * 40 + [("Bern", 2)] * 20, schema)
    new = spark.createDataFrame([("Oslo", 1)] * 60 + [("Pisa", 0)] * 30, schema)
    spec = ModelSpec(build=_build_city)
    settings = {"epochs": 20, "lr": 1.0}
    first = spark_dl.train(old, spec, small_config(2, train=settings, data=data), run_dir=str(tmp_path / "first"))
    before = first.load_model(spec).state_dict()["0.weight"]
    assert before.argmax(1)[1:].tolist() == [0, 1, 2]

    settings |= {"epochs": 1, "init_from": first.checkpoint}
    config = small_config(2, train=settings, data=data)
    after = spark_dl.train(new, spec, config, run_dir=str(tmp_path / "second")).load_model(spec).state_dict()
    changed = (after["0.weight"] != before).any(1).tolist()
    assert changed == [True, False, True, False]  # an unknown word, and Oslo
    assert checkpoint.latest(str(tmp_path / "second")).columns == checkpoint.latest(str(tmp_path / "first")).columns

    other = ModelSpec(build=build_mlp)
    with pytest.raises(ValueError, match=r"^train\.init_from: the weights of .* do not fit the model"):
        spark_dl.train(new, other, config, run_dir=str(tmp_path / "third"))
    assert not (tmp_path / "third" / "shards").exists()
