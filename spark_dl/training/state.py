"""The state of a run in checkpoints: weights, optimizer, schedule and progress.

A checkpoint can be written while training goes on: first the state is copied, then a thread writes the copy. The next
step changes the weights, so the copy is in the memory of the host, which is kept for the next checkpoint. One
checkpoint is written at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from spark_dl.config import Train
from spark_dl.data.columns.schema import Column
from spark_dl.data.load.resume_check import VALIDATION, dataset_digest
from spark_dl.gather import StoreGather, gather_json
from spark_dl.hooks import HOOKS
from spark_dl.optimization import class_name
from spark_dl.parallel.modules import plain_name
from spark_dl.parallel.trainable import Trainable, lr_factor
from spark_dl.rundir import checkpoint, saving, signing
from spark_dl.rundir.checkpoint import frozen_checksums, load_into
from spark_dl.rundir.checkpoint_files import AVERAGE, TensorFiles, plain_state
from spark_dl.spec import Position, Run
from spark_dl.training import row_metrics
from spark_dl.training.averaging import WeightAverage
from spark_dl.training.finite import StateCheck
from spark_dl.training.optimizer_settings import OptimizerSettings, RateSchedule, by_name, classes_of, group_names
from spark_dl.world import World, no_driver

_LAST_WAIT_S = 5.0

_log = logging.getLogger("spark_dl")


class StateCopy:
    """Copies a state of tensors and plain data to the memory of the host, into the tensors of the last copy."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def of(self, state: Any) -> Any:
        """Returns the copy. It is valid until the next call."""
        before, self._tensors = self._tensors, {}
        done: dict[Any, Tensor] = {}

        def copied(path: str, tensor: Tensor) -> Tensor:
            # Tied weights have two names and one memory, which the file shall have once, too.
            storage_key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if storage_key not in done or not tensor.numel():
                done[storage_key] = self._tensors[path] = _copy_of(tensor.detach(), before.get(path))
            return done[storage_key]

        copy = plain_state(state, "", on_tensor=copied)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copy


def _copy_of(tensor: Tensor, into: Tensor | None) -> Tensor:
    if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
        on_gpu = tensor.device.type == "cuda"
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return into.copy_(tensor, non_blocking=True)


