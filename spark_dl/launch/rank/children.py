"""Ends the processes that a rank has left when its own process ends in any way, also those with a session of their own.

Spark ends a rank by SIGKILL, which ends no other process. When the executor ends, the processes of the process group of
its Python daemon end, but not a process that has called setsid. When a rank starts its first process, a watcher is
started beside it. It waits for the end of the rank's process, and then ends all processes that have the mark of the
rank in their environment. A fork that runs no other program does not have it, so it tells the watcher its process id.
Processes that were started with another environment (`env=`) do not have the mark either.

The mark begins with the process of the rank (`storage.owner`). If the watcher is killed as well, `diagnose` finds what
it would have ended.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from spark_dl.launch.rank import marked
from spark_dl.launch.rank.marked import MARK
from spark_dl.storage.owner import this_process

_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
"""Events of Python before a process is started (docs.python.org/3/library/audit_events.html)."""

_watcher: _Watcher | None = None


class _Watcher:
    """The watcher of this process."""

    def __init__(self) -> None:
        here, number = this_process(), uuid.uuid4().hex
        self.mark = f"{here}-{number}" if here else number
        self._source = inspect.getsource(marked)  # also of a package in an archive (--py-files)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_started = False
        self._forks = -1
        """A pipe to the watcher, to which forks of this process write which processes they are."""
        self._pipe = (0, 0)

    def start(self) -> None:
        """Starts the watcher, unless it runs. Not in a fork of the process."""
        if self._is_started or os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_started:
                return
            self._is_started = True
            read, write = os.pipe()
            os.set_blocking(write, False)  # a fork never waits for the watcher
            with open(read, "rb") as forks:
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", self._source, f"{MARK}={self.mark}", str(self._pid)],
                    stdin=forks, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    start_new_session=True, cwd="/", env=outliving_env(),
                )  # fmt: skip
            self._forks, self._pipe = write, _file_of(write)

    def tell_fork(self) -> None:
        """Tells the watcher about this process, a fork of the one that has started it, or a fork of a fork."""
        with contextlib.suppress(OSError):  # the watcher has ended, or a daemon has closed all files
            if self._forks >= 0 and _file_of(self._forks) == self._pipe:
                os.write(self._forks, f"{os.getpid()} {marked.start_of(os.getpid())}\n".encode())


def _file_of(descriptor: int) -> tuple[int, int]:
    about = os.fstat(descriptor)
    return about.st_dev, about.st_ino


def _on_event(event: str, arguments: Any) -> None:
    if event in _STARTS and _watcher is not None and MARK in os.environ:
        with contextlib.suppress(OSError):  # no more processes: what the rank starts now will fail, too
            _watcher.start()


def _after_fork_in_child() -> None:
    if _watcher is not None and MARK in os.environ:
        _watcher.tell_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def outliving_env() -> dict[str, str]:
    """Returns the environment for a process that cleans up after this one, and must not be ended with it."""
    return {key: value for key, value in os.environ.items() if key != MARK}


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
