"""Checks on the driver before a barrier job, for what Spark would report late or not at all; GPUs for its ranks.

A session has GPUs for each executor (`spark.executor.resource.gpu.amount`) and for each task
(`spark.task.resource.gpu.amount`). With a resource profile, the tasks of one stage, the ranks, have another amount.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from spark_dl.config import Launch
from spark_dl.launch.rank import gpus
from spark_dl.launch.rank.tasks import host_of
from spark_dl.spark_job import is_connect, is_local_master
from spark_dl.storage import local_files
from spark_dl.world import local_address

_log = logging.getLogger("spark_dl")

EXECUTOR, TASK = "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"
SCRIPT = "spark.executor.resource.gpu.discoveryScript"

_COPIES = 6
"""Copies of the results in the heap of the driver's JVM, at most, with some room."""
_PYTHON_LIMIT = "spark.executor.pyspark.memory"
_LEAST_PYTHON_BYTES = 3 << 30
EXECUTORS_WAIT_S = 10.0
"""How long to wait for the next executor of a session that has some."""

ENCRYPTION = ("spark.network.crypto.enabled", "spark.ssl.enabled", "spark.authenticate.enableSaslEncryption")
"""Settings by which Spark encrypts what it sends."""


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
    return None if amount is None else _profile_of(spark, amount, _task_cpus(spark))


def build_scoring_profile(spark: Any, amount: float) -> Any:
    """Returns Spark's resource profile for tasks of `predict` with this amount of GPUs; None with a local master.

    A task gets the cores of its executor in the proportion of its GPUs, as it decodes rows while the GPU computes.
    Called on the driver. Raises ValueError if the executors do not have the GPUs, or Spark cannot give them to a stage.
    """
    session = read_session(spark)
    if isinstance(amount, bool) or not amount > 0:
        raise ValueError(f"gpus: expected a number above 0, the GPUs of a task, found {amount!r}")
    if session.is_local:  # which assigns no GPUs
        return None
    if amount > session.executor:
        raise ValueError(
            f"gpus: expected at most {EXECUTOR}, {session.executor:g}, the GPUs of an executor, found {amount:g}; give "
            f"executors more GPUs, with {EXECUTOR} and {SCRIPT}, or lower it"
        )
    if session.why_no_profile:
        raise ValueError(
            f"gpus: expected none, found {amount:g}; {session.why_no_profile}; set {TASK} to {amount:g} in its place"
        )
    local = re.fullmatch(r"local-cluster\[\d+,\s*(\d+),\s*\d+\]", session.master)
    cores = int(spark.conf.get("spark.executor.cores", None) or (local[1] if local else 0))
    return _profile_of(spark, amount, max(_task_cpus(spark), int(cores * amount / session.executor)))


def _task_cpus(spark: Any) -> int:
    return int(spark.conf.get("spark.task.cpus", None) or 1)


def _profile_of(spark: Any, amount: float, cpus: int) -> Any:
    from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests().cpus(cpus)
    if amount:
        requests = requests.resource("gpu", amount)
    profile = ResourceProfileBuilder().require(requests).build
    if is_connect(spark):
        with _active(spark):
            assert profile.id is not None  # asking for it creates the profile on the server
        return profile
    # Spark keeps every profile until the session ends, and YARN takes equal ones for different ones.
    manager = spark.sparkContext._jsc.sc().resourceProfileManager()
    profile_of_session = manager.getEquivalentProfile(profile._java_resource_profile)
    if profile_of_session.isDefined():
        return ResourceProfile(_java_resource_profile=profile_of_session.get())
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


