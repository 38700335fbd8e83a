"""A run that goes on from a checkpoint with other rows, words, models, metrics: right, or an error on the driver."""

import dataclasses
import os

import pytest
import torch
from pyspark.sql import functions as F
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler

import spark_dl
from spark_dl import ModelSpec, Optimization, Train
from spark_dl.rundir import checkpoint
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, build_mlp, small_config

ROWS = "features array<float>, label bigint"


def frame(spark, rows, seed=0, partitions=2):
    columns = blobs(rows, seed)
    plain = [(x.tolist(), int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(plain, ROWS).repartition(partitions)


def config(epochs, ranks=1, **fields):
    return small_config(ranks, train={"epochs": epochs, **fields})


def without_rate(epochs):
    """Settings for a model with an optimizer of its own."""
    return config(epochs, lr=Train().lr)


def classes(number):
    return ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, number)))


# Rows


@pytest.mark.modes("local")
def test_R8_the_rows_of_another_DataFrame_are_trained_on_from_the_next_epoch_on(spark, tmp_path, caplog):
    run_dir = str(tmp_path / "run")
    spark_dl.train(frame(spark, 480), MLP, config(1), run_dir=run_dir)
    more = spark_dl.train(frame(spark, 960, seed=1), MLP, config(2), run_dir=run_dir, resume=True)
    assert (more.rows, more.steps) == (480 + 960, 10 + 20)
    assert spark_dl.read_shards(f"{run_dir}/shards/train").rows == 960
    same = spark_dl.train(f"{run_dir}/shards/train", MLP, config(3), run_dir=run_dir, resume=True, spark=spark)
    assert same.rows == 480 + 2 * 960


@pytest.mark.modes("local")
def test_R8_in_the_middle_of_an_epoch_other_rows_are_an_error_that_says_how_to_go_on(spark, tmp_path, caplog):
    run_dir = str(tmp_path / "run")
    first = frame(spark, 480).cache()
    spark_dl.train(first, MLP, config(1, max_steps=4), run_dir=run_dir)
    with pytest.raises(
        ValueError, match=r"has other rows than the 480 .*\(it has 960 rows\).*pass '.*/shards/train' in"
    ):
        spark_dl.train(frame(spark, 960), MLP, config(1), run_dir=run_dir, resume=True)
    other = first.withColumn("features", first.features.cast("array<double>"))
    with pytest.raises(ValueError, match=r"has other rows than .*\(its columns have changed\)"):
        spark_dl.train(other, MLP, config(1), run_dir=run_dir, resume=True)
    caplog.clear()
    assert spark_dl.train(first, MLP, config(1), run_dir=run_dir, resume=True).rows == 480


@pytest.mark.modes("local")
def test_R8_a_DataFrame_of_files_is_known_to_be_the_same_or_others(spark, tmp_path, caplog):
    run_dir, path = str(tmp_path / "run"), str(tmp_path / "table")
    frame(spark, 480).write.parquet(path)
    spark_dl.train(spark.read.parquet(path), MLP, config(1, max_steps=4), run_dir=run_dir)
    caplog.clear()
    spark_dl.train(spark.read.parquet(path), MLP, config(1, max_steps=6), run_dir=run_dir, resume=True)
    assert "DataFrame" not in caplog.text
    frame(spark, 480, seed=1).write.mode("overwrite").parquet(path)
    with pytest.raises(ValueError, match=r"has other rows than .*\(its plan, its files"):
        spark_dl.train(spark.read.parquet(path), MLP, config(1), run_dir=run_dir, resume=True)


@pytest.mark.modes("local")
def test_R7_scores_of_other_validation_rows_are_not_compared(spark, tmp_path):
    run_dir = str(tmp_path / "run")
    fields = {"early_stop_metric": "loss", "early_stop_patience": 2}
    easy = frame(spark, 48)
    hard = frame(spark, 48, seed=1).withColumn("label", F.lit(1).cast("bigint"))
    spark_dl.train(frame(spark, 480), MLP, config(2, **fields), validation=easy, run_dir=run_dir)
    result = spark_dl.train(frame(spark, 480), MLP, config(4, **fields), validation=hard, run_dir=run_dir, resume=True)
    losses = [entry["metrics"]["loss"] for entry in result.history]
    assert min(losses[2:]) > max(losses[:2])
    best = checkpoint.find(result.best_checkpoint)
    assert best.score == min(losses[2:])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, word):
        return self.head(self.words(word))


