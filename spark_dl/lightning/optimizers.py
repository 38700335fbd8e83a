"""What `configure_optimizers` of a LightningModule returns, as an `Optimization`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from spark_dl.lightning.trainer import attached_trainer
from spark_dl.optimization import Optimization

_OPTIMIZER_KEYS = {"optimizer", "lr_scheduler", "monitor"}
_SCHEDULER_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def optimization_of(model: Any) -> Optimization:
    """Calls `configure_optimizers` (`ModelSpec.optimizer`). Called on a rank, and on the driver as a check.

    Raises ValueError for several optimizers or schedulers, no optimizer, and what spark_dl cannot do.
    """
    attached_trainer(model)
    configured = model.configure_optimizers()
    optimizers, schedulers, monitor = _parts(configured)
    if len(optimizers) != 1:
        raise ValueError(
            f"configure_optimizers: expected one optimizer, found {len(optimizers) or repr(configured)}; use parameter "
            "groups for different learning rates"
        )
    if len(schedulers) > 1:
        raise ValueError(
            f"configure_optimizers: expected at most one scheduler, found {len(schedulers)}; combine them, for example "
            "with ChainedScheduler or SequentialLR"
        )
    if not schedulers:
        return Optimization(optimizer=optimizers[0])
    return _scheduled(optimizers[0], schedulers[0], monitor)


def _parts(found: Any) -> tuple[list[Any], list[Any], str | None]:
    """Returns the optimizers, the schedulers and the monitored value of any form that Lightning accepts."""
    if found is None:
        return [], [], None
    if isinstance(found, Mapping):
        _check_keys(found, _OPTIMIZER_KEYS, "configure_optimizers")
        scheduler = found.get("lr_scheduler")
        return [found.get("optimizer")], [] if scheduler is None else [scheduler], found.get("monitor")
    if not isinstance(found, (list, tuple)):
        return [found], [], None
    if len(found) == 2 and isinstance(found[0], (list, tuple)):
        return list(found[0]), list(found[1]) if isinstance(found[1], (list, tuple)) else [found[1]], None
    if len(found) == 1:
        return _parts(found[0])
    return list(found), [], None


def _scheduled(optimizer: Any, scheduler: Any, monitor: str | None) -> Optimization:
    settings = dict(scheduler) if isinstance(scheduler, Mapping) else {"scheduler": scheduler}
    _check_keys(settings, _SCHEDULER_KEYS, "configure_optimizers: lr_scheduler")
    if not settings.get("strict", True):
        raise ValueError(
            "configure_optimizers: lr_scheduler: found strict=False; a value that a scheduler monitors must exist in "
            "every epoch; remove it"
        )
    by_metric = isinstance(settings.get("scheduler"), ReduceLROnPlateau)
    if settings.pop("reduce_on_plateau", by_metric) != by_metric:
        raise ValueError(
            "configure_optimizers: lr_scheduler: reduce_on_plateau is only supported with ReduceLROnPlateau; remove it"
        )
    monitor = settings.get("monitor") or monitor
    if by_metric and monitor is None:
        raise ValueError("configure_optimizers: ReduceLROnPlateau needs `monitor`, such as 'val_loss'; found None")
    fields = {field.name for field in dataclasses.fields(Optimization)}
    options = {name: value for name, value in settings.items() if name in fields}
    return Optimization(optimizer=optimizer, **{**options, "monitor": monitor if by_metric else None})


def _check_keys(found: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(str(name) for name in found.keys() - known):
        raise ValueError(f"{where}: expected keys out of {sorted(known)}, found {unknown}")