def check(spark: Any, launch: Launch, *, at_once: bool = True, executors_wait_s: float | None = None) -> Any:
    """Checks that ranks can run. Returns the resource profile of their stage, if it needs one.

    Spark itself checks the slots 40 times every 15 s (`spark.scheduler.barrier.maxConcurrentTasksCheck.*`) without a
    message. This check takes seconds.

    Args:
        at_once: whether all ranks run at the same time, as in a barrier stage. Tasks of other stages can wait for a
            slot.
        executors_wait_s: how long to wait for the next executor; by default 10 s, and for the first of an application
            `launch.start_timeout_s`.

    Raises:
        ValueError: For an unsupported Spark setting and for GPUs that ranks cannot get.
        RuntimeError: For too few slots.
    """
    if at_once and _conf(spark, "spark.dynamicAllocation.enabled") == "true":
        raise ValueError(
            "spark.dynamicAllocation.enabled: found true, expected false for barrier jobs (SPARK-24942); set it to "
            "false, with enough executors for all ranks"
        )
    if _conf(spark, "spark.python.worker.killOnIdleTimeout") == "true":
        raise ValueError(
            "spark.python.worker.killOnIdleTimeout: found true, expected false, as Spark would kill a rank that trains "
            "and returns no rows; set it to false"
        )
    warn_of_limit(spark)
    if not at_once:
        if copies := speculation(spark):
            _log.warning("%s; %s", *copies)
        if launch.device == "cuda" and not _conf(spark, TASK):
            raise ValueError(
                f"launch.device: found 'cuda', but {TASK} is not set; set it to 1, with {EXECUTOR} and {SCRIPT}"
            )
        return None
    check_encryption(spark, launch)
    profile = build_profile(spark, launch)
    check_local_gpus(spark, launch)
    check_slots(spark, launch, profile, executors_wait_s)
    return profile


def warn_of_limit(spark: Any) -> None:
    """Warns of a limit of the address space of Python workers in which Arrow and torch do not start.

    Spark sets it by `RLIMIT_AS`. Arrow then fails to allocate and aborts, and Spark says only that the worker crashed.
    """
    limit = _conf(spark, _PYTHON_LIMIT) or ""
    is_mib = limit.strip().isdigit()  # Spark's unit of this setting
    if limit and _bytes_of(f"{limit}m" if is_mib else limit) < _LEAST_PYTHON_BYTES:
        _log.warning(
            "%s: found %s: it limits the address space of each Python worker, of which torch and Arrow need about "
            "3 GiB; leave it unset, or raise it",
            _PYTHON_LIMIT,
            limit,
        )


def speculation(spark: Any) -> tuple[str, str] | None:
    """Returns what `spark.speculation` does to spark_dl's tasks, and what to change; None if it is off.

    NOTE: Spark never speculates about tasks of a barrier stage (`TaskSetManager.checkSpeculatableTasks`).
    """
    if _conf(spark, "spark.speculation") != "true":
        return None
    return (
        "spark.speculation: found true: Spark never copies ranks of a barrier job, but the tasks that write shards, "
        "predict, or compute with tree_reduce and shuffle_reduce, which costs slots"
    ), "set spark.speculation to false"


def check_local_gpus(spark: Any, launch: Launch) -> None:
    """Raises ValueError if this host has too few GPUs for ranks of a local master, which take them by their number."""
    if launch.device != "cuda" or is_connect(spark) or not read_session(spark).is_local:
        return
    try:
        gpus.gpus_of_local_rank("cuda", launch.num_ranks - 1, launch.num_ranks, launch.gpus_per_rank)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def check_encryption(spark: Any, launch: Launch) -> None:
    """Raises ValueError if Spark encrypts what it sends, as the ranks do not encrypt what they send to each other."""
    on = [key for key in ENCRYPTION if _conf(spark, key) == "true"]
    if on and launch.num_ranks > 1 and not launch.allow_plaintext:
        raise ValueError(
            f"{on[0]}: found true, but the ranks would send gradients to each other unencrypted; use a network that "
            "only the cluster can read, such as a private subnet, WireGuard or IPsec, and set launch.allow_plaintext "
            "to true"
        )


def check_disks(spark: Any) -> None:
    """Raises ValueError if Spark encrypts its local files. spark_dl does not encrypt rows on the executors' disks."""
    if _conf(spark, "spark.io.encryption.enabled") == "true":
        raise ValueError(
            "spark.io.encryption.enabled: found true, expected false, as rows on the ranks' local disks "
            "(shards.storage='local', run_on_dataframe) are not encrypted; set shards.storage to 'shared', or "
            "spark.io.encryption.enabled to false if the executors' disks are encrypted"
        )