def words(spark, often):
    rows = [(word, int(word == "a")) for word in ("a", "b", "c") for _ in range(60 if word == often else 30)]
    return spark.createDataFrame(rows, "word string, label bigint").repartition(2)


@pytest.mark.modes("local")
def test_R2_words_keep_their_numbers_when_the_rows_of_another_day_are_trained_on(spark, tmp_path):
    run_dir = str(tmp_path / "run")
    data = spark_dl.Data(features=("word",), label="label", encode={"word": {"as": "vocabulary"}})
    settings = {n: dataclasses.replace(config(n), data=data) for n in (1, 2)}
    spec = ModelSpec(build=Words)
    first = spark_dl.train(words(spark, "a"), spec, settings[1], run_dir=run_dir)
    second = spark_dl.train(words(spark, "c"), spec, settings[2], run_dir=run_dir, resume=True)
    before, after = (checkpoint.find(r.checkpoint).columns[0].encoding.vocabulary for r in (first, second))
    assert before == after
    other = spark_dl.write_shards(words(spark, "b"), str(tmp_path / "other"), data)
    assert other.select(("word",))[0].encoding.vocabulary != before
    more = dataclasses.replace(settings[2], train=dataclasses.replace(settings[2].train, epochs=3))
    with pytest.raises(ValueError, match="word"):
        spark_dl.train(other.url, spec, more, run_dir=run_dir, resume=True, spark=spark)


# What the driver can know


@pytest.mark.modes("local")
def test_R14_R13_a_model_or_an_optimizer_of_another_shape_or_class_is_one_error_on_the_driver(spark, tmp_path):
    url, run_dir = str(tmp_path / "data"), str(tmp_path / "run")
    write_dataset(url, blobs(96))
    options = {"run_dir": run_dir, "spark": spark}
    spark_dl.train(url, classes(3), without_rate(1), **options)
    message = (
        r"cannot resume: the weights of .* do not fit .*2\.weight: \[3, 16\] in the checkpoint, \[7, 16\] in the model"
    )
    with pytest.raises(ValueError, match=message):
        spark_dl.train(url, classes(7), without_rate(2), **options, resume=True)
    adam = dataclasses.replace(classes(3), optimizer=lambda model: Adam(model.parameters()))
    with pytest.raises(ValueError, match="cannot resume: the optimizer was SGD, and is Adam now"):
        spark_dl.train(url, adam, without_rate(2), **options, resume=True)
    assert [saved.generation for saved in checkpoint.list_checkpoints(run_dir)] == [1]


def one_cycle(total):
    def optimizer(model):
        made = SGD(model.parameters(), lr=0.1)
        return Optimization(optimizer=made, scheduler=lr_scheduler.OneCycleLR(made, 0.1, total), interval="step")

    return ModelSpec(build=build_mlp, optimizer=optimizer)


@pytest.mark.modes("local")
def test_R15_a_cycle_that_is_shorter_than_the_run_is_an_error_before_it_starts(spark, tmp_path):
    url = str(tmp_path / "data")
    write_dataset(url, blobs(96))
    options = {"run_dir": str(tmp_path / "run"), "spark": spark}
    message = r"OneCycleLR has total_steps=3, and the run steps it 4 times \(4 steps, 2 in an epoch\)"
    with pytest.raises(ValueError, match=rf"^spec\.optimizer: {message}"):
        spark_dl.train(url, one_cycle(3), without_rate(2), **options)
    fields = {"scheduler": "OneCycleLR", "scheduler_interval": "step", "optimizer": "SGD"}
    short = config(2, **fields, scheduler_args={"max_lr": 0.1, "total_steps": 3})
    with pytest.raises(ValueError, match=rf"^train\.scheduler_args: {message}"):
        spark_dl.train(url, MLP, short, **options)
    assert spark_dl.train(url, one_cycle(4), without_rate(2), **options).steps == 4
    with pytest.raises(ValueError, match=r"total_steps=4, and the run steps it 6 times"):
        spark_dl.train(url, one_cycle(4), without_rate(3), **options, resume=True)
    assert spark_dl.train(url, one_cycle(6), without_rate(3), **options, resume=True).steps == 6


# Scores


