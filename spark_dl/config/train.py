"""The section `train`: the optimization."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_dl.config.checks import SettingError, check, check_bool, check_choices, check_class, check_number
from spark_dl.config.fields import may_change, named_settings, of_caller

LrScaling = Literal["none", "linear", "sqrt"]
Precision = Literal["float32", "bf16-mixed", "fp16-mixed", "bf16"]
Interval = Literal["step", "epoch"]
Mode = Literal["min", "max"]
RandomBy = Literal["rank", "row"]
OnNonfinite = Literal["raise", "skip", "rollback"]


@named_settings
@dataclass(frozen=True, kw_only=True)
class Train:
    """The optimization. It does not depend on the number of ranks: one process with the same global batches takes the
    same steps.

    Example:
        >>> spark_dl.Train(epochs=5, optimizer="AdamW", lr=0.001, clip_grad_norm=1.0, precision="bf16-mixed")
    """

    global_batch_size: int = 64
    """Rows of one optimizer step, over all ranks and micro-batches. Independent of the number of ranks."""
    accumulation_steps: int = 1
    """Micro-batches of each rank per optimizer step."""
    epochs: int = may_change(1)
    """Passes over the data."""
    max_steps: int | None = may_change(None)
    """Maximum number of optimizer steps; training can end in the middle of an epoch."""
    optimizer: str = "SGD"
    """Name of a class of `torch.optim`."""
    lr: float = 0.01
    """Learning rate, used as written unless `lr_scaling` says otherwise."""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as `{momentum: 0.9, nesterov: true}`."""
    param_groups: tuple[dict[str, Any], ...] = ()
    """Parameters that are trained otherwise: `{match: <pattern>, optimizer: <class>, lr: <rate>, <arguments>}`. A
    parameter is in the first group whose pattern, a regular expression, is found in its name, such as
    `blocks.0.bias`. What a group does not set is `train.lr`, and, with the same optimizer, `train.optimizer_args`. The
    scheduler changes the rates of all groups by the same factor."""
    scheduler: str | None = None
    """Name of a class of `torch.optim.lr_scheduler`."""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the scheduler. `run` stands for how often the run steps it, such as `{total_iters: run}`. `T_max` of
    CosineAnnealingLR and `total_steps` of OneCycleLR are that, too, unless they are set."""
    scheduler_interval: Interval = "epoch"
    """When the scheduler steps. `ReduceLROnPlateau` reads the validation loss and needs `epoch`."""
    lr_scaling: LrScaling = "none"
    """Multiply the learning rate by the number of ranks (`linear`) or its square root (`sqrt`). Floors of schedulers,
    such as `eta_min` and `min_lr`, stay as they are."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its value."""
    clip_grad_norm: float | None = None
    """Maximum L2 norm of the gradient after the reduction over ranks; larger gradients are scaled down. Null disables
    clipping."""
    ema_decay: float | None = may_change(None)
    """Keep an exponential moving average of the weights, with this decay per step, such as 0.999. Validations compute
    the model with it, and `evaluate`, `predict` and `load_model` take it from a checkpoint; the steps and a resume go
    on with the weights themselves. The decay rises to this value in the first steps. Null: no average."""
    swa_start: float | None = may_change(None)
    """Keep the mean of the weights after each step from this part of the run on, such as 0.75 for the last quarter of
    its steps (stochastic weight averaging, Izmailov et al. 2018), in the place of `ema_decay`. Before, the average is
    the weights. In [0, 1). Null: no average."""
    precision: Precision = "float32"
    """Precision of the forward and backward passes. `bf16-mixed` and `fp16-mixed` use autocast, and the weights stay in
    float32. With `bf16` the weights and gradients are in bfloat16, too, which takes half of their memory and of the
    bytes of an exchange; the optimizer steps copies of the weights in float32, and modules with statistics, such as
    BatchNorm, stay in float32."""
    stochastic_rounding: bool = False
    """With `precision: bf16`: keep no copies of the weights in float32, which take 4 bytes for each parameter; each
    step is rounded up or down at random, so that small ones are not lost in the mean."""
    offload_optimizer: bool = may_change(False)
    """Keep the optimizer's state in the memory of the host, and take its steps there. A GPU then holds 8 bytes less for
    each parameter with Adam, and a step waits for the copies of gradients and weights."""
    compile: bool = may_change(False)
    """Compile the model with `torch.compile`, in a mesh each block by itself: the modules of its lists and chains. The
    first steps then take longer, also those of a validation. Needs a C++ compiler on the executors."""
    channels_last: bool = may_change(False)
    """Keep images, the tensors with 4 axes of the model and of batches, in the memory format `channels_last`, which
    convolutions in bf16 and fp16 on GPUs prefer."""
    activation_checkpointing: Literal["full"] | tuple[str, ...] = may_change(())
    """Layers that keep only their inputs in the forward pass, and compute their activations again in the backward pass,
    which takes less memory and more time: names of modules or patterns of these, such as `["encoder.layers.*"]`; or
    `full`, for the layers of all lists and chains of modules. The weights stay the same."""
    on_nonfinite: OnNonfinite = may_change("raise")
    """What all ranks do about a step with NaN or Inf in the loss or a gradient: end the run with an error (`raise`);
    leave out the update of that step (`skip`); or load the last checkpoint, and leave out that step when it comes again
    (`rollback`)."""
    max_nonfinite: int = may_change(3)
    """With `skip`, maximum number of steps in a row that are left out; with `rollback`, maximum number of times that
    the run goes back to the same checkpoint. After more, the run ends with the error."""
    check_replicas_every: int = may_change(0)
    """Steps between two comparisons of the weights of ranks that must have the same ones, to the bit. They are always
    compared before each checkpoint, together with the buffers; 0 compares them only there."""
    check_batch_loss: bool = may_change(True)
    """Check before the first step that `ModelSpec.batch_loss`, or the `training_step` of a LightningModule, is the mean
    over the rows of its batch, or over what `ModelSpec.count` says. False accepts another loss, such as one that
    compares the rows of a batch: the weights then depend on the number of ranks and micro-batches."""
    validation_fraction: float = 0.0
    """Fraction of the training rows, chosen at random, that is used for validation. In [0, 1)."""
    validation_fold: int | None = None
    """For cross-validation with a `validation_fraction` of 1/k: the fold, from 0 to k - 1, whose rows are used for
    validation. The k folds are disjoint and have all rows, chosen at random by `seed`."""
    validate_every_steps: int = may_change(0)
    """Number of steps between two validations, which also count for early stopping; 0 validates only at the ends of
    epochs, as every run does. A checkpoint of the same step is ranked by them (`checkpoint.keep_best`)."""
    metrics: dict[str, dict[str, Any]] = may_change(dict)
    """Metrics by name, as torchmetrics classes and their arguments: `{accuracy: {class: MulticlassAccuracy,
    num_classes: 10}}`. `label` names another column than `data.label`. `output` is a key or an index, for models with
    several outputs. `ModelSpec.metrics` has metrics of your own."""
    early_stop_metric: str | None = may_change(None)
    """`loss`, or the name of a metric in `train.metrics` or `ModelSpec.metrics`, on the validation rows. Training stops
    when this value no longer improves."""
    early_stop_mode: Mode | None = may_change(None)
    """Whether a lower (`min`) or a higher (`max`) value is better. Null takes it from the metric: the loss is better if
    it is lower, and classes of torchmetrics say it. Metrics of your own do not, and need this setting."""
    early_stop_patience: int = may_change(3)
    """Validations without an improvement after which all ranks stop. There is one after each epoch, and more with
    `validate_every_steps`."""
    early_stop_min_delta: float = may_change(0.0)
    """Smallest change that counts as an improvement."""
    random_by: RandomBy = "rank"
    """What decides the random numbers of the forward pass, such as dropout. `rank`: each rank draws from a generator of
    its own, which is fast, and gives other weights for other numbers of ranks. `row`: each row has its own numbers, by
    seed, epoch, step and its place in the global batch, so that the weights depend neither on ranks nor on
    micro-batches. See [exactness](exactness.md#models) for its cost."""
    init_from: str | None = of_caller(None, fixed=True)
    """A checkpoint, or the folder of a run, whose last checkpoint is used; or a file of safetensors, a folder of
    Hugging Face, or a distributed checkpoint of torch. The model starts with its weights and buffers. The optimizer and
    the scheduler start without a state, and the steps are counted from 0. Strings get the vocabularies of that run. A
    resumed run continues from its own checkpoint."""
    deterministic: bool = may_change(False)
    """Use only operations of torch that give the same bits each time (`torch.use_deterministic_algorithms`, and the
    same of cuDNN and cuBLAS). An operation that has no such form is an error that names it. On GPUs it costs speed; on
    CPUs a run has the same bits without it."""
    seed: int = 0
    """Seed of the weights, the order of rows and the random numbers of each rank."""
    log_every: int = may_change(10)
    """Steps between two log lines. The loss is reduced over the ranks only for these lines."""

    def __post_init__(self) -> None:
        at_least_1 = (
            "global_batch_size",
            "accumulation_steps",
            "epochs",
            "max_nonfinite",
            "early_stop_patience",
            "log_every",
        )
        for name in at_least_1:
            check_number(self, name, 1, whole=True)
        for name in ("warmup_steps", "check_replicas_every", "validate_every_steps", "seed"):
            check_number(self, name, 0, whole=True)
        if self.max_steps is not None:
            check_number(self, "max_steps", 1, whole=True)
        if self.clip_grad_norm is not None:
            check_number(self, "clip_grad_norm", 0, above=True)
        if self.ema_decay is not None:
            check_number(self, "ema_decay", 0, above=True)
            check(self.ema_decay < 1, "train.ema_decay", "a number < 1", self.ema_decay)
        if self.swa_start is not None:
            check_number(self, "swa_start", 0)
            check(self.swa_start < 1, "train.swa_start", "a number < 1", self.swa_start)
            both = self.ema_decay is not None
            check(not both, "train.swa_start", "null with train.ema_decay, as a run has one average", self.swa_start)
        check_number(self, "lr", 0, above=True)
        check_number(self, "validation_fraction", 0)
        check(self.validation_fraction < 1, "train.validation_fraction", "a number < 1", self.validation_fraction)
        if self.validation_fold is not None:
            self._check_fold()
        check_number(self, "early_stop_min_delta", 0)
        check_bool(
            self,
            "compile",
            "channels_last",
            "check_batch_loss",
            "deterministic",
            "offload_optimizer",
            "stochastic_rounding",
        )
        fits = not self.stochastic_rounding or self.precision == "bf16"
        check(fits, "train.stochastic_rounding", "false without train.precision bf16", self.stochastic_rounding)
        check_choices(self)
        _check_optimizer("train.optimizer", self.optimizer)
        check(isinstance(self.param_groups, tuple | list), "train.param_groups", "a list of groups", self.param_groups)
        for i, group in enumerate(self.param_groups):
            try:
                _check_group(group)
            except SettingError as error:
                raise SettingError("train.param_groups", f"group {i}: {error}") from error
        object.__setattr__(self, "param_groups", tuple(map(dict, self.param_groups)))
        object.__setattr__(self, "activation_checkpointing", _layers_of(self.activation_checkpointing))
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
            has_label = isinstance(args.get("label", "a"), str)
            check(has_label, f"train.metrics.{name}.label", "the name of a column", args.get("label"))
            has_output = isinstance(args.get("output", 0), (str, int)) and not isinstance(args.get("output"), bool)
            check(has_output, f"train.metrics.{name}.output", "a key or an index of the output", args.get("output"))
        if self.init_from is not None:
            is_url = isinstance(self.init_from, str) and self.init_from != ""
            check(is_url, "train.init_from", "the path or URL of a checkpoint or of a run", self.init_from)
        if self.early_stop_metric is not None:  # ModelSpec.metrics may have it
            is_name = isinstance(self.early_stop_metric, str) and self.early_stop_metric != ""
            check(is_name, "train.early_stop_metric", "loss or the name of a metric", self.early_stop_metric)

    @property
    def optimizers(self) -> list[str]:
        """The names of all classes of optimizers."""
        return list(dict.fromkeys([self.optimizer, *(g.get("optimizer", self.optimizer) for g in self.param_groups)]))

    def _check_fold(self) -> None:
        check_number(self, "validation_fold", 0, whole=True)
        folds = round(1 / self.validation_fraction) if self.validation_fraction else 0
        check(
            folds > 1 and abs(self.validation_fraction * folds - 1) < 0.01,
            "train.validation_fraction", "1/k for the k folds of train.validation_fold", self.validation_fraction,
        )  # fmt: skip
        check(int(self.validation_fold or 0) < folds, "train.validation_fold", f"below {folds}", self.validation_fold)


