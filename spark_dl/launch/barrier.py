"""Barrier jobs: runs one function on all ranks at the same time, and returns all results or raises one error.

The launch is `spark.range(0, n, 1, n).mapInArrow(task, ..., barrier=True)`, in classic Spark and over Spark Connect.
The Python process of each task is the rank. The rows of another DataFrame can be streamed to the ranks instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_dl.config import Launch
from spark_dl.launch import payload, preflight
from spark_dl.launch.failure import describe, failed_in_task, root_cause
from spark_dl.launch.watch import Address, Listener, Reporter, Sender
from spark_dl.spark_job import SparkJob, is_connect

_log = logging.getLogger("spark_dl")

_ROOT_CAUSE_WAIT_S = 2.0
"""How long to wait for the root cause after a failure that is only a consequence."""
_SILENCE_S = 3.0
"""A rank without a heartbeat for longer is the root cause, if the other ranks only lost a connection or timed out."""
_POLL_S = 1.0
"""Interval in which a driver without a listener calls `poll`."""
_ABORTED_BY_DRIVER_WAIT_S = 20.0

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RankResult:
    """The return value of a function under `run_barrier`: its result, and its rank from the rendezvous."""

    rank: int
    result: Any
    refused: str = ""
    """Why all ranks refused the input; empty if they did not. `run_barrier` raises it."""


@dataclass(frozen=True)
class TaskInput:
    """The input of a task of a job with a source. The task must consume all batches."""

    batches: Iterator[pa.RecordBatch]
    task: int
    """Index of the task: the partition of the source."""
    folder: str
    """A local folder of Spark on this host. Spark deletes it when the executor ends."""


def run_barrier(
    spark: Any,
    fn: Callable[..., RankResult],
    *args: Any,
    launch: Launch,
    on_event: Callable[[Event], None] | None = None,
    poll: Callable[[], list[dict[str, Any]]] | None = None,
    source: Any = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, report=..., **kwargs)` on `launch.num_ranks` ranks. Called on the driver.

    Returns the results by rank. The job has ended when this function returns or raises.

    on_event: called in the driver's thread with the events of the ranks, while they run. Over Spark Connect, where
        ranks cannot connect to the driver, it gets the events that `poll` returns.
    source: a DataFrame with one partition per rank. The ranks get its rows: `fn(..., rows=TaskInput)`.

    Raises ValueError for a call that cannot be pickled and for input that the ranks refuse, RuntimeError if the cluster
    cannot run the job or does not start it within `launch.start_timeout_s`, RankError if a rank fails.
    """
    preflight.check(spark, launch)
    if source is not None:
        preflight.check_disks(spark)
    packed = payload.pack_call(fn, args, kwargs)
    listener = None if is_connect(spark) else _listen(spark, launch.num_ranks)
    events: queue.Queue[Any] = listener.events if listener else queue.Queue()
    try:
        task = _rank_task(packed, listener.address if listener else None, launch.num_ranks, source is not None)
        tasks = spark.range(0, launch.num_ranks, 1, launch.num_ranks) if source is None else source
        df = tasks.mapInArrow(task, "rank int, result binary, refused string", barrier=True)
        job = _Job(spark, df, launch.num_ranks, events, computes_first=source is not None)
        try:
            _watch(job, events, launch, on_event, *((None, listener.silence) if listener else (poll or list, dict)))
        except BaseException:
            job.cancel()
            raise
    finally:
        if listener:
            listener.close()
    rows = sorted(job.rows, key=lambda row: row["rank"])
    if not rows:  # Spark runs no task if it knows that the DataFrame is empty
        raise ValueError("the DataFrame has no rows; expected at least one")
    if refused := [row["refused"] for row in rows if row["refused"]]:
        raise ValueError(refused[0])
    return [payload.unpack_result(bytes(row["result"])) for row in rows]


