"""`Optimization`, an optimizer with its scheduler, as `ModelSpec.optimizer` returns it; several optimizers as one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """An optimizer, and a scheduler of its learning rates. Built on every rank.

    Example:
        >>> def build_optimization(model):
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ...     schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
        ...     return spark_dl.Optimization(optimizer, schedule)
        >>> spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 2), optimizer=build_optimization)
    """

    optimizer: Optimizer
    """An optimizer that takes one gradient per step, or several as a `CombinedOptimizer`. LBFGS is not supported."""
    scheduler: LRScheduler | None = None
    """A scheduler of this optimizer."""
    interval: Literal["step", "epoch"] = "epoch"
    """When the scheduler steps. `ReduceLROnPlateau` needs `epoch`."""
    frequency: int = 1
    """The scheduler steps after every `frequency` epochs, or after every `frequency` steps of an epoch."""
    monitor: str | None = None
    """Value that `ReduceLROnPlateau` reads: `loss` or another metric of the validation rows, or `train_loss`. None:
    the validation loss, or the training loss without validation rows."""
    elementwise: bool = False
    """Whether an optimizer of your own updates each element of the weights by itself, as SGD and Adam do. Ranks that
    have parts of the weights (`parallel.strategy` mesh with ZeRO, tensor or expert ranks) need one that does."""

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Optimizer) or isinstance(self.optimizer, LBFGS):
            raise ValueError(
                "spec.optimizer: expected an optimizer of torch.optim that takes one gradient per step, found "
                f"{type(self.optimizer).__name__}"
            )
        if self.scheduler is not None:
            self._check_scheduler()

    def _check_scheduler(self) -> None:
        name = type(self.scheduler).__name__
        if not isinstance(self.scheduler, (LRScheduler, ReduceLROnPlateau)):
            raise ValueError(f"spec.optimizer: expected a scheduler of torch.optim.lr_scheduler, found {name}")
        if self.scheduler.optimizer is not self.optimizer:
            raise ValueError(f"spec.optimizer: the {name} schedules another optimizer than the one that is returned")
        if self.interval not in ("step", "epoch"):
            raise ValueError(f"spec.optimizer: expected interval 'step' or 'epoch', found {self.interval!r}")
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.interval == "step":
            raise ValueError("spec.optimizer: expected interval 'epoch' for ReduceLROnPlateau, found 'step'")
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ValueError(f"spec.optimizer: expected an integer frequency of at least 1, found {self.frequency!r}")


class CombinedOptimizer(Optimizer):
    """Several optimizers, each for its own parameters, as one: a step takes a step of each.

    Its groups are those of the optimizers, in their order, so that one scheduler has the rates of all of them: most
    scale the rate of each group by the same factor, and `LambdaLR` takes a function for each group. Checkpoints have
    the state of all of them. Built on every rank.

    Args:
        optimizers: at least one; no two of them have a parameter in common.

    Raises:
        ValueError: For something else than optimizers that take one gradient per step, and if two of them have the
            same parameter.

    Example:
        >>> def build_optimizers(model):
        ...     matrices = [p for p in model.parameters() if p.ndim == 2]
        ...     others = [p for p in model.parameters() if p.ndim != 2]
        ...     return spark_dl.CombinedOptimizer([
        ...         torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)
        ...     ])
        >>> spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 2), optimizer=build_optimizers)
    """

    def __init__(self, optimizers: Sequence[Optimizer]):
        self.optimizers = list(optimizers)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS | CombinedOptimizer):
                raise ValueError(
                    "CombinedOptimizer: expected optimizers of torch.optim that take one gradient per step, found "
                    f"{type(optimizer).__name__}"
                )
        if not self.optimizers:
            raise ValueError("CombinedOptimizer: expected at least one optimizer, found none")
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
        self._share()

    def _share(self) -> None:
        """Gives each optimizer its groups, and the state, which are then the same objects as those of this one."""
        first = 0
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            optimizer.param_groups, optimizer.state = self.param_groups[first : first + count], self.state
            first += count

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # as `load_state_dict` does, with new groups and a new state
        self._share()
        for optimizer in self.optimizers:
            optimizer.__setstate__({})  # which adds settings that a checkpoint of an older torch does not have

    def step(self, closure: Any = None) -> Any:
        """Takes a step of each optimizer. closure: not supported, as it would compute the loss once for each."""
        if closure is not None:
            raise ValueError("CombinedOptimizer: step takes no closure")
        for optimizer in self.optimizers:
            optimizer.step()


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that an optimizer is made of: itself, if it is not several."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def class_name(optimizer: Optimizer) -> str:
    """Returns the name of the class of an optimizer, or of each of several, such as `Muon + AdamW`."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


def check_elementwise(optimization: Optimization, known: Sequence[str]) -> None:
    """Raises ValueError for an optimizer that needs whole tensors, where ranks have parts of them.

    Args:
        known: the optimizers of `torch.optim` that update each element by itself. A subclass with a `step` of its own
            is another one.
    """
    classes = [getattr(torch.optim, each) for each in known]
    for part in parts_of(optimization.optimizer):
        step = inspect.unwrap(type(part).step)
        is_known = any(isinstance(part, cls) and step is inspect.unwrap(cls.step) for cls in classes)
        if not is_known and not optimization.elementwise:
            raise ValueError(
                f"spec.optimizer: expected one of {', '.join(known)} with parallel.strategy='mesh', whose ranks have "
                f"parts of the weights, found {type(part).__name__}; if it updates each element by itself, return "
                "Optimization(optimizer=..., elementwise=True), else use ddp"
            )


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer. Others of the model keep gradients that no step uses or clears."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raises ValueError if an optimizer has parameters that are not the model's, or none that requires a gradient."""
    of_model = {id(parameter) for parameter in model.parameters()}
    trained = trained_by(optimizer)
    if not all(id(parameter) in of_model for parameter in trained):
        raise ValueError("spec.optimizer: the optimizer has parameters that are not parameters of the model")
    if not any(parameter.requires_grad for parameter in trained):
        raise ValueError("spec.optimizer: no parameter of the optimizer requires a gradient; there is nothing to train")


def scale_rates(optimizer: Optimizer, scheduler: Any, ratio: float) -> None:
    """Multiplies the learning rates of an optimizer, and the base rates of its scheduler, by a ratio.

    Floors such as `eta_min` stay as they are. scheduler: None, or a scheduler.
    Raises ValueError for OneCycleLR and CyclicLR, whose rates are absolute.
    """
    if ratio == 1.0:
        return
    schedulers = list(_with_inner(scheduler))
    for part in schedulers:
        if isinstance(part, (OneCycleLR, CyclicLR)):
            raise ValueError(
                f"train.lr_scaling: has no effect on {type(part).__name__}, whose rates are absolute; set it to none, "
                "and max_lr of the scheduler"
            )
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * ratio
    for part in schedulers:
        for name in ("base_lrs", "_last_lr"):
            if hasattr(part, name):
                setattr(part, name, [float(lr) * ratio for lr in getattr(part, name)])


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """Yields a scheduler and those that it is made of, such as those of SequentialLR."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _with_inner(part)
