"""Early stopping, and the check that its metric is a single number."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spark_dl.gather import broadcast_from_rank0
from spark_dl.training.row_metrics import build_metric

if TYPE_CHECKING:
    from torchmetrics import Metric

    from spark_dl.config import Config, Train
    from spark_dl.config.train import Mode
    from spark_dl.spec import ModelSpec
    from spark_dl.training.state import Progress
    from spark_dl.world import World

_ROWS = 8


def better(name: str, spec: ModelSpec | None, config: Config) -> Mode | None:
    """Returns which value of a metric is better; None if that is not known. On any side.

    The loss is better if it is lower. The classes of torchmetrics say it (`higher_is_better`), functions do not.
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


def decide(progress: Progress, train: Train, metrics: Mapping[str, Any], device: torch.device) -> None:
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
    found = metrics[train.early_stop_metric]
    if not isinstance(found, int | float):
        raise _not_scalar(train.early_stop_metric, f"{found!r}"[:80])
    assert train.early_stop_mode is not None
    value = float(found) if train.early_stop_mode == "min" else -float(found)
    best = math.inf if progress.best is None or math.isnan(progress.best) else progress.best  # older versions saved NaN
    if value < best - train.early_stop_min_delta:
        progress.best, progress.epochs_without_gain = value, 0
    else:
        progress.epochs_without_gain += 1
    stop = torch.tensor(int(progress.epochs_without_gain >= train.early_stop_patience), device=device)
    broadcast_from_rank0(stop)  # one decision, even if a metric differs between ranks
    progress.stopped_early = bool(stop)


def ask(progress: Progress, entry: Mapping[str, Any], world: World) -> None:
    """Ends the run if the driver says so after an epoch (`World.ends_run`). Collective."""
    if world.ends_run is None:
        return
    stop = torch.tensor(int(world.rank == 0 and world.ends_run(entry)), device=world.device)
    broadcast_from_rank0(stop)
    progress.stopped_early |= bool(stop)


def take_up(progress: Progress, before: Train, train: Train, *, same_rows: bool = True) -> None:
    """Applies the current settings to resumed early stopping. Another metric or mode, or other rows, start it again.

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
