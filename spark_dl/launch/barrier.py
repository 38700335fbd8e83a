"""Barrier jobs: runs one function on all ranks at the same time, and returns all results or raises one error.

The launch is `spark.range(0, n, 1, n).mapInArrow(task, ..., barrier=True)`, in classic Spark and over Spark Connect.
The Python process of each task is the rank. The rows of another DataFrame can be streamed to the ranks instead.

All tasks of a barrier stage run, or none. Spark waits for their slots without a limit, and so do ranks for each other
in its `allGather`. So the driver checks that the ranks start, and come to meet each other, in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from spark_dl.channel import CRASH
from spark_dl.config import Launch
from spark_dl.launch import preflight
from spark_dl.launch.code import payload
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.root_cause import SILENCE_S, late_at_start, root_cause
from spark_dl.launch.rank.environment import check_env, warn_of_late
from spark_dl.launch.rank.task import ROOT_CAUSE_WAIT_S, SCHEMA, Attempt, RankResult, rank_task
from spark_dl.launch.watch import Known, Listener, listen, with_heartbeats
from spark_dl.spark_job import SparkJob, check_session, is_connect, is_local_master

RANKS = "spark_dl-ranks"
"""Tag of the Spark jobs of ranks."""

_CALLED = {"is_called", "rank", "is_returned", "is_done"}
"""Keys that are known only of tasks that have unpickled their call."""
_SAY_AFTER_S, _SAY_EVERY_S = 10.0, 60.0
"""When the driver logs that ranks wait for task slots: the first time after so long, and then as often."""
_CONNECT_S = 10.0
"""How long tasks that run may take to connect to the driver, if they have started late."""
_log = logging.getLogger("spark_dl")

_LAST_EVENTS_WAIT_S = 1.0
"""How long to wait for events that the ranks sent before the job ended."""
_FIRST = Attempt()
_POLL_S = 1.0
"""Interval in which a driver without a listener calls `poll`."""

Event = Mapping[str, Any]


class RankJob:
    """The Spark job of the ranks. Used on the driver."""

    def __init__(
        self, spark: Any, df: Any, num_ranks: int, events: queue.Queue[Any], *, description: str, computes_first: bool
    ):
        self._spark, self._num_ranks, self._events = spark, num_ranks, events
        self.computes_first = computes_first
        """Whether the job has stages before the stage of the ranks. These can take any time."""
        self._job = SparkJob(
            spark, functools.partial(self._collect, df), description=description, own_group=True, tag=RANKS,
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
        if not is_connect(self._spark) or not self.counts_tasks:
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

    @property
    def counts_tasks(self) -> bool:
        """Whether it is known that tasks run. Spark 3.5 does not tell it over Spark Connect."""
        return not is_connect(self._spark) or hasattr(self._spark, "registerProgressHandler")

    def has_tasks(self) -> bool:
        """Whether tasks of the job are running, or tasks of its last stage have completed. False over Spark Connect.

        All tasks of a barrier stage run, or none. Spark's counts can be as old as the executors' heartbeat (10 s).
        """
        if is_connect(self._spark):
            return False
        stages = self._stages(self._own_ids())
        return any(stage.numActiveTasks for stage in stages) or bool(stages and stages[-1].numCompletedTasks)

    def waits_for_own_jobs(self) -> bool:
        """Whether other ranks of this application run, such as those of another thread. False over Spark Connect."""
        if is_connect(self._spark):
            return False
        of_ranks = self._spark.sparkContext._jsc.sc().statusTracker().getJobIdsForTag(RANKS)
        return any(stage.numActiveTasks for stage in self._stages({*of_ranks} - self._own_ids()))

    def _own_ids(self) -> set[int]:
        """Returns the ids of the Spark jobs of these ranks."""
        return {*self._spark.sparkContext.statusTracker().getJobIdsForGroup(self._job.name)}

    def _stages(self, job_ids: Iterable[int]) -> list[Any]:
        """Returns Spark's counts of the stages of some jobs, in the order of the stages."""
        tracker = self._spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(i) for i in job_ids]
        ids = sorted({i for job in jobs if job for i in job.stageIds})
        return [stage for i in ids if (stage := tracker.getStageInfo(i))]


