"""The ledger of a run says which rows each step has used: those that a loader reads."""

import dataclasses
import shutil

import pytest
import torch
from pyspark.sql import functions as F
from torch.nn import functional

import spark_dl
from spark_dl import Checkpoint, ModelSpec
from spark_dl.data.load.build import build_train_loader
from spark_dl.evaluate import load_model
from spark_dl.ledger import _open
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import small_config

COLUMNS = ("epoch", "step", "global_step", "dataset", "file", "row", "logged_loss", "id")


def build():
    return torch.nn.Linear(1, 1)


def loss(model, batch):
    return functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])


def output(model, batch):
    return model(batch["x"][:, None])[:, 0]


def of_rows(output, batch):
    return (output - batch["y"]).square()


SPEC = ModelSpec(build=build, batch_loss=loss)
DATA = {"features": ("x", "y", "id"), "label": None}


def rows(spark, first, last):
    return spark.range(first, last, 1, 3).selectExpr("id", "CAST(id / 500 AS FLOAT) AS x", "CAST(id % 7 AS FLOAT) AS y")


def config(**more):
    train = {"global_batch_size": 24, "epochs": 2, "log_every": 2, "lr": 0.01, **more.pop("train", {})}
    return small_config(2, train, DATA, **more)


def steps_of_loader(url, epochs):
    """The ids of each step that a loader reads."""
    run = _open(url)
    loader = build_train_loader(run.data, SPEC, run.config, rank=0, world_size=1)
    return {
        (epoch, step.step): sorted(n for each in step.micro_batches for n in each["id"][each["weight"] > 0].tolist())
        for epoch in range(epochs)
        for step in loader.epoch(epoch)
    }  # fmt: skip


def steps_of_ledger(lines):
    found = {}
    for line in lines:
        found.setdefault((line["epoch"], line["step"]), []).append(line["id"])
    return {step: sorted(ids) for step, ids in found.items()}


@pytest.mark.modes("local", "connect")
def test_a_line_for_each_row_of_each_step(spark, tmp_path):
    url = str(tmp_path / "run")
    given = config(train={"validation_fraction": 0.1, "max_steps": 12})
    result = spark_dl.train(rows(spark, 0, 230), SPEC, given, run_dir=url, spark=spark)
    ledger = spark_dl.ledger(url, columns=["id"], spark=spark)
    assert tuple(ledger.columns) == COLUMNS
    lines = ledger.collect()
    expected = steps_of_loader(url, 2)
    steps = max(step for _, step in expected) + 1
    assert result.steps == 12 < 2 * steps
    assert steps_of_ledger(lines) == {at: ids for at, ids in expected.items() if at[0] * steps + at[1] < 12}
    losses = {line["step"]: line["loss"] for line in read_metrics(url) if line["kind"] == "step"}
    for line in lines:
        assert line["global_step"] == line["epoch"] * steps + line["step"] + 1
        assert line["logged_loss"] == losses.get(line["global_step"])
    assert {line["dataset"] for line in lines} == {""}
    assert spark_dl.ledger(url, spark=spark).where("global_step = 3").count() == 24


@pytest.mark.modes("local")
@pytest.mark.parametrize("is_batch_loss", [False, True])
def test_the_rows_of_a_step_have_their_losses_the_largest_first(spark, tmp_path, is_batch_loss):
    url = str(tmp_path / "run")
    given = config(train={"validation_fraction": 0.1}, checkpoint=Checkpoint(every_steps=3, keep=9))
    wrong = rows(spark, 0, 230).withColumn("y", F.expr("IF(id = 77, 100f, y)"))
    spec = SPEC if is_batch_loss else ModelSpec(build=build, forward=output, loss=of_rows)
    spark_dl.train(wrong, spec, given, run_dir=url, spark=spark)
    ids = steps_of_ledger(spark_dl.ledger(url, columns=["id"], spark=spark).collect())
    at = next(step for step, found in ids.items() if step[0] == 1 and 77 in found)
    step = 1 + at[0] * len({s for _, s in ids}) + at[1]
    found = spark_dl.why(url, spec, step, columns=["id", "x", "y"], spark=spark).collect()
    assert sorted(line["id"] for line in found) == ids[at]
    assert found[0]["id"] == 77
    saved = [each for each in checkpoint.list_checkpoints(url) if each.step < step][-1]
    model = load_model(spec, saved.url)
    for line in found:
        expected = (float(model(torch.tensor([[line["x"]]]))) - line["y"]) ** 2
        assert line["loss"] == pytest.approx(expected, rel=1e-4)
        assert line["weight"] == 1
    with pytest.raises(ValueError, match=r"why: step: expected 1 to \d+, the last checkpoint of .*, found 99"):
        spark_dl.why(url, spec, 99, spark=spark)


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("epoch_size", [None, 96])
def test_a_mixture_has_the_rows_of_each_dataset_as_often_as_they_are_read(spark, tmp_path, epoch_size):
    url = str(tmp_path / "run")
    loader = dataclasses.replace(
        config().loader, proportions={"small": 1, "large": 2}, num_streams=8, epoch_size=epoch_size
    )
    given = dataclasses.replace(config(), loader=loader)
    data = {"small": rows(spark, 0, 50), "large": rows(spark, 1000, 1230)}
    spark_dl.train(data, SPEC, given, run_dir=url, spark=spark)
    lines = spark_dl.ledger(url, columns=["id"], spark=spark).collect()
    assert steps_of_ledger(lines) == steps_of_loader(url, 2)
    assert {(line["dataset"], line["id"] >= 1000) for line in lines} == {("small", False), ("large", True)}


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B27_what_the_plan_does_not_know_is_an_error(spark, tmp_path):
    url = str(tmp_path / "run")
    spark_dl.train(rows(spark, 0, 60), SPEC, config(train={"epochs": 1}), run_dir=url, spark=spark)
    with pytest.raises(ValueError, match="ledger: no column 'idd' in the dataset .*; did you mean 'id'.*is read in th"):
        spark_dl.ledger(url, columns=["idd"], spark=spark)
    with pytest.raises(ValueError, match="no checkpoint"):
        spark_dl.ledger(str(tmp_path / "none"), spark=spark)
    shards = _open(url).data.url
    shutil.rmtree(shards)
    spark_dl.write_shards(rows(spark, 0, 61), shards, config().data)
    with pytest.raises(ValueError, match=f"ledger: the dataset at {shards} has changed since the training"):
        spark_dl.ledger(url, spark=spark)
