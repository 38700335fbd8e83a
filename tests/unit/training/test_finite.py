"""The check of each step finds NaN and Inf of any dtype in any place, and no large number; early stopping and NaN."""

import math

import pytest
import torch
from torch import nn

from spark_dl import Train
from spark_dl.training import row_metrics
from spark_dl.training.finite import (
    GRADIENT,
    LOSS,
    WEIGHT,
    NonFinite,
    NotFiniteTrainingError,
    StateCheck,
    StepCheck,
    check_loss_scale,
    is_finite,
)
from spark_dl.training.row_metrics import build_metric
from spark_dl.training.state import TrainingProgress

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
LARGEST = {torch.complex64: torch.finfo(torch.float32).max}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 500, -1])
def test_one_bad_element_is_found_and_the_largest_finite_ones_are_none(dtype, bad, place):
    tensor = torch.full((1001,), LARGEST.get(dtype) or torch.finfo(dtype).max, dtype=dtype)
    tensor[::2] *= -1
    assert is_finite(tensor)
    tensor[place] = bad
    assert not is_finite(tensor)


def test_sparse_and_empty_tensors():
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.zeros(5, 2).to_sparse(1))
    assert not is_finite(torch.tensor([[0.0, 0.0], [math.nan, 1.0]]).to_sparse(1))


