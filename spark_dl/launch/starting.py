"""Checks that the ranks of a job start, and come to meet each other, in time. Used on the driver.

All tasks of a barrier stage run, or none. Spark waits for their slots without a limit, and so do ranks for each other
in its `allGather`.
"""

from __future__ import annotations

import logging
import time

from spark_dl.config import Launch
from spark_dl.launch.failures.root_cause import late_at_start
from spark_dl.launch.rank_job import RankJob
from spark_dl.launch.watch import Known, Listener, with_heartbeats

_CALLED = {"is_called", "rank", "is_returned", "is_done"}
"""Keys that are known only of tasks that have unpickled their call."""
_SAY_AFTER_S, _SAY_EVERY_S = 10.0, 60.0
"""When the driver logs that ranks wait for task slots: the first time after so long, and then as often."""
_CONNECT_S = 10.0
"""How long tasks that run may take to connect to the driver, if they have started late."""
_log = logging.getLogger("spark_dl")


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
