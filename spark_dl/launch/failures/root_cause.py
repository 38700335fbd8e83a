"""The error of a failed job: finds the root cause in the events of the ranks and the error of Spark.

Also says of ranks that wait for each other in which collective operations they are, and, when one of them hung, what
each rank did: a table with a line per rank, and the stacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_dl.config.checks import UnfitPythonError, unfit_python
from spark_dl.launch.failures import rank_state
from spark_dl.launch.failures.errors import RankError, failure_in, name_of, named
from spark_dl.launch.failures.rank_state import LOADING, PLANNED, READING, SAVING, RankMemory, Status, place_in_words

_DEFAULT_GROUP = "default_pg"
"""Torch's name of the default process group."""
_SAME = "all ranks must call the same ones in the same order, with tensors of the same shapes and types"

_NO_STACKS = "  no stacks: the process does not answer, or did not stop for long enough\n"
SILENCE_S = 3.0
"""A rank without a heartbeat for longer does not answer."""
_HEAD = ("rank", "host", "step", "what it did", "last collective", "last heartbeat")

_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE", "Floating point exception": "SIGFPE",
}  # fmt: skip


def in_words(collective: Mapping[str, Any]) -> str:
    """Returns for example `all_reduce [[3, 4] Float]`."""
    return f"{collective['name']} [{collective['tensors']}]"


def numbered(collective: Mapping[str, Any]) -> str:
    """Returns for example `number 7, all_reduce [[3, 4] Float]`."""
    return f"number {collective['number']}, {in_words(collective)}"


def last_number(who: Mapping[str, Any]) -> int | None:
    """Returns the number of the last collective operation of a task; None if it is not known.

    The one that it has sent with its stacks or its error, or that of its last heartbeat, which is of the default group.
    """
    last = who.get("collective") or who.get("progress")
    number: int | None = last["number"] if last else None
    return number


