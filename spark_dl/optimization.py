"""`Optimization`, an optimizer with its scheduler, as `ModelSpec.optimizer` returns it; several optimizers as one."""

from __future__ import annotations

import inspect
from collections import defaultdict
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
        scheduled = self.optimizer.optimizer if isinstance(self.optimizer, MasterWeights) else self.optimizer
        if self.scheduler.optimizer not in (self.optimizer, scheduled):
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


_MASTER = "master"
"""The copy of a weight in the state of `MasterWeights`."""
_ROUNDS = "rounds"
"""Number of roundings of a weight so far, in the state of `MasterWeights`."""
HALF = (torch.bfloat16, torch.float16)
"""Dtypes of weights whose small steps are lost."""


class MasterWeights(Optimizer):
    """An optimizer that steps copies of the weights, in float32 if these are in half precision, and writes what they
    become back to the model.

    Steps of weights in bfloat16 would be lost where they are smaller than half of its last digit (Micikevicius et al.
    2018, section 3.1). The copies and the optimizer's state can be in the memory of the host, where the step is then
    taken (Ren et al. 2021, ZeRO-Offload). Its groups are those of the optimizer. Copies in another precision
    than the weights are a part of its state, "master". `train.precision: bf16` and `train.offload_optimizer` use it.

    Args:
        optimizer: an optimizer of the model's parameters.
        device: where the copies and the state are; where the parameters are, if it is None.
        stochastic: whether no copies are kept: a step of weights in bfloat16 is computed in float32, and what it gives
            is rounded up or down at random, with the probabilities that make its mean exact (Gupta et al. 2015, Deep
            Learning with Limited Numerical Precision). It takes 4 bytes less for each parameter. All ranks round alike.

    Raises:
        ValueError: For something else than an optimizer that takes one gradient per step.

    Example:
        >>> def build_optimizer(model):
        ...     return spark_dl.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3))
        >>> spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 2).bfloat16(), optimizer=build_optimizer)
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device | str | None = None, *, stochastic: bool = False
    ):  # fmt: skip
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS | MasterWeights):
            raise ValueError(
                "MasterWeights: expected an optimizer of torch.optim that takes one gradient per step, found "
                f"{type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        self._device = None if device is None else torch.device(device)
        self._stochastic = stochastic
        self._masters: dict[Tensor, tuple[nn.Parameter, int]] = {}
        """The copy of each parameter, and the version of the parameter that has it."""
        super().__init__(optimizer.param_groups, {})
        for parameter, state in optimizer.state.items():  # that of Adagrad is made with the optimizer
            self.state[parameter] = {key: self._placed(parameter, key, value) for key, value in state.items()}
        self._give(self.param_groups, self.state)

    def _give(self, groups: list[dict[str, Any]], state: Any) -> None:
        """Gives the optimizer groups and a state, outside a step those of this one: a scheduler may know it."""
        self.optimizer.param_groups, self.optimizer.state = groups, state
        if isinstance(self.optimizer, CombinedOptimizer):
            self.optimizer._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # as `load_state_dict` does, with new groups and a new state
        self._give(self.param_groups, self.state)
        self.optimizer.__setstate__({})  # which adds settings that a checkpoint of an older torch does not have

    def _placed(self, parameter: Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()) or key == "step":
            return value
        dtype = torch.float32 if value.dtype in HALF else value.dtype
        return value.detach().to(self._device or parameter.device, dtype, copy=True)

    def _master_of(self, parameter: Tensor) -> nn.Parameter:
        """Returns the copy of a parameter; a new one if something else than a step has written the parameter."""
        master, version = self._masters.get(parameter, (None, -1))
        if master is not None and version != parameter._version:
            same = torch.equal(master.to(parameter.device, parameter.dtype), parameter.detach())
            master = master if same else None
        return nn.Parameter(self._placed(parameter, "", parameter)) if master is None else master

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step. closure: not supported, as it would compute the loss with the copies."""
        if closure is not None:
            raise ValueError("MasterWeights: step takes no closure")
        pairs = [(p, self._master_of(p)) for p in trained_by(self) if p.grad is not None]
        for parameter, master in pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.to(master.device, master.dtype)
        of = dict(pairs)
        groups = [{**group, "params": [of[p] for p in group["params"] if p in of]} for group in self.param_groups]
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        rounds = {p: self.state[p].pop(_ROUNDS, 0) for p, _ in pairs if p in self.state}
        state.update({master: self.state[parameter] for parameter, master in pairs if parameter in self.state})
        self._give(groups, state)
        try:
            self.optimizer.step()
        finally:
            for i, (parameter, master) in enumerate(pairs):
                master.grad = None
                self.state[parameter] = state[master]
                if self._stochastic and parameter.dtype == torch.bfloat16:
                    done = int(rounds.get(parameter, 0))
                    parameter.copy_(_rounded(master, seed=done * 1_000_003 + i))
                    self.state[parameter][_ROUNDS] = torch.tensor(done + 1)
                else:
                    parameter.copy_(master)
                    self._masters[parameter] = master, parameter._version
            for group, stepped in zip(self.param_groups, groups, strict=True):
                group.update({**stepped, "params": group["params"]})
            self._give(self.param_groups, self.state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as other optimizers do, with the copies of weights that are not float32."""
        state = super().state_dict()
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, trained_by(self), strict=True):
            if parameter.dtype in HALF and parameter in self._masters:
                master = self._masters[parameter][0].detach()
                state["state"][number] = {**state["state"].get(number, {}), _MASTER: master}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of `state_dict`, or of the optimizer alone. The weights must have been loaded before."""
        super().load_state_dict(state_dict)
        self._masters = {}
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, trained_by(self), strict=True):
            # torch has given the state the dtype and the device of the parameters.
            of_one = state_dict["state"].get(number, {})
            placed = {key: self._placed(parameter, key, value) for key, value in of_one.items() if key != "step"}
            if parameter in self.state:
                self.state[parameter] = {**self.state[parameter], **placed}
                self.state[parameter].pop(_MASTER, None)
            if _MASTER in placed:
                self._masters[parameter] = nn.Parameter(placed[_MASTER]), parameter._version


def _rounded(values: Tensor, *, seed: int) -> Tensor:
    """Returns float32 values with the digits of bfloat16, rounded up or down at random."""
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = (values.detach().contiguous().view(torch.int32) + noise) & -(1 << 16)
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizers that an optimizer is made of: itself, if it is not several."""
    if isinstance(optimizer, MasterWeights):
        return parts_of(optimizer.optimizer)
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
