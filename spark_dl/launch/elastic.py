"""Runs with a range of ranks: as many as the cluster has slots for, and more of them at a checkpoint.

The order of rows does not depend on the ranks, so a run can go on with another number of them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection
from typing import Any

from spark_dl.config import Config
from spark_dl.launch import preflight, resources

_log = logging.getLogger("spark_dl")
_EXECUTORS_WAIT_S = 10.0
"""How long to wait for the slots of `launch.num_ranks`, before fewer ranks start."""


class MoreSlotsError(Exception):
    """Raised on the driver to end an attempt at a checkpoint, as the cluster has slots for more ranks now."""


def fit_ranks(
    spark: Any, config: Config, most: int, *, wait_s: float = _EXECUTORS_WAIT_S, left_out: Collection[str] = ()
) -> Config:
    """Returns the settings with the number of ranks that the cluster can run now. Called on the driver.

    Without `launch.min_ranks`, or if the number of slots is unknown, they stay as they are.
    most: the ranks that were asked for. wait_s: how long to wait for their slots; for those of the fewest ranks it is
        `launch.start_timeout_s`, and then the call that starts the ranks says what is missing.
    left_out: hosts whose slots do not count, if the others have slots for the fewest ranks.
    Raises ValueError if the other settings allow no number of ranks in the range that has slots.
    """
    launch = config.launch
    if launch.min_ranks is None or config.parallel.by_spark:
        return config
    start, profile = time.monotonic(), resources.build_profile(spark, launch)
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
    found = _largest(config, launch.min_ranks, min(most, max(slots, launch.min_ranks)))
    if found.launch.num_ranks != launch.num_ranks:
        _log.info("%d slots: %d ranks, of launch.min_ranks=%d to %d", slots, found.launch.num_ranks,
                  launch.min_ranks, most)  # fmt: skip
    return found


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

    left_out: as in `fit_ranks`.
    """
    if config.launch.min_ranks is None or config.launch.num_ranks >= most or config.parallel.by_spark:
        return
    more = fit_ranks(spark, config, most, wait_s=0.0, left_out=left_out).launch.num_ranks
    if more > config.launch.num_ranks:
        raise MoreSlotsError(f"the cluster has slots for {more} ranks now, and {config.launch.num_ranks} run")