def _listen(spark: Any, num_ranks: int) -> Listener:
    """Returns a listener on the bind address of Spark's driver, with the driver's host name for executors."""
    conf = spark.sparkContext.getConf()
    public = conf.get("spark.driver.host")
    return Listener(conf.get("spark.driver.bindAddress") or public, public, num_ranks=num_ranks)


class _Job:
    """The Spark job of the ranks."""

    def __init__(self, spark: Any, df: Any, num_ranks: int, events: queue.Queue[Any], *, computes_first: bool):
        self._spark, self._num_ranks, self._events = spark, num_ranks, events
        self.computes_first = computes_first
        """Whether the job has stages before the stage of the ranks. These can take any time."""
        self._job = SparkJob(
            spark, functools.partial(self._collect, df), description="spark_dl ranks",
            on_end=lambda: events.put({"kind": "job ended"}),
        )  # fmt: skip
        self.cancel = self._job.cancel

    @property
    def rows(self) -> list[Any]:
        """The rows of the ranks, after the job has ended without an error."""
        return list(self._job.result)

    @property
    def error(self) -> BaseException | None:
        """The error of Spark, after the job has failed."""
        return self._job.error

    def _collect(self, df: Any) -> list[Any]:
        with self._task_counts():
            return list(df.collect())

    @contextlib.contextmanager
    def _task_counts(self) -> Iterator[None]:
        """Puts events with the number of running tasks, from Spark's progress. Only over Spark Connect.

        NOTE: Spark reports the progress of all operations of the session. Another operation with the same number of
        tasks is mistaken for this job, and the start timeout then does not apply.
        """
        if not hasattr(self._spark, "registerProgressHandler") or not is_connect(self._spark):
            yield
            return

        def on_progress(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
            if any(stage.num_tasks == self._num_ranks for stage in stages):
                self._events.put({"kind": "tasks", "running": inflight_tasks})
            if self.computes_first and inflight_tasks:
                self._events.put({"kind": "computing"})

        self._spark.registerProgressHandler(on_progress)
        try:
            yield
        finally:
            self._spark.removeProgressHandler(on_progress)

    def has_tasks(self) -> bool:
        """Whether tasks of the job are running, or tasks of its last stage have completed. False over Spark Connect.

        All tasks of a barrier stage run, or none. Spark's counts can be as old as the executors' heartbeat (10 s).
        """
        if is_connect(self._spark):
            return False
        tracker = self._spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(i) for i in tracker.getJobIdsForGroup(self._job.name)]
        ids = sorted({i for job in jobs if job for i in job.stageIds})
        stages = [stage for i in ids if (stage := tracker.getStageInfo(i))]
        return any(stage.numActiveTasks for stage in stages) or bool(stages and stages[-1].numCompletedTasks)


