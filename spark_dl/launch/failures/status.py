"""Where this process is in a run: its phase and step, which heartbeats and errors name."""

from __future__ import annotations

import time
from typing import TypedDict

STARTING, READING, TRAINING, VALIDATING, SAVING, LOADING = (
    "starting", "reading rows", "training", "validating", "saving a checkpoint", "loading a checkpoint",
)  # fmt: skip


PLANNED = "SIGTERM, as planned"
"""Text in place of the stacks of a rank that ends as planned. They would show threads that wait for the end."""


class Status(TypedDict):
    """As events and failures have it."""

    phase: str
    step: int | None
    """Optimizer step that the rank is in, from 1; None if it has taken none."""


_now: Status = {"phase": STARTING, "step": None}
_since = time.monotonic()
_began_ns = time.time_ns()


def enter(phase: str, step: int | None = None) -> None:
    """Notes that this process begins a phase. step: None keeps the last one."""
    global _since
    _since = time.monotonic()
    _now["phase"] = phase
    if step is not None:
        _now["step"] = step


def reset() -> None:
    """Forgets what an earlier run of this process has noted."""
    global _since, _began_ns
    _since, _began_ns = time.monotonic(), time.time_ns()
    _now["phase"], _now["step"] = STARTING, None


def now() -> Status:
    """Returns what the process does now."""
    return {**_now}


def began_ns() -> int:
    """Returns when this task has begun, in nanoseconds of the wall clock."""
    return _began_ns


def since() -> float:
    """Returns when this process has noted something the last time, by the monotonic clock."""
    return _since


def in_words(phase: str | None, step: int | None) -> str:
    """Returns for example ` in step 12 (training)`; empty without a step."""
    return "" if step is None else f" in step {step} ({phase})"
