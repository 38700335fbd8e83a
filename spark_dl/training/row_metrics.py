"""The metrics of an evaluation: classes of torchmetrics, and functions and classes of the user's own."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.gather import gather_tensors
from spark_dl.parallel.loss import in_words, is_of_exchange
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from torchmetrics import Metric

_MODULES = ("torchmetrics", "torchmetrics.classification", "torchmetrics.regression")
_OWN_ARGUMENTS = ("class", "label", "output")
"""Arguments of `train.metrics` that select what the metric sees; all others are those of the class."""


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
    found = [build_metric(name, args, config.data.label) for name, args in config.train.metrics.items()]
    for name, metric in spec.metrics.items():
        if name in config.train.metrics or name == "loss":
            raise ValueError(f"spec.metrics: the name {name!r} is already that of another metric; choose another one")
        found.append(_own_metric(name, metric, config.data.label))
    for row_metric in found:
        row_metric.classes_second = isinstance(spec.loss, (nn.CrossEntropyLoss, nn.NLLLoss))
    return found


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
    return [_rows_of(v, rows) for v in values] if isinstance(values, Sequence) else values


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
