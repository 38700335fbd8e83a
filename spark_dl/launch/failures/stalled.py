"""Describes what each rank did when one of them hung: a table with a line per rank, and the stacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spark_dl.launch.failures import mismatch
from spark_dl.launch.failures.describe import named
from spark_dl.launch.failures.status import LOADING, READING, SAVING, in_words

_NO_STACKS = "  no stacks: the process does not answer, or did not stop for long enough\n"
SILENCE_S = 3.0
"""A rank without a heartbeat for longer does not answer."""
_HEAD = ("rank", "host", "step", "what it did", "last collective", "last heartbeat")


def what_ranks_did(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns where each rank was, by rank; empty if nothing is known. known: what each task has reported."""
    if not any(who.get("stack") or who.get("progress") for who in known.values()):
        return ""
    tasks = sorted(known, key=lambda task: (known[task].get("rank") is None, known[task].get("rank"), task))
    rows = [_HEAD, *(_row(known[task], task) for task in tasks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)
    stacks = [
        f"{named(who, task)}{in_words(who.get('phase', ''), who.get('step'))}:\n{who.get('stack') or _NO_STACKS}"
        for task, who in ((task, known[task]) for task in tasks)
    ]
    return "\n".join([table, *stacks])


def _row(who: Mapping[str, Any], task: int) -> tuple[str, ...]:
    rank, step, age = who.get("rank"), who.get("step"), who.get("silent_s")
    number = mismatch.last_number(who)
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
        return f"waiting in collective {mismatch.numbered(last)}" if last else "waiting in a collective operation"
    phase = who.get("phase", "")
    if who.get("rank") is None:
        return "starting"
    # Without stacks, or where the flight recorder is off, only the number of the last operation is known.
    other = "computing, or waiting for other ranks" if not last and mismatch.last_number(who) else "computing"
    return phase if phase in (READING, SAVING, LOADING) else other
