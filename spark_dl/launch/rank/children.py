"""Ends the processes that a rank has left when its own process ends in any way, also those with a session of their own.

Spark ends a rank by SIGKILL, and with it the processes of its process group, but not a process that has called setsid.
When a rank starts its first process, a watcher is started beside it. It waits for the end of the rank's process, and
then ends all processes that have the mark of the rank in their environment. Processes that were started with another
environment (`env=`), and forks that run no other program, do not have it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

MARK = "SPARK_DL_RANK"
"""Environment variable of the processes that a rank starts."""
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
"""Events of Python before a process is started (docs.python.org/3/library/audit_events.html)."""

# The standard library alone, so that it starts at once. It ends what it finds, politely first, until nothing is left.
_WATCHER = """
import os, select, signal, sys, time
mark, rank = sys.argv[1].encode(), int(sys.argv[2])
def marked():
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read().split(bytes(1)):
                        yield int(name)
            except OSError:
                pass
try:
    select.select([os.pidfd_open(rank)], [], [])
except (AttributeError, OSError):
    while os.getppid() == rank:
        time.sleep(0.5)
for i in range(20):
    found = list(marked())
    if not found:
        break
    for pid in found:
        try:
            os.kill(pid, signal.SIGTERM if i < 5 else signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.2)
"""


class _Watcher:
    """The watcher of this process."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_started = False

    def start(self) -> None:
        """Starts the watcher, unless it runs. Not in a fork of the process."""
        if self._is_started or os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_started:
                return
            self._is_started = True
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHER, f"{MARK}={self.mark}", str(self._pid)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd="/", env={key: value for key, value in os.environ.items() if key != MARK},
            )  # fmt: skip


_watcher: _Watcher | None = None


def _on_event(event: str, arguments: Any) -> None:
    if event in _STARTS and _watcher is not None and MARK in os.environ:
        with contextlib.suppress(OSError):  # no more processes: what the rank starts now will fail, too
            _watcher.start()


@contextlib.contextmanager
def ended_with_rank() -> Iterator[None]:
    """Gives the processes that are started in the block an end with that of this process, at the latest."""
    global _watcher
    if not os.path.isdir("/proc/self"):
        yield
        return
    if _watcher is None:
        _watcher = _Watcher()
        sys.addaudithook(_on_event)  # which cannot be removed
    os.environ[MARK] = _watcher.mark
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
