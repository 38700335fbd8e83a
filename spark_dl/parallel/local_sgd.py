"""Local SGD: each rank takes its own steps, and the weights are averaged every few steps (Stich 2019,
arXiv:1805.09767). With `sync_start_step`, gradients are averaged in all earlier steps: post-local SGD (Lin et al.
2020, "Don't Use Large Mini-Batches, Use Local SGD", arXiv:1808.07217).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.config.checks import check_bool, check_number
from spark_dl.config.conflicts import Conflict, without_average
from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.parallel import ddp, single
from spark_dl.parallel.exchange_clock import ExchangeClock, build_clock
from spark_dl.parallel.loss import Count, count_of
from spark_dl.parallel.trainable import OptimizerState, Trainable, build_optimization
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World


def _compares_apart(every: int, settings: Any) -> bool:
    """Whether weights would be compared in a step after which the ranks have different ones."""
    return every > 0 and bool(every % settings.sync_every_steps or settings.sync_start_step % settings.sync_every_steps)


@named_settings
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Parallel):
    """Local SGD: each rank takes its own steps, and the weights are averaged every few steps.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.LocalSGD(sync_every_steps=16))
    """

    strategy: ClassVar[str] = "local_sgd"
    excludes: ClassVar[tuple[Conflict, ...]] = (
        *without_average(lambda c: True, "expected null with parallel.strategy='local_sgd', whose ranks have other "
                         "weights until the next average"),
    Conflict("train.validate_every_steps",
                 lambda c: _compares_apart(c.train.validate_every_steps, c.parallel),
                 "expected a multiple of parallel.sync_every_steps={c.parallel.sync_every_steps}, as each validation "
                 "averages the weights of all ranks, found {c.train.validate_every_steps}; parallel.sync_start_step "
                 "must be such a multiple, too, found {c.parallel.sync_start_step}"),
        Conflict("train.check_replicas_every", lambda c: _compares_apart(c.train.check_replicas_every, c.parallel),
                 "expected a multiple of parallel.sync_every_steps={c.parallel.sync_every_steps}, after which the "
                 "weights of all ranks are the same, found {c.train.check_replicas_every}; parallel.sync_start_step "
                 "must be such a multiple, too, found {c.parallel.sync_start_step}"),
        Conflict("train.precision", lambda c: c.train.precision == "fp16-mixed",
                 "expected float32 or bf16-mixed with parallel.strategy='local_sgd', where each rank would leave out "
                 "other steps, as each has its own loss scale, found fp16-mixed"),
    )  # fmt: skip
    sync_every_steps: int = 8
    """Number of steps between two averages of the ranks' weights."""
    sync_start_step: int = 0
    """Number of steps at the start of a run in which the gradients are averaged instead of the weights (post-local
    SGD)."""
    sync_batchnorm: bool = False
    """Normalize by the mean and variance of the rows of all ranks in a micro-batch, not of the rank's rows alone. With
    one micro-batch per step (`train.accumulation_steps`), these are the rows of the global batch."""

    def __post_init__(self) -> None:
        check_number(self, "sync_every_steps", 1, whole=True)
        check_number(self, "sync_start_step", 0, whole=True)
        check_bool(self, "sync_batchnorm")


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds a model and an optimizer on every rank. `parallel.sync_*` says when weights are averaged. Collective."""
    settings = config.parallel
    assert isinstance(settings, LocalSGD)
    clock = build_clock(world)
    spec, model = ddp.build_model(spec, world, config, sync_batchnorm=settings.sync_batchnorm, clock=clock)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    optimization = build_optimization(spec, model, config, world.world_size)
    optimizer = optimization.optimizer
    alone = single.train_alone(spec, model, optimization, world, config)
    together = None
    if settings.sync_start_step:
        together = ddp.average_gradients(spec, model, optimization, world, config, settings=ddp.DDP(), clock=clock)
    training = _LocalSgd(alone, together, settings, clock, count=functools.partial(count_of, spec, config=config))
    return Trainable(
        modules=[model],
        optimizer=optimizer,
        optimization=optimization,
        forward_backward=training.forward_backward,
        clip_grad_norm=alone.clip_grad_norm,
        step=training.step,
        skip_step=training.skip_step,
        extra_state={"local_sgd": training, **(together.extra_state if together else {})},
        rank_state={"optimizer": OptimizerState(optimizer), **alone.extra_state},
        takes_counts=False,
        clock=clock,
        sync_weights=training.sync_weights,
        close=together.close if together else lambda: None,
    )


class _LocalSgd:
    """Number of steps taken, and of rows trained since the last average, on this rank and on all ranks.

    Rows, or what the mean loss is over in their place.
    """

    def __init__(
        self, alone: Trainable, together: Trainable | None, settings: LocalSGD, clock: ExchangeClock | None, *,
        count: Callable[[Batch], Tensor],
    ):  # fmt: skip
        self._count = count
        self._alone, self._together, self._clock = alone, together, clock
        self._start, self._every = settings.sync_start_step, settings.sync_every_steps
        self._step, self._own_rows, self._all_rows = 0, 0.0, 0.0
        self._last_counts = (0.0, 0.0)
        """Rows of this step, on this rank and on all ranks."""

    def forward_backward(self, micro_batches: Sequence[Batch], count: Count) -> Tensor:
        """See `Trainable`. In a local step the gradient is of the mean loss over this rank's true rows."""
        if self._together is not None and self._step < self._start:
            return self._together.forward_backward(micro_batches, count)
        own = float(sum(self._count(batch) for batch in micro_batches))
        self._last_counts = own, float(count)
        total = self._alone.forward_backward(micro_batches, own or 1.0)
        if not own:  # without gradients the optimizer does not change the weights, even with momentum or decay
            self._alone.optimizer.zero_grad(set_to_none=True)
        return total

    def step(self) -> None:
        """Takes a step of the optimizer, and averages the weights if that is due."""
        if self._together is not None and self._step < self._start:
            self._together.step()
        else:
            self._alone.step()
            self._own_rows += self._last_counts[0]
            self._all_rows += self._last_counts[1]
        self._end_step()

    def skip_step(self) -> None:
        """Leaves out a step, whose rows then have no share in the next average."""
        together = self._together if self._step < self._start else None
        (together or self._alone).skip_step()
        self._end_step()

    def _end_step(self) -> None:
        if self._step >= self._start and (self._step + 1 - self._start) % self._every == 0:
            with self._clock or contextlib.nullcontext():
                self.sync_weights()
        self._step += 1

    def sync_weights(self) -> None:
        """Averages the weights if they may differ, or else broadcasts the buffers as DDP does. Collective.

        Each rank is weighted by the rows that it has trained on since the last average, so every row counts the same.
        With plain SGD and an average after every step, the result is that of a single process.
        """
        if self._all_rows:
            average_weights(self._alone.modules[0], self._own_rows / self._all_rows)
            self._own_rows = self._all_rows = 0.0
        elif self._together is not None and self._step <= self._start:  # no local step was taken yet
            self._together.sync_weights()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}  # a checkpoint is saved after `sync_weights`

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]
        self._own_rows = self._all_rows = 0.0


def average_weights(model: nn.Module, share: float) -> None:
    """Replaces a model's trained parameters and buffers by their weighted mean over the ranks. Collective.

    Args:
        share: weight of this rank. The weights of all ranks add up to 1. Integer buffers stay as they are.
    """
    _average([p.detach() for p in model.parameters() if p.requires_grad], share, torch.float32)
    # In float64, buffers that are equal on all ranks, such as tables of constants, keep their exact values.
    _average([b for b in model.buffers() if b.is_floating_point()], share, torch.float64)


def _average(tensors: Iterable[Tensor], share: float, least: torch.dtype) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, same in by_dtype.items():
        flat = torch.cat([t.reshape(-1) for t in same]).to(torch.promote_types(dtype, least)).mul_(share)
        dist.all_reduce(flat)
        for tensor, mean in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(mean.view_as(tensor))


STRATEGY = Strategy(settings=LocalSGD, parallelize=parallelize)
