"""The learning rate of each step: a scheduler of `torch.optim`, with a linear warm-up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer, lr_scheduler

from spark_dl.config import Config
from spark_dl.optimization import Optimization
from spark_dl.parallel.trainable import build_optimizer
from spark_dl.rundir.plain import plain_state


class Schedule:
    """A scheduler and a linear warm-up. The warm-up is a factor during the step, so it works with any scheduler.

    own: the scheduler of `ModelSpec.optimizer`, instead of that of the settings.
    """

    def __init__(self, optimizer: Optimizer, config: Config, *, own: Optimization | None = None):
        self._optimizer, self._train = optimizer, config.train
        self._interval: str = self._train.scheduler_interval
        self._frequency = 1
        self._monitor: str | None = None
        self.scheduler: Any = None
        if own is not None and own.scheduler is not None:
            self.scheduler = own.scheduler
            self._interval, self._frequency, self._monitor = own.interval, own.frequency, own.monitor
        elif self._train.scheduler is not None:
            cls = getattr(lr_scheduler, self._train.scheduler)
            try:
                self.scheduler = cls(optimizer, **self._train.scheduler_args)
            except (TypeError, ValueError, ArithmeticError) as error:
                raise ValueError(
                    f"train.scheduler_args: {cls.__name__} does not take {self._train.scheduler_args}: {error}"
                ) from error

    @contextlib.contextmanager
    def warm(self, global_step: int) -> Iterator[float]:
        """Sets the learning rates of this step for the block. Yields the rate of the first parameter group."""
        groups = self._optimizer.param_groups
        for group in groups:
            if isinstance(group["lr"], np.generic):  # as of a LambdaLR with np.cos; a resumed run has numbers, too
                group["lr"] = group["lr"].item()
        full = [group["lr"] for group in groups]
        factor = min(1.0, (global_step + 1) / self._train.warmup_steps) if self._train.warmup_steps else 1.0
        for group, lr in zip(groups, full, strict=True):
            group["lr"] = lr * factor
        try:
            yield float(groups[0]["lr"])
        finally:
            for group, lr in zip(groups, full, strict=True):
                group["lr"] = lr

    def end_step(self, step: int = 1) -> None:
        """Must be called after every optimizer step. step: number of steps of the epoch so far."""
        if self.scheduler is not None and self._interval == "step" and step % self._frequency == 0:
            self.scheduler.step()

    def calls(self, total_steps: int, steps_per_epoch: int) -> int:
        """Returns how often a run of so many steps steps the scheduler."""
        epochs, rest = divmod(total_steps, steps_per_epoch)
        if self._interval == "epoch":
            return epochs // self._frequency
        return epochs * (steps_per_epoch // self._frequency) + rest // self._frequency

    def end_epoch(self, train_loss: float, metrics: Mapping[str, Any] | None = None, *, epoch: int = 1) -> None:
        """Must be called after every epoch. metrics: of the validation rows. epoch: number of epochs so far.

        Raises ValueError if the metrics lack the value that the scheduler monitors.
        """
        if self.scheduler is None or self._interval != "epoch" or epoch % self._frequency:
            return
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(self._monitored({"train_loss": train_loss, **(metrics or {})}))
        else:
            self.scheduler.step()

    def _monitored(self, values: Mapping[str, Any]) -> float:
        if self._monitor is None:
            return float(values.get("loss", values["train_loss"]))
        found = values.get(self._monitor)
        if not isinstance(found, int | float):
            numbers = [name for name, value in values.items() if isinstance(value, int | float)]
            raise ValueError(
                f"spec.optimizer: the scheduler monitors {self._monitor!r}, expected one of {numbers}, the numbers of "
                "this epoch; add a metric of this name, or monitor one of these"
            )
        return float(found)

    def check_without_validation(self) -> None:
        """Raises ValueError if the scheduler monitors a value of validation rows. Called if there are none."""
        if self._monitor not in (None, "train_loss"):
            raise ValueError(
                f"spec.optimizer: the scheduler monitors {self._monitor!r}, which needs validation rows; set "
                "train.validation_fraction, pass validation, or monitor 'train_loss'"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint can hold of the scheduler. Raises ValueError if it has other objects."""
        if self.scheduler is None:
            return {}
        owner = f"train.scheduler: {type(self.scheduler).__name__}"
        return plain_state(self.scheduler.state_dict(), owner, of_scheduler=True)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the scheduler."""
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state)


def check_optimization(config: Config) -> None:
    """Builds the configured optimizer and scheduler for a small model, and takes a step. Called on the driver.

    Raises ValueError, with the key, for arguments that torch refuses, so that ranks need not start to find them.
    """
    model = torch.nn.ParameterList([torch.zeros(2, 2)])  # a matrix, which all optimizers can train
    optimizer = build_optimizer(model, config, config.launch.num_ranks)
    scheduler = Schedule(optimizer, config).scheduler
    optimizer.step()  # without a gradient it changes nothing
    if scheduler is None:
        return
    try:
        scheduler.step(*([0.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    except Exception as error:
        name, args = type(scheduler).__name__, config.train.scheduler_args
        raise ValueError(f"train.scheduler_args: {name} fails with {args}: {type(error).__name__}: {error}") from error
