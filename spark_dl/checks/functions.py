"""Checks of the functions of a `ModelSpec`, on the driver: against the settings and a checkpoint to resume from.

Settings that exclude other settings are in `config.conflicts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import OneCycleLR

from spark_dl.config import Config, Train
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.mixture import Mixture
from spark_dl.parallel.modules import plain_name
from spark_dl.parallel.trainable import build_optimization, sample_optimizer
from spark_dl.rundir.checkpoint import Saved, shapes_of
from spark_dl.scoring.outputs import Squeezed
from spark_dl.spec import ModelSpec
from spark_dl.training.optimizer_settings import RateSchedule, check_classes, classes_of, total_steps, with_length

_DEFAULTS = Train()


@dataclass(frozen=True)
class FunctionConflict:
    """A row of the table."""

    key: str
    """Setting that the error names."""
    excluded: Callable[[ModelSpec, Config], bool]
    """Whether a spec and a configuration have the conflict."""
    message: str
    """What was expected and found, why, and what to change. A format string with the configuration as `c`."""


def _set_beside_optimizer(name: str) -> FunctionConflict:
    return FunctionConflict(
        f"train.{name}",
        lambda s, c: s.optimizer is not None and getattr(c.train, name) != getattr(_DEFAULTS, name),
        "has no effect with spec.optimizer (a LightningModule: configure_optimizers), which builds the optimizer and "
        "the scheduler; remove it",
    )


CONFLICTS = (
    *(_set_beside_optimizer(name) for name in (
        "optimizer", "lr", "optimizer_args", "param_groups", "scheduler", "scheduler_args", "scheduler_interval",
    )),
    FunctionConflict("parallel.strategy", lambda s, c: s.optimizer is not None and c.parallel.servers > 0,
                     "expected a strategy without servers with spec.optimizer, found {c.parallel.strategy!r}, whose "
                     "servers have blocks of the weights instead of the model; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.optimizer is not None and c.parallel.own_optimizer,
                     "expected another strategy with spec.optimizer, found {c.parallel.strategy!r}, which builds a new "
                     "optimizer that a scheduler does not know; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.set_position is not None and c.parallel.servers > 0,
                     "expected a strategy without servers with spec.set_position, found {c.parallel.strategy!r}, whose "
                     "ranks have no common step; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.hooks is not None and c.parallel.servers > 0,
                     "expected a strategy without servers with spec.hooks, found {c.parallel.strategy!r}, whose ranks "
                     "have no common step; set ddp"),
    FunctionConflict("parallel.strategy", lambda s, c: s.batch_loss is not None and c.parallel.all_gpus,
                     "expected one process for each GPU with spec.batch_loss, found {c.parallel.strategy!r}, which "
                     "splits batches inside the forward pass; set ddp"),
    FunctionConflict("data.weight", lambda s, c: s.batch_loss is not None and c.data.weight is not None,
                     "not supported with spec.batch_loss (a LightningModule: training_step), whose mean over a batch "
                     "gives all rows the same weight; add the column to data.labels, and weight the rows there"),
    FunctionConflict("train.compile", lambda s, c: s.batch_loss is not None and c.train.compile,
                     "not supported with spec.batch_loss (a LightningModule: training_step), which calls the parts of "
                     "the model itself; compile them in spec.build"),
    FunctionConflict("parallel.context", lambda s, c: getattr(c.parallel, "context", 1) > 1 and (
                         _by_batch(s) or s.embed is not None),
                     "expected 1 with spec.batch_loss, spec.evaluation (a LightningModule) and spec.embed, which need "
                     "whole rows, found {c.parallel.context}; use spec.loss, with labels that are shifted already"),
    FunctionConflict("parallel.experts", lambda s, c: s.evaluation is not None and _divides_experts(c),
                     "expected 1 with spec.evaluation (a LightningModule: validation_step), found "
                     "{c.parallel.experts}: ranks evaluate different numbers of batches, and cannot exchange tokens"),
    FunctionConflict("parallel.zero_stage", lambda s, c: s.evaluation is not None and _gathers_weights(c),
                     "expected 0, 1 or 2 with spec.evaluation (a LightningModule: validation_step), found 3: ranks "
                     "evaluate different numbers of batches, and cannot gather weights in each of them"),
    FunctionConflict("parallel.strategy", lambda s, c: _by_batch(s) and c.parallel.planned,
                     "expected another strategy with spec.batch_loss and spec.evaluation (a LightningModule), which "
                     "need the whole model, found {c.parallel.strategy!r}, whose plans can cut it; set ddp, or mesh "
                     "with zero_stage"),
    FunctionConflict("loader.ragged", lambda s, c: _by_batch(s) and c.loader.ragged == "offsets",
                     "expected 'pad' with spec.batch_loss and spec.evaluation, which get the true rows of a batch, "
                     "found 'offsets'"),
    FunctionConflict("loader.max_tokens", lambda s, c: s.global_loss is not None and c.loader.max_tokens is not None,
                     "expected null with spec.global_loss, which needs equally many micro-batches on all ranks, found "
                     "{c.loader.max_tokens}; use train.accumulation_steps"),
    FunctionConflict("data.assemble", lambda s, c: c.data.assemble is not None and _gets_batches(s),
                     "expected null with spec.forward, spec.batch_loss and spec.evaluation, which get the columns of "
                     "the batch, found {c.data.assemble}"),
)  # fmt: skip


def _gets_batches(spec: ModelSpec) -> bool:
    return _by_batch(spec) or not isinstance(spec.forward, (type(None), Squeezed))


def _gathers_weights(config: Config) -> bool:
    return getattr(config.parallel, "zero_stage", 0) == 3


def _divides_experts(config: Config) -> bool:
    return getattr(config.parallel, "experts", 1) > 1


def _by_batch(spec: ModelSpec) -> bool:
    return spec.batch_loss is not None or spec.evaluation is not None


def check_functions(spec: ModelSpec, config: Config) -> None:
    """Raises ValueError for the first conflict in the table. Called on the driver, before any data is read."""
    for conflict in CONFLICTS:
        if conflict.excluded(spec, config):
            raise ValueError(f"{conflict.key}: {conflict.message.format(c=config)}")


def check_training(spec: ModelSpec, train: ShardSet | Mixture, config: Config, saved: Saved | None) -> None:
    """Raises ValueError for a schedule that ends before the run, and for a checkpoint of another model or optimizer.

    Called on the driver, so that ranks need not start to find it. Builds the model if there is a checkpoint, or a
    `spec.optimizer`. Other errors of these functions are left to the ranks, which may have packages and devices that
    the driver lacks. saved: the checkpoint to resume from.
    """
    if saved is None and spec.optimizer is None:
        if config.train.scheduler == "OneCycleLR" and with_length(config, 1, 1) == config:  # of a length that is set
            _check_length(RateSchedule(sample_optimizer(config, 1), config), spec, train, config)
        return
    if config.parallel.cuts_model:  # can be larger than the memory of the driver
        return
    with torch.random.fork_rng(devices=[]):
        try:
            model = spec.build()
            shapes = {plain_name(name): list(value.shape) for name, value in model.state_dict().items()}
        except Exception:
            return
        if saved is not None:
            _check_shapes(shapes, saved)
        try:
            of_run = spec.with_total_steps(lambda: total_steps(config, _steps_per_epoch(spec, train, config)))
            optimization = build_optimization(of_run, model, config, config.launch.num_ranks)
            schedule = RateSchedule(optimization.optimizer, with_length(config, 1, 1), own=optimization)
        except Exception:
            return
    if saved is not None and (before := saved.manifest.get("optimizer")) is not None:
        check_classes(before, classes_of(optimization.optimizer, schedule))
    if spec.optimizer is not None or with_length(config, 1, 1) == config:
        _check_length(schedule, spec, train, config)


def _check_shapes(shapes: dict[str, list[int]], saved: Saved) -> None:
    before = shapes_of(saved)
    differ = [name for name in shapes if name in before and before[name] != shapes[name]]
    if differ:
        told = "; ".join(
            f"{name}: {before[name]} in the checkpoint, {shapes[name]} in the model" for name in differ[:5]
        )
        more = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise ValueError(
            f"cannot resume: the weights of {saved.url} do not fit the model of spec.build ({told}{more}); build the "
            "same model, or begin another run, in whose spec.build the parts that fit are loaded"
        )


def _steps_per_epoch(spec: ModelSpec, train: ShardSet | Mixture, config: Config) -> int:
    return build_train_loader(train, spec, config, rank=0, world_size=config.data_size).plan.steps


def _check_length(schedule: RateSchedule, spec: ModelSpec, train: ShardSet | Mixture, config: Config) -> None:
    """Raises ValueError for a OneCycleLR of fewer steps than the run has."""
    if not isinstance(schedule.scheduler, OneCycleLR):
        return
    steps = _steps_per_epoch(spec, train, config)
    total = total_steps(config, steps)
    needed, found = schedule.calls(total, steps), schedule.scheduler.total_steps
    if needed > found:
        key = "train.scheduler_args" if spec.optimizer is None else "spec.optimizer"
        raise ValueError(
            f"{key}: OneCycleLR has total_steps={found}, and the run steps it {needed} times ({total} steps, {steps} "
            f"in an epoch); set total_steps to {needed}, or epochs and max_steps so that the run ends with it"
        )
