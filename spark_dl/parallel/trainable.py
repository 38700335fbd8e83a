"""The `Trainable` that a strategy returns, and the optimizer, loss scaler and gradients that strategies share."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.config.checks import listed
from spark_dl.gather import RowRanks
from spark_dl.optimization import CombinedOptimizer, MasterWeights, Optimization, check_parameters, scale_rates
from spark_dl.parallel.exchange_clock import ExchangeClock, StepClock
from spark_dl.parallel.loss import (
    CachedGlobalLoss,
    Call,
    Count,
    check_ignored,
    misfits_named,
    true_rows,
    weighted_loss_sum,
)
from spark_dl.parallel.modules import plain_name, to_device
from spark_dl.spec import Batch, ModelSpec, NumberedBatch, Output

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.parallel.mesh.state import MeshState


NoteBucket: TypeAlias = Callable[[dist.GradBucket], None]
"""Looks at the gradients of this rank, before they are sent."""
WatchBuckets: TypeAlias = Callable[[NoteBucket], None]


@dataclass(frozen=True)
class Trainable:
    """A model that can take optimizer steps on all ranks together."""

    modules: list[nn.Module]
    """Modules for checkpoints and evaluations, without wrappers."""
    optimizer: torch.optim.Optimizer
    forward_backward: Callable[[Sequence[Batch], Count], Tensor]
    """(micro-batches of this rank, what the mean loss of the global batch is over: its true rows, or the sum of
    `count_of`) -> sum of this rank's losses, a float32 scalar. Collective. On return every `.grad` is the gradient of
    the mean loss over the global batch; in the local steps of `local_sgd`, over this rank's part of it."""
    clip_grad_norm: Callable[[float], Tensor]
    """Scales the reduced gradients to at most this L2 norm. Returns the norm before the scaling. Collective."""
    step: Callable[[], None]
    """Applies the gradients. With fp16, a step with overflowed gradients is skipped on all ranks."""
    skip_step: Callable[[], None] = lambda: None
    """Called in the place of `step` if all ranks leave out the update, also if no gradient was computed."""
    optimization: Optimization | None = None
    """How `ModelSpec.optimizer` schedules the learning rates. None: `train.scheduler` does."""
    extra_state: Mapping[str, Any] = field(default_factory=dict)
    """Further objects with `state_dict` and `load_state_dict`, the same on all ranks."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """Objects whose state differs between ranks, such as the residuals of compression: tensors and plain data. If a run
    resumes with another number of ranks, each rank gets the mean of the tensors over the ranks of the checkpoint."""
    saved_rank: Callable[[int], int] | None = None
    """(number of ranks in a checkpoint) -> the rank whose `rank_state` this rank loads; None: as `rank_state` says."""
    clock: StepClock | None = None
    """Measures how long this rank is blocked in the exchanges of `forward_backward` and `step`. None: not measured."""
    call: Call | None = None
    """Calls a function with the model, in an evaluation, inside the wrapper that it needs. None: with `modules[0]`."""
    forward: Callable[[Batch], Output | None] | None = None
    """(batch on the device) -> the model's output, in an evaluation; None on ranks that do not have it. None: every
    rank computes it with `modules`. Collective in the ranks of a copy of the model."""
    counts: bool = True
    """Whether the outputs of this rank count in an evaluation. One rank of each copy of the model counts."""
    sum_over_data: Callable[[Tensor], None] | None = None
    """Sums a tensor over the ranks that train the same layers on different rows, in place. Collective. None: these are
    all ranks."""
    takes_counts: bool = True
    """Whether a loss may say itself, `(losses, weights)` or `(sum, count)`, what it is over. The loop then calls
    `forward_backward` with the rows of the global batch, and scales `.grad` by rows / count. False if `.grad` is of
    another batch then, or is not of the global batch."""
    row_ranks: RowRanks | None = None
    """The ranks that compute a step together on different rows, for `spark_dl.gather_rows`. None: it is an error."""
    state: MeshState | None = None
    """State of which ranks have different parts, in the place of `modules` and `optimizer` in checkpoints."""
    watch_buckets: WatchBuckets | None = None
    """Makes a function known that is called with each bucket of this rank's gradients before it is sent. None for a
    strategy that does not send buckets in each step."""
    share_weights: Callable[[], None] = lambda: None
    """Called after something else than `step` has written the optimizer's parameters, so that the model has them.
    Collective."""
    sync_weights: Callable[[], None] = lambda: None
    """Makes the weights and buffers equal on all ranks, before an evaluation and a checkpoint. Collective."""
    close: Callable[[], None] = lambda: None
    """Stops threads and releases resources of the strategy. Called once, also after an error. Not collective."""


def add_gradients(
    spec: ModelSpec, model: nn.Module, micro_batches: Sequence[Batch], config: Config, *, device: torch.device,
    scale: Callable[[Tensor], Tensor], call: Call | None = None,
    before_last: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    clock: ExchangeClock | None = None,
) -> Tensor:  # fmt: skip
    """Adds this rank's gradients of the sum of the true rows' losses to `.grad`. Returns that sum, a float32 scalar.

    Args:
        scale: (loss sum of a micro-batch) -> what the backward pass begins with, a multiple of it.
        call: calls the functions of the spec inside the strategy's wrapper; by default with the model.
        before_last: context of all micro-batches except the last, such as DDP's `no_sync`.
        clock: measures how long the backward passes wait for exchanges after their last gradient.
    """
    total: Tensor | None = None
    compute: Callable[..., tuple[Output | None, Tensor]] = functools.partial(
        weighted_loss_sum, spec, model, config=config, call=call
    )
    if spec.embed is not None and config.train.accumulation_steps > 1:
        on_devices = ((batch, to_device(batch, device, config)) for batch in micro_batches)
        batches = ((moved, _random_by_row(spec, model, batch, moved, config)) for batch, moved in on_devices)
        compute = CachedGlobalLoss(spec, model, batches, config, call=call)
    for i, batch in enumerate(micro_batches):
        check_ignored(spec, batch, config.data.label)
        on_device = to_device(batch, device, config)
        is_last = i == len(micro_batches) - 1
        random = _random_by_row(spec, model, batch, on_device, config)
        with contextlib.nullcontext() if is_last else before_last(), random:
            with misfits_named(on_device):
                _, losses = compute(batch=on_device)
            if clock is not None:
                clock.watch_backward(losses)
            losses.backward(scale(torch.ones_like(losses)))  # which is the gradient of scale(losses)
        total = losses.detach() if total is None else total + losses.detach()
    if clock is not None:
        clock.end_backward()
    assert total is not None
    return total


def _random_by_row(
    spec: ModelSpec, model: nn.Module, batch: Batch, on_device: Batch, config: Config
) -> contextlib.AbstractContextManager[None]:
    """Returns the context of `train.random_by` for the passes of a micro-batch. # batch: as the loader made it"""
    if config.train.random_by == "rank":
        return contextlib.nullcontext()
    from spark_dl.parallel.row_random import check_rows_are_first, random_by_row

    check_rows_are_first(model)
    assert isinstance(batch, NumberedBatch)
    rows: Batch = {"weight": on_device["weight"], "number": batch.row_numbers().to(on_device["weight"].device)}
    if spec.batch_loss is not None:
        rows = true_rows(rows, model)
    return random_by_row(batch, rows["number"], config.train.seed)