class StartCheck:
    """The start of the ranks of one job."""

    def __init__(self, job: RankJob, launch: Launch, listener: Listener | None):
        self._job, self._launch, self._listener = job, launch, listener
        self._running = 0
        """How many ranks are known to run."""
        self._deadline = time.monotonic() + launch.start_timeout_s
        self._say_at = time.monotonic() + _SAY_AFTER_S
        self._has_tasks = False
        """Whether tasks ran when the deadline was over, though not all of them had told the driver so."""
        self._late_since: float | None = None
        """Since when all ranks run, and some of them have not joined yet."""

    @property
    def all_run(self) -> bool:
        """Whether all ranks run, as far as that can be known."""
        return self._running >= self._launch.num_ranks

    def count(self, running: int) -> None:
        """Notes how many ranks run."""
        self._running = max(self._running, running)

    def postpone(self) -> None:
        """Starts the time limit again, as Spark still computes the rows of the ranks, or other ranks run."""
        self._deadline = time.monotonic() + self._launch.start_timeout_s
        self._say_at = time.monotonic() + _SAY_EVERY_S

    def check(self, known: Known, *, is_failing: bool) -> None:
        """Raises RuntimeError if ranks have not started in time, RankError if one does not come to meet the others.

        Args:
            is_failing: whether a rank has failed, so that others need not come.
        """
        if not self.all_run:
            self._check_started()
        elif not is_failing:
            self._check_joined(known)

    def _check_started(self) -> None:
        """Raises RuntimeError if the ranks have not started in time. Logs now and then that they wait."""
        if (now := time.monotonic()) < min(self._deadline, self._say_at):
            return
        num_ranks, limit_s = self._launch.num_ranks, self._launch.start_timeout_s
        if not self._job.counts_tasks:
            self._running = num_ranks
        elif self._job.has_tasks():
            self._say_at = now + _SAY_EVERY_S
            if now < self._deadline:
                return
            if self._job.computes_first:  # Spark still computes the DataFrame, or the ranks cannot reach the driver
                self.postpone()
            elif not self._has_tasks:  # they may have started just now
                self._has_tasks, self._deadline = True, now + min(limit_s, _CONNECT_S)
            else:
                unknown, self._running = num_ranks - self._running, num_ranks
                _log.warning("all ranks run, but %d of %d cannot reach the driver to report progress; open its port",
                             unknown, num_ranks)  # fmt: skip
        else:
            waits_for_own = self._job.waits_for_own_jobs()
            why = "other ranks of this application run" if waits_for_own else (
                "the cluster is busy with other jobs, or its executors have not started"
            )  # fmt: skip
            if now >= self._say_at:
                self._say_at = now + _SAY_EVERY_S
                _log.warning("%d of %d ranks have started; waiting for task slots: %s", self._running, num_ranks, why)
            if now >= self._deadline and waits_for_own:
                self.postpone()
            elif now >= self._deadline:
                raise RuntimeError(
                    f"{self._running} of {num_ranks} ranks started within launch.start_timeout_s={limit_s:g} s; {why}"
                )

    def _check_joined(self, known: Known) -> None:
        """Raises RankError if ranks run, but do not come to the others. These would wait for them for ever."""
        if not (late := self._late(known)):
            self._late_since = None
            return
        self._late_since = self._late_since or time.monotonic()
        if time.monotonic() - self._late_since > self._launch.start_timeout_s:
            raise late_at_start(late, with_heartbeats(known, self._listener), self._launch.num_ranks,
                                self._launch.start_timeout_s)  # fmt: skip

    def _late(self, known: Known) -> list[int]:
        """Returns the tasks that have not unpickled their call, or else those that others wait for where ranks meet.

        Not every function joins the others. One that gets the rows of a DataFrame first waits for these.
        """
        met = self._listener.met if self._listener else frozenset[int]()
        late = [task for task, who in known.items() if task not in met and not _CALLED & who.keys()]
        if late or self._job.computes_first:
            return sorted(late)
        if all("rank" in known.get(task, {}) for task in met):
            return []
        return sorted({*range(self._launch.num_ranks)} - met)


