"""The learning rate of each step: a scheduler of `torch.optim`, with a linear warm-up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer, lr_scheduler

from spark_dl.config import Config


class Schedule:
    """A scheduler and a linear warm-up. The warm-up is a factor during the step, so it works with any scheduler."""

    def __init__(self, optimizer: Optimizer, config: Config):
        self._optimizer, self._train = optimizer, config.train
        self.scheduler: Any = None
        if self._train.scheduler is not None:
            cls = getattr(lr_scheduler, self._train.scheduler)
            try:
                self.scheduler = cls(optimizer, **self._train.scheduler_args)
            except TypeError as error:
                raise ValueError(
                    f"train.scheduler_args: {cls.__name__} does not accept these arguments: {error}"
                ) from error

    @contextlib.contextmanager
    def warm(self, global_step: int) -> Iterator[float]:
        """Sets the learning rates of this step for the block. Yields the rate of the first parameter group."""
        groups = self._optimizer.param_groups
        full = [group["lr"] for group in groups]
        factor = min(1.0, (global_step + 1) / self._train.warmup_steps) if self._train.warmup_steps else 1.0
        for group, lr in zip(groups, full, strict=True):
            group["lr"] = lr * factor
        try:
            yield float(groups[0]["lr"])
        finally:
            for group, lr in zip(groups, full, strict=True):
                group["lr"] = lr

    def end_step(self) -> None:
        """Must be called after every optimizer step."""
        if self.scheduler is not None and self._train.scheduler_interval == "step":
            self.scheduler.step()

    def end_epoch(self, loss: float) -> None:
        """Must be called after every epoch, with the validation loss, or the training loss without validation."""
        if self.scheduler is None or self._train.scheduler_interval != "epoch":
            return
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns a state for `torch.load(weights_only=True)`. Raises ValueError if the scheduler has other objects."""
        if self.scheduler is None:
            return {}
        return plain_state(self.scheduler.state_dict(), f"train.scheduler: {type(self.scheduler).__name__}")  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any], lr_ratio: float) -> None:
        """Restores the scheduler. lr_ratio: current factor of `train.lr_scaling` over the saved one."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)
        # These two have absolute rates, which are not scaled.
        if lr_ratio == 1.0 or isinstance(self.scheduler, (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)):
            return
        for group in self._optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if key in group:
                    group[key] = group[key] * lr_ratio
        for name in ("base_lrs", "_last_lr"):
            if hasattr(self.scheduler, name):
                setattr(self.scheduler, name, [float(lr) * lr_ratio for lr in getattr(self.scheduler, name)])


def plain_state(value: Any, owner: str) -> Any:
    """Returns a state dict that `torch.load(weights_only=True)` accepts: without defaultdicts, counters and functions.

    Raises ValueError, with owner, key and type, for values that are not tensors, numbers or strings.
    """
    if isinstance(value, dict):
        return {k: plain_state(v, f"{owner}[{k!r}]") for k, v in value.items() if not callable(v)}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_state(v, f"{owner}[{i}]") for i, v in enumerate(value))
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (torch.Tensor, int, float, str)):
        return value
    raise ValueError(
        f"{owner}: found a {type(value).__module__}.{type(value).__qualname__} in its state, which cannot be saved "
        "in a checkpoint; expected tensors, numbers and strings, in dicts, lists and tuples"
    )
