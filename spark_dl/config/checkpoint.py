"""The section `checkpoint`: when the state of training is saved."""

from dataclasses import dataclass
from typing import ClassVar

from spark_dl.config.checks import check_bool, check_number


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of training is saved."""

    MAY_CHANGE: ClassVar[bool] = True
    every_steps: int = 0
    """Steps between two checkpoints; 0 saves only by epochs."""
    every_epochs: int = 1
    """Epochs between two checkpoints. The end of training is always saved."""
    keep: int = 2
    """Checkpoints that are kept: the newest ones."""
    strict: bool = False
    """Whether a damaged newest checkpoint stops a resume; else the last valid one is used, with a warning."""

    def __post_init__(self) -> None:
        check_number(self, "every_steps", 0, whole=True)
        check_number(self, "every_epochs", 1, whole=True)
        check_number(self, "keep", 1, whole=True)
        check_bool(self, "strict")