class Scaler:
    """Loss scaling for fp16 (Micikevicius et al. 2018, section 3.2). Small gradients do not underflow, and a step with
    overflowed gradients is skipped. With any other precision it changes nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: Config, device: torch.device):
        self._optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16-mixed")
        self.state = {"scaler": self._scaler} if self._scaler.is_enabled() else {}
        """Entries for `Trainable.extra_state`."""
        self._is_unscaled = False

    def scale(self, losses: Tensor) -> Tensor:
        return self._scaler.scale(losses)

    def unscale(self) -> None:
        """Divides the reduced gradients by the scale."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
            self._is_unscaled = True

    def step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._is_unscaled = False

    def skip(self) -> None:
        """Leaves out a step. If its gradients have overflowed, the scale is lowered, as in `step`."""
        if self._is_unscaled:
            self._scaler.update()
            self._is_unscaled = False


class OptimizerState:
    """State of an optimizer on this rank, without its settings, which the schedule restores on all ranks."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._optimizer.state_dict()["state"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state["state"]})


def build_optimization(spec: ModelSpec, model: nn.Module, config: Config, world_size: int) -> Optimization:
    """Builds the optimizer of `ModelSpec.optimizer`, or the configured one, with the factor of `train.lr_scaling`.

    Raises ValueError as `build_optimizer` does, and for an optimizer of other parameters than the model's.
    """
    if spec.optimizer is None:
        optimization = Optimization(optimizer=build_optimizer(model, config, world_size))
    else:
        built = spec.optimizer(model)
        optimization = built if isinstance(built, Optimization) else Optimization(optimizer=built)
        check_parameters(optimization.optimizer, model)
        scale_rates(optimization.optimizer, optimization.scheduler, lr_factor(config, world_size))
    train = config.train
    if config.parallel.has_master_weights and (train.precision == "bf16" or train.offload_optimizer):
        if isinstance(optimization.optimizer, MasterWeights):
            return optimization
        device = "cpu" if train.offload_optimizer else None
        master = MasterWeights(optimization.optimizer, device, stochastic=train.stochastic_rounding)
        return replace(optimization, optimizer=master)
    return optimization


def build_optimizer(model: nn.Module, config: Config, world_size: int) -> torch.optim.Optimizer:
    """Builds the configured `torch.optim` optimizers for the parameters that require a gradient.

    A parameter is in the first group of `train.param_groups` whose pattern is in its name. Raises ValueError if no
    parameter requires a gradient, if a group has none, or if an optimizer does not take its arguments.
    """
    named = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("spec.build: no parameter of the model requires a gradient; there is nothing to train")
    patterns = [group["match"] for group in config.train.param_groups]
    members: list[list[nn.Parameter]] = [[] for _ in [*patterns, None]]
    for name, parameter in named:
        at = next((i for i, pattern in enumerate(patterns) if re.search(pattern, name)), -1)
        members[at].append(parameter)
    for i, (pattern, of_group) in enumerate(zip(patterns, members, strict=False)):
        if not of_group:
            raise ValueError(
                f"train.param_groups[{i}].match: found no parameter to train with {pattern!r} in its name that is in "
                f"no group before; the names are {listed([name for name, _ in named])}"
            )
    return _optimizer_of_groups(config, world_size, members)


def _optimizer_of_groups(
    config: Config, world_size: int, members: Sequence[Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Builds an optimizer of groups of parameters. Raises ValueError if an optimizer does not take its arguments.

    Args:
        members: the parameters of each of `train.param_groups`, and at the end those of none of them.
    """
    train, factor = config.train, lr_factor(config, world_size)
    built: dict[str, torch.optim.Optimizer] = {}
    for i, (settings, parameters) in enumerate(zip([*train.param_groups, {}], members, strict=True)):
        if not parameters:  # all are in groups
            continue
        name = settings.get("optimizer", train.optimizer)
        shared = train.optimizer_args if name == train.optimizer else {}
        args = {key: value for key, value in settings.items() if key not in ("match", "optimizer", "lr")}
        try:
            of_group: torch.optim.Optimizer = getattr(torch.optim, name)(
                parameters, lr=settings.get("lr", train.lr) * factor, **{**shared, **args}
            )
        except (TypeError, ValueError) as error:
            key = f"train.param_groups[{i}]" if settings else "train.optimizer_args"
            raise ValueError(f"{key}: {name} does not take {settings or train.optimizer_args}: {error}") from error
        first = built.setdefault(name, of_group)
        if first is not of_group:
            first.add_param_group(of_group.param_groups[0])
            first.state.update(of_group.state)  # that of Adagrad is made with the optimizer
    optimizers = list(built.values())
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def sample_optimizer(config: Config, world_size: int) -> torch.optim.Optimizer:
    """Builds the configured optimizers for a matrix in each group, which all optimizers can train.

    Raises ValueError as `build_optimizer` does for arguments. Called on the driver.
    """
    members = [[nn.Parameter(torch.zeros(2, 2))] for _ in (*config.train.param_groups, None)]
    return _optimizer_of_groups(config, world_size, members)


def lr_factor(config: Config, world_size: int) -> float:
    """Returns the factor of `train.lr` by `train.lr_scaling`, from the number of ranks that train."""
    ranks = world_size - config.parallel.servers
    if config.train.lr_scaling == "none":
        return 1.0
    return float(ranks) if config.train.lr_scaling == "linear" else math.sqrt(ranks)
