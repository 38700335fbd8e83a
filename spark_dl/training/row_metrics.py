"""The metrics of an evaluation, and early stopping by one of them.

Metrics are classes of torchmetrics, and functions and classes of the user's own. Early stopping needs a single
number.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.gather import broadcast_from_rank0, gather_tensors
from spark_dl.parallel.loss import in_words, is_of_exchange
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from torchmetrics import Metric

    from spark_dl.config import Train
    from spark_dl.config.train import Mode
    from spark_dl.training.state import TrainingProgress
    from spark_dl.world import World

_MODULES = ("torchmetrics", "torchmetrics.classification", "torchmetrics.regression")
_OWN_ARGUMENTS = ("class", "label", "output")
"""Arguments of `train.metrics` that select what the metric sees; all others are those of the class."""

_ROWS = 8


@dataclass
class RowMetric:
    """A metric over the true rows of all ranks. `update` is called per batch, `compute` is collective."""

    name: str
    metric: Metric
    function: Any = None
    """The user's function, whose values per row `metric` averages; None for a class of torchmetrics."""
    label: str | None = None
    """Column that the metric compares with the output; None if it gets the whole batch."""
    output: str | int | None = None
    """Key or index of the output, for models with several outputs."""
    classes_second: bool = False
    """Whether outputs for a ragged label are [rows, classes, longest], as torch's CrossEntropyLoss takes them, and not
    [rows, longest, ...]."""
    _seen: str = ""
    """What the last batch was, for messages."""

    def update(self, output: Output, batch: Batch) -> None:
        """Adds the rows of a batch whose weight is above 0. Raises ValueError, with the metric, if it does not take
        them."""
        column = "" if self.label is None else f", and its label {self.label!r} {in_words(batch.get(self.label))}"
        self._seen = f"The output is {in_words(output)}{column}; choose another metric, or its arguments, or the output"
        try:
            self._update(output, batch)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if self.name in str(error):
                raise
            raise ValueError(self._explained(error)) from error

    def _explained(self, error: Exception) -> str:
        return f"metric {self.name!r}: {str(error).rstrip('.')[:1000]}. {self._seen} (train.metrics, spec.metrics)"

    def _update(self, output: Output, batch: Batch) -> None:
        weight = batch["weight"]
        counts = weight > 0
        if not bool(counts.any()):
            return
        if self.function is not None:
            values = self.function(output, batch)
            if not isinstance(values, Tensor) or values.shape != weight.shape:
                found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"spec.metrics[{self.name!r}]: expected one value per row, shape {tuple(weight.shape)}, found "
                    f"{found}"
                )
            self.metric.update(values[counts].double(), weight[counts].double())
            return
        target: Any = batch if self.label is None else batch[self.label]
        chosen, mask = self._chosen(output), batch.get(f"{self.label}_mask")
        if mask is not None and isinstance(target, Tensor):
            chosen, target = self._values_of(chosen, target, mask & counts[:, None])
        else:
            chosen, target = _rows_of(chosen, counts), _rows_of(target, counts)
        self.metric.update(chosen, target)

    def _values_of(self, output: Any, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs for the true values of a ragged label, and these, without padding. # (values, ...)"""
        found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        expected = f"{tuple(mask.shape)} and further axes"
        if isinstance(output, Tensor) and self.classes_second and output.ndim == 3:
            output, expected = output.transpose(1, 2), f"({mask.shape[0]}, classes, {mask.shape[1]})"
        if not isinstance(output, Tensor) or output.shape[:2] != mask.shape:
            raise ValueError(
                f"metric {self.name!r}: its label {self.label!r} is ragged, so expected an output for each of its "
                f"values, shape {expected}, found {found}"
            )
        chosen = output[mask]
        return chosen.float() if chosen.is_floating_point() else chosen, target[mask]

    def compute(self) -> Any:
        """Returns the value over all ranks, as plain numbers and lists. Collective."""
        with warnings.catch_warnings():  # torchmetrics warns on a rank without true rows
            warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
            try:
                return _plain(self.metric.compute())
            except (IndexError, RuntimeError, TypeError, ValueError) as error:
                if is_of_exchange(error):
                    raise
                raise ValueError(self._explained(error)) from error

    def _chosen(self, output: Any) -> Any:
        if self.output is None:
            return output
        try:
            return output[self.output]
        except (LookupError, TypeError) as error:
            known = list(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
            raise ValueError(
                f"train.metrics.{self.name}.output: found {self.output!r}, the model's output has {known}"
            ) from error


def build_metrics(spec: ModelSpec, config: Config) -> list[RowMetric]:
    """Builds the metrics of `train.metrics` and of `ModelSpec.metrics`. Called on any side.

    Raises ValueError for an unknown class, wrong arguments, and a name that is used twice.
    """
    row_metrics = [build_metric(name, args, config.data.label) for name, args in config.train.metrics.items()]
    for name, metric in spec.metrics.items():
        if name in config.train.metrics or name == "loss":
            raise ValueError(f"spec.metrics: the name {name!r} is already that of another metric; choose another one")
        row_metrics.append(_own_metric(name, metric, config.data.label))
    for row_metric in row_metrics:
        row_metric.classes_second = isinstance(spec.loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    return row_metrics


def build_metric(name: str, args: Mapping[str, Any], label: str | None) -> RowMetric:
    """Builds a metric of torchmetrics. Raises ValueError for an unknown class or wrong arguments."""
    arguments = {key: value for key, value in args.items() if key not in _OWN_ARGUMENTS}
    for module in _MODULES:
        cls = getattr(importlib.import_module(module), args["class"], None)
        if isinstance(cls, type):
            try:
                metric: Metric = cls(**arguments, dist_sync_fn=gather_tensors)
            except (TypeError, ValueError) as error:
                raise ValueError(f"train.metrics.{name}: {args['class']} does not take {arguments}: {error}") from error
            return RowMetric(name, metric, label=args.get("label", label), output=args.get("output"))
    known = sorted({n for m in _MODULES for n in importlib.import_module(m).__all__})
    raise ValueError(
        f"train.metrics.{name}: no class {args['class']!r} in torchmetrics{suggestion(args['class'], known)}; "
        "ModelSpec.metrics has metrics of your own"
    )


def _own_metric(name: str, metric: Any, label: str | None) -> RowMetric:
    from torchmetrics import MeanMetric, Metric

    if isinstance(metric, type) and issubclass(metric, Metric):
        metric = metric()
    if isinstance(metric, Metric):
        metric = copy.deepcopy(metric)
        metric.dist_sync_fn = gather_tensors
        return RowMetric(name, metric, label=label)
    mean = MeanMetric(dist_sync_fn=gather_tensors).set_dtype(torch.float64)
    return RowMetric(name, mean, function=metric)


def _rows_of(values: Any, rows: Tensor) -> Any:
    """Selects rows of a tensor, or of the tensors of an output or a batch that have one entry per row."""
    if isinstance(values, Tensor):
        chosen = values[rows] if values.ndim and len(values) == len(rows) else values
        return chosen.float() if chosen.is_floating_point() else chosen
    if isinstance(values, Mapping):
        return {key: _rows_of(value, rows) for key, value in values.items()}
    return [_rows_of(v, rows) for v in values] if isinstance(values, list | tuple) else values  # and not text


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def better(name: str, spec: ModelSpec | None, config: Config) -> Mode | None:
    """Returns which value of a metric is better; None if that is not known. On any side.

    The loss is better if it is lower. The classes of torchmetrics say it (`higher_is_better`), functions do not.

    Args:
        spec: None if only the metrics of the settings are known.
    """
    if name in ("loss", "train_loss"):
        return "min"
    if name in config.train.metrics:
        metric: Any = build_metric(name, config.train.metrics[name], config.data.label).metric
    else:
        metric = None if spec is None else spec.metrics.get(name)
    is_higher = getattr(metric, "higher_is_better", None)
    return None if is_higher is None else "max" if is_higher else "min"


def with_mode(spec: ModelSpec, config: Config) -> Config:
    """Returns the settings with an `early_stop_mode`. Called on the driver and on ranks, before training.

    Raises ValueError if the metric does not say which value is better, and the settings do not, either.
    """
    if config.train.early_stop_mode is not None:
        return config
    name = config.train.early_stop_metric or "loss"
    mode = better(name, spec, config)
    if mode is None:
        raise ValueError(
            f"train.early_stop_mode: {name!r} does not say which value is better; set it to min if a lower value is "
            "better, or to max"
        )
    return dataclasses.replace(config, train=dataclasses.replace(config.train, early_stop_mode=mode))


def decide(progress: TrainingProgress, train: Train, metrics: Mapping[str, Any], device: torch.device) -> None:
    """Updates early stopping after an epoch, and decides whether to stop. Collective.

    NaN is neither an improvement nor the best value. Raises ValueError if there is no such metric, or
    if it is not a single number.
    """
    if train.early_stop_metric is None:
        return
    if train.early_stop_metric not in metrics:  # `ModelSpec.evaluation` has names that only an evaluation shows
        raise ValueError(
            f"train.early_stop_metric: expected one of {list(metrics)}, the values of the validation rows, found "
            f"{train.early_stop_metric!r}"
        )
    measured = metrics[train.early_stop_metric]
    if not isinstance(measured, int | float):
        raise _not_scalar(train.early_stop_metric, f"{measured!r}"[:80])
    assert train.early_stop_mode is not None
    value = float(measured) if train.early_stop_mode == "min" else -float(measured)
    best = math.inf if progress.best is None or math.isnan(progress.best) else progress.best  # older versions saved NaN
    if value < best - train.early_stop_min_delta:
        progress.best, progress.epochs_without_gain = value, 0
    else:
        progress.epochs_without_gain += 1
    stop = torch.tensor(int(progress.epochs_without_gain >= train.early_stop_patience), device=device)
    broadcast_from_rank0(stop)  # one decision, even if a metric differs between ranks
    progress.stopped_early = bool(stop)


def ask(progress: TrainingProgress, entry: Mapping[str, Any], world: World) -> None:
    """Ends the run if the driver says so after an epoch (`World.ends_run`). Collective."""
    if world.ends_run is None:
        return
    stop = torch.tensor(int(world.rank == 0 and world.ends_run(entry)), device=world.device)
    broadcast_from_rank0(stop)
    progress.stopped_early |= bool(stop)


def take_up(progress: TrainingProgress, before: Train, train: Train, *, same_rows: bool = True) -> None:
    """Applies the current settings to resumed early stopping. Another metric or mode, or other rows, start it again.

    Args:
        same_rows: whether the validation rows are those of before.
    """
    settings = {(each.early_stop_metric, each.early_stop_mode) for each in (before, train)}
    if not same_rows or len(settings) > 1:
        progress.best, progress.epochs_without_gain = None, 0
    progress.stopped_early = progress.epochs_without_gain >= train.early_stop_patience


def check_scalar(name: str, metric: Metric) -> None:
    """Raises ValueError if a metric returns several values for synthetic rows. Called on the driver.

    A metric that accepts none of these rows passes; `decide` checks it after the first epoch.
    """
    for output, label in _rows(metric):
        value = None
        with (
            contextlib.suppress(Exception),
            warnings.catch_warnings(),
        ):  # metrics raise many types for other kinds of rows
            warnings.simplefilter("ignore")
            metric.reset()
            metric.update(output, label)
            value = metric.compute()
        if isinstance(value, Tensor) and value.ndim == 0:
            return
        if value is not None:
            shape = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"in a {type(value).__name__}"
            raise _not_scalar(name, f"values {shape}")


def _rows(metric: Metric) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields synthetic outputs and labels: multiclass, multilabel, binary, regression."""
    classes, labels = getattr(metric, "num_classes", None), getattr(metric, "num_labels", None)
    if isinstance(classes, int):
        yield torch.eye(classes).repeat(_ROWS, 1), torch.arange(classes).repeat(_ROWS)
    if isinstance(labels, int):
        yield torch.eye(labels).repeat(_ROWS, 1), torch.eye(labels, dtype=torch.int64).repeat(_ROWS, 1)
    half = torch.arange(_ROWS) % 2
    yield half * 0.5 + 0.25, half
    yield torch.linspace(0, 1, _ROWS), torch.linspace(0, 1, _ROWS)


def _not_scalar(name: str, found: str) -> ValueError:
    return ValueError(
        f"train.early_stop_metric: expected a metric of one number, found {name!r} with {found}; set an average in "
        f"train.metrics.{name}, such as average: macro, or choose another metric"
    )