class Two(nn.Module):
    """A sparse gradient, parameters of two dtypes, one that is never used, and one without elements."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=True)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.spare, self.empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))

    def forward(self, index):
        return (self.embedding(index) * self.wide).sum()


def step(model, check, number, factor=1.0, then=lambda: None):
    loss = model(torch.tensor([1, 3]))
    (loss * factor).backward()
    then()
    check.end_step(number, loss.detach())
    model.zero_grad()


@pytest.mark.parametrize("waits", [True, False], ids=["values_at_once", "values_later"])
@pytest.mark.parametrize(("factor", "bad_step"), [(math.nan, 2), (math.inf, 3)])
def test_the_first_bad_step_is_kept(factor, bad_step, waits):
    model = Two()
    check = StepCheck(model, CPU, gradients=True)
    check._waits = waits  # False: as on a GPU, where reading a value would stop the stream
    for number in range(1, 5):
        step(model, check, number, factor if number >= bad_step else 1.0)
        assert math.isnan(check.mark(torch.tensor(1.0))) == (number >= bad_step)
        expected = NonFinite(bad_step, GRADIENT, 7, "wide") if number >= bad_step else None
        assert check.finding(7) == expected
    check.close()
    model(torch.tensor([0])).backward()  # no hook is left that would write into the check
    assert all(not hooks for hooks in (p._post_accumulate_grad_hooks for p in model.parameters()))


@pytest.mark.parametrize("waits", [True, False], ids=["values_at_once", "values_later"])
def test_a_weight_is_found_after_the_step_and_a_loss_comes_first(waits):
    model = Two()
    check = StepCheck(model, CPU, gradients=True)
    check._waits = waits
    step(model, check, 1, then=lambda: model.wide.data.fill_(math.inf))
    assert check.finding(0) == NonFinite(1, WEIGHT, 0, "wide")
    step(model, check, 2)
    assert check.finding(0) == NonFinite(1, WEIGHT, 0, "wide")
    assert min(NonFinite(2, LOSS, 0), NonFinite(1, WEIGHT, 1, "a"), NonFinite(1, GRADIENT, 2, "b")).rank == 2


@pytest.mark.parametrize("waits", [True, False], ids=["values_at_once", "values_later"])
@pytest.mark.parametrize(("loss", "factor", "expected"), [
    (1.0, 1.0, None), (1.0, math.nan, NonFinite(3, GRADIENT, 2, "wide")), (math.inf, 1.0, NonFinite(3, LOSS, 2)),
    (math.nan, math.nan, NonFinite(3, LOSS, 2)),
])  # fmt: skip
def test_F22_a_bad_step_is_known_before_its_update_and_can_be_forgotten(waits, loss, factor, expected):
    model = Two()
    check = StepCheck(model, CPU, gradients=True)
    check._waits = waits
    (model(torch.tensor([1, 3])) * factor).backward()
    assert bool(check.is_bad(torch.tensor(loss))) == (expected is not None)
    assert check.finding_of_step(2, 3) == expected
    check.forget_step()
    assert check.finding_of_step(2, 3) is None
    model.zero_grad()
    step(model, check, 4)
    assert not check.has_findings


def test_gradients_are_not_looked_at_where_a_scaler_does():
    model = Two()
    check = StepCheck(model, CPU, gradients=False)
    step(model, check, 1, math.nan)
    assert check.finding(0) is None


def test_a_loss_scale_of_normal_size_is_no_error():
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    check_loss_scale(scaler, 3)
    check_loss_scale(None, 3)
    with pytest.raises(NotFiniteTrainingError, match=r"train.precision: .* until step 3"):
        check_loss_scale(torch.amp.GradScaler("cpu", init_scale=1e-5), 3)


def test_the_state_of_an_optimizer_may_not_overflow():
    model = nn.Linear(2, 2)
    check = StateCheck([model], None)
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.tensor([1.0, math.inf])}}}
    state = {"model": {"0": model.state_dict()}, "training": {"optimizer": optimizer}}
    found = check.problem(state, 3, "file:/run/1")
    assert found.startswith("training.optimizer.state.0.exp_avg_sq is not finite (NaN or Inf) on rank 3")
    assert "file:/run/1" in found
    optimizer["state"][0]["exp_avg_sq"].fill_(1.0)
    assert check.problem(state, 3, None) == ""


def decide(values, **train):
    settings = Train(early_stop_metric="loss", early_stop_patience=2, **train)
    progress = TrainingProgress()
    for value in values:
        row_metrics.decide(progress, settings, {"loss": value}, CPU)
    return progress


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_counts_as_no_gain(mode):
    sign = 1 if mode == "min" else -1
    found = decide([math.nan, sign * 3.0, sign * 2.0, math.nan, sign * 1.0], early_stop_mode=mode)
    assert (found.best, found.epochs_without_gain, found.stopped_early) == (1.0, 0, False)
    assert decide([sign * 3.0, math.nan, math.nan], early_stop_mode=mode).stopped_early
    assert decide([math.nan, math.nan], early_stop_mode=mode).stopped_early


def test_nan_that_an_older_version_took_for_the_best_is_forgotten():
    progress = TrainingProgress(best=math.nan, epochs_without_gain=1)
    train = Train(early_stop_metric="loss", early_stop_mode="min", early_stop_patience=2)
    row_metrics.decide(progress, train, {"loss": 5.0}, CPU)
    assert (progress.best, progress.stopped_early) == (5.0, False)


def test_a_metric_of_several_values_is_an_error_that_names_the_setting():
    with pytest.raises(ValueError, match=r"train.early_stop_metric: .*'loss' with \[0.5, 0.2\]"):
        decide([[0.5, 0.2]])


@pytest.mark.parametrize(
    ("args", "scalar"),
    [
        ({"class": "MulticlassAccuracy", "num_classes": 3}, True),
        ({"class": "MulticlassAccuracy", "num_classes": 3, "average": "none"}, False),
        ({"class": "MulticlassConfusionMatrix", "num_classes": 3}, False),
        ({"class": "MultilabelF1Score", "num_labels": 4}, True),
        ({"class": "MultilabelF1Score", "num_labels": 4, "average": "none"}, False),
        ({"class": "BinaryAUROC"}, True),
        ({"class": "BinaryROC"}, False),
        ({"class": "MeanSquaredError"}, True),
        ({"class": "MeanSquaredError", "num_outputs": 2}, False),
        ({"class": "PearsonCorrCoef", "num_outputs": 2}, True),  # cannot be known before the first values come
    ],
    ids=str,
)
def test_metrics_of_several_values_are_found_on_made_up_rows(args, scalar):
    metric = build_metric("m", args, "label").metric
    if scalar:
        row_metrics.check_scalar("m", metric)
    else:
        with pytest.raises(ValueError, match=r"train.early_stop_metric: .*'m' with values"):
            row_metrics.check_scalar("m", metric)
