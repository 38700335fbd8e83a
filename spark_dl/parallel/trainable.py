"""What a strategy returns, and the optimizer that all of them build in the same way."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spark_dl.spec import Batch, ModelSpec, weighted_loss_sum

if TYPE_CHECKING:
    from spark_dl.config import Config


@dataclass(frozen=True)
class Trainable:
    """A model that can take optimizer steps on all ranks together."""

    modules: list[nn.Module]
    """What a checkpoint holds and an evaluation calls, without wrappers."""
    optimizer: torch.optim.Optimizer
    forward_backward: Callable[[Sequence[Batch], int], Tensor]
    """(micro-batches of this rank, true rows of the global batch) -> sum of this rank's losses, a float32 scalar.
    Collective. On return every `.grad` is the gradient of the mean loss over the global batch's true rows; over this
    rank's own ones where it steps by itself (`local_sgd`)."""
    clip_grad_norm: Callable[[float], Tensor]
    """Scales the reduced gradients to at most this L2 norm. Collective; returns the norm before."""
    step: Callable[[], None]
    """Applies the gradients. With fp16 a step whose gradients overflowed is left out, on all ranks alike."""
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    """Further objects with `state_dict` and `load_state_dict`, the same on all ranks."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """The same for what each rank has of its own, such as what compression left out: tensors and plain data. Where a
    run goes on with another number of ranks, each gets the mean of the tensors over the ranks of before."""
    saved_rank: Callable[[int], int] | None = None
    """(ranks of a checkpoint) -> the rank of it whose `rank_state` this rank takes, where that is not as said above."""
    settle: Callable[[], None] = lambda: None
    """Brings the weights of all ranks together; called before an evaluation and a checkpoint. Collective."""
    close: Callable[[], None] = lambda: None
    """Ends what runs beside the training, such as threads. Called once, also after an error; not collective."""


def add_gradients(
    spec: ModelSpec, module: nn.Module, micro_batches: Sequence[Batch], config: Config, *, device: torch.device,
    scale: Callable[[Tensor], Tensor],
    before_last: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Tensor:  # fmt: skip
    """Adds this rank's gradients of the sum of the true rows' losses to `.grad`. Returns that sum, a float32 scalar.

    scale: what backward begins with, from the sum of a micro-batch.
    before_last: context of all micro-batches but the last one, such as DDP's `no_sync`.
    """
    total = torch.zeros((), device=device)
    for i, batch in enumerate(micro_batches):
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        is_last = i == len(micro_batches) - 1
        with contextlib.nullcontext() if is_last else before_last():
            _, losses = weighted_loss_sum(spec, module, on_device, config)
            scale(losses).backward()
        total += losses.detach()
    return total


class Scaler:
    """What training in fp16 needs around an optimizer (Micikevicius et al. 2018, section 3.2): the loss is scaled, so
    that small gradients are not lost, and a step whose gradients overflowed is left out. Else it changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: Config, device: torch.device):
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
        self.state = {"scaler": self._scaler} if self._scaler.is_enabled() else {}
        """Of `Trainable.extra_state`."""

    def scale(self, losses: Tensor) -> Tensor:
        return self._scaler.scale(losses)

    def unscale(self) -> None:
        """Brings the reduced gradients to their true size."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)

    def step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()


class OptimizerState:
    """What an optimizer has learned on this rank; its settings are those of all ranks, which the schedule restores."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state["state"]})


def build_optimizer(model: nn.Module, config: Config, world_size: int) -> torch.optim.Optimizer:
    """The configured optimizer of `torch.optim` over the parameters that require a gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("spec.build: no parameter of the model requires a gradient; there is nothing to train")
    train = config.train
    cls = getattr(torch.optim, train.optimizer)
    try:
        optimizer: torch.optim.Optimizer = cls(
            parameters, lr=train.lr * lr_factor(config, world_size), **train.optimizer_args
        )
    except TypeError as error:
        raise ValueError(f"train.optimizer_args: {train.optimizer} does not take them: {error}") from error
    return optimizer


def lr_factor(config: Config, world_size: int) -> float:
    """What `train.lr` is multiplied by: 1 unless `train.lr_scaling` says otherwise. It counts the ranks that train."""
    ranks = world_size - config.parallel.servers
    return {"none": 1.0, "linear": float(ranks), "sqrt": math.sqrt(ranks)}[config.train.lr_scaling]
