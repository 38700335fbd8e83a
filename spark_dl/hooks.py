"""`Hooks`: what a run calls on every rank around its steps, validations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from spark_dl.spec import ModelSpec, Position


@dataclass(frozen=True)
class StepInfo:
    """What a hook gets: the run at this moment, on one rank."""

    model: nn.Module
    """The model, or, with `mesh`, the part of it that this rank has."""
    optimizer: Optimizer
    position: Position
    """Epochs and steps done. In `before_step` and `after_gradients`, without this step."""
    seed: int
    """`train.seed`."""
    rank: int
    world_size: int
    loss_sum: Tensor | None = None
    """The sum of the losses of this rank's rows in this step, a float32 scalar on the device. Its sum over the ranks,
    divided by `count`, is the loss of the step. None before the forward pass, and around validations and checkpoints.
    """
    count: float | Tensor | None = None
    """What the mean loss of the global batch is over: its rows, tokens or weights. None where `loss_sum` is None."""

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Returns a generator of random numbers of this step, the same on all ranks and after a resume."""
        generator = torch.Generator(device)
        return generator.manual_seed((self.seed + 1) * 1_000_003 + self.position.global_step)


class Hooks:
    """Methods that a run calls on every rank, for what needs no loop of its own. Override those that you need.

    `ModelSpec.hooks` makes the object, on every rank; with a strategy of Spark, such as `tree_reduce`, on the driver,
    which takes the steps. All ranks must do the same to weights and gradients; ranks that have whole weights are
    compared before each checkpoint. A step that is left out (`train.on_nonfinite`) has `before_step` alone.

    Example:
        >>> class NoisyGradients(spark_dl.Hooks):
        ...     def after_gradients(self, step):
        ...         generator = step.generator()
        ...         for parameter in step.model.parameters():
        ...             if parameter.grad is not None:
        ...                 noise = torch.randn(parameter.shape, generator=generator)
        ...                 parameter.grad.add_(0.01 * noise.to(parameter.device))
        >>> noisy = spark_dl.ModelSpec(build=lambda: torch.nn.Linear(2, 2), hooks=NoisyGradients)
    """

    def before_step(self, step: StepInfo) -> None:
        """Called before the forward pass of each step. Not collective."""

    def after_gradients(self, step: StepInfo) -> None:
        """Called when `.grad` is the gradient of the loss of the global batch, before clipping and the update.

        Not collective, but all ranks must change the gradients alike. In the local steps of `local_sgd`, it is that of
        the rows of this rank.
        """

    def after_step(self, step: StepInfo) -> None:
        """Called after the update of each step."""

    def after_validation(self, step: StepInfo, metrics: Mapping[str, Any]) -> None:
        """Called after each validation, also within epochs. metrics: `loss` and others, the same on all ranks."""

    def after_checkpoint(self, step: StepInfo, url: str) -> None:
        """Called when a checkpoint is committed. With `checkpoint.asynchronous`, that is some steps later.

        Args:
            url: of the checkpoint, which must not be changed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: tensors and plain data, the same on all ranks. That of rank 0 is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it, before the first step of a resumed run. Not called for a checkpoint of a run without hooks."""


HOOKS = "hooks"
"""The name of their state in checkpoints."""


def build_hooks(spec: ModelSpec) -> Hooks | None:
    """Returns the hooks of a spec, if it has any. Raises ValueError for another object."""
    if spec.hooks is None:
        return None
    hooks = spec.hooks()
    if not isinstance(hooks, Hooks):
        raise ValueError(f"spec.hooks: expected an object of a class derived from spark_dl.Hooks, found {hooks!r:.200}")
    return hooks
