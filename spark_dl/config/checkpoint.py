"""The section `checkpoint`: when the state of training is saved."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from spark_dl.config.checks import check, check_bool, check_choices, check_number
from spark_dl.config.fields import named_settings, of_caller

OnError = Literal["raise", "warn"]
Weights = Literal["all", "trainable"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of training is saved.

    Example:
        >>> spark_dl.Checkpoint(every_steps=500, keep=2, keep_best=1)
    """

    MAY_CHANGE: ClassVar[bool] = True
    every_steps: int = 0
    """Number of steps between two checkpoints; 0 saves checkpoints only as set in `every_epochs`."""
    every_epochs: int = 1
    """Number of epochs between two checkpoints. A checkpoint is always saved at the end of training."""
    keep: int = 2
    """Number of checkpoints to keep. The newest are kept."""
    keep_best: int | None = None
    """Number of further checkpoints to keep: those of steps with a validation, which the ends of epochs and
    `train.validate_every_steps` have, with the best value of `train.early_stop_metric`, or of the validation loss
    without one. `train.early_stop_mode` says what is better. Null is 1 with validation rows, and 0 without."""
    weights: Weights = "all"
    """Which weights a checkpoint has. `trainable` leaves out those that are frozen (`requires_grad=False`) and are as
    `spec.build` has made them, such as those of a pretrained model under LoRA: whoever loads the checkpoint builds the
    model first, and a checksum of each of them is compared. Buffers are always saved."""
    asynchronous: bool = False
    """Write checkpoints while training goes on. Training pauses only while the state is copied. The copy needs host
    memory equal to the size of the state. A checkpoint begins only when the one before is written. If writing that one
    failed, its error is raised then."""
    on_error: OnError = "raise"
    """What happens if the storage refuses a checkpoint, for example because a disk is full or read-only. `raise` ends
    the attempt, and the ranks are started again, up to `launch.max_restarts` times. `warn` logs a warning, and training
    goes on; the last checkpoint of the run must be written."""
    signing_key_file: str | None = of_caller(None)
    """File with a key of at least 32 bytes, on the driver and on the host of rank 0. Checkpoints are signed with it
    (HMAC-SHA256), and a checkpoint with another signature, or without one, is never loaded."""
    strict: bool = False
    """Whether a resume fails if the newest checkpoint is damaged. Otherwise, the last valid checkpoint is used, with a
    warning."""

    def __post_init__(self) -> None:
        check_number(self, "every_steps", 0, whole=True)
        check_number(self, "every_epochs", 1, whole=True)
        check_number(self, "keep", 1, whole=True)
        if self.keep_best is not None:
            check_number(self, "keep_best", 0, whole=True)
        check_bool(self, "strict", "asynchronous")
        check_choices(self)
        if (path := self.signing_key_file) is not None:
            check(isinstance(path, str) and path != "", "checkpoint.signing_key_file", "the path of a file", path)
