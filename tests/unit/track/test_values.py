"""Parameters and metrics, by the names that trackers show."""

import functools

import pytest
from torch import nn

from spark_dl import Config, Train
from spark_dl.track.events import as_key, as_value, flatten, metrics_of, name_of

STEP = {"kind": "step", "epoch": 0, "step": 10, "steps": 90, "loss": 0.5, "lr": 0.1, "rows_per_s": 99.0, "data_s": 0.2,
        "seconds": 1.0, "time": 5.0, "task": 0, "rank": 0, "host": "h", "pid": 3}  # fmt: skip


def test_a_step_has_its_numbers_and_nothing_of_who_sent_it():
    expected = {"train/loss": 0.5, "train/lr": 0.1, "train/rows_per_s": 99.0, "train/data_s": 0.2}
    assert metrics_of(STEP) == expected
    assert metrics_of({**STEP, "staleness": 2, "ranks": [{"wait_s": 1.0}]}) == {**expected, "train/staleness": 2.0}
    load = {"3.moe": {"share": [0.25, 0.75], "max_over_mean": 1.5, "dropped": 0.0}}
    assert metrics_of({**STEP, "expert_load": load}) == {**expected, "expert_load/3.moe": 1.5}


def test_an_epoch_has_the_mean_loss_and_the_metrics_of_the_validation():
    event = {"kind": "epoch", "epoch": 1, "step": 20, "steps": 90, "train_loss": 0.25, "time": 5.0, "rank": 0}
    metrics = {"loss": 0.5, "recall": [0.25, 1], "table": [[1, 2], [3, 4]], "name": "x", "good": True}
    assert metrics_of({**event, "metrics": metrics}) == {
        "train/epoch_loss": 0.25, "validation/loss": 0.5, "validation/recall/0": 0.25, "validation/recall/1": 1.0,
    }  # fmt: skip
    assert metrics_of({**event, "metrics": {}}) == {"train/epoch_loss": 0.25}
    assert metrics_of({"kind": "validation", "step": 15, "metrics": {"loss": 0.5}}) == {"validation/loss": 0.5}
    assert metrics_of({"kind": "test", "step": 20, "metrics": metrics}) == {
        "test/loss": 0.5, "test/recall/0": 0.25, "test/recall/1": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("event", [{"kind": "joined", "rank": 0}, {"kind": "checkpoint", "step": 3, "url": "/r"}])
def test_other_events_have_no_metrics(event):
    assert metrics_of(event) == {}


def test_settings_are_strings_by_their_keys():
    found = flatten(
        {"train": {"lr": 0.1, "optimizer": "SGD", "args": {}, "nested": {"a": [1, None]}}, "sequences": None}
    )
    assert found == {
        "train.lr": "0.1", "train.optimizer": "SGD", "train.args": "{}", "train.nested.a": "[1, null]",
        "sequences": "null",
    }  # fmt: skip
    config = Config(train=Train(metrics={"top": {"class": "MulticlassAccuracy", "num_classes": 3}}))
    assert flatten(config.to_dict())["train.metrics.top.class"] == "MulticlassAccuracy"


@pytest.mark.parametrize(("name", "expected"), [
    ("validation/loss", "validation/loss"), ("validation/f1@0.5", "validation/f1_0.5"),
    ("data.cast.größe", "data.cast.gr__e"),
    ("/a/", "a"), ("x" * 20 + "end", "x" * 7 + "end"),
])  # fmt: skip
def test_a_name_has_only_what_mlflow_accepts(name, expected):
    assert as_key(name, 10 if name.startswith("x") else 250) == expected


def test_a_long_value_is_shortened():
    assert as_value("a" * 500, 500) == "a" * 500
    assert as_value("a" * 501, 500) == "a" * 497 + "..."


class Callme:
    def __call__(self):
        pass


@pytest.mark.parametrize(("function", "name"), [
    (test_a_long_value_is_shortened, "test_a_long_value_is_shortened"), (functools.partial(len, "a"), "len"),
    (Callme(), "Callme"), (nn.CrossEntropyLoss(), "CrossEntropyLoss"), (nn.Linear, "Linear"),
])  # fmt: skip
def test_a_function_has_a_name(function, name):
    assert name_of(function) == name
