"""What validation steps log, over batches of different sizes, as Lightning computes it."""

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import MeanMetric

from spark_dl import ModelSpec, Train
from spark_dl.training import row_metrics
from spark_dl.training.state import TrainingProgress
from tests.builders.lightning_modules import Classifier

SIZES = (4, 1, 3)


def values_of(step):
    """The values of an evaluation of three batches, whose rows are numbered."""

    class Own(Classifier):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            return step(self, batch[0], batch_idx)

    spec = ModelSpec.from_lightning(Own)
    model = spec.build().eval()
    evaluation, first = spec.evaluation(model), 0
    with torch.inference_mode():
        for size in SIZES:
            evaluation.update({"x": torch.arange(first, first + size).float(), "weight": torch.ones(size)})
            first += size
    found = evaluation.compute()
    assert "log" not in vars(model)
    assert model.mean._update_count == 0
    return found


def log(**options):
    return lambda self, x, index: self.log("a", x.mean(), **options)


@pytest.mark.parametrize(("options", "expected"), [
    ({}, 3.5),
    ({"on_step": True, "on_epoch": True, "prog_bar": True, "sync_dist": True}, 3.5),
    ({"reduce_fx": torch.mean}, 3.5),
    ({"reduce_fx": "sum"}, 1.5 + 4 + 6),
    ({"reduce_fx": torch.max}, 6),
    ({"reduce_fx": "min"}, 1.5),
    ({"batch_size": 1}, (1.5 + 4 + 6) / 3),
])  # fmt: skip
def test_values_are_reduced_as_the_arguments_say(options, expected):
    assert values_of(log(**options)) == {"a": pytest.approx(expected)}


def test_values_of_steps_alone_are_not_kept():
    assert values_of(log(on_step=True, on_epoch=False)) == {}


def test_a_metric_is_computed_over_all_rows_and_reset():
    def step(self, x, index):
        self.mean.update(x)
        self.log_dict({"mean": self.mean, "index": index})

    assert values_of(step) == {"mean": 3.5, "index": pytest.approx((0 * 4 + 1 * 1 + 2 * 3) / 8)}


@pytest.mark.parametrize("returned", [lambda x: x.mean(), lambda x: {"loss": x.mean(), "more": x}], ids=["one", "dict"])
def test_what_the_step_returns_is_the_loss(returned):
    assert values_of(lambda self, x, index: returned(x)) == {"loss": pytest.approx(3.5)}


def test_a_value_that_is_logged_as_the_loss_is_it():
    def step(self, x, index):
        self.log("loss", 2.0)
        return x.mean()

    assert values_of(step) == {"loss": 2}


@pytest.mark.parametrize(("step", "error", "fact"), [
    (lambda self, x, i: self.log("a", x.repeat(2)), ValueError, r"self\.log\('a'\): expected one value, found shape"),
    (log(reduce_fx="median"), ValueError, "expected reduce_fx mean, sum, min or max, found 'median'"),
    (lambda self, x, i: self.log("a", i, reduce_fx="sum" if i else "mean"), ValueError, "expected one reduce_fx"),
    (lambda self, x, i: self.log("a", NOT_AN_ATTRIBUTE), ValueError, "expected a metric that is an attribute"),
    (lambda self, x, i: self.log("a", 1.0, onstep=True), TypeError, "onstep"),
])  # fmt: skip
def test_what_cannot_be_logged_is_an_error(step, error, fact):
    with pytest.raises(error, match=fact):
        values_of(step)


NOT_AN_ATTRIBUTE = MeanMetric()


def test_without_a_validation_step_the_loss_is_that_of_training():
    class TrainsOnly(Classifier):
        validation_step = pl.LightningModule.validation_step

        def training_step(self, batch, batch_idx):
            self.log("train", 1.0)
            return batch[0].mean()

    spec = ModelSpec.from_lightning(TrainsOnly)
    evaluation = spec.evaluation(spec.build().eval())
    for x in ([1.0, 2.0], [6.0]):
        evaluation.update({"x": torch.tensor(x), "weight": torch.ones(len(x))})
    assert evaluation.compute() == {"loss": 3.0}


def test_early_stopping_at_a_name_that_was_not_logged_is_an_error_that_names_those_that_were():
    train, values = Train(early_stop_metric="val_loss"), values_of(log())
    with pytest.raises(ValueError, match=r"train\.early_stop_metric: expected one of \['a'\].*found 'val_loss'"):
        row_metrics.decide(TrainingProgress(), train, values, torch.device("cpu"))