def run_barrier(
    spark: Any,
    call: functools.partial[RankResult],
    *,
    launch: Launch,
    description: str = "spark_dl ranks",
    on_event: Callable[[Event], None] | None = None,
    on_ask: Callable[[Event], Mapping[int, Any]] | None = None,
    poll: Callable[[], list[dict[str, Any]]] | None = None,
    source: Any = None,
    env: Mapping[str, str] | None = None,
    begin: Callable[[], Mapping[str, str]] = dict,
    attempt: Attempt = _FIRST,
    limit_s: float = math.inf,
) -> list[Any]:
    """Makes a call on each of `launch.num_ranks` ranks, in one barrier job. Called on the driver.

    Returns the results by rank. When this function raises, it has cancelled the job, and waited up to 30 s for its end.
    If the job has not ended then, a warning says so.

    Args:
        call: a function and its arguments. Ranks call it with `report`, which sends events to `on_event`, besides.
        description: of the job, in Spark's UI.
        on_event: called in the driver's thread with the events of the ranks, while they run. Over Spark Connect, where
            ranks cannot connect to the driver, it gets the events that `poll` returns.
        on_ask: called in the driver's thread with each question of a rank (`Reporter.ask`); returns answers by task,
            also to earlier questions of other ranks. Not over Spark Connect.
        source: a DataFrame with one partition per rank. The call gets the rows of the rank: `rows`, a `TaskInput`.
        env: environment variables of the user for the ranks, set when the function is called.
        begin: called after all checks of the call, before its job is started; returns further variables of the ranks,
            which are set when the function is called.
        attempt: with the hosts to leave out. After a failure, the cluster has `launch.start_timeout_s` to replace lost
            executors.
        limit_s: how long the ranks may run, from the start of the last one.

    Raises:
        ValueError: For a call that cannot be pickled and for input that the ranks refuse.
        RuntimeError: If the cluster cannot run the job or does not start it within `launch.start_timeout_s`.
        RankError: If a rank fails.
        TimeoutError: If the ranks run for longer than `limit_s`.
    """
    check_env(env or {})
    if not attempt.number:
        warn_of_late(env or {})
    try:
        profile = preflight.check(spark, launch, executors_wait_s=launch.start_timeout_s if attempt.number else None)
        preflight.check_log_dir(launch)
        if source is not None:
            preflight.check_disks(spark)
        packed = payload.pack_call(call.func, call.args, call.keywords)
        num_tasks = preflight.num_tasks(spark, launch.num_ranks, profile, attempt.left_out if source is None else ())
        if num_tasks == launch.num_ranks:
            attempt = dataclasses.replace(attempt, left_out=frozenset())
        tasks = spark.range(0, num_tasks, 1, num_tasks) if source is None else source
        # Tasks on hosts that are left out do not come to Spark's `allGather`, so that the ranks can meet here alone.
        meeting_s = launch.start_timeout_s if num_tasks > launch.num_ranks else None
        listener = None if is_connect(spark) else listen(spark, launch.num_ranks, meeting_s=meeting_s)
        events: queue.Queue[Any] = listener.events if listener else queue.Queue()
        try:
            task = rank_task(
                packed, listener.address if listener else None, launch, has_source=source is not None,
                result_limit_bytes=preflight.result_limit_bytes(spark, launch.num_ranks), secret=os.urandom(32),
                has_log=not is_local_master(spark.conf.get("spark.master", "")), attempt=attempt,
                env=env or {}, run_env=begin(),
            )  # fmt: skip
            # Without a profile, also on Spark 3.5, which has no such argument.
            df = tasks.mapInArrow(task, SCHEMA, barrier=True, **({} if profile is None else {"profile": profile}))
            job = RankJob(
                spark, df, launch.num_ranks, events, description=description, computes_first=source is not None
            )
            try:
                watch = _Watch(job, launch, on_event, on_ask, listener, None if listener else poll or list, limit_s)
                watch.run(events)
            except BaseException:
                job.cancel()
                raise
        finally:
            if listener:
                listener.close()
        return _results(job, launch.num_ranks, on_event)
    except Exception:  # such as of py4j, which has lost its JVM
        check_session(spark)
        raise


def _results(job: RankJob, num_ranks: int, on_event: Callable[[Event], None] | None) -> list[Any]:
    """Returns the results by rank. Raises as `run_barrier` does."""
    rows = sorted(job.rows, key=lambda row: row["rank"])
    if not rows and job.computes_first:  # Spark runs no task if it knows that the DataFrame is empty
        raise ValueError("the DataFrame has no rows; expected at least one")
    if len(rows) < num_ranks:  # Spark says so only in its log
        raise RuntimeError(
            f"the results of {num_ranks - len(rows)} of {num_ranks} ranks did not reach the driver; they "
            "may be larger than its memory; raise spark.driver.memory, or write large results to files"
        )
    if refused := [row["refused"] for row in rows if row["refused"]]:
        raise ValueError(refused[0])
    if on_event:
        for row in rows:
            for stream, line in json.loads(row["output"]):
                on_event({"kind": "output", "rank": row["rank"], "stream": stream, "lines": [line]})
    return [payload.unpack_result(bytes(row["result"])) for row in rows]


