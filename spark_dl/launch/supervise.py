"""Attempts: the driver starts the ranks again after a failure that another attempt can avoid.

Spark never retries a barrier stage that returns results: it ends the job ("Could not recover from a failed barrier
ResultStage"). So each attempt is a new job, with Python workers of its own and a generation of its own, which fences
what is left of the attempts before it.

A run with a range of ranks has as many as the cluster has slots for, and more of them at a checkpoint. The order of
rows does not depend on the ranks, so a run can go on with another number of them.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from spark_dl.config import Config, Launch
from spark_dl.launch import preflight
from spark_dl.launch.failures.errors import RankError
from spark_dl.launch.rank.task import Attempt
from spark_dl.spark_job import SessionEndedError

T = TypeVar("T")
RESTARTS = 3
"""What `launch.max_restarts` is with "auto", for what goes on from its last checkpoint."""
_LONGEST_WAIT_S = 60.0
PREEMPTIONS = 100
"""How often ranks are started again after SIGTERM, by which hosts that are taken away end their processes."""
_NOT_OF_USER = ("builtins", "py4j", "pyspark", "spark_dl")
"""Packages of the exceptions that do not come from a function of the user."""
_log = logging.getLogger("spark_dl")

_EXECUTORS_WAIT_S = 10.0
"""How long to wait for the slots of `launch.num_ranks`, before fewer ranks start."""


def run_attempts(
    attempt: Callable[[Attempt], T],
    launch: Launch,
    *,
    default_restarts: int = RESTARTS,
    on_restart: Callable[[RankError, int], None] = lambda error, restarts: None,
    advice: Callable[[], str] = lambda: "",
) -> T:
    """Calls `attempt` until one succeeds, and returns its result. Called on the driver.

    Raises the RankError of the last attempt, which has the errors of those before it, if it is not worth another one
    (`reason_to_stop`), or if the attempt after it ends with an error of the driver, such as a full disk of the run
    folder or a Spark that has ended, which is its cause then. Before a failure of a rank, errors of the driver are
    raised as they are. So are, at any time, an interrupt and exceptions of other classes than those of Python and of
    Spark, as of an `on_event`.

    Args:
        default_restarts: what `launch.max_restarts` is with "auto".
        on_restart: called before each restart, with the error and the number of restarts so far.
        advice: called before the last error is raised, which ends with the returned text.
    """
    max_restarts = default_restarts if launch.max_restarts == "auto" else launch.max_restarts
    failures: list[RankError] = []
    while True:
        try:
            return attempt(Attempt(len(failures), failing_hosts(failures, launch.exclude_host_after)))
        except RankError as error:
            failures.append(error)
            if reason := reason_to_stop(failures, max_restarts):
                last = error if len(failures) == 1 else error.after(failures[:-1], reason, again=_is_same(failures))
                raise last.advised(advice()) from error.__cause__
        except Exception as error:
            is_of_user = type(error).__module__.partition(".")[0] not in _NOT_OF_USER
            if not failures or is_of_user or isinstance(error, SessionEndedError):
                raise
            why_last = f"the next one ended with {type(error).__name__}: {error}"
            again = not getattr(error, "is_retryable", True)
            raise failures[-1].after(failures[:-1], why_last, again=again).advised(advice()) from error
        wait_s = backoff_s(len(failures), launch.restart_wait_s)
        counted = sum(not failure.is_preemption for failure in failures)
        number = "preempted" if failures[-1].is_preemption else f"restart {counted} of {max_restarts}"
        reason = failures[-1].reason.replace("\n", "\n    ")  # no line as of the log
        _log.warning("%s; starting the ranks again in %.1f s (%s)", reason, wait_s, number)
        on_restart(failures[-1], len(failures))
        time.sleep(wait_s)


def reason_to_stop(failures: Sequence[RankError], max_restarts: int) -> str:
    """Returns why there is no other attempt after these failures; empty if there is one.

    Preemptions do not count up to `max_restarts`, unless it is 0.
    """
    last = failures[-1]
    preempted = sum(failure.is_preemption for failure in failures)
    if last.is_preemption and max_restarts:
        return f"ranks were ended by SIGTERM {preempted} times" if preempted > PREEMPTIONS else ""
    if not last.is_retryable:
        return "the error would come again"
    if _is_same(failures):
        return f"the same error came twice in step {last.step}"
    if len(failures) - (preempted if max_restarts else 0) > max_restarts:
        hosts = {failure.host for failure in failures if not failure.is_preemption}
        others = frozenset[str]().union(*(failure.hosts for failure in failures)) - hosts
        # A host can only be taken out if there are others.
        same = len(failures) - preempted > 1 and len(hosts) == 1 and others
        where = f", and all failures were on host {hosts.pop()}: take it out of the cluster" if same else ""
        return f"launch.max_restarts is {max_restarts}{where}"
    return ""


def _is_same(failures: Sequence[RankError]) -> bool:
    """Whether the last two attempts have ended with the same error in the same step."""
    if len(failures) < 2 or not failures[-1].error or failures[-1].step is None:
        return False
    return (failures[-2].error, failures[-2].step) == (failures[-1].error, failures[-1].step)


def failing_hosts(failures: Sequence[RankError], exclude_after: int | None) -> frozenset[str]:
    """Returns the hosts with so many failures of ranks, or more. Preemptions do not count."""
    counts = Counter(failure.host for failure in failures if failure.host and not failure.is_preemption)
    return frozenset(host for host, number in counts.items() if exclude_after and number >= exclude_after)


def backoff_s(failures: int, first_s: float) -> float:
    """Returns the seconds before the next attempt: `first_s`, then twice as long each time, up to a minute, with up to
    a quarter more, so that drivers that fail together do not come back together."""
    longest = min(_LONGEST_WAIT_S, first_s * 2.0 ** (min(failures, 32) - 1))
    return longest * (1 + random.random() / 4)  # noqa: S311


class MoreSlotsError(Exception):
    """Raised on the driver to end an attempt at a checkpoint, as the cluster has slots for more ranks now."""


def fit_ranks(
    spark: Any, config: Config, most: int, *, wait_s: float = _EXECUTORS_WAIT_S, left_out: Collection[str] = ()
) -> Config:
    """Returns the settings with the number of ranks that the cluster can run now. Called on the driver.

    Without `launch.min_ranks`, or if the number of slots is unknown, they stay as they are.

    Args:
        most: the ranks that were asked for.
        wait_s: how long to wait for their slots; for those of the fewest ranks it is `launch.start_timeout_s`, and then
            the call that starts the ranks says what is missing.
        left_out: hosts whose slots do not count, if the others have slots for the fewest ranks.

    Raises:
        ValueError: If the other settings allow no number of ranks in the range that has slots.
    """
    launch = config.launch
    if launch.min_ranks is None or config.parallel.by_spark:
        return config
    start, profile = time.monotonic(), preflight.build_profile(spark, launch)
    slots = preflight.num_slots(spark, profile)
    while slots is not None and slots < most:
        waited_s = time.monotonic() - start
        if waited_s > (launch.start_timeout_s if slots < launch.min_ranks else wait_s):
            break
        time.sleep(0.2)
        slots = preflight.num_slots(spark, profile)
    if slots is None:
        return config
    usable = preflight.usable_slots(spark, profile, left_out)
    slots = usable if usable is not None and usable >= launch.min_ranks else slots
    fitted = _largest(config, launch.min_ranks, min(most, max(slots, launch.min_ranks)))
    if fitted.launch.num_ranks != launch.num_ranks:
        _log.info("%d slots: %d ranks, of launch.min_ranks=%d to %d", slots, fitted.launch.num_ranks,
                  launch.min_ranks, most)  # fmt: skip
    return fitted


def _largest(config: Config, fewest: int, most: int) -> Config:
    """Returns the settings with the largest number of ranks in a range that they allow."""
    problem: ValueError | None = None
    for num_ranks in range(most, fewest - 1, -1):
        try:
            return dataclasses.replace(config, launch=dataclasses.replace(config.launch, num_ranks=num_ranks))
        except ValueError as error:
            problem = problem or error
    raise ValueError(
        f"launch.min_ranks: no number of ranks from {fewest} to {most}, for which the cluster has slots, fits the "
        f"other settings; with {most}: {problem}"
    ) from problem


def check_growth(spark: Any, config: Config, most: int, left_out: Collection[str] = ()) -> None:
    """Raises MoreSlotsError if the cluster can run more ranks now than those that run. Called at a checkpoint.

    Args:
        left_out: as in `fit_ranks`.
    """
    if config.launch.min_ranks is None or config.launch.num_ranks >= most or config.parallel.by_spark:
        return
    more = fit_ranks(spark, config, most, wait_s=0.0, left_out=left_out).launch.num_ranks
    if more > config.launch.num_ranks:
        raise MoreSlotsError(f"the cluster has slots for {more} ranks now, and {config.launch.num_ranks} run")
