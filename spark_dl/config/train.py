"""The section `train`: the optimization."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_dl.config.checks import check, check_choices, check_class, check_number
from spark_dl.config.fields import may_change

LrScaling = Literal["none", "linear", "sqrt"]
Precision = Literal["float32", "bf16", "fp16"]
Interval = Literal["step", "epoch"]
Mode = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class Train:
    """The optimization: what a single process would do with the same global batches."""

    global_batch_size: int = 64
    """Rows of one optimizer step, over all ranks and micro-batches; does not change with the number of ranks."""
    accumulation_steps: int = 1
    """Micro-batches that each rank cuts its part of a global batch into."""
    epochs: int = may_change(1)
    """Passes over the data."""
    max_steps: int | None = may_change(None)
    """Optimizer steps after which training ends, in the middle of an epoch if need be."""
    optimizer: str = "SGD"
    """Name of a class of `torch.optim`."""
    lr: float = 0.01
    """Learning rate, used as written unless `lr_scaling` says otherwise."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as `{momentum: 0.9, nesterov: true}`."""
    scheduler: str | None = None
    """Name of a class of `torch.optim.lr_scheduler`."""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the scheduler."""
    scheduler_interval: Interval = "epoch"
    """When the scheduler steps. `ReduceLROnPlateau` reads the validation loss and needs `epoch`."""
    lr_scaling: LrScaling = "none"
    """Multiply the learning rate by the number of ranks (`linear`) or its square root (`sqrt`)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its value."""
    clip_grad_norm: float | None = None
    """Largest L2 norm of the reduced gradient."""
    precision: Precision = "float32"
    """Arithmetic of forward and backward; `bf16` and `fp16` use autocast, the weights stay float32."""
    validation_fraction: float = 0.0
    """Fraction of the training rows, drawn at random, that is used for validation instead. In [0, 1)."""
    metrics: dict[str, dict[str, Any]] = may_change(dict)
    """Metrics by name: `{accuracy: {class: MulticlassAccuracy, num_classes: 10}}`, classes of torchmetrics."""
    early_stop_metric: str | None = may_change(None)
    """`loss` or a name of `metrics`, of the validation rows, that must go on improving."""
    early_stop_mode: Mode = may_change("min")
    """Whether less (`min`) or more (`max`) of it is better."""
    early_stop_patience: int = may_change(3)
    """Epochs without an improvement after which all ranks stop."""
    early_stop_min_delta: float = may_change(0.0)
    """Least change that counts as an improvement."""
    seed: int = 0
    """Seed of the weights, the order of rows and the random numbers of each rank."""
    log_every: int = may_change(10)
    """Steps between two lines of metrics; the loss is summed over the ranks only then."""

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "accumulation_steps", "epochs", "early_stop_patience", "log_every"):
            check_number(self, name, 1, whole=True)
        for name in ("warmup_steps", "seed"):
            check_number(self, name, 0, whole=True)
        if self.max_steps is not None:
            check_number(self, "max_steps", 1, whole=True)
        if self.clip_grad_norm is not None:
            check_number(self, "clip_grad_norm", 0, above=True)
        check_number(self, "lr", 0, above=True)
        check_number(self, "validation_fraction", 0)
        check(self.validation_fraction < 1, "train.validation_fraction", "a number < 1", self.validation_fraction)
        check_number(self, "early_stop_min_delta", 0)
        check_choices(self)
        check_class("train.optimizer", "torch.optim", "Optimizer", self.optimizer)
        calls_back = self.optimizer == "LBFGS"  # its step computes the loss again and again
        check(not calls_back, "train.optimizer", "an optimizer that takes one gradient per step", self.optimizer)
        for name in ("optimizer_args", "scheduler_args", "metrics"):
            value = getattr(self, name)
            check(isinstance(value, Mapping), f"train.{name}", "a mapping of names to values", value)
        if self.scheduler is not None:
            check_class("train.scheduler", "torch.optim.lr_scheduler", "LRScheduler", self.scheduler)
            plateau = self.scheduler == "ReduceLROnPlateau" and self.scheduler_interval == "step"
            check(not plateau, "train.scheduler_interval", "epoch for ReduceLROnPlateau", self.scheduler_interval)
        for name, args in self.metrics.items():
            is_metric = isinstance(args, Mapping) and isinstance(args.get("class"), str)
            check(is_metric, f"train.metrics.{name}", "{class: <torchmetrics class>, <its arguments>}", args)
            check(name != "loss", "train.metrics", "another name than 'loss', which is always reported", name)
        known = ["loss", *self.metrics]
        if self.early_stop_metric is not None:
            check(self.early_stop_metric in known, "train.early_stop_metric", f"one of {known}", self.early_stop_metric)
