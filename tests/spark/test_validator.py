"""A validation beside a training: its metrics are those of `evaluate`, and the training does not notice it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from pyspark.sql import functions as F

import spark_dl
from spark_dl import Checkpoint, ModelSpec
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import build_mlp, same_bits, small_config
from tests.builders.settings import parallel

DATA = {"features": ("a", "b", "c", "d"), "label": "label"}


def forward(model, batch):
    return model(torch.stack([batch[name] for name in DATA["features"]], 1))


SPEC = ModelSpec(build=build_mlp, forward=forward, loss="CrossEntropyLoss")


def rows(spark, first, last):
    cells = [f"CAST(({n} * id) % 17 / 17 AS FLOAT) AS {name}" for n, name in zip((1, 3, 5, 7), "abcd", strict=True)]
    return spark.range(first, last, 1, 1).selectExpr(*cells, "id % 3 AS label")


def config(num_ranks=2, **checkpoints):
    metric = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3, "average": "micro"}}
    given = small_config(num_ranks, {"metrics": metric}, DATA)
    return dataclasses.replace(given, checkpoint=Checkpoint(**{"every_steps": 3, "keep": 20, **checkpoints}))


@pytest.mark.modes("local", "connect")
def test_each_checkpoint_has_the_metrics_of_an_evaluation_and_the_weights_do_not_change(spark, tmp_path):
    data, held_out, url = rows(spark, 0, 300), rows(spark, 300, 401), str(tmp_path / "run")
    with spark_dl.Validator(held_out, SPEC, config(), spark=spark) as validator:
        result = spark_dl.train(data, SPEC, config(), run_dir=url, on_event=validator, spark=spark)
    saved = checkpoint.list_checkpoints(url)
    assert [line["checkpoint"] for line in validator.results] == [each.url for each in saved]
    assert len(saved) > 3
    assert saved[-1].url == result.checkpoint
    assert validator.failed == []
    for line in (validator.results[0], validator.results[-1]):
        expected = spark_dl.evaluate(held_out, SPEC, line["checkpoint"], spark=spark)
        assert {"rows": 101, **line["metrics"]} == pytest.approx(expected, rel=1e-6)
    for metric, of_all in (("loss", min), ("accuracy", max)):
        expected = of_all(line["metrics"][metric] for line in validator.results)
        assert validator.best(metric)["metrics"][metric] == expected

    with pytest.raises(ValueError, match=r"Validator.best: expected one of \['loss', 'accuracy'\], found 'recall'"):
        validator.best("recall")
    validator.results.insert(0, {**validator.results[0], "metrics": {"loss": float("nan"), "accuracy": 0.0}})
    assert validator.best()["metrics"]["loss"] < 2
    del validator.results[0]

    lines = [line for line in read_metrics(url) if line["kind"] == "validation"]
    assert [(line["step"], line["metrics"]) for line in lines] == [
        (line["step"], line["metrics"]) for line in validator.results
    ]
    assert "accuracy" in Path(spark_dl.report(url)).read_text()
    alone = spark_dl.train(data, SPEC, config(), run_dir=str(tmp_path / "alone"), spark=spark)
    assert same_bits(*[load_weights(checkpoint.find(each.checkpoint)) for each in (result, alone)])


@pytest.mark.modes("local")
def test_a_mesh_is_validated_by_ranks_that_have_the_whole_model(spark, tmp_path):
    mesh = dataclasses.replace(config(), parallel=parallel("mesh", pipeline=2, schedule="gpipe"))
    spec = ModelSpec(build=build_mlp, loss="CrossEntropyLoss", forward=None)
    data = {"features": ("features",), "label": "label"}
    mesh = dataclasses.replace(mesh, data=spark_dl.Data(**data), train=dataclasses.replace(mesh.train, metrics={}))
    points = rows(spark, 0, 96).selectExpr("array(a, b, c, d) AS features", "label")
    with spark_dl.Validator(points, spec, mesh) as validator:
        result = spark_dl.train(points, spec, mesh, run_dir=str(tmp_path / "run"), on_event=validator)
    assert validator.results[-1]["checkpoint"] == result.checkpoint
    assert validator.best() in validator.results


@pytest.mark.modes("local")
def test_too_few_slots_for_both_are_an_error_before_the_training(spark):
    validator = spark_dl.Validator(rows(spark, 0, 9), SPEC, config(), num_ranks=3)
    with pytest.raises(RuntimeError, match="5 ranks need 5 task slots at the same time, and the cluster has 4"):
        validator.__enter__()


@pytest.mark.modes("local")
def test_what_cannot_be_evaluated_is_said_and_does_not_end_the_training(spark, tmp_path, caplog):
    held_out, url = rows(spark, 0, 30).withColumn("label", F.lit(7)), str(tmp_path / "run")
    validator = spark_dl.Validator(held_out, SPEC, config())
    with pytest.raises(RuntimeError, match=r"the checkpoint .*step-\d+.* could not be evaluated") as error, validator:
        result = spark_dl.train(rows(spark, 0, 96), SPEC, config(), run_dir=url, on_event=validator)
    assert "label" in str(error.value.__cause__)
    assert result.steps == 4
    assert validator.results == []
    assert [failed for failed, _ in validator.failed][-1] == result.checkpoint
    with pytest.raises(LookupError, match=r"Validator.best: no checkpoint has been evaluated"):
        validator.best()


@pytest.mark.modes("local")
def test_a_checkpoint_that_was_deleted_before_its_turn_is_left_out(spark, tmp_path, caplog):
    url = str(tmp_path / "run")
    result = spark_dl.train(rows(spark, 0, 300), SPEC, config(), run_dir=url)
    saved = checkpoint.list_checkpoints(url)
    shutil.rmtree(saved[1].url)
    with spark_dl.Validator(rows(spark, 300, 330), SPEC, config()) as validator:
        for line in read_metrics(url):
            validator(line)
    assert [line["checkpoint"] for line in validator.results] == [saved[0].url, *(each.url for each in saved[2:])]
    assert f"the checkpoint of step {saved[1].step} was deleted before its turn" in caplog.text
    assert json.loads(json.dumps(validator.results))[-1]["checkpoint"] == result.checkpoint


@pytest.mark.modes("local")
def test_an_error_of_the_training_ends_the_validation_after_the_current_checkpoint(spark, tmp_path):
    def fails(event):
        if event["kind"] == "epoch":
            raise KeyError("of the user")

    validator = spark_dl.Validator(rows(spark, 300, 330), SPEC, config())
    with pytest.raises(KeyError, match="of the user"), validator:
        spark_dl.train(
            rows(spark, 0, 300), SPEC, config(every_steps=1), run_dir=str(tmp_path / "run"),
            on_event=[validator, fails],
        )  # fmt: skip
    assert len(validator.results) < 7