def _layers_of(given: Any) -> Literal["full"] | tuple[str, ...]:
    """Returns the value of `activation_checkpointing`. Raises SettingError for another type."""
    if given == "full":
        return "full"
    are_names = isinstance(given, tuple | list) and all(isinstance(name, str) and name for name in given)
    check(are_names, "train.activation_checkpointing", "'full', or a list of names or patterns of modules", given)
    return tuple(given)


def _check_optimizer(key: str, name: Any) -> None:
    check_class(key, "torch.optim", "Optimizer", name)
    calls_back = name == "LBFGS"  # its step evaluates the loss several times
    check(not calls_back, key, "an optimizer that takes one gradient per step", name)


def _check_group(group: Any) -> None:
    is_group = isinstance(group, Mapping) and isinstance(group.get("match"), str)
    check(is_group, "match", "{match: <pattern of names>, optimizer: <class>, lr: <rate>, <its arguments>}", group)
    try:
        re.compile(group["match"])
    except re.error as error:
        raise SettingError("match", f"expected a regular expression, found {group['match']!r}: {error}") from error
    if "optimizer" in group:
        _check_optimizer("optimizer", group["optimizer"])
    lr = group.get("lr", 1.0)
    is_rate = isinstance(lr, int | float) and not isinstance(lr, bool) and 0 < lr < math.inf
    check(is_rate, "lr", "a finite number above 0", lr)
