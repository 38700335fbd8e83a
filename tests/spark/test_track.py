"""Tracking of runs on Spark: jobs in Spark's UI, TensorBoard, profiles, and a real MLflow server on SQLite."""

import json
import logging
import os
from pathlib import Path

import mlflow
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import spark_dl
from benchmarks.peers.track import MlflowServer
from spark_dl.ml import TorchClassifier
from tests.builders.models import MLP, blobs, build_mlp, small_config


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(240)
    rows = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").coalesce(1).cache()


def jobs_of(spark):
    """Description and group of the session's jobs, by their numbers."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    found = {}
    for i in range(jobs.size()):
        job = jobs.apply(i)
        found[job.jobId()] = (text_of(job.description()), text_of(job.jobGroup()))
    return found


def text_of(option):
    return str(option.get()) if option.isDefined() else ""


def rank_number():
    return int(os.environ["RANK"])


@pytest.mark.slow
@pytest.mark.modes("local")
def test_jobs_name_the_run_in_spark_s_ui_and_the_user_s_group_stays(spark, points, tmp_path):
    context, run = spark.sparkContext, str(tmp_path / "run")
    context.setJobGroup("etl", "the nightly job")
    before = jobs_of(spark)
    try:
        spark_dl.train(points, MLP, small_config(2, train={"epochs": 1}), run_dir=run)
        spark_dl.evaluate(points, MLP, run)
        spark_dl.launch(rank_number, num_ranks=1)
        own = small_config(2, train={"max_steps": 2}, parallel=spark_dl.TreeReduce())
        spark_dl.train(f"{run}/shards/train", MLP, own, run_dir=f"{run}-2")
        assert context.getLocalProperty("spark.jobGroup.id") == "etl"
        assert context.getLocalProperty("spark.job.description") == "the nightly job"
        spark.range(3).count()
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)
    after = jobs_of(spark)
    jobs = [after[number] for number in sorted(after.keys() - before.keys())]
    descriptions = list(dict.fromkeys(description for description, _ in jobs))
    (evaluated,) = [d for d in descriptions if d.startswith("spark_dl: writing the rows of") and "evaluate-" in d]
    (checkpoint,) = Path(run, "checkpoints").iterdir()
    assert descriptions == [
        f"spark_dl: writing the rows of {run}/shards/train",
        f"spark_dl train: 2 ranks, {run}",
        evaluated,
        f"spark_dl evaluate: 2 ranks, {checkpoint}",
        "spark_dl launch: 1 rank, rank_number",
        f"spark_dl train: 2 ranks, {run}-2, tree_reduce",
        "the nightly job",
    ]
    assert jobs[-1] == ("the nightly job", "etl")
    assert {group for description, group in jobs if "writing" in description} == {"etl"}


@pytest.mark.modes("local", "connect")
def test_the_settings_of_a_pipeline_track_a_fit_too(points, tmp_path):
    settings = {"track.tensorboard": True, "track.profile_steps": [2, 3], "train.log_every": 1}
    config = small_config(2)
    TorchClassifier(build_mlp, config, settings=settings, epochs=1, runDir=str(tmp_path), progress=False).fit(points)
    (run,) = tmp_path.iterdir()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert sorted(os.listdir(run / "profile")) == [
        f"rank-{rank}.{end}" for rank in range(2) for end in ("pt.trace.json.gz", "summary.json")
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with MlflowServer(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


@pytest.fixture(autouse=True)
def on_the_server(request, monkeypatch):
    if "server" in request.fixturenames:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("server").uri)


def tracked_config(server, train=None, **track):
    return small_config(2, train=train, mlflow=True, **track)


def found_run(server, run_dir):
    client = mlflow.MlflowClient(server.uri)
    return client.get_run(json.loads(Path(run_dir, "mlflow.json").read_text())["run_id"]), client


def steps_of(client, found):
    return [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_run_is_on_the_server_with_its_model_and_goes_on_when_it_is_resumed(
    points, server, tmp_path, monkeypatch, caplog
):
    train = {"epochs": 2, "validation_fraction": 0.2}
    options = {"mlflow_log_model": True, "mlflow_registered_model_name": "points", "mlflow_log_checkpoint": True}
    config = tracked_config(server, train, **options)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "spark")
    run_dir = str(tmp_path / "run")
    with caplog.at_level(logging.INFO, "spark_dl"):
        result = spark_dl.train(points, MLP, config, run_dir=run_dir)
    found, client = found_run(server, run_dir)
    assert client.get_experiment(found.info.experiment_id).name == "spark"
    assert found.info.status == "FINISHED"
    assert f"MLflow ({server.uri}/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id})" in caplog.messages
    assert (found.data.params["train.epochs"], found.data.params["launch.num_ranks"]) == ("2", "2")
    assert steps_of(client, found) == list(range(1, result.steps + 1))
    assert found.data.metrics["validation/loss"] == pytest.approx(result.metrics["loss"])
    uploaded = [artifact.path for artifact in client.list_artifacts(found.info.run_id, "checkpoint")]
    assert uploaded == [f"checkpoint/{name}" for name in sorted(os.listdir(result.checkpoint))]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    x = torch.randn(6, 4)
    expected = result.load_model(MLP)(x)
    assert torch.allclose(mlflow.pytorch.load_model("models:/points/1")(x), expected, atol=1e-6)
    loaded = mlflow.pyfunc.load_model("models:/points/1", model_config={"device": "cpu"})
    assert torch.allclose(torch.from_numpy(loaded.predict(x.numpy())), expected.detach(), atol=1e-6)

    longer = tracked_config(server, {**train, "epochs": 3}, **options)
    more = spark_dl.train(points, MLP, longer, run_dir=run_dir, resume=True)
    again, client = found_run(server, run_dir)
    assert (again.info.run_id, again.info.status) == (found.info.run_id, "FINISHED")
    assert steps_of(client, again) == list(range(1, more.steps + 1))
    assert client.get_model_version("points", "2").run_id == found.info.run_id


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.long
def test_a_server_that_is_killed_costs_a_run_nothing(points, server, tmp_path, caplog):
    run_dirs = [str(tmp_path / name) for name in ("restarted", "killed")]

    def kill(event):
        if event["kind"] == "step" and event["step"] == 3:
            server.kill()

    def kill_and_restart(event):
        kill(event)
        if event["kind"] == "step" and event["step"] == 8:
            server.start()

    config = tracked_config(server, {"epochs": 3})
    result = spark_dl.train(points, MLP, config, run_dir=run_dirs[0], on_event=kill_and_restart)
    found, client = found_run(server, run_dirs[0])
    assert found.info.status == "FINISHED"
    assert steps_of(client, found) == list(range(1, result.steps + 1)), "nothing is missing"

    caplog.clear()
    log_model = tracked_config(server, {"epochs": 3}, mlflow_log_model=True)
    result = spark_dl.train(points, MLP, log_model, run_dir=run_dirs[1], on_event=kill)
    assert result.steps == 15
    lines = [json.loads(line) for line in Path(run_dirs[1], "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 16))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "the server does not answer; training continues, and the metrics are sent later" in warnings[0]
    assert "event(s) of the run were not written; metrics.jsonl has them" in warnings[1]

    with pytest.raises(RuntimeError, match=rf"track.mlflow: the server {server.uri} does not answer; start it"):
        spark_dl.train(points, MLP, config, run_dir=str(tmp_path / "next"))
    assert not (tmp_path / "next").exists(), "nothing is written for a run that cannot be tracked"
