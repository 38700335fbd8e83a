"""Checks on the driver what the model and its optimizer make of the settings, and of a checkpoint to resume from."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from spark_dl.config import Config
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.mixture import Mixture
from spark_dl.parallel.trainable import build_optimization, build_optimizer
from spark_dl.rundir.checkpoint import Saved
from spark_dl.rundir.weights import plain_name, shapes_of
from spark_dl.spec import ModelSpec
from spark_dl.training.optimizer_settings import check_classes, classes_of
from spark_dl.training.schedule import Schedule


def check_training(spec: ModelSpec, train: ShardSet | Mixture, config: Config, saved: Saved | None) -> None:
    """Raises ValueError for a schedule that ends before the run, and for a checkpoint of another model or optimizer.

    Called on the driver, so that ranks need not start to find it. Builds the model if there is a checkpoint, or a
    `spec.optimizer`. Other errors of these functions are left to the ranks, which may have packages and devices that
    the driver lacks. saved: the checkpoint to resume from.
    """
    if saved is None and spec.optimizer is None:
        if config.train.scheduler == "OneCycleLR":
            _check_length(Schedule(build_optimizer(nn.Linear(1, 1), config, 1), config), spec, train, config)
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
            optimization = build_optimization(spec, model, config, config.launch.num_ranks)
            schedule = Schedule(optimization.optimizer, config, own=optimization)
        except Exception:
            return
    if saved is not None and (before := saved.manifest.get("optimizer")) is not None:
        check_classes(before, classes_of(optimization.optimizer, schedule))
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


def _check_length(schedule: Schedule, spec: ModelSpec, train: ShardSet | Mixture, config: Config) -> None:
    """Raises ValueError for a OneCycleLR of fewer steps than the run has."""
    if not isinstance(schedule.scheduler, OneCycleLR):
        return
    steps = build_train_loader(train, spec, config, rank=0, world_size=config.data_size).plan.steps
    total = min(config.train.epochs * steps, config.train.max_steps or config.train.epochs * steps)
    needed, found = schedule.calls(total, steps), schedule.scheduler.total_steps
    if needed > found:
        key = "train.scheduler_args" if spec.optimizer is None else "spec.optimizer"
        raise ValueError(
            f"{key}: OneCycleLR has total_steps={found}, and the run steps it {needed} times ({total} steps, {steps} "
            f"in an epoch); set total_steps to {needed}, or epochs and max_steps so that the run ends with it"
        )
