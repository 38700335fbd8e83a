"""What metrics see of a batch, when a run stops early, and what is wrong with a metric that does not fit."""

import dataclasses
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric, Metric

from spark_dl import Config, Data, ModelSpec, Train
from spark_dl.training.row_metrics import RowMetric, ask, build_metric, build_metrics, decide, take_up
from spark_dl.training.state import TrainingProgress
from spark_dl.world import World

CPU = torch.device("cpu")
ACCURACY = {"class": "MulticlassAccuracy", "num_classes": 3, "average": "micro"}
SCORES = torch.tensor([[9.0, 1, 1], [1, 9, 1], [1, 1, 9], [9, 1, 1]])
BATCH = {"label": torch.tensor([0, 1, 0, 1]), "weight": torch.tensor([1.0, 2, 0.5, 0])}


def metrics_of(loss="CrossEntropyLoss", own=(), **of_settings):
    config = Config(data=Data(label="label", labels=("price",)), train=Train(metrics=of_settings))
    spec = ModelSpec(build=nn.Identity, loss=loss, metrics=dict(own))
    return {metric.name: metric for metric in build_metrics(spec, config)}


def test_rows_of_weight_0_do_not_count_and_a_batch_of_them_is_left_out():
    accuracy = build_metric("top", ACCURACY, "label")
    accuracy.update(SCORES, BATCH)
    assert accuracy.compute() == pytest.approx(2 / 3)
    accuracy.update(SCORES, {**BATCH, "weight": torch.zeros(4)})
    assert accuracy.compute() == pytest.approx(2 / 3)


def test_the_mean_of_a_function_is_weighted_in_double_precision():
    (hits,) = metrics_of(own={"hits": lambda output, batch: (output.argmax(1) == batch["label"]).float()}).values()
    hits.update(SCORES, BATCH)
    assert hits.compute() == pytest.approx((1 + 2) / 3.5, abs=1e-12)
    large = torch.full((4,), 16_777_217.0, dtype=torch.float64)
    (mean,) = metrics_of(own={"mean": lambda output, batch: large}).values()
    mean.update(SCORES, BATCH)
    assert mean.compute() == 16_777_217.0


@pytest.mark.parametrize(("values", "found"), [
    (torch.ones(4, 1), r"shape \(4, 1\)"), (torch.tensor(1.0), r"shape \(\)"), ([1.0] * 4, "list"),
])  # fmt: skip
def test_a_function_has_one_value_per_row(values, found):
    (metric,) = metrics_of(own={"hits": lambda output, batch: values}).values()
    with pytest.raises(
        ValueError, match=rf"spec.metrics\['hits'\]: expected one value per row, shape \(4,\), found {found}"
    ):
        metric.update(SCORES, BATCH)


def test_a_metric_of_the_user_s_own_is_not_changed():
    given = MeanMetric()
    (metric,) = metrics_of(own={"mean": given}).values()
    assert metric.metric is not given
    assert given.dist_sync_fn is None
    (of_class,) = metrics_of(own={"mean": MeanMetric}).values()
    assert isinstance(of_class.metric, MeanMetric)


def test_the_label_and_the_output_are_those_of_the_settings():
    error = {"class": "MeanSquaredError", "label": "price", "output": "cost"}
    batch = {**BATCH, "price": torch.tensor([1.0, 2, 3, 99])}
    metric = metrics_of(cost=error)["cost"]
    metric.update({"cost": torch.tensor([1.0, 2, 6, 0]), "other": SCORES}, batch)
    assert metric.compute() == 3.0
    by_index = build_metric("cost", {**error, "output": 1}, "label")
    by_index.update((SCORES, torch.tensor([1.0, 2, 6, 0])), batch)
    assert by_index.compute() == 3.0
    with pytest.raises(
        ValueError, match=r"train.metrics.cost.output: found 'cost', the model's output has \['price'\]"
    ):
        build_metric("cost", error, "label").update({"price": SCORES}, batch)
    with pytest.raises(ValueError, match=r"train.metrics.cost.output: found 'cost', the model's output has a Tensor"):
        build_metric("cost", error, "label").update(SCORES, batch)


