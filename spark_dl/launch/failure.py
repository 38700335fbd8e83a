"""The error of a failed job: finds the root cause in the events of the ranks and the error of Spark."""

from __future__ import annotations

import base64
import json
import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from spark_dl.config.checks import missing_on_executors
from spark_dl.launch.rank.script import ScriptError
from spark_dl.launch.shown_error import as_html, as_lines

_OUTPUT_CHARACTERS = 4000
"""How much of the end of a rank's output is in its error."""


class RankError(RuntimeError):
    """A rank failed, and the job was ended. The message has the reason, and the traceback of the rank.

    rank: the failed rank; None if it failed before the ranks were dealt.
    host, pid: host and process id of the rank.
    reason: the root cause, without tracebacks.
    rank_traceback: the traceback on the rank; empty for a rank that was killed or that hangs.
    rank_output: the last lines that the rank has written, if they were not shown; else empty.
    rank and pid are None if only Spark reports the failure, for example of a killed rank over Spark Connect.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None,
        host: str,
        pid: int | None,
        rank_traceback: str = "",
        rank_output: str = "",
    ):
        text = reason
        if rank_traceback:
            text += f"\n\nTraceback on the rank:\n{rank_traceback}"
        if rank_output:
            text += f"\n\nLast output of the rank:\n{rank_output}"
        super().__init__(text)
        self.rank, self.host, self.pid = rank, host, pid
        self.reason, self.rank_traceback, self.rank_output = reason, rank_traceback, rank_output

    def __reduce__(self) -> Any:
        return _rank_error, (self.reason, {name: getattr(self, name) for name in _ABOUT_RANK})

    def _render_traceback_(self) -> list[str]:
        """Called by IPython, which shows the lines instead of a traceback."""
        try:
            return as_lines(self)
        except Exception:  # IPython, of any version, is asked for its cells; the message must be shown in any case
            return traceback.format_exception(self)

    def _repr_html_(self) -> str:
        """Called by notebooks for an error that is the value of a cell."""
        return as_html(self)


_ABOUT_RANK = ("rank", "host", "pid", "rank_traceback", "rank_output")


def _rank_error(reason: str, about: Mapping[str, Any]) -> RankError:
    return RankError(reason, **about)


class OtherRankError(RuntimeError):
    """Raised on a rank that stops because of a problem on another rank. The message names the problem."""


def describe(
    error: BaseException,
    me: Mapping[str, Any],
    output: Sequence[tuple[str, str]] = (),
    *,
    is_shown: bool = True,
) -> dict[str, Any]:
    """Returns a failure as plain data. Called on a rank. `me` has its `task`, `host`, `pid`, and `rank` if known.

    output: the last lines of the rank, each with its stream. is_shown: whether the driver has got them already.
    """
    lines = "\n".join(line for _, line in output)[-_OUTPUT_CHARACTERS:]
    found = {**me, "error": f"{type(error).__name__}: {error}"[:4000]}
    if isinstance(error, ScriptError):
        # The program's own traceback is in its output, and says whether it failed because of another rank.
        return {**found, "error": str(error), "output": lines, "is_secondary": _is_of_lost_connection(lines)}
    if isinstance(error, SystemExit):
        found["error"] = f"the function ended with exit code {error.code} (sys.exit)"
    frames = "".join(traceback.format_exception(error))[-16000:]
    return {
        **found,
        "traceback": frames,
        "output": "" if is_shown else lines,
        "is_secondary": is_secondary(error),
    }


def is_secondary(error: BaseException) -> bool:
    """Whether an error is only a consequence of the failure or exit of another rank."""
    import torch.distributed as dist

    if isinstance(error, (OtherRankError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    of_storage = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, ConnectionError)
    return isinstance(error, RuntimeError) and not of_storage and _is_of_lost_connection(str(error))


def _is_of_lost_connection(text: str) -> bool:
    signs = (
        r"Connection closed by peer|Connection reset by peer|Broken pipe|gloo/transport|Connection refused|"
        r"Application timeout caused pair closure|"  # of Gloo, after another operation has timed out
        r"Horovod has been shut down"
    )
    return re.search(signs, text) is not None


class RankFailedError(Exception):
    """Raised in a task, so that Spark ends the job. A driver without a listener reads the failure from its message."""


def failed_in_task(failure: Mapping[str, Any]) -> RankFailedError:
    """Returns the exception that a task raises for a failure from `describe`."""
    encoded = base64.b64encode(json.dumps(failure).encode()).decode()
    return RankFailedError(f"{_name(failure.get('rank'), failure['task'])} failed [spark_dl failure {encoded}]")


def _failure_in(text: str) -> dict[str, Any] | None:
    match = re.search(r"\[spark_dl failure ([A-Za-z0-9+/=]+)\]", text)
    if match is None:
        return None
    failure: dict[str, Any] = json.loads(base64.b64decode(match.group(1)))
    return failure


def root_cause(
    failures: list[dict[str, Any]],
    known: Mapping[int, Mapping[str, Any]],
    error: BaseException | None,
    silent: Mapping[int, float],
) -> BaseException:
    """Returns the root cause: the first rank that raised an error of its own, or was killed, or is silent.

    known: what each task has reported about itself. silent: seconds since the last heartbeat, of the silent tasks.
    """
    raised = [f for f in failures if f["kind"] == "failed"]
    by_spark = _failure_in(str(error)) if error else None
    if by_spark:
        raised.append(by_spark)
    roots = [f for f in raised if not f["is_secondary"]]
    lost = [f for f in failures if f["kind"] == "lost"]
    if roots:
        return _error_of(roots[0])
    if lost:
        rank, host, pid = _who(known, lost[0]["task"])
        return RankError(
            f"{_name(rank, lost[0]['task'])} on {host} (pid {pid}) was killed: its process ended without an error. "
            "A SIGKILL often comes from the host running out of memory; see the executor's and the kernel's log",
            rank=rank, host=host, pid=pid,
        )  # fmt: skip
    if silent:
        tasks = sorted(silent, key=lambda task: -silent[task])
        return _error_about(tasks, (
            f"sent no heartbeat for {silent[tasks[0]]:.0f} s: the driver cannot reach the host, or the process hangs "
            "(stopped, swapped out, or in a call that holds the GIL)"
        ), known, raised)  # fmt: skip
    if absent := _absent(raised, known):
        return _error_about(absent, (
            "never entered a collective operation: its process is alive, but hangs or is slow; if it needs more time, "
            "raise launch.collective_timeout_s"
        ), known, raised)  # fmt: skip
    if raised:
        return _error_of(raised[0])
    text = str(error)
    if missing := missing_on_executors(text):
        return RuntimeError(f"{missing}. Spark's error: {_last_lines(text)}")
    if re.search(r"Python worker (exited|terminated|failed)", text):
        found = re.search(r"Lost task (\d+)\.\d+ in stage \S+ \(TID \d+\) \((\S+) executor", text)
        task, host = found.groups() if found else ("?", "an unknown host")
        rank = known.get(int(task), {}).get("rank") if found else None
        return RankError(
            f"{f'task {task}' if rank is None else _name(rank, int(task))} on {host} was killed: its Python process "
            f"ended without an error. A SIGKILL often comes from the host running out of memory. Spark's error: "
            f"{_last_lines(text)}",
            rank=rank, host=host, pid=None,
        )  # fmt: skip
    if isinstance(error, Exception):
        return RuntimeError(f"the job failed: {_last_lines(text)}").with_traceback(error.__traceback__)
    return error or RuntimeError("the job failed")


def _who(known: Mapping[int, Mapping[str, Any]], task: int) -> tuple[int | None, str, int | None]:
    """Returns rank, host and process id of a task, as far as it has reported them."""
    who = known.get(task, {})
    return who.get("rank"), who.get("host", "an unknown host"), who.get("pid")


def _absent(raised: list[dict[str, Any]], known: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Returns the tasks that other tasks timed out waiting for: they have neither failed nor ended."""
    if not raised or not re.search(r"timed? ?out", raised[0]["error"], re.IGNORECASE):
        return []
    failed = {failure["task"] for failure in raised}
    return sorted(task for task, who in known.items() if task not in failed and not who.get("is_done"))