def mismatch(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns which ranks are in different operations of the same number; empty if none are.

    Args:
        known: what each task has reported, with `rank` and, after a stall, its last `collective`.
    """
    numbers: dict[tuple[str, int], dict[str, list[int]]] = {}
    for who in sorted((who for who in known.values() if who.get("rank") is not None), key=lambda who: who["rank"]):
        if (last := who.get("collective")) is not None:
            operations = numbers.setdefault((last["group"], last["number"]), {})
            operations.setdefault(in_words(last), []).append(who["rank"])
    for (_, number), operations in numbers.items():
        if len(operations) > 1:
            return different(number, operations)
    return ""


def different(number: int, operations: Mapping[str, list[int]]) -> str:
    """Returns the error about ranks that called different operations. operations: the ranks of each operation."""
    called = "; ".join(f"{_ranks(ranks)} {operation}" for operation, ranks in operations.items())
    return f"the ranks called different collective operations as number {number}: {called}; {_SAME}"


def behind(tasks: list[int], known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns by which collective operations some tasks are behind the others; empty if that is not known."""
    who, first = known.get(tasks[0], {}), None
    for task, other in known.items():
        last = other.get("collective")
        if task not in tasks and last is not None and (first is None or last["number"] > first["number"]):
            first = last
    if first is None:
        return ""
    own, number = who.get("collective"), last_number(who)
    if own is None and first["group"] != _DEFAULT_GROUP:
        number = None  # that of a heartbeat is of another group
    if number is not None and number >= first["number"]:
        return ""
    done = ""
    if own or number:
        done = f", and its last is {numbered(own) if own else f'number {number}, by its last heartbeat'}"
    elif number == 0 or "collective" in who:
        done = ", and its last is none yet"
    return f"; the others wait in collective {numbered(first)}{done}"


def aborted_by_gloo(crash: str, raised: Sequence[Mapping[str, Any]]) -> str:
    """Returns why a process that was in a collective operation has probably aborted itself; empty if it was in none.

    Args:
        crash: its stacks.
        raised: the failures of other tasks.
    """
    if "torch/distributed/" not in crash:
        return ""
    other = next((who for who in raised if who.get("collective") and "rank" in who), None)
    told = "" if other is None else f"; rank {other['rank']} had called {in_words(other['collective'])}"
    return (
        "; Gloo aborts the process of a rank that gives a smaller tensor to a collective operation than another rank: "
        f"{_SAME}{told}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def what_ranks_did(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns where each rank was, by rank; empty if nothing is known. known: what each task has reported."""
    if not any(who.get("stack") or who.get("progress") for who in known.values()):
        return ""
    tasks = sorted(known, key=lambda task: (known[task].get("rank") is None, known[task].get("rank"), task))
    rows = [_HEAD, *(_row(known[task], task) for task in tasks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)
    stacks = [
        f"{named(who, task)}{place_in_words(who.get('phase', ''), who.get('step'))}:\n{who.get('stack') or _NO_STACKS}"
        for task, who in ((task, known[task]) for task in tasks)
    ]
    return "\n".join([table, *stacks])


def _row(who: Mapping[str, Any], task: int) -> tuple[str, ...]:
    rank, step, age = who.get("rank"), who.get("step"), who.get("silent_s")
    number = last_number(who)
    return (
        f"task {task}" if rank is None else str(rank), who.get("host", ""), "" if step is None else str(step),
        _doing(who), "" if number is None else str(number), "" if age is None else f"{age:.1f} s ago",
    )  # fmt: skip


def is_silent(who: Mapping[str, Any]) -> bool:
    """Whether a task has sent no heartbeat for a while."""
    return bool(who.get("silent_s", 0.0) > SILENCE_S)


def _doing(who: Mapping[str, Any]) -> str:
    """Returns what a rank did: data, computation or communication."""
    if is_silent(who):
        return "no answer"
    if who.get("is_done") or who.get("is_returned"):
        return "has returned"
    files = re.findall(r'File "([^"]+)"', who.get("stack", "").partition("\nThread ")[0])
    last = who.get("collective")
    # Only the innermost frame: pipelines and FSDP of torch call the model from there.
    if (last and last["is_open"]) or "/torch/distributed/" in "".join(files[-1:]):
        return f"waiting in collective {numbered(last)}" if last else "waiting in a collective operation"
    phase = who.get("phase", "")
    if who.get("rank") is None:
        return "starting"
    # Without stacks, or where the flight recorder is off, only the number of the last operation is known.
    other = "computing, or waiting for other ranks" if not last and last_number(who) else "computing"
    return phase if phase in (READING, SAVING, LOADING) else other


def root_cause(
    failures: list[dict[str, Any]],
    known: Mapping[int, Mapping[str, Any]],
    error: BaseException | None,
    silent: Mapping[int, float],
    memories: Mapping[int, RankMemory] | None = None,
) -> BaseException:
    """Returns the root cause: the first rank that raised an error of its own, or was killed, or is silent.

    A rank that aborts itself (SIGABRT) while another one is silent has waited for it: threads of Gloo end so.

    Args:
        known: what each task has reported about itself.
        silent: seconds since the last heartbeat, of the silent tasks.
        memories: the memory of the tasks, by their last heartbeats.
    """
    evidence = _Evidence(failures, known, error, silent, memories or {})
    cause = next(cause for rule in _RULES if (cause := rule(evidence)) is not None)
    if isinstance(cause, RankError):
        cause.hosts = _hosts(known)
    return cause


def _hosts(known: Mapping[int, Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(who["host"] for who in known.values() if who.get("host"))


class _Evidence:
    """A failed attempt, as far as the driver knows: the arguments of `root_cause`, and what follows from them."""

    def __init__(
        self,
        failures: Sequence[Mapping[str, Any]],
        known: Mapping[int, Mapping[str, Any]],
        error: BaseException | None,
        silent: Mapping[int, float],
        memories: Mapping[int, RankMemory],
    ):
        self.known, self.error, self.silent, self.memories = known, error, silent, memories
        by_spark = failure_in(str(error)) if error else None
        raised = [dict(failure) for failure in failures if failure["kind"] == "failed"]
        self.raised: list[dict[str, Any]] = [*raised, *([by_spark] if by_spark else [])]
        """Errors of the ranks, in the order of arrival."""
        self.lost = [dict(failure) for failure in failures if failure["kind"] == "lost"]
        """Ranks whose processes have ended without a word."""
        last = {failure["task"]: {**known.get(failure["task"], {}), **failure} for failure in self.raised}
        self.reports: dict[int, Mapping[str, Any]] = {**known, **last}
        """The last report of each task."""


def _an_error_of_its_own(evidence: _Evidence) -> BaseException | None:
    """A rank raised an error that no other rank has caused."""
    return next((_error_of(failure) for failure in evidence.raised if not failure["is_secondary"]), None)


def _cancelled(evidence: _Evidence) -> BaseException | None:
    """Somebody cancelled the job."""
    cancelled = re.search(r"\[?(SPARK_JOB_CANCELLED|OPERATION_CANCELED)[^\n]*", str(evidence.error or ""))
    if cancelled is None:
        return None
    return RuntimeError(f"the Spark job of the ranks was cancelled ({cancelled[0].strip()}); resume the run")


def _killed(evidence: _Evidence) -> BaseException | None:
    """A process was killed, but for one that aborts itself as it waits for a silent rank."""
    if not evidence.lost:
        return None
    task = evidence.lost[0]["task"]
    is_aborted = _signal_of(evidence.known.get(task, {}).get("crash", "")) == "SIGABRT"
    if is_aborted and evidence.silent:
        return None
    return _error_of_lost(task, evidence.known, evidence.memories, evidence.raised)


def _silent(evidence: _Evidence) -> BaseException | None:
    """The driver cannot reach a host, or a process hangs."""
    tasks = sorted(evidence.silent, key=lambda task: -evidence.silent[task])
    if not tasks:
        return None
    return _error_about(tasks, (
        f"sent no heartbeat for {evidence.silent[tasks[0]]:.0f} s: the driver cannot reach the host, or the process "
        f"hangs (stopped, swapped out, or in a call that holds the GIL){behind(tasks, evidence.reports)}"
    ), evidence.known, evidence.raised or evidence.lost)  # fmt: skip


def _late(evidence: _Evidence) -> BaseException | None:
    """A rank has not entered the collective operation in which the others time out."""
    absent = _absent(evidence.raised, evidence.known)
    if not absent:
        return None
    return _error_about(absent, (
        "never entered a collective operation: its process is alive, but hangs or is slow; if it needs more time, "
        f"raise launch.collective_timeout_s{behind(absent, evidence.reports)}"
    ), evidence.known, evidence.raised)  # fmt: skip


def _different_operations(evidence: _Evidence) -> BaseException | None:
    """The ranks called different collective operations."""
    text = mismatch(evidence.reports) if evidence.raised else ""
    return _error_of({**evidence.raised[0], "error": text, "is_retryable": False}) if text else None


def _caused_by_another(evidence: _Evidence) -> BaseException | None:
    """A rank lost another one, whose own failure is not known."""
    if not evidence.raised:
        return None
    first = evidence.raised[0]
    left = _left_early(first, evidence.known)
    # An error of the code, which leaves a collective operation to some ranks: the next attempt would do so again.
    return _error_of({**first, "is_retryable": first.get("is_retryable", True) and not left}, left)


def _unfit_python(evidence: _Evidence) -> BaseException | None:
    """Executors lack spark_dl or torch."""
    unfit = unfit_python(str(evidence.error))
    return UnfitPythonError(f"{unfit}. Spark's error: {_last_lines(str(evidence.error))}") if unfit else None


def _worker_exited(evidence: _Evidence) -> BaseException | None:
    """Spark says that a Python process has ended, as over Spark Connect, where nothing else tells."""
    text = str(evidence.error)
    if not re.search(r"Python worker (exited|terminated|failed)", text):
        return None
    match = re.search(r"Lost task (\d+)\.\d+ in stage \S+ \(TID \d+\) \((\S+) executor", text)
    task, host = match.groups() if match else ("?", "an unknown host")
    who = evidence.known.get(int(task), {}) if match else {}
    rank = who.get("rank")
    return RankError(
        f"{f'task {task}' if rank is None else name_of(rank, int(task))} on {host} was killed: its Python process "
        "ended without an error. A SIGKILL often comes from the host running out of memory, a crash from the limit "
        "spark.executor.pyspark.memory, if it is set. Spark's error: "
        f"{_last_lines(text)}",
        **{**_who(who), "host": host, "pid": None},
    )  # fmt: skip


def _job_failed(evidence: _Evidence) -> BaseException:
    """Anything else that Spark says."""
    error = evidence.error
    if isinstance(error, Exception):
        return RuntimeError(f"the job failed: {_last_lines(str(error))}").with_traceback(error.__traceback__)
    return error or RuntimeError("the job failed")


_RULES: tuple[Callable[[_Evidence], BaseException | None], ...] = (
    _an_error_of_its_own, _cancelled, _killed, _silent, _late, _different_operations, _caused_by_another,
    _unfit_python, _worker_exited, _job_failed,
)  # fmt: skip
"""The first rule that gives an error decides."""


def _error_of_lost(
    task: int, known: Mapping[int, Mapping[str, Any]], memories: Mapping[int, RankMemory], raised: list[dict[str, Any]]
) -> RankError:
    """Returns the error of a task whose process has ended without a word, or in the handler of a signal.

    Args:
        raised: the failures of other tasks.
    """
    who = known.get(task, {})
    place, peak, crash = _place(who), rank_state.memory_in_words(memories.get(task)), who.get("crash", "")
    error, why = "", peak
    if crash == PLANNED:
        ended = error = "ended by SIGTERM"
        crash, why = "", f", after a checkpoint of all ranks{peak}"
    elif crash:
        ended = error = f"ended by {_signal_of(crash)}"
        if _signal_of(crash) == "SIGABRT":
            why += aborted_by_gloo(crash, raised)
    elif rank_state.killed_by_kernel(task, memories):
        ended = error = "killed by the kernel: out of memory"
        why += "; raise spark.executor.memoryOverhead or the container's limit, lower loader.memory_mib or the batch"
    else:
        ended = "killed"
        why = (
            f": its process ended without an error{peak}. A SIGKILL can come from the host running out of memory, or "
            "from a container that is deleted; see the executor's and the kernel's log"
        )
    return RankError(
        f"{named(who, task)} was {ended}{place_in_words(**place)}{why}",
        **_who(who), **place, error=error, rank_traceback=crash,
    )  # fmt: skip


def _who(who: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which rank a RankError is about, as far as its task has reported it."""
    return {
        "rank": who.get("rank"), "host": who.get("host", "an unknown host"), "pid": who.get("pid"),
        "executor": who.get("executor", ""), "device": who.get("device", ""),
    }  # fmt: skip


def _signal_of(crash: str) -> str:
    """Returns the signal that ended a process, by what Python's faulthandler has written."""
    match = re.match(r"Fatal Python error: (.*)", crash)
    return _SIGNALS.get(match[1].strip(), match[1].strip()) if match else "SIGTERM"


def _place(who: Mapping[str, Any]) -> Status:
    """Returns where a task was, by its last heartbeat."""
    return {"phase": who.get("phase", ""), "step": who.get("step")}


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
    consequence = ""
    if raised:
        task = raised[0]["task"]
        other = {**known.get(task, {}), **raised[0]}
        name = f"{name_of(other.get('rank'), task)} on {other.get('host', 'an unknown host')}"
        consequence = f". As a consequence, {name} failed: {other.get('error', 'its process ended by SIGABRT')}"
    who = known.get(tasks[0], {})
    place = _place(who)
    return RankError(
        f"{_names(tasks, known)} {what}{place_in_words(**place)}{consequence}",
        **_who(who), **place, stacks=what_ranks_did(known),
    )  # fmt: skip


def late_at_start(
    tasks: list[int], known: Mapping[int, Mapping[str, Any]], num_ranks: int, limit_s: float
) -> RankError:
    """Returns the error about ranks that run, but have not joined the others in time. tasks: at least one."""
    who = known.get(tasks[0])
    did = "has told nothing to the driver: its Python hangs or is slow, or its host cannot reach the driver"
    if who is not None and is_silent(who):
        did = "does not answer: it is stopped or swapped out, or the driver cannot reach its host"
    elif who is not None and who.get("is_called"):
        did = "is alive, but has not come to the other ranks, which wait for it"
    elif who is not None:
        did = "is alive, but has not unpickled the function and its arguments, for which it imports their modules"
    error = _error_about(tasks, (
        f"did not join within launch.start_timeout_s={limit_s:g} s ({len(tasks)} of {num_ranks} ranks). The process "
        f"{did}. See where it stands in its stacks, and look for a file system that does not answer on its host; if it "
        "only needs more time, raise launch.start_timeout_s"
    ), known, [])  # fmt: skip
    error.hosts = _hosts(known)
    return error


def _names(tasks: list[int], known: Mapping[int, Mapping[str, Any]]) -> str:
    return ", ".join(named(known.get(task, {}), task) for task in tasks)


def _left_early(failure: Mapping[str, Any], known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns which ranks had returned from their function when another one lost the connection to them."""
    done = [task for task, who in known.items() if who.get("is_returned") and task != failure["task"]]
    if not done:
        return ""
    return (
        f". {_names(sorted(done), known)} had returned from the function before, without an error: all ranks must call "
        "the same collective operations, such as barrier()"
    )


def _error_of(failure: Mapping[str, Any], more: str = "") -> RankError:
    place = _place(failure)
    return RankError(
        f"{named(failure, failure['task'])} failed{place_in_words(**place)}: {failure['error']}{more}",
        **_who(failure), **place, error=failure["error"],
        is_retryable=failure.get("is_retryable", True),
        rank_traceback=failure.get("traceback") or "", rank_output=failure.get("output") or "",
    )  # fmt: skip


def _last_lines(text: str, limit: int = 2000) -> str:
    head = re.split(r"\n\s*at (?:org|java|scala)\.|JVM stacktrace|Driver stacktrace", text)[0].strip()
    return head if len(head) <= limit else "... " + head[-limit:]
