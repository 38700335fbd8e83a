"""Training from the driver with one Spark job per step: the common part of the strategies that Spark aggregates.

The driver runs the ordinary loop as a single process, with the model, the optimizer, checkpoints and metrics. Its
batches are positions in the plan instead of rows. Its gradient comes from a job: the weights are broadcast, one task
per rank computes the gradient of that rank's rows, and `aggregate` adds the gradients.

Spark repeats failed tasks (`spark.task.maxFailures`), including those of a lost executor. Gradients are added in the
order of the ranks if Spark's order is fixed: `treeReduce` without an intermediate level, and any shuffle inside one
executor. Otherwise the last bits of a sum of three or more depend on which shuffle block arrives first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import platform
import re
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl import loop
from spark_dl.baselines.driver_loop import gradient_sum
from spark_dl.baselines.driver_loop.gradient_sum import GradientSum, only_gradients
from spark_dl.baselines.driver_loop.rank_task import CallData, Step, part_of_rank
from spark_dl.config import Config
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.data.columns.batch import StepBatches
from spark_dl.data.load.build import BatchLoader, build_train_loader
from spark_dl.generators import generators_kept
from spark_dl.launch.code import payload
from spark_dl.launch.failures.root_cause import root_cause
from spark_dl.parallel.exchange_clock import Seconds
from spark_dl.parallel.loss import Count
from spark_dl.parallel.trainable import Scaler, Trainable, build_optimization
from spark_dl.spark_job import describe, is_connect
from spark_dl.spec import Batch, Run
from spark_dl.training.finite import NotFiniteError
from spark_dl.world import World

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

_CANCEL_WAIT_S = 30.0

Aggregate: TypeAlias = "Callable[[RDD[GradientSum], Config], GradientSum]"


def train(
    spark: SparkSession,
    run: Run,
    aggregate: Aggregate,
    *,
    report: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Trains from the driver with `launch.num_ranks` tasks per step. Returns the result of `spark_dl.loop.train`.

    `report` is called with each line of metrics. Validation runs on the driver's CPU, over all validation rows.
    Raises ValueError for a session without RDDs, RankError if a task fails, RuntimeError if a job fails otherwise or
    takes longer than `launch.collective_timeout_s`, and as the loop does. No job of this call runs after an error.
    """
    check(spark, run.config)
    world = World(
        rank=0, world_size=1, local_rank=0, local_world_size=1, host=platform.node(), device=torch.device("cpu"),
        store=dist.HashStore(), report=report or (lambda event: None),
    )  # fmt: skip
    # The loop seeds the generators of its process, which here is the user's.
    with generators_kept(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        return loop.train(
            run,
            world,
            lambda spec, world, config: _parallelize(spark, dataclasses.replace(run, spec=spec), aggregate),
            build_train_loader=_build_places,
            num_ranks=run.config.launch.num_ranks,
        )


def check(spark: Any, config: Config) -> None:
    """Raises ValueError for a session without RDDs. Called before the first job."""
    if is_connect(spark):
        raise ValueError(
            f"parallel.strategy: {config.parallel.strategy!r} uses RDDs, which Spark Connect does not have; use a "
            "classic session (a spark.master instead of sc://), or another strategy, such as ddp"
        )


def _parallelize(spark: SparkSession, run: Run, aggregate: Aggregate) -> Trainable:
    config = run.config
    model = run.spec.build_to_train()
    gradient_sum.check_real(model)
    optimization = build_optimization(run.spec, model, config, config.launch.num_ranks)
    parameters, buffers = gradient_sum.trained(model), list(model.buffers())
    scaler = Scaler(optimization.optimizer, config, torch.device("cpu"))
    jobs, clock = _Jobs(spark, run, aggregate), _TaskClock(config.launch.num_ranks)

    def forward_backward(micro_batches: Sequence[Batch], rows: Count) -> Tensor:
        epoch, step, global_step = micro_batches[0]["place"].tolist()
        weights = gradient_sum.to_arrays([*parameters, *buffers])
        scale = float(scaler.scale(torch.ones(())))
        start = time.perf_counter()
        total = jobs.run(Step(epoch, step, global_step, int(rows), scale, weights), gradient_sum.frozen(model))
        clock.add(time.perf_counter() - start, total.seconds)
        if total.finding is not None:
            raise NotFiniteError(total.finding)
        gradient_sum.set_gradient(total, parameters)
        ratio = rows / total.count if total.count else 0.0  # what the mean is over is known with the sum alone
        if ratio != 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(ratio)
        if total.buffers is not None:
            gradient_sum.from_arrays(total.buffers, buffers)
        scaler.unscale()
        return torch.tensor(total.loss_sum * ratio, dtype=torch.float64)

    return Trainable(
        modules=[model],
        optimizer=optimization.optimizer,
        optimization=optimization,
        forward_backward=forward_backward,
        clip_grad_norm=lambda norm: nn.utils.clip_grad_norm_(parameters, norm),
        step=scaler.step,
        skip_step=scaler.skip,
        extra_state=scaler.state,
        clock=clock,
        close=jobs.close,
    )


class _TaskClock:
    """Times of all ranks, which are tasks of jobs. A rank counts as blocked while its task does not compute."""

    def __init__(self, num_ranks: int):
        self._data_s, self._blocked_s = np.zeros(num_ranks), np.zeros(num_ranks)

    def add(self, job_s: float, seconds: Mapping[int, tuple[float, float]]) -> None:
        """Adds a job. seconds: by rank: waiting for data, computing."""
        for rank, (data_s, compute_s) in seconds.items():
            self._data_s[rank] += data_s
            self._blocked_s[rank] += max(0.0, job_s - data_s - compute_s)

    def take_step(self) -> tuple[Seconds, Seconds]:
        """See `StepClock`."""
        taken = self._data_s.copy(), self._blocked_s.copy()
        self._data_s[:] = self._blocked_s[:] = 0.0
        return taken


@dataclass(frozen=True)
class _Places:
    """The driver's loader. It reads no rows: a batch is only the position of a step."""

    plan: Any
    columns: Any

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[StepBatches, None, None]:
        for step in range(start_step, self.plan.steps):
            place = torch.tensor([epoch, step, epoch * self.plan.steps + step])
            yield StepBatches(step, [{"place": place}], self.plan.batch_rows(step, epoch))

    def name_rows(self, epoch: int, step: int) -> str:
        """Returns no rows: the ranks name theirs."""
        return ""


def _build_places(data: Any, spec: Any, config: Config, **options: Any) -> BatchLoader:
    options["world_size"] = config.launch.num_ranks  # each rank reads, and needs memory for its part only
    loader = build_train_loader(data, spec, config, **options)  # reads nothing before `epoch` is called
    return _Places(loader.plan, loader.columns)


class _Jobs:
    """The Spark jobs of one call of `train`: one for each step.

    A separate thread starts them. So an interrupt of the caller's thread never happens inside a call to the JVM, which
    would leave the job running. The job group of the caller's thread does not change, either.
    """

    def __init__(self, spark: SparkSession, run: Run, aggregate: Aggregate):
        self._context, self._run, self._aggregate = spark.sparkContext, run, aggregate
        self._id = f"spark_dl-{uuid.uuid4().hex}"
        num_ranks = run.config.launch.num_ranks
        # Persisted, so that Spark schedules each rank on the executor with its partition, where its loader is open.
        self._ranks = self._context.parallelize(range(num_ranks), num_ranks).persist()
        self._attempt: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spark_dl steps")

    def run(self, step: Step, frozen: Sequence[Tensor]) -> GradientSum:
        """Returns the sum of all ranks' gradients of a step. If this raises, its job has ended."""
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        launch = self._run.config.launch
        limit_s = launch.collective_timeout_s + (launch.start_timeout_s if self._attempt is None else 0.0)
        job = self._thread.submit(self._run_job, step, frozen)
        try:
            if not wait([job], limit_s).done:
                raise RuntimeError(
                    f"a step was not done within {limit_s:g} s; raise launch.collective_timeout_s (for the first step "
                    "launch.start_timeout_s is added), or look for executors that are busy with other jobs"
                )
            return job.result()
        except (Py4JJavaError, PySparkException) as error:
            raise self._cause(error) from None
        except BaseException:
            self._cancel(job)
            raise

    def _run_job(self, step: Step, frozen: Sequence[Tensor]) -> GradientSum:
        context = self._context
        if self._attempt is None:
            # Interrupted tasks free their slots at once. A Python worker notices it after it has computed its step.
            subject = f"{self._run.run_dir}, {self._run.config.parallel.strategy}"
            description = describe("train", self._run.config.launch.num_ranks, subject)
            context.setJobGroup(self._id, description, interruptOnCancel=True)
            packed = payload.pack_call(None, (self._run,), {})
            self._attempt = context.broadcast(CallData(self._id, packed, gradient_sum.to_arrays(frozen)))
        sent = context.broadcast(step)
        try:
            task = functools.partial(part_of_rank, attempt=self._attempt, step=sent)
            return self._aggregate(only_gradients(self._ranks.mapPartitions(task)), self._run.config)
        finally:
            sent.destroy()

    def _cancel(self, job: Future[GradientSum]) -> None:
        """Cancels a job and waits until it has ended. Does nothing if it has already ended."""
        end = time.monotonic() + _CANCEL_WAIT_S
        while not job.done() and time.monotonic() < end:
            with contextlib.suppress(Exception):  # the session, and with it the job, may have ended
                self._context.cancelJobGroup(self._id)
            wait([job], 0.5)  # the loop cancels again, in case the job had not begun

    def close(self) -> None:
        """Frees the persisted and broadcast data. The Python workers free their memory by themselves."""
        self._thread.shutdown(wait=False)
        with contextlib.suppress(Exception):  # the session, and with it this data, may have ended
            self._ranks.unpersist()
            if self._attempt is not None:
                self._attempt.destroy()

    def _cause(self, error: Exception) -> BaseException:
        """Returns the root cause of a failed job. The tasks of its first stage are the ranks; later stages only add."""
        num_ranks, text = self._run.config.launch.num_ranks, str(error)
        tracker = self._context.statusTracker()
        job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(self._id), default=-1))
        failed = re.search(r"[Tt]ask \d+\.?\d* in stage (\d+)", text)
        is_first = job is not None and failed is not None and int(failed.group(1)) == min(job.stageIds)
        return root_cause([], {rank: {"rank": rank} for rank in range(num_ranks)} if is_first else {}, error, {})


def by_spark(settings: type[Parallel], aggregate: Aggregate) -> Strategy:
    """Returns the strategy in which Spark aggregates the gradients of a step in this way."""
    return Strategy(settings=settings, train_from_driver=functools.partial(train, aggregate=aggregate), check=check)