class Seen(Metric):
    """Keeps what it gets."""

    def update(self, output, batch):
        self.seen = output, batch

    def compute(self):
        return torch.zeros(())


def test_a_metric_without_a_label_gets_the_true_rows_of_all_that_the_model_and_the_batch_have():
    spec = ModelSpec(build=nn.Identity, batch_loss=lambda model, batch: 0.0, metrics={"seen": Seen})
    (metric,) = build_metrics(spec, Config(data=Data(label=None), train=Train()))
    whole, words = torch.ones(2), ["of", "the", "batch", "!"]
    metric.update({"a": SCORES.double(), "more": (BATCH["label"], whole)}, {**BATCH, "text": words})
    output, batch = metric.metric.seen
    assert torch.equal(output["a"], SCORES[:3])
    assert output["a"].dtype == torch.float32
    assert [each.tolist() for each in output["more"]] == [[0, 1, 0], [1.0, 1.0]]
    assert (batch["label"].tolist(), batch["weight"].tolist(), batch["text"]) == ([0, 1, 0], [1.0, 2.0, 0.5], words)


RAGGED = {"label": torch.tensor([[0, 1], [2, 0]]), "label_mask": torch.tensor([[True, True], [True, False]]),
          "weight": torch.tensor([1.0, 1.0])}  # fmt: skip


@pytest.mark.parametrize("weights", [(1, 1), (1, 0), (0, 1)])
@pytest.mark.parametrize("classes_second", [True, False])
def test_of_a_ragged_label_each_true_value_counts_once(weights, classes_second):
    output = nn.functional.one_hot(torch.tensor([[0, 2], [2, 1]]), 3).float()  # right, wrong; right, padding
    metric = metrics_of("CrossEntropyLoss" if classes_second else "MSELoss", top=ACCURACY)["top"]
    metric.classes_second = classes_second
    metric.update(
        output.transpose(1, 2) if classes_second else output, {**RAGGED, "weight": torch.tensor(weights).float()}
    )
    right, values = weights[0] + weights[1], 2 * weights[0] + weights[1]
    assert metric.compute() == pytest.approx(right / values)


@pytest.mark.parametrize(("output", "loss", "expected", "found"), [
    (torch.ones(2, 3), "MSELoss", r"\(2, 2\) and further axes", r"shape \(2, 3\)"),
    (torch.ones(2, 3, 3), "CrossEntropyLoss", r"\(2, classes, 2\)", r"shape \(2, 3, 3\)"),
    ([1.0], "MSELoss", r"\(2, 2\) and further axes", "list"),
])  # fmt: skip
def test_of_a_ragged_label_each_value_has_an_output(output, loss, expected, found):
    spec = ModelSpec(build=nn.Identity, loss=getattr(nn, loss)(reduction="none"))
    (metric,) = build_metrics(spec, Config(data=Data(label="label"), train=Train(metrics={"top": ACCURACY})))
    with pytest.raises(
        ValueError, match=f"metric 'top': its label 'label' is ragged, .*shape {expected}, found {found}"
    ):
        metric.update(output, RAGGED)


def test_what_a_metric_does_not_take_is_told_with_what_it_got():
    with pytest.raises(ValueError, match=r"metric 'top': .*The output is .*\(4, 2\).*label 'label'.*\(train.metrics"):
        build_metric("top", ACCURACY, "label").update(SCORES[:, :2], BATCH)
    with pytest.raises(ValueError, match=r"train.metrics.top: MulticlassAccuracy does not take {'classes': 3}: "):
        build_metric("top", {"class": "MulticlassAccuracy", "classes": 3}, "label")
    with pytest.raises(ValueError, match=r"train.metrics.top: no class 'MulticlasAccuracy' .*'MulticlassAccuracy'"):
        build_metric("top", {"class": "MulticlasAccuracy"}, "label")


