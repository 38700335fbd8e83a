"""One barrier job: the same function on every rank, all at once, with all results or one error.

`spark.range(0, n, 1, n).mapInArrow(task, ..., barrier=True)` is the whole launch: it works in classic Spark and over
Spark Connect, and each task's own Python process is the rank. Instead of the range another DataFrame can be given,
whose rows then stream into the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from spark_dl.config import Launch
from spark_dl.launch import payload, preflight
from spark_dl.launch.failure import describe, failed_in_task, root_cause
from spark_dl.launch.watch import Address, Listener, Sender

_log = logging.getLogger("spark_dl")

_ROOT_CAUSE_WAIT_S = 2.0
"""How long a failure that only follows from another one waits for that other one to be known."""
_SILENCE_S = 3.0
"""A rank that sends no sign of life for so long is the cause, where others only lost contact or waited in vain."""
_POLL_S = 1.0
"""How often a driver without a listener looks for news."""
_CANCEL_WAIT_S = 30.0
_ABORTED_BY_DRIVER_WAIT_S = 20.0

Event = Mapping[str, Any]


@dataclass(frozen=True)
class RankResult:
    """What a function that `run_barrier` runs returns: its rank, which the rendezvous dealt, and its result."""

    rank: int
    result: Any
    refused: str = ""
    """What is wrong with the input, where the ranks have agreed on it and none went on; `run_barrier` raises it."""


@dataclass(frozen=True)
class TaskInput:
    """What a task of a job with a source gets. Its batches are to be consumed to the end."""

    batches: Iterator[pa.RecordBatch]
    task: int
    """Number of the task: the partition of the source."""
    folder: str
    """A folder of Spark's on a disk of this host; Spark deletes it when the executor ends."""


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
    """Runs `fn(*args, report=..., **kwargs)` on `launch.num_ranks` ranks. Called on the driver; returns by rank.

    With `source`, a DataFrame of as many partitions as ranks, the tasks get its rows: `fn(..., rows=TaskInput)`.

    `on_event` gets what ranks report, in the driver's thread, while they run. Over Spark Connect, where ranks cannot
    reach the driver, it gets what `poll` returns.
    Raises ValueError for a call that cannot be sent and for input that the ranks refuse, RuntimeError for a cluster
    that cannot run it or does not start it within `launch.start_timeout_s`, RankError for a rank that fails. In every
    case the job has ended then.
    """
    preflight.check(spark, launch)
    if source is not None:
        preflight.check_disks(spark)
    packed = payload.pack_call(fn, args, kwargs)
    listener = None if preflight.is_connect(spark) else _listen(spark)
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
    if not rows:  # Spark runs no task at all for what it knows to be empty
        raise ValueError("the DataFrame has no rows; at least one is needed")
    if refused := [row["refused"] for row in rows if row["refused"]]:
        raise ValueError(refused[0])
    return [payload.unpack_result(bytes(row["result"])) for row in rows]


def _listen(spark: Any) -> Listener:
    """A listener where Spark's own driver listens, under the name by which executors know the driver."""
    conf = spark.sparkContext.getConf()
    public = conf.get("spark.driver.host")
    return Listener(conf.get("spark.driver.bindAddress") or public, public)


class _Job:
    """A Spark job in a thread of its own, so that the driver can watch it and cancel it."""

    def __init__(self, spark: Any, df: Any, num_ranks: int, events: queue.Queue[Any], *, computes_first: bool):
        self._num_ranks = num_ranks
        self.computes_first = computes_first
        """Whether the job has stages before that of the ranks, which may take any time."""
        self.rows: list[Any] = []
        self.error: BaseException | None = None
        self._spark, self._df, self._events = spark, df, events
        self._name = f"spark_dl-{uuid.uuid4().hex}"
        self._thread = threading.Thread(target=self._work, name="spark_dl job", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._mark()
            with self._task_counts():
                self.rows = self._df.collect()
        except BaseException as error:  # raised again by _watch
            self.error = error
        self._events.put({"kind": "job ended"})

    @contextlib.contextmanager
    def _task_counts(self) -> Iterator[None]:
        """Over Spark Connect, where ranks cannot say that they have started, Spark's own progress does.

        NOTE: Spark reports on all operations of the session, so another one with as many tasks is taken for this job;
        the start timeout then does not apply.
        """
        if not hasattr(self._spark, "registerProgressHandler") or not preflight.is_connect(self._spark):
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

    def _mark(self) -> None:
        """Names the job, so that it can be cancelled. Job groups and tags belong to the thread that starts the job."""
        if preflight.is_connect(self._spark):
            self._spark.addTag(self._name)
        else:
            # Interrupted tasks end at once; otherwise Spark leaves a Python worker that waits until it returns.
            self._spark.sparkContext.setJobGroup(self._name, "spark_dl ranks", interruptOnCancel=True)

    def has_tasks(self) -> bool:
        """Whether tasks of the job run, or those of its last stage have run. False over Spark Connect.

        Of a barrier stage all run, if any. Spark's answer may be as old as a heartbeat of the executors (10 s).
        """
        if preflight.is_connect(self._spark):
            return False
        tracker = self._spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(i) for i in tracker.getJobIdsForGroup(self._name)]
        ids = sorted({i for job in jobs if job for i in job.stageIds})
        stages = [stage for i in ids if (stage := tracker.getStageInfo(i))]
        return any(stage.numActiveTasks for stage in stages) or bool(stages and stages[-1].numCompletedTasks)

    def cancel(self) -> None:
        """Ends the job and waits until Spark has ended it; without effect on a job that is over."""
        end = time.monotonic() + _CANCEL_WAIT_S
        while self._thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(Exception):  # the session may be gone, and the job with it
                if preflight.is_connect(self._spark):
                    self._spark.interruptTag(self._name)
                else:
                    self._spark.sparkContext.cancelJobGroup(self._name)
            self._thread.join(0.5)  # again, in case that the job had not begun yet


