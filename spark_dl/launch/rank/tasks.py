"""Which tasks of a barrier job are ranks: all of them, or those that are not on hosts that are left out.

A barrier job cannot choose its hosts. To leave out a host, the driver starts a task in every slot of the cluster, and
the tasks on that host end at once. Every task knows the hosts of all tasks, so all take the same decision.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl.launch.failures.errors import OtherRankError


@dataclass(frozen=True)
class RankTasks:
    """The tasks of a barrier job that are ranks, as one task sees them."""

    executors: tuple[str, ...]
    """Addresses of their executors, `host:port`, in the order of the tasks."""
    own: int | None
    """Index of this task among them; None if it is not a rank."""
    num_tasks: int
    """Number of all tasks of the job."""

    @property
    def hosts(self) -> list[str]:
        return [host_of(executor) for executor in self.executors]

    def check(self, num_ranks: int) -> None:
        """Raises RuntimeError if there are not as many tasks as ranks."""
        if len(self.executors) != num_ranks:
            raise RuntimeError(
                f"Spark started {self.num_tasks} tasks for {num_ranks} ranks; the DataFrame must have one partition "
                "per rank"
            )


def choose(executors: Sequence[str], task: int, num_ranks: int, left_out: Collection[str]) -> RankTasks:
    """Returns the tasks that are ranks. executors: addresses of the executors of all tasks. task: index of this one.

    Hosts that are left out get ranks only if the tasks on the others are too few.
    """
    chosen = list(range(len(executors)))
    if left_out:
        others_first = sorted(chosen, key=lambda index: host_of(executors[index]) in left_out)
        chosen = sorted(others_first[:num_ranks])
    place = chosen.index(task) if task in chosen else None
    return RankTasks(tuple(executors[index] for index in chosen), place, len(executors))


def own_executor(address: str) -> str:
    """Returns the id of the executor of this process: `3`; its address, `host:port`, where Spark does not tell the id.

    Spark tells it on Kubernetes, and in standalone clusters as a part of the link to the executor's log.
    """
    link = re.search(r"[?&]executorId=(\d+)", os.environ.get("SPARK_LOG_URL_STDERR", ""))
    return os.environ.get("SPARK_EXECUTOR_ID") or (link[1] if link else address)


def all_gather(context: Any, message: str, limit_s: float | None) -> list[str]:
    """Returns the messages of all tasks of a barrier job, with Spark's `allGather`, which waits for up to a year.

    Collective. context: the BarrierTaskContext. Raises OtherRankError if not all tasks come within `limit_s`.
    """
    answers: queue.Queue[Any] = queue.Queue()

    def gather() -> None:
        try:
            answers.put(context.allGather(message))
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=gather, name="spark_dl allGather", daemon=True).start()
    try:
        messages: list[str] | BaseException = answers.get(timeout=limit_s)
    except queue.Empty:
        raise OtherRankError(
            f"not all ranks came to meet the others within launch.start_timeout_s={limit_s:g} s: one of them hangs or "
            "is slow, for example at the import of its modules; look at the executors that have not failed, or raise "
            "launch.start_timeout_s"
        ) from None
    if isinstance(messages, BaseException):
        raise messages
    return messages


def host_of(executor: str) -> str:
    """Returns the host in the address of a task, `host:port`."""
    return executor.rsplit(":", 1)[0].strip("[]")
