"""The section `checkpoint`: when the state of training is saved."""

from dataclasses import dataclass
from typing import ClassVar

from spark_dl.config.checks import check_bool, check_number


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of training is saved."""

    MAY_CHANGE: ClassVar[bool] = True
    every_steps: int = 0
    """Number of steps between two checkpoints; 0 saves checkpoints only as set in `every_epochs`."""
    every_epochs: int = 1
    """Number of epochs between two checkpoints. A checkpoint is always saved at the end of training."""
    keep: int = 2
    """Number of checkpoints to keep. The newest are kept."""
    strict: bool = False
    """Whether a resume fails if the newest checkpoint is damaged. Otherwise, the last valid checkpoint is used, with a
    warning."""

    def __post_init__(self) -> None:
        check_number(self, "every_steps", 0, whole=True)
        check_number(self, "every_epochs", 1, whole=True)
        check_number(self, "keep", 1, whole=True)
        check_bool(self, "strict")
