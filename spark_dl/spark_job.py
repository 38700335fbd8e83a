"""One Spark job in its own thread, so that the driver can watch and cancel it.

An interrupt of the caller's thread then never happens inside a call to the JVM, which would leave the job running.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("spark_dl")

_CANCEL_WAIT_S = 30.0


class SessionEndedError(RuntimeError):
    """The Spark session has ended while a job of it ran: it was stopped, or its JVM has ended."""


def check_session(spark: Any) -> None:
    """Raises SessionEndedError if a session was stopped, or its JVM has ended. Not over Spark Connect."""
    if is_connect(spark):
        return
    context, why = spark.sparkContext._jsc, ""
    try:
        if context is None or context.sc().isStopped():
            why = "the Spark session was stopped (spark.stop())"
    except Exception:  # of py4j or its socket
        why = "the JVM of Spark's driver has ended; its log, or that of the kernel, may say why"
    if why:
        raise SessionEndedError(f"{why}, so the ranks have ended; build a session, and resume the run")


def refuse_ended(spark: Any) -> None:
    """Raises ValueError for a session that was stopped before the call. Not over Spark Connect."""
    if not is_connect(spark) and spark.sparkContext._jsc is None:
        raise ValueError(
            "the Spark session of this call has ended (spark.stop()); build a session, and read the DataFrame with it"
        )


def is_connect(spark: Any) -> bool:
    """Whether this is a Spark Connect session, which has no SparkContext."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local_master(master: str) -> bool:
    """Whether this is the URL of a local master, whose tasks run in the driver's process. `local-cluster` is none."""
    return re.match(r"local(\[|$)", master) is not None


def refuse_stream(data: Any, call: str) -> None:
    """Raises ValueError for a streaming DataFrame, whose rows have no end. Called on the driver, before any job."""
    if getattr(data, "isStreaming", False):
        raise ValueError(
            f"{call}: found a streaming DataFrame, which has no end; expected the rows of a table: call it for each "
            f"batch, df.writeStream.foreachBatch(lambda batch, number: {call}(batch, ...)); predict and transform take "
            "a stream"
        )


def quoted(name: str) -> str:
    """Returns the name of a top-level column for Spark's functions, which take dots for fields of structs."""
    return f"`{name.replace('`', '``')}`"


def describe(call: str, num_ranks: int, subject: str) -> str:
    """Returns the description of the job of some ranks, such as `spark_dl train: 2 ranks, /data/runs/digits`."""
    return f"spark_dl {call}: {num_ranks} rank{'s' * (num_ranks != 1)}, {subject}"


def collect(df: Any, description: str) -> list[Any]:
    """Returns `df.collect()`. If this thread is interrupted, the job is cancelled. Called on the driver."""
    job = SparkJob(df.sparkSession, df.collect, description=description)
    try:
        while not job.wait(3600.0):
            pass
    except BaseException:
        job.cancel()
        raise
    if job.error is not None:
        raise job.error
    rows: list[Any] = job.result
    return rows


class SparkJob:
    """A call that runs Spark jobs, in a thread with the caller's local properties, such as its scheduler pool.

    The properties of the caller's thread do not change.

    Args:
        description: shown in Spark's UI. Over Spark Connect, it is a tag of the operation.
        own_group: whether the group of the jobs is `name`, and not that of the caller.
        tag: a tag of the jobs, beside their `name`.
        on_end: called in the thread after the call.
    """

    def __init__(
        self,
        spark: Any,
        call: Callable[[], Any],
        *,
        description: str,
        own_group: bool = False,
        tag: str | None = None,
        on_end: Callable[[], None] = lambda: None,
    ):
        self.name = f"spark_dl-{uuid.uuid4().hex}"
        self.result: Any = None
        self.error: BaseException | None = None
        self._spark, self._description, self._own_group, self._tag = spark, description, own_group, tag
        self._properties = None if is_connect(spark) else spark.sparkContext._jsc.sc().getLocalProperties().clone()
        # NOTE: not Thread.join, which takes a running thread for ended if a signal interrupts it (before Python 3.13).
        self._has_ended = threading.Event()
        threading.Thread(target=self._work, args=(call, on_end), name="spark_dl job", daemon=True).start()

    def _work(self, call: Callable[[], Any], on_end: Callable[[], None]) -> None:
        try:
            self._mark()
            self.result = call()
        except BaseException as error:  # raised again by the caller
            self.error = error
        self._has_ended.set()
        on_end()

    def _mark(self) -> None:
        """Names the jobs of this thread, so that they can be cancelled."""
        if is_connect(self._spark):
            self._spark.addTag(self.name)
            self._spark.addTag(self._description.replace(",", ";"))  # a tag has no comma
            return
        context = self._spark.sparkContext
        context._jsc.sc().setLocalProperties(self._properties)
        # Interrupted tasks end at once. Otherwise a Python worker that waits would run until it returns.
        if self._own_group:
            context.setJobGroup(self.name, self._description, interruptOnCancel=True)
        else:
            context.setInterruptOnCancel(True)
            context.setJobDescription(self._description)
        for tag in filter(None, (self.name, self._tag)):
            context.addJobTag(tag)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end of the call. Returns whether it has ended."""
        return self._has_ended.wait(timeout_s)

    def cancel(self) -> None:
        """Cancels the jobs and waits up to 30 s until the call has ended. Does nothing if it has ended.

        If it has not ended then, a warning says so.
        """
        end = time.monotonic() + _CANCEL_WAIT_S
        while not self._has_ended.is_set() and time.monotonic() < end:
            with contextlib.suppress(Exception):  # the session may have ended, and the jobs with it
                if is_connect(self._spark):
                    self._spark.interruptTag(self.name)
                else:
                    self._spark.sparkContext.cancelJobsWithTag(self.name)
            self._has_ended.wait(0.5)  # then cancel again: the job may not have started yet
        if not self._has_ended.is_set():
            _log.warning(
                "Spark has not ended the job %r within %g s after it was cancelled; its tasks can still hold slots and "
                "write files; look at it in Spark's UI, and end it there", self._description, _CANCEL_WAIT_S,
            )  # fmt: skip
