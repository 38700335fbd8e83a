"""The values that a LightningModule logs with `self.log` and `self.log_dict`, without Lightning's Trainer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spark_dl.gather import gather_json, gather_tensors

if TYPE_CHECKING:
    from torchmetrics import Metric

_COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
}


@contextlib.contextmanager
def logging_to(model: nn.Module, receive: Callable[..., None]) -> Iterator[None]:
    """Calls `receive` with the arguments of each `self.log` within the block; `self.log_dict` calls it, too."""
    before = vars(model).get("log")
    model.log = receive  # type: ignore[assignment] # shadows the method of the class
    try:
        yield
    finally:
        del model.log
        if before is not None:
            model.log = before


@dataclass
class TrainingLog:
    """Values logged in `training_step`. They are not kept, but their metrics are reset, as they would grow."""

    metrics: list[Metric] = field(default_factory=list)

    def __call__(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if _is_metric(value):
            self.metrics.append(value)

    def reset(self) -> None:
        """Resets the metrics that were logged."""
        for metric in self.metrics:
            metric.reset()


@dataclass
class _Value:
    """A logged value over the batches so far. # mean: the sum of the values times their weights"""

    reduce: str
    value: Any
    weight: float = 0.0


class EpochLog:
    """Values logged in `validation_step`, over all batches and ranks: numbers, and metrics of torchmetrics.

    A mean is weighted by the rows of the batches, or by `batch_size` of `self.log`. Values that are logged for the step
    only (`on_epoch=False`) are not kept.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._signature = inspect.signature(type(model).log)  # type: ignore[attr-defined]
        self._values: dict[str, _Value] = {}
        self._metrics: dict[str, Metric] = {}

    def receiving(self, rows: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the module logs here. rows: rows of the batch."""
        return logging_to(self._model, functools.partial(self._receive, rows))

    def _receive(self, rows: int, *args: Any, **kwargs: Any) -> None:
        bound = self._signature.bind(self._model, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        name, value = given["name"], given["value"]
        if given["on_epoch"] is False:
            return
        if _is_metric(value):
            self._metrics[name] = value
            return
        reduce = given["reduce_fx"] if isinstance(given["reduce_fx"], str) else given["reduce_fx"].__name__
        reduce = {"avg": "mean"}.get(reduce.lower(), reduce.lower())
        if reduce not in _COMBINE:
            raise ValueError(f"self.log({name!r}): expected reduce_fx mean, sum, min or max, found {reduce!r}")
        size = given["batch_size"]
        self.add(name, value, rows if size is None else size, reduce)

    def add(self, name: str, value: Any, weight: float, reduce: str = "mean") -> None:
        """Adds a number, or a tensor with one value, to the value of this name."""
        value = torch.as_tensor(value)
        if value.numel() != 1:
            raise ValueError(f"self.log({name!r}): expected one value, found shape {tuple(value.shape)}")
        value = value.detach().reshape(()).double()
        new = _Value(reduce, value * weight if reduce == "mean" else value, float(weight))
        self._values[name] = _combined(name, self._values[name], new) if name in self._values else new

    def compute(self) -> dict[str, Any]:
        """Returns the values over all batches of all ranks, in the order in which they were first logged. Collective.

        Resets the metrics. Raises ValueError if ranks logged a name in different ways.
        """
        paths = {id(module): path for path, module in self._model.named_modules()}
        own: dict[str, Any] = {n: [v.reduce, float(v.value), v.weight] for n, v in self._values.items()}
        for name, metric in self._metrics.items():
            if id(metric) not in paths:
                raise ValueError(
                    f"self.log({name!r}): expected a metric that is an attribute of the module; assign it in __init__"
                )
            own[name] = paths[id(metric)]
        values: dict[str, _Value] = {}
        logged: dict[str, Any] = {}
        for of_rank in gather_json(own):
            for name, part in of_rank.items():
                if isinstance(part, str):
                    logged[name] = part
                    continue
                new = _Value(*part)
                values[name] = _combined(name, values[name], new) if name in values else new
                logged[name] = values[name]
        return {name: self._result(value) for name, value in logged.items()}

    def _result(self, found: _Value | str) -> Any:
        if isinstance(found, _Value):
            return found.value / found.weight if found.reduce == "mean" else found.value
        metric: Any = self._model.get_submodule(found)
        metric.dist_sync_fn = gather_tensors  # which also takes ranks without rows
        with warnings.catch_warnings():  # torchmetrics warns on a rank without rows
            warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
            value = metric.compute()
        metric.reset()
        return value.tolist() if isinstance(value, Tensor) else value


def _combined(name: str, a: _Value, b: _Value) -> _Value:
    if a.reduce != b.reduce:
        raise ValueError(f"self.log({name!r}): expected one reduce_fx for a name, found {a.reduce!r} and {b.reduce!r}")
    return _Value(a.reduce, _COMBINE[a.reduce](a.value, b.value), a.weight + b.weight)


def _is_metric(value: Any) -> bool:
    from torchmetrics import Metric

    return isinstance(value, Metric)
