"""The state of a run in checkpoints: weights, optimizer, schedule and progress."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spark_dl.config import Train
from spark_dl.data.columns.schema import Column
from spark_dl.data.load.resume_check import dataset_digest
from spark_dl.parallel.trainable import Trainable, lr_factor
from spark_dl.rundir import checkpoint, rank_files
from spark_dl.rundir.tensor_files import TensorFiles
from spark_dl.spec import Run
from spark_dl.training import early_stop
from spark_dl.training.finite import StateCheck
from spark_dl.training.schedule import Schedule
from spark_dl.world import World


@dataclass
class Progress:
    """Epochs, steps and rows of a run so far."""

    epoch: int = 0
    step: int = 0
    """Steps done in the current epoch."""
    global_step: int = 0
    rows: int = 0
    """True rows used, over all epochs."""
    epoch_rows: int = 0
    """True rows used in the current epoch."""
    loss_sum: float = 0.0
    """Sum of the losses in the current epoch, over all ranks."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One dict per finished epoch."""
    best: float | None = None
    epochs_without_gain: int = 0
    stopped_early: bool = False


class RunState:
    """The state of one rank. num_ranks: ranks that share a step."""

    def __init__(
        self,
        run: Run,
        world: World,
        trainable: Trainable,
        schedule: Schedule,
        columns: Sequence[Column],
        num_ranks: int,
    ):
        self._run, self._world, self._trainable, self._schedule = run, world, trainable, schedule
        self._columns, self._num_ranks = columns, num_ranks
        self._dataset = dataset_digest(run.train)
        self.progress = Progress()
        self.saved_url: str | None = None
        """URL of the last checkpoint that was saved or restored."""
        self.saved_step: int | None = None
        if run.checkpoint is not None:
            self._restore(checkpoint.open_checkpoint(run.checkpoint, sha256=run.checkpoint_sha256))
        self._check = StateCheck(trainable.modules, self.saved_url)

    def save(self) -> None:
        """Writes a checkpoint. Collective. Raises as `rundir.checkpoint.save` does, also for NaN and Inf."""
        trainable, world, config = self._trainable, self._world, self._run.config
        parts = trainable.state
        model = {str(i): module.state_dict() for i, module in enumerate(trainable.modules)}
        optimizer = trainable.optimizer.state_dict()
        training = {
            "optimizer": optimizer if parts is None else {"param_groups": _settings_of(optimizer)},
            "scheduler": self._schedule.state_dict(),
            "extra": {name: part.state_dict() for name, part in trainable.extra_state.items()},
            "progress": dataclasses.asdict(self.progress),
            "lr_factor": lr_factor(config, self._num_ranks),
        }
        of_rank = {name: part.state_dict() for name, part in trainable.rank_state.items()}
        state = {"model": model, "training": {**training, "optimizer": optimizer}, "rank": of_rank}
        self.saved_url = checkpoint.save(
            self._run.run_dir,
            rank=world.rank,
            world_size=world.world_size,
            generation=self._run.generation,
            step=self.progress.global_step,
            config=config,
            columns=self._columns,
            rows={**self._dataset, "step_of_epoch": self.progress.step},
            model=model if parts is None else None,
            training=training,
            tensors=parts,
            of_rank=of_rank,
            problem=self._check.problem(state, world.rank, self.saved_url),
        )
        self.saved_step = self.progress.global_step

    def _restore(self, saved: checkpoint.Saved) -> None:
        trainable, world, train = self._trainable, self._world, self._run.config.train
        state = checkpoint.load(saved, "training.pt")
        if trainable.state is not None:
            _load_parts(trainable, saved, state["optimizer"]["param_groups"])
        else:
            weights = checkpoint.load(saved, "model.pt")
            for i, module in enumerate(trainable.modules):
                module.load_state_dict(weights[str(i)])
            trainable.optimizer.load_state_dict(state["optimizer"])
        now = lr_factor(self._run.config, self._num_ranks)
        self._schedule.load_state_dict(state["scheduler"], now / state["lr_factor"])
        for name, part in trainable.extra_state.items():
            part.load_state_dict(state["extra"][name])
        if trainable.rank_state:
            of_rank = rank_files.load_rank_state(saved, world.rank, world.world_size, trainable.saved_rank)
            for name, part in trainable.rank_state.items():
                part.load_state_dict(of_rank[name])
        self.progress = Progress(**state["progress"])
        early_stop.take_up(self.progress, Train(**saved.manifest["config"]["train"]), train)
        self.saved_url, self.saved_step = saved.url, self.progress.global_step
        if not rank_files.restore_random_state(saved, world.rank, world.world_size, self._run.config):
            seed_generators(train.seed + 1 + world.seed_rank + 100_003 * self.progress.global_step)


def _settings_of(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer's `state_dict` without their parameters, which differ between ranks."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer["param_groups"]]


def _load_parts(trainable: Trainable, saved: checkpoint.Saved, groups: Sequence[Mapping[str, Any]]) -> None:
    """Loads what this rank has of the weights and of the optimizer's state, from any mesh."""
    assert trainable.state is not None
    model, optimizer = (TensorFiles(saved.url, saved.manifest, kind) for kind in ("model", "optimizer"))
    trainable.state.load(model.read, optimizer.read, optimizer.shapes)
    for group, before in zip(trainable.optimizer.param_groups, groups, strict=True):
        group.update(before)


def seed_generators(seed: int) -> None:
    """Seeds the random number generators of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
