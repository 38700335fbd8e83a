"""What `self.trainer` of a LightningModule is on a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from spark_dl.spec import Position


@dataclass(frozen=True)
class StepTrainer:
    """The position of the run, and the rank. `current_epoch` and the like of a LightningModule read their values here.

    Raises AttributeError, with the names that exist, for all others of Lightning's Trainer.
    """

    current_epoch: int = 0
    batch_idx: int = 0
    """Steps done in the current epoch."""
    global_step: int = 0
    """Optimizer steps done, over all epochs."""

    logger = None
    loggers = ()
    sanity_checking = False
    progress_bar_callback = None

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def local_rank(self) -> int:
        return self.global_rank

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def __getattr__(self, name: str) -> Any:
        known = "current_epoch, global_step, global_rank, world_size, is_global_zero"
        raise AttributeError(
            f"self.trainer.{name}: spark_dl trains without Lightning's Trainer; expected one of {known}; pass other "
            "values, such as the number of steps, to the module when it is built"
        )


def set_position(model: Any, position: Position) -> None:
    """Sets the epoch and the step that a LightningModule sees. Called on a rank (`ModelSpec.set_position`)."""
    model.trainer = StepTrainer(position.epoch, position.step, position.global_step)


def attached_trainer(model: Any) -> StepTrainer:
    """Returns the trainer of a module. A module without one gets one at step 0."""
    if not isinstance(model._trainer, StepTrainer):
        model.trainer = StepTrainer()
    trainer: StepTrainer = model._trainer
    return trainer
