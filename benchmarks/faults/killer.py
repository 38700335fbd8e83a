"""Kills ranks of a training from the driver, and takes the time until it trains again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Kill:
    """A rank that was killed while it trained."""

    step: int
    """The last step that the driver knew of."""
    rank: int
    at: float
    """Seconds on the clock of `time.monotonic`."""
    noticed_s: float | None = None
    """Seconds until the driver knew of it, and had decided to start the ranks again."""
    again_s: float | None = None
    """Seconds until the first step after the restart."""


def kill_process(pid: int) -> None:
    """Ends a process with SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def kill_executor(pid: int) -> None:
    """Ends the executor of a rank, the parent of the daemon that has forked the rank, with SIGKILL."""
    os.kill(parent_of(parent_of(pid)), signal.SIGKILL)


def parent_of(pid: int) -> int:
    """Returns the parent of a process. Linux only. Raises OSError if there is no such process."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


class Killer:
    """A function for `on_event` that kills a rank once in each of several steps. On the machine of the ranks.

    kills: the rank by the step, after whose event, or that of the next one that is seen, it is killed.
    kill: called with the process id of the rank.
    """

    def __init__(self, kills: Mapping[int, int], kill: Callable[[int], None] = kill_process):
        self.left, self._kill = sorted(kills.items()), kill
        self._pids: dict[int, int] = {}
        self.done: list[Kill] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        now, last = time.monotonic(), self.done[-1] if self.done else None
        if event["kind"] == "joined":
            self._pids[event["rank"]] = event["pid"]
        elif event["kind"] == "restart":
            assert last is not None, f"a restart without a fault: {event['error']}"
            last.noticed_s = now - last.at
        elif event["kind"] == "step":
            if last is not None and last.again_s is None:
                if last.noticed_s is None:  # steps of the ranks that have not noticed it yet
                    return
                last.again_s = now - last.at
            if self.left and event["step"] >= self.left[0][0]:
                _, rank = self.left.pop(0)
                self._kill(self._pids[rank])
                self.done.append(Kill(event["step"], rank, time.monotonic()))
