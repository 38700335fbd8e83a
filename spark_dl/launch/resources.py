"""GPUs for ranks, on the driver: how many a rank gets, and the resource profile with which Spark assigns them.

A session has GPUs for each executor (`spark.executor.resource.gpu.amount`) and for each task
(`spark.task.resource.gpu.amount`). With a resource profile, the tasks of one stage, the ranks, have another amount.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spark_dl.config import Launch
from spark_dl.spark_job import is_connect, is_local_master

_log = logging.getLogger("spark_dl")

EXECUTOR, TASK = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"
SCRIPT = "spark.executor.resource.gpu.discoveryScript"


@dataclass(frozen=True)
class Session:
    """The settings of a Spark session about GPUs."""

    executor: float = 0.0
    """GPUs of an executor."""
    task: float = 0.0
    """GPUs of a task."""
    master: str = ""
    version: str = "4.0.0"

    @property
    def is_local(self) -> bool:
        return is_local_master(self.master)

    @property
    def why_no_profile(self) -> str:
        """Returns why a stage cannot have resources of its own; empty if it can.

        The conditions are those of Spark's ResourceProfileManager for profiles without requirements on executors, while
        dynamic allocation is off, as barrier stages require; compare `_skip_stage_level_scheduling` of xgboost.spark
        (https://github.com/dmlc/xgboost/blob/master/python-package/xgboost/spark/core.py). xgboost also reserves more
        than half of an executor's cores, because of SPARK-45527, which Spark 4.0 has corrected.
        """
        if int(self.version.split(".")[0]) < 4:
            return f"Spark {self.version} cannot give one stage another amount, Spark 4 can"
        if self.is_local:
            return f"a local master ({self.master}) assigns no GPUs to tasks"
        if not self.master.startswith(("spark://", "local-cluster", "yarn", "k8s://")):
            return f"this is known of standalone, YARN and Kubernetes only, not of spark.master={self.master}"
        return ""


def read_session(spark: Any) -> Session:
    """Returns the settings of a session about GPUs."""
    executor, task = (float(spark.conf.get(key, None) or 0) for key in (EXECUTOR, TASK))
    return Session(executor, task, spark.conf.get("spark.master", None) or "", spark.version)


def amount_of_profile(launch: Launch, session: Session) -> float | None:
    """Returns the GPUs of a rank that differ from those of the session's tasks; None to use the tasks' as they are.

    Raises ValueError, before any task starts, if ranks cannot get the GPUs of `launch`.
    """
    wanted, why = launch.gpus_per_rank, session.why_no_profile
    if session.is_local:  # ranks take GPUs by their number there
        return None
    if wanted == "auto":
        if session.task or launch.device == "cpu" or (not session.executor and launch.device == "auto"):
            return None
        if session.executor and not why:
            return 1.0
        if launch.device == "cuda":
            raise ValueError(
                f"launch.device: found 'cuda', but {TASK} is not set, so tasks have no GPU; set it to 1, with "
                f"{EXECUTOR} and {SCRIPT}{f' ({why})' if session.executor else ''}"
            )
        _log.warning("the ranks use CPUs, as %s is not set; set it to 1 for a GPU for each rank (%s)", TASK, why)
        return None
    if wanted == session.task:
        return None
    if wanted > session.executor:
        raise ValueError(
            f"launch.gpus_per_rank: expected at most {EXECUTOR}, {session.executor:g}, the GPUs of an executor, found "
            f"{wanted:g}; give executors more GPUs, with {EXECUTOR} and {SCRIPT}, or lower launch.gpus_per_rank"
        )
    if why:
        raise ValueError(
            f"launch.gpus_per_rank: expected {session.task:g}, the GPUs of a task in this session, found {wanted:g}; "
            f"{why}; set {TASK} to {wanted:g}"
        )
    return float(wanted)


def with_all_gpus(launch: Launch, session: Session) -> Launch:
    """Returns settings with which a rank gets all GPUs of an executor, if neither they nor the session say how many."""
    has_choice = launch.gpus_per_rank == "auto" and launch.device != "cpu" and not session.task
    if not has_choice or session.executor <= 1 or session.why_no_profile:
        return launch
    return dataclasses.replace(launch, gpus_per_rank=session.executor)


def build_profile(spark: Any, launch: Launch) -> Any:
    """Returns Spark's resource profile for the tasks of ranks, or None. Called on the driver.

    Raises ValueError as `amount_of_profile` does.
    """
    amount = amount_of_profile(launch, read_session(spark))
    if amount is None:
        return None
    from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(int(spark.conf.get("spark.task.cpus", None) or 1))
    if amount:
        requests = requests.resource("gpu", amount)
    profile = ResourceProfileBuilder().require(requests).build
    if is_connect(spark):
        with _active(spark):
            assert profile.id is not None  # asking for it creates the profile on the server
        return profile
    # Spark keeps every profile until the session ends, and YARN takes equal ones for different ones.
    manager = spark.sparkContext._jsc.sc().resourceProfileManager()
    found = manager.getEquivalentProfile(profile._java_resource_profile)
    if found.isDefined():
        return ResourceProfile(_java_resource_profile=found.get())
    manager.addResourceProfile(profile._java_resource_profile)
    return profile


@contextlib.contextmanager
def _active(spark: Any) -> Iterator[None]:
    """Makes a session of Spark Connect the one of this thread for the block, as profiles take no session."""
    threads = type(spark)._active_session
    before = getattr(threads, "session", None)
    threads.session = spark
    try:
        yield
    finally:
        threads.session = before
