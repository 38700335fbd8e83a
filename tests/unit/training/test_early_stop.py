"""Which value of a metric is better."""

import pytest
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.regression import MeanSquaredError

from spark_dl import Config, Data, ModelSpec, Train
from spark_dl.training.row_metrics import better, with_mode

CLASSES = {
    "acc": {"class": "MulticlassAccuracy", "num_classes": 3},
    "auc": {"class": "BinaryAUROC"},
    "rmse": {"class": "MeanSquaredError", "squared": False},
    "r2": {"class": "R2Score"},
}
OWN = {
    "own": lambda output, batch: output,
    "auc of a class": BinaryAUROC,
    "mse": MeanSquaredError(),
    "mean": MeanMetric,
}
SPEC = ModelSpec(build=nn.Identity, metrics=OWN)


def config_of(**train):
    return Config(data=Data(label="label"), train=Train(metrics=CLASSES, **train))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("loss", "min"), ("train_loss", "min"), ("acc", "max"), ("auc", "max"), ("rmse", "min"), ("r2", "max"),
        ("auc of a class", "max"), ("mse", "min"), ("own", None), ("mean", None), ("of an evaluation", None),
    ],
)  # fmt: skip
def test_classes_of_torchmetrics_say_which_value_is_better(name, mode):
    assert better(name, SPEC, config_of()) == mode


def test_what_is_set_is_used():
    assert with_mode(SPEC, config_of(early_stop_metric="acc", early_stop_mode="min")).train.early_stop_mode == "min"
    assert with_mode(SPEC, config_of(early_stop_metric="acc")).train.early_stop_mode == "max"
    assert with_mode(SPEC, config_of()).train.early_stop_mode == "min"


def test_a_metric_of_ones_own_must_say_it():
    with pytest.raises(
        ValueError, match=r"^train\.early_stop_mode: 'own' does not say which value is better; set it to"
    ):
        with_mode(SPEC, config_of(early_stop_metric="own"))
