"""What a failed barrier job is told as: one error with its root cause, whichever way the news of it came."""

from __future__ import annotations

import base64
import json
import re
import traceback
from collections.abc import Mapping
from typing import Any


class RankError(RuntimeError):
    """A rank failed, and with it the job. The message holds the rank's own traceback.

    rank is None if it failed before the ranks were dealt; host and pid say where it ran.
    """

    def __init__(self, message: str, *, rank: int | None, host: str, pid: int | None):
        super().__init__(message)
        self.rank, self.host, self.pid = rank, host, pid

    def __reduce__(self) -> Any:
        return _rank_error, (str(self), self.rank, self.host, self.pid)


def _rank_error(message: str, rank: int | None, host: str, pid: int | None) -> RankError:
    return RankError(message, rank=rank, host=host, pid=pid)


def describe(error: BaseException, me: Mapping[str, Any]) -> dict[str, Any]:
    """A failure as plain data. Called on a rank; `me` has its `task`, `host`, `pid`, and `rank` if it has one."""
    frames = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"
    return {**me, "error": message[:4000], "traceback": frames[-16000:], "follows": _follows(error)}


def _follows(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone."""
    import torch.distributed as dist

    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    signs = r"Connection closed by peer|Connection reset by peer|Broken pipe|gloo/transport|Connection refused"
    return isinstance(error, RuntimeError) and re.search(signs, str(error)) is not None


class RankFailedError(Exception):
    """Raised in a task, so that Spark ends the job. Its text carries the failure to a driver without a listener."""


def failed_in_task(failure: Mapping[str, Any]) -> RankFailedError:
    """What a task raises for a failure, as `describe` gives it."""
    encoded = base64.b64encode(json.dumps(failure).encode()).decode()
    return RankFailedError(f"{_name(failure.get('rank'), failure['task'])} failed [spark_dl failure {encoded}]")


def _failure_in(text: str) -> dict[str, Any] | None:
    match = re.search(r"\[spark_dl failure ([A-Za-z0-9+/=]+)\]", text)
    if match is None:
        return None
    failure: dict[str, Any] = json.loads(base64.b64decode(match.group(1)))
    return failure


def root_cause(
    failures: list[dict[str, Any]], known: Mapping[int, Mapping[str, Any]], error: BaseException | None
) -> BaseException:
    """The failure that the others follow from: the first rank that raised by itself, or that was killed."""
    raised = [f for f in failures if f["kind"] == "failed"]
    by_spark = _failure_in(str(error)) if error else None
    if by_spark:
        raised.append(by_spark)
    roots = [f for f in raised if not f["follows"]]
    lost = [f for f in failures if f["kind"] == "lost"]
    if roots:
        return _error_of(roots[0])
    if lost:
        who = known.get(lost[0]["task"], {})
        rank, host, pid = who.get("rank"), who.get("host", "an unknown host"), who.get("pid")
        return RankError(
            f"{_name(rank, lost[0]['task'])} on {host} (pid {pid}) was killed: its process ended without an error. "
            "A SIGKILL often comes from the host running out of memory; see the executor's and the kernel's log",
            rank=rank, host=host, pid=pid,
        )  # fmt: skip
    if raised:
        return _error_of(raised[0])
    text = str(error)
    if "No module named" in text and "spark_dl" in text:
        return RuntimeError(
            "the executors' Python has no spark_dl; set PYSPARK_PYTHON to an interpreter that has it (and torch), or "
            f"install it there. Spark's error: {_last_lines(text)}"
        )
    if re.search(r"Python worker (exited|terminated|failed)", text):
        task = re.search(r"ResultTask\(\d+, (\d+)\)", text)
        return RankError(
            f"the rank of task {task.group(1) if task else '?'} was killed: its Python process ended without an error. "
            f"Spark's error: {_last_lines(text)}",
            rank=None, host="an unknown host", pid=None,
        )  # fmt: skip
    if isinstance(error, Exception):
        return RuntimeError(f"the barrier job failed: {_last_lines(text)}").with_traceback(error.__traceback__)
    return error or RuntimeError("the barrier job failed")


def _error_of(failure: Mapping[str, Any]) -> RankError:
    rank, host, pid = failure.get("rank"), failure["host"], failure["pid"]
    return RankError(
        f"{_name(rank, failure['task'])} on {host} (pid {pid}) failed: {failure['error']}\n\n"
        f"Traceback on the rank:\n{failure['traceback']}",
        rank=rank, host=host, pid=pid,
    )  # fmt: skip


def _name(rank: int | None, task: int) -> str:
    return f"task {task} (which has no rank yet)" if rank is None else f"rank {rank}"


def _last_lines(text: str, limit: int = 2000) -> str:
    head = re.split(r"\n\s*at (?:org|java|scala)\.|JVM stacktrace|Driver stacktrace", text)[0].strip()
    return head if len(head) <= limit else "... " + head[-limit:]
