"""Finds and ends processes by the mark of their rank, which they have in their environment. Linux.

The watcher of a rank runs the source of this module: `python -c SOURCE SPARK_DL_RANK=MARK PID`. It needs only the
standard library, so that the watcher starts at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator

MARK = "SPARK_DL_RANK"
"""Environment variable of the processes that a rank starts."""
_AGAIN_S = 0.2


def mark_of(pid: int | str) -> str | None:
    """Returns the mark that a process was started with; None without one, and if its environment cannot be read."""
    start = f"{MARK}=".encode()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for variable in file.read().split(b"\0"):
            if variable.startswith(start):
                return variable[len(start) :].decode(errors="replace")
    return None


def marked(is_wanted: Callable[[str], bool]) -> Iterator[int]:
    """Yields the processes whose mark is wanted, without this one."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            mark = mark_of(name)
            if mark is not None and is_wanted(mark):
                yield int(name)


def start_of(pid: int) -> str | None:
    """Returns when a process was started, as the kernel tells it (`storage.owner`); None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def command_of(pid: int) -> str:
    """Returns the command line of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def end(find: Callable[[], Iterable[int]], *, polite_s: float, limit_s: float) -> set[int]:
    """Ends the processes that are found, politely first, until none is found. Returns those that run at the limit.

    Args:
        find: called again and again, as processes start others meanwhile.
    """
    start, asked = time.monotonic(), set()
    while True:
        seconds, ended = time.monotonic() - start, set()
        for pid in find():
            ended.add(pid)
            number = signal.SIGTERM if seconds < polite_s else signal.SIGKILL
            if (pid, number) not in asked:  # a second SIGTERM makes some programs leave out their cleanup
                asked.add((pid, number))
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        if not ended or seconds > limit_s:
            return ended
        time.sleep(_AGAIN_S)


def _watch(mark: str, rank: int) -> None:
    """Waits for the end of the rank, and ends what has its mark, and its forks, of which standard input tells."""
    forks = _wait(rank)

    def find() -> Iterator[int]:
        yield from marked(mark.__eq__)
        for line in forks.decode().splitlines():
            pid, _, start = line.partition(" ")
            if start and start_of(int(pid)) == start:
                yield int(pid)

    end(find, polite_s=1.0, limit_s=4.0)


def _wait(rank: int) -> bytes:
    """Returns what standard input has told until the rank's process ended."""
    told, inputs = b"", [0]
    try:
        process = [os.pidfd_open(rank)]
    except (AttributeError, OSError):
        process = []
    while True:
        # Forks that outlive the rank hold the input open, so its end does not tell that of the rank.
        ready, _, _ = select.select([*process, *inputs], [], [], None if process else 0.5)
        if 0 in ready:
            told += (more := os.read(0, 1 << 16))
            inputs = [0] if more else []
        elif process or os.getppid() != rank:
            return told


if __name__ == "__main__":
    _watch(sys.argv[1].partition("=")[2], int(sys.argv[2]))