class BackgroundSave:
    """Runs one function at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], Any]) -> None:
        """Starts a function. The result of the one before must have been taken."""
        assert self._thread is None, "one checkpoint is written at a time"
        self._thread = threading.Thread(target=self._run, args=(write,), name="spark_dl checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], Any]) -> None:
        start = time.perf_counter()
        self._result, self._error = None, None
        try:
            self._result = (write(), time.perf_counter() - start)
        except BaseException as error:
            self._error = error

    def take(self, *, wait: bool) -> tuple[Any, float] | None:
        """Returns the result of the function and its seconds, once. None without one, or if it still runs.

        Args:
            wait: waits for its end. Raises its error.
        """
        if self._thread is None or (not wait and self._thread.is_alive()):
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        result: tuple[Any, float] = self._result
        return result

    def close(self) -> None:
        """Waits some seconds for the end of the function, after an error of the training, which is raised instead."""
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)
            with contextlib.suppress(BaseException):
                self.take(wait=False)


@dataclass
class TrainingProgress:
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
    skipped_steps: int = 0
    """Steps whose update was left out, over all epochs (`train.on_nonfinite`)."""
    skipped_rows: int = 0
    """True rows of these steps. They are not among `rows`."""
    rollbacks: int = 0
    """How often the run has gone back to a checkpoint because of NaN or Inf."""
    failed_checkpoints: int = 0
    """Checkpoints that could not be written (`checkpoint.on_error`)."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One dict per finished epoch."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Values of the last validation, which an epoch that `max_steps` ends early has, too."""
    validated_step: int | None = None
    """Step of the last validation."""
    best: float | None = None
    epochs_without_gain: int = 0
    """Validations without an improvement: by default one at the end of each epoch."""
    stopped_early: bool = False

    @property
    def position(self) -> Position:
        """Where the run is, for `ModelSpec.set_position`."""
        return Position(self.epoch, self.step, self.global_step)

    @property
    def epoch_loss(self) -> float | None:
        """Mean loss of the current epoch so far; None if no row was used."""
        return self.loss_sum / self.epoch_rows if self.epoch_rows else None

    def summary(self) -> dict[str, Any]:
        """Returns what the result of a run says about it."""
        last = self.history[-1]["train_loss"] if self.history else None
        names = (
            "rows", "history", "stopped_early", "skipped_steps", "skipped_rows", "rollbacks", "failed_checkpoints",
        )  # fmt: skip
        about = {"epochs": self.epoch, "steps": self.global_step, **{name: getattr(self, name) for name in names}}
        return {**about, "train_loss": self.epoch_loss if self.step else last}


@dataclass(frozen=True)
class Committed:
    """A checkpoint that has been committed."""

    kind: ClassVar[str] = "checkpoint"
    """Kind of its log line."""
    url: str
    epoch: int
    global_step: int
    seconds: float
    """How long training stood still for it."""
    background_s: float | None = None
    """How long it was written while training went on; None if it was not."""

    def as_fields(self) -> dict[str, Any]:
        """Returns what its log line says."""
        background = {} if self.background_s is None else {"background_s": self.background_s}
        return {"epoch": self.epoch, "step": self.global_step, "url": self.url, "seconds": self.seconds, **background}


@dataclass(frozen=True)
class NotWritten:
    """A checkpoint that the storage has refused, in a run that goes on."""

    kind: ClassVar[str] = "checkpoint_failed"
    """Kind of its log line."""
    url: str
    epoch: int
    global_step: int
    reason: str

    def as_fields(self) -> dict[str, Any]:
        """Returns what its log line says."""
        return {"epoch": self.epoch, "step": self.global_step, "url": self.url, "reason": self.reason}


Saved: TypeAlias = Committed | NotWritten


class RunState:
    """The state of one rank. num_ranks: ranks that share a step."""

    def __init__(
        self,
        run: Run,
        world: World,
        trainable: Trainable,
        schedule: RateSchedule,
        columns: Sequence[Column],
        num_ranks: int,
        total_steps: int,
    ):
        self._run, self._world, self._trainable, self._schedule = run, world, trainable, schedule
        self._columns, self._num_ranks = columns, num_ranks
        self._dataset = dataset_digest(run.train)
        self._validation = None if run.validation is None else dataset_digest(run.validation)
        self.progress = TrainingProgress()
        self.saved_url: str | None = None
        """URL of the last checkpoint that was committed or restored."""
        self._saved_sha256: str | None = None
        """Checksum of its manifest."""
        self.saved_step: int | None = None
        """Step of the last checkpoint that was begun or restored."""
        self._has_saved = False
        self._branch: list[tuple[int, int]] = []
        optimizer = trainable.optimizer
        self._owner = f"{'spec' if run.spec.optimizer else 'train'}.optimizer: {class_name(optimizer)}"
        self._names = (
            group_names(optimizer, trainable.modules[0]) if trainable.state is None else trainable.state.group_names()
        )
        self._settings = OptimizerSettings(optimizer, schedule, self._names, self._owner)
        train = run.config.train
        self.average: WeightAverage | None = None
        """The average of the weights; None without `train.ema_decay` and `train.swa_start`."""
        if train.ema_decay is not None or train.swa_start is not None:
            parts, start = trainable.state, math.ceil((train.swa_start or 0.0) * total_steps)
            parameters = trainable.modules[0].parameters() if parts is None else parts.optimized_parameters()
            self.average = WeightAverage(parameters, train.ema_decay, start=start, share=trainable.share_weights)
            if parts is not None:
                parts.average = self.average.values
        leaves_out = run.config.checkpoint.weights == "trainable" and world.rank == 0
        self._as_built = frozen_checksums(trainable.modules[0]) if leaves_out else {}
        if run.checkpoint is not None:
            self._restore(checkpoint.open_checkpoint(run.checkpoint, sha256=run.checkpoint_sha256))
        self._check = StateCheck(trainable.modules, self.saved_url)
        key_file = run.config.checkpoint.signing_key_file
        self._key = signing.read_key(key_file) if key_file and world.rank == 0 else None
        self._background = BackgroundSave() if run.config.checkpoint.asynchronous else None
        self._copy, self._begun = StateCopy(), Committed("", 0, 0, 0.0)
        self.check()
        self._goes_on = False
        """Whether training goes on if the storage refuses the checkpoint that was begun last."""
        self._gather = gather_json
        if self._background is not None and world.world_size > 1:
            # A group of its own, or the one of the training, would mix with the collectives of the steps.
            self._gather = StoreGather(world.store, world.rank, world.world_size, f"checkpoints/{run.generation}")

    def check(self) -> None:
        """Raises ValueError, with the object, if this rank has a state that a checkpoint cannot hold. Not collective.

        Called before the first step, and after it, when the optimizer has its state.
        """
        self._plain()
        if (parts := self._trainable.state) is not None:
            parts.weights()
            parts.optimizer_state()

    def _plain(self) -> dict[str, Any]:
        """Returns the state of this rank as a checkpoint holds it. The tensors are those of the run."""
        trainable = self._trainable
        extra = {name: part.state_dict() for name, part in trainable.extra_state.items()}
        of_rank = {name: part.state_dict() for name, part in trainable.rank_state.items()}
        model = {str(i): module.state_dict() for i, module in enumerate(trainable.modules)}
        optimizer = trainable.optimizer.state_dict()
        if trainable.state is None:
            model = {i: _plain_names(plain_state(state, "spec.build: the model")) for i, state in model.items()}
            if self.average is not None:
                model[AVERAGE] = self.average.state_dict(trainable.modules[0])
            optimizer = plain_state(optimizer, self._owner)
        return {
            "model": model,
            "training": {
                "optimizer": optimizer,
                "settings": self._settings.state_dict(),
                "extra": plain_state(extra, "the training"),
                "lr_factor": lr_factor(self._run.config, self._num_ranks),
            },
            "rank": plain_state(of_rank, "the rank"),
        }

    def save(self, *, is_last: bool) -> Saved | None:
        """Writes a checkpoint. Collective. Raises as `rundir.saving.save` does, also for NaN and Inf.

        Returns it, or None with `checkpoint.asynchronous`: `committed` returns it later.

        Args:
            is_last: whether it is the last one of the run, without which the run has no result.
        """
        start = time.perf_counter()
        world, config, parts = self._world, self._run.config, self._trainable.state
        state = self._plain()
        training, of_rank = {**state["training"], "progress": dataclasses.asdict(self.progress)}, state["rank"]
        if parts is not None:
            del training["optimizer"]
        model, frozen = self._without_frozen(state["model"])
        contents = saving.contents(
            world.rank, model=model if parts is None else None, training=training, tensors=parts,
            of_rank=of_rank, settings=None if parts is None else training["settings"],
        )  # fmt: skip
        rows = {**self._dataset, "step_of_epoch": self.progress.step, VALIDATION: self._validation}
        about = saving.About(
            world_size=world.world_size, generation=self._run.generation, step=self.progress.global_step,
            config=config, columns=self._columns, rows=rows,
            code=self._run.code, shapes=_shapes_of(state["model"]["0"]),
            classes=classes_of(self._trainable.optimizer, self._schedule), score=self._score(), branch=self._branch,
            frozen=frozen,
        )  # fmt: skip
        write = functools.partial(
            saving.save, self._run.run_dir, about=about,
            problem=self._check.problem(state, world.rank, self.saved_url),
            in_use="" if self._has_saved else self.saved_url or "",
            key=self._key, gather=self._gather, read_back=not self._has_saved,
        )  # fmt: skip
        self._has_saved = True
        self.saved_step = self.progress.global_step
        self._goes_on = config.checkpoint.on_error == "warn" and not is_last
        self._begun = self._committed("", 0.0)
        if self._background is None:
            try:
                commit = write(contents)
            except saving.NotWrittenError as error:
                return self._not_written(error)
            self.saved_url, self._saved_sha256 = commit.url, commit.sha256
            return self._committed(commit.url, time.perf_counter() - start)
        copy = dataclasses.replace(contents, files=self._copy.of(contents.files))
        self._background.start(functools.partial(write, copy))
        self._begun = self._committed("", time.perf_counter() - start)
        return None

    def _without_frozen(self, model: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the weights to save, and the checksums of those that are left out: frozen, and as they were built."""
        if not self._as_built:
            return model, {}
        now = frozen_checksums(self._trainable.modules[0])
        frozen = {name: sha for name, sha in now.items() if self._as_built.get(name) == sha}
        left = {
            part: {name: v for name, v in of_part.items() if part not in ("0", AVERAGE) or name not in frozen}
            for part, of_part in model.items()
        }
        return left, frozen

    def committed(self, *, wait: bool) -> Saved | None:
        """Returns the checkpoint that was written in the background, once, when it is committed. Raises its error.

        Args:
            wait: waits until it is. Collective then.
        """
        try:
            taken = self._background.take(wait=wait) if self._background is not None else None
        except saving.NotWrittenError as error:
            return self._not_written(error)
        if taken is None:
            return None
        commit, background_s = taken
        self.saved_url, self._saved_sha256 = commit.url, commit.sha256
        return dataclasses.replace(self._begun, url=commit.url, background_s=background_s)

    def close(self) -> None:
        """Ends what is written in the background, after an error of the training."""
        if self._background is not None:
            self._background.close()

    def _committed(self, url: str, seconds: float) -> Committed:
        return Committed(url, self.progress.epoch, self.progress.global_step, seconds)

    def _not_written(self, error: saving.NotWrittenError) -> NotWritten:
        """Counts a checkpoint that all ranks have failed to write. Raises the error if the run ends with it."""
        if not self._goes_on:
            raise error
        self.saved_step = None
        self.progress.failed_checkpoints += 1
        if self._world.rank == 0 and self._world.report is no_driver:  # a driver says it
            _log.warning("checkpoint.on_error: %s; training goes on", error)
        return NotWritten(error.url, self._begun.epoch, self._begun.global_step, error.reason)

    def _score(self) -> checkpoint.Score | None:
        """The value for `checkpoint.keep_best`: of the validation of this step, if it has one."""
        if self.progress.validated_step != self.progress.global_step:
            return None
        train = self._run.config.train
        metric = train.early_stop_metric or "loss"
        score = self.progress.metrics.get(metric)
        if not isinstance(score, int | float):
            return None
        rows = None if self._validation is None else str(self._validation.get("sha256"))
        return checkpoint.Score(float(score), metric, train.early_stop_mode or "min", rows)

    def go_back(self) -> None:
        """Loads the last checkpoint of this run again. Every rank calls it, at the same step.

        Raises RuntimeError if it is not the one that was saved or restored, and DamagedError if a file is damaged.
        """
        assert self.saved_url is not None
        before = self.progress
        self._restore(checkpoint.open_checkpoint(self.saved_url, sha256=self._saved_sha256))
        self.progress.rollbacks = before.rollbacks + 1
        self.progress.failed_checkpoints = before.failed_checkpoints

    def _restore(self, saved: checkpoint.Saved) -> None:
        trainable, world, train = self._trainable, self._world, self._run.config.train
        state = checkpoint.load(saved, "training.pt")
        if "settings" not in state:  # of a version before
            ratio = lr_factor(self._run.config, self._num_ranks) / state["lr_factor"]
            groups = state["optimizer"]["param_groups"]
            state["settings"] = self._settings.of_older(groups, state["scheduler"], ratio)
            of_ranks = iter([state["settings"]])
        elif trainable.state is None:
            of_ranks = iter([state["settings"]])
        else:
            of_ranks = saving.settings_of_ranks(saved, world.rank)
        self._settings.check_classes(state["settings"])  # torch would fail at the state of another class
        if trainable.state is not None:
            _load_parts(trainable, saved)
        else:
            weights = checkpoint.load(saved, "model.pt")
            for i, module in enumerate(trainable.modules):
                what = f"cannot resume: the weights of {saved.url}"
                load_into(module, weights[str(i)], what, frozen=saved.frozen if i == 0 else None)
            if self.average is not None:
                self.average.load_state_dict(trainable.modules[0], weights.get(AVERAGE))
            built = trainable.optimizer.state_dict()
            built["state"] = by_name(state["optimizer"]["state"], state["settings"]["names"], self._names)
            trainable.optimizer.load_state_dict(built)
        self._settings.load_state_dict(of_ranks, tells=world.rank == 0)
        for name, part in trainable.extra_state.items():
            if name in state["extra"] or name != HOOKS:  # a run may go on with hooks that it had not
                part.load_state_dict(state["extra"][name])
        if trainable.rank_state:
            of_rank = saving.load_rank_state(saved, world.rank, world.world_size, trainable.saved_rank)
            for name, part in trainable.rank_state.items():
                part.load_state_dict(of_rank[name])
        self.progress = TrainingProgress(**state["progress"])
        rows = saved.manifest.get("rows") or {}
        is_same = rows.get(VALIDATION, self._validation) == self._validation
        row_metrics.take_up(self.progress, Train(**saved.manifest["config"]["train"]), train, same_rows=is_same)
        self.saved_url, self.saved_step = saved.url, self.progress.global_step
        self._saved_sha256 = saved.sha256
        if saved.generation != self._run.generation:
            self._branch = [*saved.branch, (saved.generation, saved.step)]
        if not saving.restore_random_state(saved, world.rank, world.world_size, self._run.config):
            seed_generators(train.seed + 1 + world.seed_rank + 100_003 * self.progress.global_step)


def _shapes_of(model: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.items() if isinstance(value, Tensor)}


def _plain_names(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state dict without the names that `torch.compile` adds, in which parts of a model can be compiled."""
    if not any(name != plain_name(name) for name in state):
        return state
    return {plain_name(name): value for name, value in state.items()}


def _load_parts(trainable: Trainable, saved: checkpoint.Saved) -> None:
    """Loads what this rank has of the weights and of the optimizer's state, from any mesh."""
    assert trainable.state is not None
    model, optimizer = (TensorFiles(saved.url, saved.manifest, kind) for kind in ("model", "optimizer"))
    trainable.state.load(model.read, optimizer.read, optimizer.shapes)


def seed_generators(seed: int) -> None:
    """Seeds the random number generators of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
