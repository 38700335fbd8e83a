"""Training by one rank: on its device, or on all GPUs of its task with torch's DataParallel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.gather import RowRanks
from spark_dl.optimization import Optimization, trained_by
from spark_dl.parallel.exchange_clock import build_clock
from spark_dl.parallel.loss import Call, Count, Inside
from spark_dl.parallel.trainable import Scaler, Trainable, add_gradients, build_optimization
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

_log = logging.getLogger("spark_dl")


@named_settings
@dataclass(frozen=True, kw_only=True)
class Single(Parallel):
    """One rank on one device, without a process group.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.Single())
    """

    strategy: ClassVar[str] = "single"
    has_master_weights: ClassVar[bool] = True
    has_group: ClassVar[bool] = False
    one_rank: ClassVar[bool] = True


@named_settings
@dataclass(frozen=True, kw_only=True)
class DPSingleProcess(Parallel):
    """One rank on all GPUs of its task, with torch's DataParallel; with fewer than two GPUs the same as `single`.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.DPSingleProcess())
    """

    strategy: ClassVar[str] = "dp_single_process"
    has_group: ClassVar[bool] = False
    one_rank: ClassVar[bool] = True
    all_gpus: ClassVar[bool] = True


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds the model on the rank's device. Not collective: there is one rank and no process group.

    A model whose layers `spec.build` has put on several GPUs stays there: naive model parallelism, where one GPU
    computes at a time. Its forward pass moves activations from GPU to GPU, and its output to the first one.
    """
    model = spec.build_to_train()
    if len({p.device for p in model.parameters() if p.device.type == "cuda"}) < 2:
        model = model.to(world.device)
    return train_alone(spec, model, build_optimization(spec, model, config, world.world_size), world, config)


def parallelize_over_gpus(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """Builds the model for all GPUs of the task. Each step copies the model to all of them, splits the rows, and sums
    the gradients on the first GPU. With fewer than two GPUs the same as `parallelize`. Not collective.
    """
    model = spec.build_to_train().to(world.device)
    optimization = build_optimization(spec, model, config, world.world_size)
    if len(world.gpus) < 2:
        found = f"{len(world.gpus)} GPU" if world.gpus else "no GPU"
        _log.info("parallel.strategy 'dp_single_process' trains as 'single' does: the task has %s", found)
        return train_alone(spec, model, optimization, world, config)
    _log.info("the model is copied to %d GPUs in each step", len(world.gpus))
    wrapped = nn.DataParallel(Inside(model), device_ids=[gpu.index for gpu in world.gpus])
    return train_alone(spec, model, optimization, world, config, call=wrapped)


def train_alone(
    spec: ModelSpec, model: nn.Module, optimization: Optimization, world: World, config: Config, *,
    call: Call | None = None,
) -> Trainable:  # fmt: skip
    """Returns a model that is trained on this rank's rows alone. `forward_backward` divides their losses by `count`.

    Not collective. call: as of `add_gradients`.
    """
    scaler = Scaler(optimization.optimizer, config, world.device)

    def forward_backward(micro_batches: Sequence[Batch], count: Count) -> Tensor:
        total = add_gradients(
            spec, model, micro_batches, config,
            device=world.device, scale=lambda losses: scaler.scale(losses / count), call=call,
        )  # fmt: skip
        scaler.unscale()
        return total

    return Trainable(
        modules=[model],
        optimizer=optimization.optimizer,
        optimization=optimization,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: nn.utils.clip_grad_norm_(trained_by(optimization.optimizer), norm),
        step=scaler.step,
        skip_step=scaler.skip,
        extra_state=scaler.state,
        row_ranks=RowRanks(world.world_size),
        clock=build_clock(world),
    )


SINGLE = Strategy(settings=Single, parallelize=parallelize)
OVER_GPUS = Strategy(settings=DPSingleProcess, parallelize=parallelize_over_gpus)