def _watch(
    job: _Job,
    events: queue.Queue[Any],
    launch: Launch,
    on_event: Callable[[Event], None] | None,
    poll: Callable[[], list[dict[str, Any]]] | None,
    silence: Callable[[], Mapping[int, float]],
) -> None:
    """Follows a job to its end. Raises the root cause of its failure. `poll` is given where there is no listener.

    `silence` tells for how many seconds each rank at work was not heard.
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
                _pass_on(poll, on_event)  # what came since the last time
                return
            if kind in ("job ended", "failed", "lost"):
                failures.append(event)
                is_root = kind == "lost" or (kind == "failed" and not event["follows"])
                # A rank that was killed and one that raised in consequence are told apart by a short wait.
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
        silent = silent_for(launch.collective_timeout_s)  # nobody may be waiting for it, or be able to say so
        silent_at = (silent_at or time.monotonic()) if silent else None
        if silent_at and time.monotonic() - silent_at > _SILENCE_S:  # it was not the driver that stood still
            raise root_cause(failures, known, job.error, silent)
        if time.monotonic() >= poll_at:
            _pass_on(poll, on_event)
            poll_at = time.monotonic() + _POLL_S
        if running < launch.num_ranks and time.monotonic() > deadline:
            if job.has_tasks():
                if job.computes_first:  # the DataFrame is still being computed, or the ranks cannot reach the driver
                    deadline = time.monotonic() + launch.start_timeout_s
                    continue
                running = launch.num_ranks
                _log.warning("the ranks run, but cannot reach the driver to report progress; is its port closed?")
                continue
            raise RuntimeError(
                f"{running} of {launch.num_ranks} ranks started within launch.start_timeout_s="
                f"{launch.start_timeout_s:g} s; the cluster is busy with other jobs, or its executors are not up yet"
            )


def _pass_on(poll: Callable[[], list[dict[str, Any]]] | None, on_event: Callable[[Event], None] | None) -> None:
    if poll and on_event:
        for event in poll():
            on_event(event)


def _rank_task(
    packed: bytes, address: Address | None, num_ranks: int, has_source: bool
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """The task of one rank."""

    def run_rank(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not has_source:
            # Spark uses a Python worker again, with torch already imported, only if its input was consumed.
            for _ in batches:
                pass
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        task = context.partitionId()
        host = context.getTaskInfos()[task].address.rsplit(":", 1)[0]
        me = {"host": host, "pid": os.getpid()}
        sender = Sender(address, task)

        def report(event: Mapping[str, Any]) -> None:
            sender.send({**event, **me})
            if event["kind"] == "joined":
                me["rank"] = event["rank"]
                sender.flush()  # from here on the rank may die of anything, and is to be named

        report({"kind": "started"})
        try:
            fn, args, kwargs = payload.unpack_call(packed)
            if (found := len(context.getTaskInfos())) != num_ranks:
                raise RuntimeError(
                    f"Spark started {found} tasks for {num_ranks} ranks; the DataFrame was not dealt to them"
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
                # The driver has the error now and cancels the job, which kills this process without a line in Spark's
                # log. Only if the driver does not, Spark has to learn it from here.
                time.sleep(_ABORTED_BY_DRIVER_WAIT_S)
            elif failure["follows"]:
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
    """A folder of Spark's on a disk of this host: the tasks take turns, where there are several disks."""
    folders = [f for f in os.environ.get("SPARK_LOCAL_DIRS", "").split(",") if f and os.path.isdir(f)]
    return folders[task % len(folders)] if folders else tempfile.gettempdir()