class _Watch:
    """Waits for the end of a job, and passes events on. Raises the root cause if the job fails.

    Args:
        poll: returns further events; None if there is a listener.
    """

    def __init__(
        self,
        job: RankJob,
        launch: Launch,
        on_event: Callable[[Event], None] | None,
        on_ask: Callable[[Event], Mapping[int, Any]] | None,
        listener: Listener | None,
        poll: Callable[[], list[dict[str, Any]]] | None,
        limit_s: float,
    ):
        self._job, self._launch, self._on_event, self._on_ask = job, launch, on_event, on_ask
        self._listener, self._poll, self._limit_s = listener, poll, limit_s
        self._known: dict[int, dict[str, Any]] = {}
        """What each task has reported about itself."""
        self._start = StartCheck(job, launch, listener)
        self._failures: list[dict[str, Any]] = []
        self._decide_at: float | None = None
        """When the root cause is chosen among the failures."""
        self._end_at: float | None = None
        """Until when the last events of a job are awaited that has ended."""
        self._started_at: float | None = None
        """When the last rank has started."""
        self._silent_at: float | None = None
        self._poll_at = 0.0

    def run(self, events: queue.Queue[Any]) -> None:
        """Returns when the job has ended, and all its events have been passed on."""
        while not self._has_ended():
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=0.2)
                self._take(event)
                if event["kind"] == "ask":
                    self._answer(event)
                elif self._on_event and event["kind"] not in ("called", "stack", CRASH):
                    self._on_event(event)
            self._raise_failure()
            if time.monotonic() >= self._poll_at:
                self._pass_on()
                self._poll_at = time.monotonic() + _POLL_S
            self._start.check(self._known, is_failing=self._decide_at is not None)
            self._check_limit()
        self._pass_on()

    def _answer(self, question: Event) -> None:
        assert self._listener is not None
        assert self._on_ask is not None, "no function of the driver answers the ranks"
        for task, answer in self._on_ask(question).items():
            self._listener.answer(task, answer)

    def _has_ended(self) -> bool:
        if self._end_at is None:
            return False
        return time.monotonic() >= self._end_at or all(who.get("is_done") for who in self._known.values())

    def _take(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "job ended" and self._job.error is None:
            self._end_at = time.monotonic() + _LAST_EVENTS_WAIT_S
        elif kind in ("job ended", "failed", "lost"):
            self._failures.append(dict(event))
            is_root = kind == "lost" or (kind == "failed" and not event["is_secondary"])
            # The root cause, such as a killed rank, can arrive shortly after an error that follows from it.
            wait = 0.2 if is_root else ROOT_CAUSE_WAIT_S
            if kind == "lost":
                wait += rank_state.wait_for_count_s(event["task"], self._memories())
            self._decide_at = min(self._decide_at or float("inf"), time.monotonic() + wait)
        elif kind in ("started", "joined"):
            self._known.setdefault(event["task"], {}).update(event)
            self._start.count(len(self._known))
        elif kind == "stack":
            self._known.setdefault(event["task"], {}).update(stack=event["stack"], collective=event["collective"])
        elif kind == CRASH:
            self._known.setdefault(event["task"], {})[kind] = event["text"]
        elif kind in ("called", "returned", "done"):
            self._known.setdefault(event["task"], {})[f"is_{kind}"] = True
        elif kind == "tasks":
            self._start.count(event["running"])
        elif kind == "computing":
            self._start.postpone()

    def _memories(self) -> Mapping[int, rank_state.RankMemory]:
        return self._listener.memories if self._listener else {}

    def _silent_for(self, seconds: float) -> dict[int, float]:
        silence = self._listener.silence() if self._listener else {}
        return {task: s for task, s in silence.items() if s > seconds}

    def _raise_failure(self) -> None:
        if self._decide_at is not None and time.monotonic() >= self._decide_at:
            # A silent rank is the root cause if the other ranks only lost a connection or timed out.
            raise self._root_cause(self._silent_for(SILENCE_S))
        silent = self._silent_for(self._launch.collective_timeout_s)  # other ranks may not notice it
        self._silent_at = (self._silent_at or time.monotonic()) if silent else None
        if self._silent_at and time.monotonic() - self._silent_at > SILENCE_S:  # the driver itself did not hang
            raise self._root_cause(silent)

    def _root_cause(self, silent: Mapping[int, float]) -> BaseException:
        known = with_heartbeats(self._known, self._listener)
        return root_cause(self._failures, known, self._job.error, silent, self._memories())

    def _check_limit(self) -> None:
        """Raises TimeoutError if the ranks run for longer than they may."""
        if self._started_at is None and self._start.all_run:
            self._started_at = time.monotonic()
        is_ending = self._end_at is not None or self._decide_at is not None
        if self._started_at and not is_ending and time.monotonic() - self._started_at > self._limit_s:
            raise TimeoutError(f"the ranks have not returned within {self._limit_s:g} s")

    def _pass_on(self) -> None:
        if self._poll and self._on_event:
            for event in self._poll():
                self._on_event(event)
