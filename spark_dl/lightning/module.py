"""The fields of a `ModelSpec` for a LightningModule, and the check of the module on the driver."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spark_dl.config.checks import suggestion
from spark_dl.generators import generators_kept
from spark_dl.lightning import steps
from spark_dl.lightning.optimizers import optimization_of
from spark_dl.lightning.trainer import set_position
from spark_dl.optimization import check_parameters

if TYPE_CHECKING:
    from spark_dl.spec import Batch

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_OF_THE_TRAINER = (
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_sharded_model",
    "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "predict_dataloader", "prepare_data", "setup",
    "teardown", "train_dataloader", "transfer_batch_to_device", "val_dataloader",
)  # fmt: skip
"""Methods that Lightning's Trainer calls, and spark_dl does not; beside those whose names begin with `on_`."""
_REMOVED = ("training_epoch_end", "training_step_end", "validation_epoch_end", "validation_step_end")
"""Methods that the Trainer of Lightning 1 called, and that of Lightning 2 refuses."""
_OF_TESTS = "on_test_"
"""Beginning of the names of methods that are called by `Trainer.test` alone, which has no counterpart here."""


@dataclass(frozen=True)
class _Copies:
    """Builds copies of a module, on the CPU."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module).cpu()


def spec_fields(
    module: Any, *, batch: Callable[[Batch], Any] | None, ignore_hooks: Sequence[str],
    count: Callable[[Batch], Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the fields of `ModelSpec.from_lightning`. Called on the driver. Raises ValueError as that does."""
    build = _Copies(module) if isinstance(module, nn.Module) else module
    if not callable(build):
        raise ValueError(
            f"from_lightning: expected a LightningModule, or a function or class that builds it, found {module!r}"
        )
    make_batch = batch or steps.columns_of
    with generators_kept(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        model = build()
        base = _lightning_class(model)
        _check(model, base, ignore_hooks)
        check_parameters(optimization_of(model).optimizer, model)
    step = "validation_step" if _is_overridden(model, base, "validation_step") else "training_step"
    predict = functools.partial(steps.predict_step, make_batch=make_batch)
    return {
        "build": build,
        "forward": predict if _is_overridden(model, base, "predict_step") else None,
        "optimizer": optimization_of,
        "batch_loss": functools.partial(steps.training_loss, make_batch=make_batch),
        "evaluation": functools.partial(steps.ModuleEvaluation, step=step, make_batch=make_batch, count=count),
        "set_position": set_position,
    }


def _lightning_class(model: Any) -> type:
    """Returns the class LightningModule of the package that the module comes from, which is imported already."""
    for package in _PACKAGES:
        base = getattr(sys.modules.get(package), "LightningModule", None)
        if base is not None and isinstance(model, base):
            return base  # type: ignore[no-any-return]
    raise ValueError(
        f"from_lightning: expected a LightningModule of lightning or pytorch_lightning, found {type(model).__name__}; "
        "pass other modules to ModelSpec(build=...)"
    )


def _is_overridden(model: nn.Module, base: type, name: str) -> bool:
    return getattr(type(model), name, None) is not getattr(base, name, None)


def _check(model: Any, base: type, ignore_hooks: Sequence[str]) -> None:
    name = type(model).__name__
    if not model.automatic_optimization:
        raise ValueError(
            f"from_lightning: {name} sets automatic_optimization=False, which spark_dl does not support: it takes the "
            "optimizer steps; return the loss from training_step, or run a loop of your own with "
            "spark_dl.launch"
        )
    for needed in ("training_step", "configure_optimizers"):
        if not _is_overridden(model, base, needed):
            raise ValueError(f"from_lightning: {name} needs {needed}, which it does not define")
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        raise ValueError(f"from_lightning: training_step of {name} takes dataloader_iter, expected a batch")
    _check_hooks(model, base, ignore_hooks)


def _check_hooks(model: nn.Module, base: type, ignore_hooks: Sequence[str]) -> None:
    own = [n for n in dir(base) if n.startswith("on_") and callable(getattr(base, n)) and not n.startswith(_OF_TESTS)]
    hooks = [*own, *(name for name in _OF_THE_TRAINER if hasattr(base, name)), *_REMOVED]
    for name in ignore_hooks:
        if name not in hooks:
            raise ValueError(f"ignore_hooks: no method {name!r} that spark_dl leaves out{suggestion(name, hooks)}")
    overridden = [n for n in hooks if _is_overridden(model, base, n) and n not in ignore_hooks]
    if overridden:
        raise ValueError(
            f"from_lightning: {type(model).__name__} overrides {', '.join(overridden)}, which spark_dl does not call; "
            f"remove them, or accept that they are left out: ignore_hooks={overridden!r}"
        )