def check_log_dir(launch: Launch) -> None:
    """Creates `launch.log_dir`. Raises ValueError if that is not possible, as ranks would lose their output."""
    if launch.log_dir:
        try:
            local_files.make_folder(launch.log_dir)
        except OSError as error:
            raise ValueError(f"launch.log_dir: cannot create the folder {launch.log_dir!r}: {error}") from error


class TooFewSlotsError(RuntimeError):
    """The cluster has fewer task slots than there are ranks. On a cluster, executors can come later."""

    def __init__(self, message: str, is_retryable: bool):
        super().__init__(message)
        self.is_retryable = is_retryable


def check_slots(spark: Any, launch: Launch, profile: Any = None, wait_s: float | None = None) -> None:
    """Raises RuntimeError if the cluster has fewer task slots than ranks, ValueError if no executor has one.

    Args:
        profile: the resources of a rank.
        wait_s: how long to wait for the next executor. By default it is 10 s; the first executor of an application may
            take `launch.start_timeout_s`, as a cluster may have to make room for it.
    """
    num_ranks = launch.num_ranks
    slots, since = num_slots(spark, profile), time.monotonic()
    fixed = (_conf(spark, "spark.master") or "").startswith("local[")
    if slots == 0 and not fixed and not _has_executors(spark):
        _log.warning("no executor has registered yet; waiting for %d task slots", num_ranks)
    while slots is not None and slots < num_ranks and not fixed:
        has_executors = slots or _has_executors(spark)
        limit_s = wait_s if wait_s is not None else EXECUTORS_WAIT_S if has_executors else launch.start_timeout_s
        if time.monotonic() - since > limit_s:
            break
        time.sleep(0.2)
        before, slots = slots, num_slots(spark, profile)
        since = since if slots == before else time.monotonic()
    if slots is not None and slots < num_ranks:
        _check_task_cpus(spark)
        about = "" if profile is None else f", launch.gpus_per_rank={launch.gpus_per_rank}"
        if executor_gpus := _conf(spark, EXECUTOR):
            about += f", {EXECUTOR}={executor_gpus}, {TASK}={_conf(spark, TASK)}"
        raise TooFewSlotsError(
            f"{num_ranks} ranks need {num_ranks} task slots at the same time, and the cluster has {slots} "
            f"(spark.master={_conf(spark, 'spark.master')}, spark.task.cpus={_conf(spark, 'spark.task.cpus') or 1}"
            f"{about}); lower launch.num_ranks, or give the application more executors"
            f"{', cores or GPUs' if about else ' or cores'}",
            is_retryable=not fixed,
        )
    if slots is not None and slots > num_ranks == Launch().num_ranks:
        _log.info(
            "1 rank starts, and the cluster has %d slots: launch.num_ranks asks for more, and with launch.min_ranks=1 "
            "train and evaluate take as many as there are, up to it",
            slots,
        )


def _has_executors(spark: Any) -> bool:
    return not is_connect(spark) and bool(_executors(spark))


def _check_task_cpus(spark: Any) -> None:
    """Raises ValueError if no executor has the cores of one task. Spark checks it if `spark.executor.cores` is set.

    Otherwise an executor of a standalone cluster has all cores of its host, and one with more cores may come.
    """
    executors = [] if is_connect(spark) else _executors(spark)
    cpus, most = int(_conf(spark, "spark.task.cpus") or 1), max((cores for _, cores in executors), default=0)
    if cpus > most > 0:
        raise ValueError(
            f"spark.task.cpus: found {cpus}, expected at most {most}, the cores of an executor, as no task can run; "
            f"set it to {most} or less, or give executors {cpus} cores (spark.executor.cores)"
        )