def _error_about(
    tasks: list[int], what: str, known: Mapping[int, Mapping[str, Any]], raised: list[dict[str, Any]]
) -> RankError:
    """Returns an error about ranks that reported none. `raised` has the errors of other ranks, as consequences."""
    rank, host, pid = _who(known, tasks[0])
    consequence = ""
    if raised:
        first = raised[0]
        name = _name(first.get("rank"), first["task"])
        consequence = f". As a consequence, {name} on {first['host']} failed: {first['error']}"
    return RankError(f"{_names(tasks, known)} {what}{consequence}", rank=rank, host=host, pid=pid)


def _names(tasks: list[int], known: Mapping[int, Mapping[str, Any]]) -> str:
    found = [(task, *_who(known, task)) for task in tasks]
    return ", ".join(f"{_name(rank, task)} on {host} (pid {pid})" for task, rank, host, pid in found)


def _error_of(failure: Mapping[str, Any]) -> RankError:
    rank, host, pid = failure.get("rank"), failure["host"], failure["pid"]
    return RankError(
        f"{_name(rank, failure['task'])} on {host} (pid {pid}) failed: {failure['error']}",
        rank=rank, host=host, pid=pid,
        rank_traceback=failure.get("traceback") or "", rank_output=failure.get("output") or "",
    )  # fmt: skip


def _name(rank: int | None, task: int) -> str:
    return f"task {task} (which has no rank yet)" if rank is None else f"rank {rank}"


def _last_lines(text: str, limit: int = 2000) -> str:
    head = re.split(r"\n\s*at (?:org|java|scala)\.|JVM stacktrace|Driver stacktrace", text)[0].strip()
    return head if len(head) <= limit else "... " + head[-limit:]