def _watch(
    job: _Job,
    events: queue.Queue[Any],
    launch: Launch,
    on_event: Callable[[Event], None] | None,
    poll: Callable[[], list[dict[str, Any]]] | None,
    silence: Callable[[], Mapping[int, float]],
) -> None:
    """Waits for the end of a job. Raises the root cause if it fails. `poll` is None if there is a listener.

    silence: returns the seconds since the last heartbeat, by task, of the tasks that have not ended.
    """

    def silent_for(seconds: float) -> dict[int, float]:
        return {task: s for task, s in silence().items() if s > seconds}

    known: dict[int, dict[str, Any]] = {}
    running = 0
    failures: list[dict[str, Any]] = []
    deadline = time.monotonic() + launch.start_timeout_s
    decide_at: float | None = None
    silent_at: float | None = None
    poll_at = 0.0
    while True:
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=0.2)
            kind = event["kind"]
            if kind == "job ended" and job.error is None:
                _pass_on(poll, on_event)  # the last events
                return
            if kind in ("job ended", "failed", "lost"):
                failures.append(event)
                is_root = kind == "lost" or (kind == "failed" and not event["is_secondary"])
                # The root cause, such as a killed rank, can arrive shortly after an error that follows from it.
                wait = 0.2 if is_root else _ROOT_CAUSE_WAIT_S
                decide_at = min(decide_at or float("inf"), time.monotonic() + wait)
            elif kind in ("started", "joined"):
                known.setdefault(event["task"], {}).update(event)
                running = len(known)
            elif kind == "done":
                known.setdefault(event["task"], {})["is_done"] = True
            elif kind == "tasks":
                running = max(running, event["running"])
            elif kind == "computing":
                deadline = time.monotonic() + launch.start_timeout_s
            if on_event:
                on_event(event)
        if decide_at is not None and time.monotonic() >= decide_at:
            raise root_cause(failures, known, job.error, silent_for(_SILENCE_S))
        silent = silent_for(launch.collective_timeout_s)  # other ranks may not notice it
        silent_at = (silent_at or time.monotonic()) if silent else None
        if silent_at and time.monotonic() - silent_at > _SILENCE_S:  # the driver itself did not hang
            raise root_cause(failures, known, job.error, silent)
        if time.monotonic() >= poll_at:
            _pass_on(poll, on_event)
            poll_at = time.monotonic() + _POLL_S
        if running < launch.num_ranks and time.monotonic() > deadline:
            if job.has_tasks():
                if job.computes_first:  # Spark still computes the DataFrame, or the ranks cannot reach the driver
                    deadline = time.monotonic() + launch.start_timeout_s
                    continue
                running = launch.num_ranks
                _log.warning("the ranks run, but cannot reach the driver to report progress; open its port")
                continue
            raise RuntimeError(
                f"{running} of {launch.num_ranks} ranks started within launch.start_timeout_s="
                f"{launch.start_timeout_s:g} s; the cluster is busy with other jobs, or its executors have not started"
            )


def _pass_on(poll: Callable[[], list[dict[str, Any]]] | None, on_event: Callable[[Event], None] | None) -> None:
    if poll and on_event:
        for event in poll():
            on_event(event)


def _rank_task(
    packed: bytes, address: Address | None, num_ranks: int, has_source: bool
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns the function that Spark runs as the task of one rank."""

    def run_rank(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not has_source:
            # Spark reuses a Python worker, with torch already imported, only if its input was consumed.
            for _ in batches:
                pass
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        task = context.partitionId()
        host = context.getTaskInfos()[task].address.rsplit(":", 1)[0]
        me: dict[str, Any] = {"host": host, "pid": os.getpid()}
        sender = Sender(address, task)
        report = Reporter(sender, me)
        report({"kind": "started"})
        try:
            fn, args, kwargs = payload.unpack_call(packed)
            if (found := len(context.getTaskInfos())) != num_ranks:
                raise RuntimeError(
                    f"Spark started {found} tasks for {num_ranks} ranks; the DataFrame must have one partition per rank"
                )
            if has_source:
                kwargs["rows"] = TaskInput(batches, task, _local_folder(task))
            done = fn(*args, report=report, **kwargs)
            result = payload.pack_result(done.result)
        except BaseException as error:
            failure = describe(error, {**me, "task": task})
            sender.send({"kind": "failed", **failure})
            sender.close()
            if sender.is_connected:
                # The driver has the error and cancels the job, which kills this process without an error in Spark's
                # log. If the driver does not cancel the job in time, this task fails.
                time.sleep(_ABORTED_BY_DRIVER_WAIT_S)
            elif failure["is_secondary"]:
                time.sleep(_ROOT_CAUSE_WAIT_S)  # let the root cause reach Spark first
            raise failed_in_task(failure) from error
        sender.send({"kind": "done"})
        sender.close()
        yield pa.RecordBatch.from_pydict(
            {
                "rank": pa.array([done.rank], pa.int32()),
                "result": pa.array([result], pa.binary()),
                "refused": pa.array([done.refused], pa.string()),
            }
        )

    return run_rank


def _local_folder(task: int) -> str:
    """Returns a local folder of Spark on this host. With several disks, the tasks are spread over them."""
    folders = [f for f in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if f and os.path.isdir(f)]
    return folders[task % len(folders)] if folders else tempfile.gettempdir()