def num_tasks(spark: Any, num_ranks: int, profile: Any, left_out: Collection[str]) -> int:
    """Returns how many tasks a job of ranks has: more than ranks, if hosts can be left out (`rank.tasks`).

    Logs which hosts are left out, or that the others have too few slots, if there are others. If ranks keep failing on
    all hosts, all are used again: `launch.max_restarts` limits that, and a host that had bad luck may be good.
    """
    usable = usable_slots(spark, profile, left_out)
    if usable is not None and usable >= num_ranks:
        _log.warning("leaving out %s, where ranks keep failing", ", ".join(sorted(left_out)))
        return num_slots(spark, profile) or num_ranks
    if usable:
        _log.warning(
            "ranks keep failing on %s; the other hosts have %s slots for %d ranks, so it is not left out",
            ", ".join(sorted(left_out)), usable, num_ranks,
        )  # fmt: skip
    elif usable == 0 and len(left_out) > 1:
        _log.warning(
            "ranks keep failing on %s, and no other host has slots, so all of them are used again",
            ", ".join(sorted(left_out)),
        )  # fmt: skip
    return num_ranks


def usable_slots(spark: Any, profile: Any, left_out: Collection[str]) -> int | None:
    """Returns the number of tasks that can run at the same time beside some hosts; None if unknown, or without any.

    The slots of executors count by their cores.
    """
    if not left_out or is_connect(spark):
        return None
    cores = _cores_by_host(spark)
    if not cores:
        return None
    others = {_address(host) for host in left_out}
    usable = sum(number for host, number in cores.items() if _address(host) not in others)
    return (num_slots(spark, profile) or 0) * usable // sum(cores.values())


def _cores_by_host(spark: Any) -> dict[str, int]:
    """Returns the cores of the executors of each host; nothing with a local master, which has no executors."""
    cores: dict[str, int] = {}
    for host, number in _executors(spark):
        cores[host] = cores.get(host, 0) + number
    return cores


def _executors(spark: Any) -> list[tuple[str, int]]:
    """Returns the host and the cores of each executor; nothing with a local master."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = [listed.apply(index) for index in range(listed.size())]
    return [(host_of(each.hostPort()), each.totalCores()) for each in executors if each.id() != "driver"]


def _address(host: str) -> str:
    """Returns the address of a host, which Spark names by its address or by its name; the name if it has none."""
    try:
        return local_address(host)
    except RuntimeError:
        return host


def num_slots(spark: Any, profile: Any = None) -> int | None:
    """Returns the number of tasks that can run at the same time on the current executors; None if unknown."""
    if is_connect(spark):
        return _slots_of_master(_conf(spark, "spark.master") or "", int(_conf(spark, "spark.task.cpus") or 1))
    context = spark.sparkContext._jsc.sc()
    default = context.resourceProfileManager().resourceProfileFromId(0)
    return int(context.maxNumConcurrentTasks(default if profile is None else profile._java_resource_profile))


def _slots_of_master(master: str, task_cpus: int) -> int | None:
    """Returns the slots of a local master; None for others. Spark Connect gives no other data about the cluster."""
    if match := re.fullmatch(r"local(?:\[(\d+)(?:,\s*\d+)?\])?", master):
        return int(match.group(1) or 1) // task_cpus
    if match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*\]", master):
        return int(match.group(1)) * (int(match.group(2)) // task_cpus)
    return None


def result_limit_bytes(spark: Any, num_ranks: int) -> int | None:
    """Returns how large the result of one rank may be; None over Spark Connect, where the driver is the server's.

    The results pass through the heap of the driver's JVM, which holds several copies of them for a moment.
    """
    if is_connect(spark):
        return None
    heap_bytes = spark.sparkContext._jvm.java.lang.Runtime.getRuntime().maxMemory()
    limits = [heap_bytes // _COPIES, _bytes_of(_conf(spark, "spark.driver.maxResultSize") or "1g")]
    return int(min(limit for limit in limits if limit) // num_ranks)


def _bytes_of(text: str) -> int:
    """Returns the bytes of a size as Spark writes it: 512m, 1g, or a number of bytes."""
    match = re.fullmatch(r"(\d+)([kmgtp]?)b?", text.strip().lower())
    return int(match[1]) << 10 * " kmgtp".index(match[2] or " ") if match else 0


def _conf(spark: Any, key: str) -> str | None:
    value: str | None = spark.conf.get(key, None)
    return value