def test_a_metric_that_cannot_be_computed_is_told_with_what_it_got():
    metric = build_metric("r2", {"class": "R2Score"}, "label")
    metric.update(torch.ones(1), {"label": torch.ones(1), "weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"metric 'r2': Needs at least two samples.*The output is .*\(1,\)"):
        metric.compute()


@pytest.mark.parametrize("name", ["top", "loss"])
def test_a_name_is_that_of_one_metric(name):
    with pytest.raises(ValueError, match=f"spec.metrics: the name '{name}' is already that of another metric"):
        metrics_of(own={name: MeanMetric}, top=ACCURACY)


def test_values_are_plain():
    class Several(MeanMetric):
        def compute(self):
            return {"a": torch.tensor([1.0, 2.0]), "b": [torch.tensor(3)], "c": "text"}

    metric = RowMetric("several", Several())
    metric.metric.update(1.0)
    assert metric.compute() == {"a": [1.0, 2.0], "b": [3], "c": "text"}


def stopping(mode="min", patience=2, delta=0.0):
    return Train(
        early_stop_metric="loss", early_stop_mode=mode, early_stop_patience=patience, early_stop_min_delta=delta
    )


@pytest.mark.parametrize(("mode", "values", "delta", "stops_after"), [
    ("min", [3.0, 2, 2, 2], 0.0, 4), ("min", [3.0, 2, 1, 0], 0.0, None), ("max", [1.0, 2, 2, 2], 0.0, 4),
    ("max", [3.0, 2, 1], 0.0, 3), ("min", [3.0, 2.5, 2.5, 1.9], 0.5, 3), ("min", [3.0, 2.4, 1.9, 1.9], 0.5, 4),
    ("min", [math.nan, math.nan, 1.0], 0.0, 2), ("min", [2.0, math.nan, 1.0, 1.0], 0.0, None),
])  # fmt: skip
def test_a_run_stops_when_the_metric_was_not_better_for_patience_epochs(no_launcher, mode, values, delta, stops_after):
    progress, train = TrainingProgress(), stopping(mode, delta=delta)
    stopped = None
    for epoch, value in enumerate(values, 1):
        decide(progress, train, {"loss": value}, CPU)
        if progress.stopped_early:
            stopped = epoch
            break
    assert stopped == stops_after


def test_without_a_metric_nothing_stops_and_one_that_is_not_there_or_no_number_is_an_error():
    progress = TrainingProgress()
    decide(progress, Train(), {}, CPU)
    assert not progress.stopped_early
    with pytest.raises(ValueError, match=r"train.early_stop_metric: expected one of \['top'\].*found 'loss'"):
        decide(progress, stopping(), {"top": 1.0}, CPU)
    with pytest.raises(ValueError, match=r"\[1.0\]"):
        decide(progress, stopping(), {"loss": [1.0]}, CPU)


@pytest.mark.parametrize(("change", "same_rows", "starts_again"), [
    ({}, True, False), ({}, False, True), ({"early_stop_metric": "train_loss"}, True, True),
    ({"early_stop_mode": "max"}, True, True), ({"early_stop_patience": 9}, True, False),
])  # fmt: skip
def test_a_resumed_run_goes_on_counting_by_the_same_metric(change, same_rows, starts_again):
    before = stopping(patience=3)
    progress = TrainingProgress()
    progress.best, progress.epochs_without_gain, progress.stopped_early = 1.0, 2, True
    take_up(progress, before, dataclasses.replace(before, **change), same_rows=same_rows)
    assert (progress.best, progress.epochs_without_gain) == ((None, 0) if starts_again else (1.0, 2))
    assert not progress.stopped_early
    lower = dataclasses.replace(before, early_stop_patience=2)
    progress.best, progress.epochs_without_gain = 1.0, 2
    take_up(progress, before, lower)
    assert progress.stopped_early


@pytest.mark.parametrize("answer", [True, False])
def test_the_driver_can_end_a_run(no_launcher, answer):
    progress, asked = TrainingProgress(), []
    world = World(0, 1, 0, 1, "host", CPU, dist.HashStore(), ends_run=lambda entry: asked.append(entry) or answer)
    ask(progress, {"epoch": 1}, world)
    assert (progress.stopped_early, asked) == (answer, [{"epoch": 1}])
    ask(TrainingProgress(), {}, dataclasses.replace(world, ends_run=None))
    assert len(asked) == 1