@pytest.mark.modes("local")
def test_R6_R19_R20_the_best_checkpoint_is_by_one_metric_and_of_the_branch_that_the_run_is_on(spark, tmp_path):
    url, run_dir = str(tmp_path / "data"), str(tmp_path / "run")
    write_dataset(url, blobs(480))
    fields = {"validation_fraction": 0.2, "metrics": {"acc": {"class": "MulticlassAccuracy", "num_classes": 3}}}
    options = {"run_dir": run_dir, "spark": spark}
    five = spark_dl.train(url, MLP, config(5, **fields, keep=5), **options)
    scores = [entry["metrics"]["loss"] for entry in five.history]
    assert checkpoint.find(five.best_checkpoint).score == min(scores), "without a setting"
    first = checkpoint.list_checkpoints(run_dir)[0]
    back = spark_dl.train(url, MLP, config(2, **fields, keep=5), **options, resume=first.url)
    assert checkpoint.find(back.best_checkpoint).step <= back.steps
    assert checkpoint.find(back.best_checkpoint).score == min(entry["metrics"]["loss"] for entry in back.history)
    by_accuracy = {**fields, "early_stop_metric": "acc", "early_stop_mode": "max"}
    last = spark_dl.train(url, MLP, config(4, **by_accuracy, keep=5), **options, resume=True)
    best = checkpoint.find(last.best_checkpoint)
    assert best.manifest["score_of"] == {"metric": "acc", "mode": "max", "rows": None}
    assert best.score == max(entry["metrics"]["acc"] for entry in last.history[2:])


@pytest.mark.modes("local")
def test_R22_a_run_that_is_over_has_the_metrics_of_its_last_step(spark, tmp_path):
    url = str(tmp_path / "data")
    write_dataset(url, blobs(480))
    options = {"run_dir": str(tmp_path / "run"), "spark": spark}
    settings = config(2, validation_fraction=0.2, max_steps=12)
    first = spark_dl.train(url, MLP, settings, **options)
    again = spark_dl.train(url, MLP, settings, **options, resume=True)
    assert first.metrics == again.metrics
    assert again.metrics != again.history[-1]["metrics"]


@pytest.mark.modes("local")
def test_R21_a_folder_whose_name_is_mistyped_and_a_run_that_is_over_are_told(spark, tmp_path, caplog):
    url = str(tmp_path / "data")
    write_dataset(url, blobs(96))
    spark_dl.train(url, MLP, config(2), run_dir=str(tmp_path / "nightly"), spark=spark)
    spark_dl.train(url, MLP, config(1), run_dir=str(tmp_path / "nightli"), spark=spark, resume=True)
    assert f"begins from the start; {tmp_path / 'nightly'} has some, if you mean that" in caplog.text
    caplog.clear()
    again = spark_dl.train(url, MLP, config(1), run_dir=str(tmp_path / "nightly"), spark=spark, resume=True)
    assert again.epochs == 2
    assert "no step was trained: the checkpoint" in caplog.text


def build_compiled():
    return nn.Sequential(torch.compile(nn.Linear(4, 16)), nn.Tanh(), nn.Linear(16, 3))


def by_weight(model, batch):
    return model(batch["features"]) * batch["weight"][:, None]


@pytest.mark.modes("local")
def test_R12_R23_a_model_that_reads_the_weights_of_rows_predicts_and_a_compiled_one_has_plain_names(spark, tmp_path):
    rows = frame(spark, 96)
    settings = dataclasses.replace(config(1), data=spark_dl.Data(features=("features",), label="label"))
    spec = ModelSpec(build=build_mlp, forward=by_weight)
    run = spark_dl.train(rows, spec, settings, run_dir=str(tmp_path / "run"))
    found = spark_dl.predict(rows, spec, run.run_dir)
    assert found.count() == 96
    spark_dl.save_model(tmp_path / "program", spec, run.checkpoint, format="export")
    assert spark_dl.predict(rows, str(tmp_path / "program")).exceptAll(found).isEmpty()
    compiled = spark_dl.train(rows, ModelSpec(build=build_compiled), settings, run_dir=str(tmp_path / "compiled"))
    weights = compiled.load_model(MLP).state_dict()
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.modes("local")
def test_R26_a_run_that_one_may_only_read_is_evaluated(spark, tmp_path, monkeypatch):
    rows, run_dir = frame(spark, 96), str(tmp_path / "run")
    result = spark_dl.train(rows, MLP, config(1), run_dir=run_dir)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != run_dir and access(path, mode))
    assert spark_dl.evaluate(rows, MLP, result.checkpoint)["rows"] == 96
    assert os.listdir(tmp_path / "run" / "shards") == ["train"]
