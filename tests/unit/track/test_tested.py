"""Metrics of test rows: in the run's file and in its MLflow run, and never the end of a training that succeeded."""

import json
import logging
import os
from types import SimpleNamespace

import mlflow
import pytest

from spark_dl import Config
from spark_dl.rundir.metrics import read_metrics
from spark_dl.track import tested
from tests.builders.models import small_config
from tests.builders.run_folders import make_run

METRICS = {"loss": 0.25, "accuracy": 0.75, "recall": [0.5, 1.0]}


def result_of(run_dir):
    return SimpleNamespace(run_dir=str(run_dir), checkpoint=f"{run_dir}/checkpoints/step-20", steps=20, epochs=2)


def test_they_are_a_line_after_those_of_the_run(tmp_path):
    run = make_run(tmp_path / "run")
    before = read_metrics(str(run))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "st')  # a rank was killed in the middle of a line
    tested.record(result_of(run), Config(), METRICS, 99)
    *others, line = read_metrics(str(run))
    assert others == before
    assert line.pop("time") > 1.7e9
    assert line == {
        "kind": "test", "step": 20, "epoch": 1, "checkpoint": f"{run}/checkpoints/step-20", "rows": 99,
        "metrics": METRICS,
    }  # fmt: skip


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    os.rename(run / "metrics.jsonl", run / "moved")
    os.symlink(run / "moved", run / "metrics.jsonl")
    with caplog.at_level(logging.WARNING, "spark_dl"):
        tested.record(result_of(run), Config(), METRICS, 99)
    assert "the metrics of the test rows are not in metrics.jsonl" in caplog.text


def test_mlflow_has_them_beside_those_of_the_training(tmp_path, monkeypatch, caplog):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    client = mlflow.MlflowClient(uri)
    logged = client.create_run("0")
    client.set_terminated(logged.info.run_id)
    run = make_run(tmp_path / "run")
    saved = {"run_id": logged.info.run_id, "tracking_uri": uri}
    (run / "mlflow.json").write_text(json.dumps(saved))
    config = small_config(1, mlflow=True)
    tested.record(result_of(run), config, METRICS, 99)
    found = client.get_run(logged.info.run_id)
    assert found.data.metrics == {
        "test/loss": 0.25, "test/accuracy": 0.75, "test/recall/0": 0.5, "test/recall/1": 1.0,
    }  # fmt: skip
    assert [m.step for m in client.get_metric_history(logged.info.run_id, "test/loss")] == [20]
    assert found.info.status == "FINISHED"
    client.delete_run(logged.info.run_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "spark_dl"):
        tested.record(result_of(run), config, METRICS, 99)
    assert "the metrics of the test rows are not in MLflow: track.mlflow: the server" in caplog.text


@pytest.mark.parametrize("uri", ["", "sqlite:///elsewhere.db"])
def test_without_an_mlflow_run_of_this_server_nothing_is_logged(tmp_path, monkeypatch, uri):
    own = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    if uri:
        (run / "mlflow.json").write_text(json.dumps({"run_id": "0" * 32, "tracking_uri": uri}))
    tested.record(result_of(run), small_config(1, mlflow=True), METRICS, 99)
    assert mlflow.MlflowClient(own).search_runs(["0"]) == []
