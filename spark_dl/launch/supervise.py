"""Attempts: the driver starts the ranks again after a failure that another attempt can avoid.

Spark never retries a barrier stage that returns results: it ends the job ("Could not recover from a failed barrier
ResultStage"). So each attempt is a new job, with Python workers of its own and a generation of its own, which fences
what is left of the attempts before it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from spark_dl.config import Launch
from spark_dl.launch.failures.errors import RankError

T = TypeVar("T")
RESTARTS = 3
"""What `launch.max_restarts` is with "auto", for a training, which goes on from its last checkpoint."""
_LONGEST_WAIT_S = 60.0
_log = logging.getLogger("spark_dl")


def run_attempts(
    attempt: Callable[[int], T],
    launch: Launch,
    *,
    default_restarts: int = RESTARTS,
    on_restart: Callable[[RankError, int], None] = lambda error, restarts: None,
) -> T:
    """Calls `attempt(number)` until one succeeds, and returns its result. Called on the driver.

    default_restarts: what `launch.max_restarts` is with "auto".
    on_restart: called before each restart, with the error and the number of restarts so far.
    Raises the RankError of the last attempt, which has the errors of those before it, if it is not worth another one
    (`reason_to_stop`). Other errors, such as those of the cluster or an interrupt, are raised as they are.
    """
    max_restarts = default_restarts if launch.max_restarts == "auto" else launch.max_restarts
    failures: list[RankError] = []
    while True:
        try:
            return attempt(len(failures))
        except RankError as error:
            failures.append(error)
            if reason := reason_to_stop(failures, max_restarts):
                raise (error if len(failures) == 1 else error.after(failures[:-1], reason)) from error.__cause__
        wait_s = backoff_s(len(failures), launch.restart_wait_s)
        _log.warning(
            "%s; starting the ranks again in %.1f s (restart %d of %d)",
            failures[-1].reason.replace("\n", "\n    "), wait_s, len(failures), max_restarts,  # no line as of the log
        )  # fmt: skip
        on_restart(failures[-1], len(failures))
        time.sleep(wait_s)


def reason_to_stop(failures: Sequence[RankError], max_restarts: int) -> str:
    """Returns why there is no other attempt after these failures; empty if there is one."""
    last = failures[-1]
    if not last.is_retryable:
        return "the error would come again"
    if last.error and last.step is not None and len(failures) > 1:
        before = failures[-2]
        if (before.error, before.step) == (last.error, last.step):
            return f"the same error came twice in step {last.step}"
    if len(failures) > max_restarts:
        return f"launch.max_restarts is {max_restarts}"
    return ""


def backoff_s(failures: int, first_s: float) -> float:
    """Returns the seconds before the next attempt: `first_s`, then twice as long each time, up to a minute, with up to
    a quarter more, so that drivers that fail together do not come back together."""
    longest = min(_LONGEST_WAIT_S, first_s * 2.0 ** (min(failures, 32) - 1))
    return longest * (1 + random.random() / 4)  # noqa: S311
