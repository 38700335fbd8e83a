"""The Spark job in which the ranks run: its start and end, its tasks, and what has ended its session."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Iterable, Iterator
from typing import Any

from spark_dl.spark_job import SparkJob, is_connect

RANKS = "spark_dl-ranks"
"""Tag of the Spark jobs of ranks."""


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
