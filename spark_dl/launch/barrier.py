"""Barrier jobs: runs one function on all ranks at the same time, and returns all results or raises one error.

The launch is `spark.range(0, n, 1, n).mapInArrow(task, ..., barrier=True)`, in classic Spark and over Spark Connect.
The Python process of each task is the rank. The rows of another DataFrame can be streamed to the ranks instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_dl.channel import CRASH
from spark_dl.config import Launch
from spark_dl.launch import preflight
from spark_dl.launch.code import payload
from spark_dl.launch.failures import memory
from spark_dl.launch.failures.root_cause import root_cause
from spark_dl.launch.failures.stalled import SILENCE_S
from spark_dl.launch.rank.environment import check_env, warn_of_late
from spark_dl.launch.rank.task import ROOT_CAUSE_WAIT_S, SCHEMA, Attempt, RankResult, rank_task
from spark_dl.launch.rank_job import RankJob
from spark_dl.launch.starting import StartCheck
from spark_dl.launch.watch import Listener, listen, with_heartbeats
from spark_dl.spark_job import check_session, is_connect, is_local_master

_log = logging.getLogger("spark_dl")

_LAST_EVENTS_WAIT_S = 1.0
"""How long to wait for events that the ranks sent before the job ended."""
_FIRST = Attempt()
_POLL_S = 1.0
"""Interval in which a driver without a listener calls `poll`."""

Event = Mapping[str, Any]


def run_barrier(
    spark: Any,
    fn: Callable[..., RankResult],
    *args: Any,
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
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(*args, report=..., **kwargs)` on `launch.num_ranks` ranks. Called on the driver.

    Returns the results by rank. When this function raises, it has cancelled the job, and waited up to 30 s for its end.
    If the job has not ended then, a warning says so.

    description: of the job, in Spark's UI.
    on_event: called in the driver's thread with the events of the ranks, while they run. Over Spark Connect, where
        ranks cannot connect to the driver, it gets the events that `poll` returns.
    on_ask: called in the driver's thread with each question of a rank (`Reporter.ask`); returns answers by task, also
        to earlier questions of other ranks. Not over Spark Connect.
    source: a DataFrame with one partition per rank. The ranks get its rows: `fn(..., rows=TaskInput)`.
    env: environment variables of the user for the ranks, set when the function is called.
    begin: called after all checks of the call, before its job is started; returns further variables of the ranks, which
        are set when the function is called.
    attempt: with the hosts to leave out. After a failure, the cluster has `launch.start_timeout_s` to replace lost
        executors.
    limit_s: how long the ranks may run, from the start of the last one.

    Raises ValueError for a call that cannot be pickled and for input that the ranks refuse, RuntimeError if the cluster
    cannot run the job or does not start it within `launch.start_timeout_s`, RankError if a rank fails, TimeoutError if
    the ranks run for longer than `limit_s`.
    """
    check_env(env or {})
    if not attempt.number:
        warn_of_late(env or {})
    try:
        profile = preflight.check(spark, launch, executors_wait_s=launch.start_timeout_s if attempt.number else None)
        preflight.check_log_dir(launch)
        if source is not None:
            preflight.check_disks(spark)
        packed = payload.pack_call(fn, args, kwargs)
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
                wait += memory.wait_for_count_s(event["task"], self._memories())
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

    def _memories(self) -> Mapping[int, memory.Memory]:
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
