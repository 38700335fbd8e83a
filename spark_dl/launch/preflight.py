"""Checks on the driver before a barrier job: what Spark would refuse late, or wait for in silence."""

from __future__ import annotations

import re
import time
from typing import Any

from spark_dl.config import Launch

_EXECUTORS_WAIT_S = 10.0
"""Executors of a session that has just started need a few seconds to register."""


def check(spark: Any, launch: Launch, *, at_once: bool = True) -> None:
    """Raises ValueError for a Spark setting under which ranks cannot run, RuntimeError for too few slots.

    at_once: whether all ranks run at the same time, as in a barrier stage. The tasks of other stages wait for a slot.
    Spark itself checks the slots 40 times, 15 s apart (`spark.scheduler.barrier.maxConcurrentTasksCheck.*`), and says
    nothing meanwhile; here the answer takes seconds.
    """
    if at_once and _conf(spark, "spark.dynamicAllocation.enabled") == "true":
        raise ValueError(
            "spark.dynamicAllocation.enabled is true; barrier jobs need it to be false (SPARK-24942), with as many "
            "executors as the ranks need"
        )
    if _conf(spark, "spark.python.worker.killOnIdleTimeout") == "true":
        raise ValueError(
            "spark.python.worker.killOnIdleTimeout is true; Spark would kill a rank that trains and returns nothing "
            "for a while; set it to false"
        )
    if launch.device == "cuda" and not _conf(spark, "spark.task.resource.gpu.amount"):
        raise ValueError(
            "launch.device is 'cuda', but spark.task.resource.gpu.amount is not set; set it to 1, with "
            "spark.executor.resource.gpu.amount and spark.executor.resource.gpu.discoveryScript"
        )
    if at_once:
        check_slots(spark, launch.num_ranks)


def check_disks(spark: Any) -> None:
    """Raises ValueError where rows may not lie on the disks of executors as they are."""
    if _conf(spark, "spark.io.encryption.enabled") == "true":
        raise ValueError(
            "spark.io.encryption.enabled is true, and rows on the ranks' own disks (shards.storage='local', "
            "run_on_dataframe) are not encrypted; set shards.storage to 'shared', or the former to false where the "
            "executors' disks are encrypted by themselves"
        )


def check_slots(spark: Any, num_ranks: int) -> None:
    """Raises RuntimeError if the cluster has fewer task slots than ranks."""
    end = time.monotonic() + _EXECUTORS_WAIT_S
    slots = num_slots(spark)
    fixed = (_conf(spark, "spark.master") or "").startswith("local[")
    while slots is not None and slots < num_ranks and not fixed and time.monotonic() < end:
        time.sleep(0.2)
        slots = num_slots(spark)
    if slots is not None and slots < num_ranks:
        raise RuntimeError(
            f"{num_ranks} ranks need {num_ranks} task slots at the same time, and the cluster has {slots} "
            f"(spark.master={_conf(spark, 'spark.master')}, spark.task.cpus={_conf(spark, 'spark.task.cpus') or 1}); "
            "lower launch.num_ranks, or give the application more executors or cores"
        )


def is_connect(spark: Any) -> bool:
    """Whether the session is a Spark Connect one, which has no SparkContext here."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def num_slots(spark: Any) -> int | None:
    """Tasks that can run at once on the executors that are there; None if it cannot be known."""
    if is_connect(spark):
        return _slots_of_master(_conf(spark, "spark.master") or "", int(_conf(spark, "spark.task.cpus") or 1))
    context = spark.sparkContext._jsc.sc()
    profile = context.resourceProfileManager().resourceProfileFromId(0)
    return int(context.maxNumConcurrentTasks(profile))


def _slots_of_master(master: str, task_cpus: int) -> int | None:
    """Slots of a local master by its URL; over Spark Connect this is all that can be seen of the cluster."""
    if match := re.fullmatch(r"local(?:\[(\d+)(?:,\s*\d+)?\])?", master):
        return int(match.group(1) or 1) // task_cpus
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(match.group(1)) * (int(match.group(2)) // task_cpus)
    return None


def _conf(spark: Any, key: str) -> str | None:
    value: str | None = spark.conf.get(key, None)
    return value
