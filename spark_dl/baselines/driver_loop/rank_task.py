"""One rank's part of one step, as a task of a Spark job. Its result depends only on the data from the driver.

Spark's Python worker keeps what is slow to build for the next task: the model, whose values every task overwrites, and
the open loader of the rank, which has read ahead. A task builds what its worker does not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spark_dl._version import __version__
from spark_dl.baselines.driver_loop.gradient_sum import (
    Bytes,
    GradientSum,
    flat_gradient,
    from_arrays,
    frozen,
    to_arrays,
    trained,
)
from spark_dl.data.columns.batch import Batch, StepBatches
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.row_names import name_rows
from spark_dl.gather import RowRanks, gathering
from spark_dl.launch.code import payload
from spark_dl.launch.failures.errors import describe, failed_in_task
from spark_dl.launch.rank import gpus
from spark_dl.parallel.loss import count_of, noting_counts
from spark_dl.parallel.stragglers import delay_s
from spark_dl.parallel.trainable import add_gradients
from spark_dl.spec import Position, Run
from spark_dl.training.finite import find_in_gradients
from spark_dl.training.state import seed_generators

if TYPE_CHECKING:
    from pyspark import Broadcast

_MAX_LOADERS = 4
_MAX_STEPS_PASSED_BY = 64

VERSIONS = (("torch", torch.__version__), ("spark_dl", __version__))

# NOTE: the only global state of the package: in Spark nothing else outlives a task. After
# `launch.collective_timeout_s` without a task, the longest time of a step, a timer ends the threads and frees the
# memory, even if the driver was lost. A shorter time would drop this state in every step on slow links.
_LOCK = threading.Lock()
_KEPT: dict[str, _Kept] = {}
_TIMERS: list[threading.Timer] = []


@dataclass(frozen=True)
class CallData:
    """Data for all tasks of a call of `train`."""

    id: str
    packed: bytes
    """The run, packed by `payload.pack_call`."""
    frozen: list[Bytes]
    """The parameters that are not trained."""
    versions: tuple[tuple[str, str], ...] = VERSIONS
    """Versions on the driver."""


@dataclass(frozen=True)
class Step:
    """Data for the tasks of one step."""

    epoch: int
    step: int
    """Number of the step in its epoch."""
    global_step: int
    rows: int
    """True rows of the global batch."""
    scale: float
    """Factor of the loss, so that small gradients do not underflow in fp16; 1 otherwise."""
    weights: list[Bytes]
    """The trained parameters, then the buffers."""


def part_of_rank(ranks: Iterator[int], *, attempt: Broadcast[CallData], step: Broadcast[Step]) -> Iterator[GradientSum]:
    """Yields the gradient of a rank's part of a global batch. Called by Spark, in a task whose partition is the rank.

    The sum over all ranks, times true rows / `count`, is the gradient of the mean loss. Raises RankFailedError, whose
    message gives the driver the failed rank and the error.
    """
    (rank,) = ranks  # reads all input: Spark does not reuse a worker whose task left some
    try:
        with _kept(attempt.value) as kept:
            part = _compute(kept, rank, step.value)
    except BaseException as error:
        me = {"task": rank, "rank": rank, "host": platform.node(), "pid": os.getpid()}
        raise failed_in_task(describe(error, me)) from error
    yield part


def _compute(kept: _Kept, rank: int, step: Step) -> GradientSum:
    spec, config, start = kept.run.spec, kept.run.config, time.perf_counter()
    device = _device(kept.run)
    batches = kept.batches(rank, step, pin=device.type == "cuda")
    data_s = time.perf_counter() - start
    model = kept.model.to(device)
    parameters = trained(model)
    from_arrays(step.weights, [*parameters, *model.buffers()])
    # NOTE: a seed for each rank and step, so that dropout does not depend on the worker that runs the task. A rank of
    # DDP draws different numbers, as its generator continues from step to step.
    seed = np.random.SeedSequence((config.train.seed, rank, step.global_step)).generate_state(1, np.uint64)[0]
    seed_generators(int(seed) >> 1)
    time.sleep(delay_s(config, rank, step.global_step))
    model.zero_grad(set_to_none=True)
    if spec.set_position is not None:
        spec.set_position(model, Position(step.epoch, step.step, step.global_step))
    factor = step.scale / step.rows
    with (
        _threads(config.launch.threads),
        gathering(RowRanks(1) if config.launch.num_ranks == 1 else None, several=config.several_micro_batches()),
        noting_counts() as noted,
    ):
        total = add_gradients(spec, model, batches, config, device=device, scale=lambda losses: losses * factor)
    finding = None
    if config.train.precision != "fp16-mixed":  # with fp16, the scaler on the driver skips a step that overflows
        finding = find_in_gradients(model, total, rank, step.global_step + 1)
        finding = finding and dataclasses.replace(finding, rows=kept.name_rows(rank, step))
    gradient, used = flat_gradient(parameters)
    buffers = to_arrays(list(model.buffers())) if rank == 0 else None  # DDP, too, uses the buffers of rank 0
    seconds = {rank: (data_s, time.perf_counter() - start - data_s)}
    own_count = noted.total()
    count = float(sum(count_of(spec, batch, config) for batch in batches) if own_count is None else own_count)
    return GradientSum(gradient, float(total), used, buffers, finding, seconds, count)


def _device(run: Run) -> torch.device:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return gpus.first(gpus.gpus_of_task(run.config.launch.device, context.resources()))


@contextlib.contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Sets torch's number of threads within; 0 keeps the number that Spark sets (`spark.task.cpus`)."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Kept:
    """Model and loaders that a Python worker keeps for the tasks of one attempt. Used only with `_LOCK` held."""

    def __init__(self, attempt: CallData):
        if attempt.versions != VERSIONS:
            raise RuntimeError(
                f"the driver has {dict(attempt.versions)}, this executor {dict(VERSIONS)}; install the same versions"
            )
        if not gc.get_freeze_count():
            # NOTE: Spark's worker collects garbage after every task, which takes 0.1 s with torch's objects. `freeze`
            # excludes all present objects, mostly modules, from collections. `launch.daemon` does the same.
            gc.freeze()
        _, (self.run,), _ = payload.unpack_call(attempt.packed)
        self.id = attempt.id
        self.model = self.run.spec.build_to_train()
        from_arrays(attempt.frozen, frozen(self.model))
        self._loaders: dict[int, _OpenLoader] = {}  # in order of last use

    def batches(self, rank: int, step: Step, *, pin: bool = False) -> list[Batch]:
        """Returns the micro-batches of a rank, in page-locked memory with `pin`.

        NOTE: Spark gives an executor's tasks to any free Python worker. If an executor has several task slots, each of
        its workers gets all of its ranks in turn, and has a loader for each, up to `_MAX_LOADERS`. Then each of these
        workers reads the rows, and each loader may use `loader.memory_mib`. With one slot every row is read once.
        """
        loader = self._loaders.pop(rank) if rank in self._loaders else _OpenLoader(self.run, rank, pin)
        self._loaders[rank] = loader
        if len(self._loaders) > _MAX_LOADERS:
            self._loaders.pop(next(iter(self._loaders))).close()
        return loader.batches(step)

    def name_rows(self, rank: int, step: Step) -> str:
        """Names the rows of a rank in its last step."""
        return name_rows(self._loaders[rank].loader, step.epoch, step.step)

    def close(self) -> None:
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()


class _OpenLoader:
    """The loader of a rank, and its position."""

    def __init__(self, run: Run, rank: int, pin: bool):
        self.loader = build_train_loader(
            run.train, run.spec, run.config, rank=rank, world_size=run.config.launch.num_ranks, pin=pin
        )
        self._steps: Any = iter(())
        self._next: tuple[int, int] | None = None
        """Epoch and step of the next batches."""

    def batches(self, step: Step) -> list[Batch]:
        """Returns a step's micro-batches. Skips steps of other workers: cheaper than to read a window again."""
        epoch, ready = self._next or (-1, 0)
        if step.epoch != epoch or not ready <= step.step <= ready + _MAX_STEPS_PASSED_BY:
            self.close()
            self._steps = self.loader.epoch(step.epoch, step.step)
        step_batches: StepBatches = next(batches for batches in self._steps if batches.step == step.step)
        self._next = (step.epoch, step.step + 1)
        if step.step + 1 == self.loader.plan.steps:
            self.close()
        return step_batches.micro_batches

    def close(self) -> None:
        """Ends the threads that read ahead."""
        if self._next is not None:
            self._steps.close()
            self._next = None


@contextlib.contextmanager
def _kept(attempt: CallData) -> Iterator[_Kept]:
    """Yields the state of an attempt, made if there is none. Drops it after an error, and other attempts' state."""
    with _LOCK:
        while _TIMERS:
            _TIMERS.pop().cancel()
        try:
            if attempt.id not in _KEPT:
                _close_all()
                _KEPT[attempt.id] = _Kept(attempt)
            yield _KEPT[attempt.id]
        except BaseException:
            _close_all()
            raise
        timer = threading.Timer(_KEPT[attempt.id].run.config.launch.collective_timeout_s, _close_idle)
        timer.name, timer.daemon = "spark_dl idle", True
        timer.start()
        _TIMERS.append(timer)


def _close_idle() -> None:
    with _LOCK:
        _close_all()


def _close_all() -> None:
    for kept in _KEPT.values():
        kept.close()
    _KEPT.clear()
