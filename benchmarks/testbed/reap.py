"""Removes a testbed: kills the processes on its hosts, and deletes its parts, however its creator ended.

All parts of a bed have its name in their name: namespaces, their files in /etc/netns, and a folder for temporary files.
The name contains the process id and the start time of the creator, so leftovers can be told from beds in use.

Run as a file, this module is a bed's guard (`python reap.py BED`): it removes the bed when its creator has ended. It
needs only the standard library, so the process is small and starts fast.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

NAMESPACES, FILES = Path("/run/netns"), Path("/etc/netns")  # as in ip-netns(8)
_NAMES = re.compile(r"(spark_dl-(\d+)-(\d+)-\d+)(\..+)?")
_TOOL_TIMEOUT_S = 30.0
_KILL_WAIT_S = 30.0

_serial = itertools.count()


def bed_name() -> str:
    """Returns a new name for a bed of this process. Its parts are named `NAME.part`."""
    return f"spark_dl-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}"


def bed_folder(bed: str) -> Path:
    """Returns the folder for a bed's temporary files."""
    return Path(tempfile.gettempdir(), bed)


def processes(namespaces: Iterable[str]) -> list[int]:
    """Returns the process ids in namespaces, without zombies."""
    keys = set()
    for namespace in namespaces:
        with contextlib.suppress(FileNotFoundError):
            keys.add(_key(os.stat(NAMESPACES / namespace)))
    return _processes_in(keys)


def _processes_in(keys: set[tuple[int, int]]) -> list[int]:
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
        # A process without access, such as init in a container, is not part of a bed.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if _key(os.stat(f"/proc/{pid}/ns/net")) in keys:
                found.append(pid)
    return found


def _key(namespace: os.stat_result) -> tuple[int, int]:
    return namespace.st_dev, namespace.st_ino


def remove(bed: str) -> None:
    """Kills the processes on a bed's hosts and removes its parts. Missing parts are not an error.

    Raises RuntimeError if something cannot be removed.
    """
    namespaces = [name for name in _names_in(NAMESPACES) if name.startswith(f"{bed}.")]
    with contextlib.ExitStack() as files:  # an open file prevents reuse of a namespace's identity
        keys = set()
        for name in namespaces:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(NAMESPACES / name, os.O_RDONLY)
                files.callback(os.close, file)
                keys.add(_key(os.fstat(file)))
        _kill_all(bed, keys)
        for name in namespaces:
            _delete_namespace(name)
        _kill_all(bed, keys)  # processes that entered just before the namespace lost its name
    folders = [FILES / name for name in _names_in(FILES) if name.startswith(f"{bed}.")]
    for folder in (*folders, bed_folder(bed)):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _kill_all(bed: str, keys: set[tuple[int, int]]) -> None:
    end = time.monotonic() + _KILL_WAIT_S
    while pids := _processes_in(keys):
        if time.monotonic() > end:
            raise RuntimeError(
                f"processes {pids} of the testbed {bed} are still running {_KILL_WAIT_S:g} s after SIGKILL"
            )
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _delete_namespace(name: str) -> None:
    try:
        run_tool(["ip", "netns", "delete", name])
    except RuntimeError:
        if (NAMESPACES / name).exists():  # otherwise another process has removed it
            raise


def leftovers() -> list[str]:
    """Returns the beds whose creators have ended."""
    found = set()
    for folder in (NAMESPACES, FILES, Path(tempfile.gettempdir())):
        for name in _names_in(folder):
            match = _NAMES.fullmatch(name)
            if match and _start_time(int(match.group(2))) != int(match.group(3)):
                found.add(match.group(1))
    return sorted(found)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _start_time(pid: int) -> int | None:
    """Returns the start time of a process, in clock ticks since boot; None if it has ended. See proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def start_guard(bed: str) -> subprocess.Popen[bytes]:
    """Starts the process that removes the bed when its standard input is closed, or when this process has ended.

    Its exit code is 0 if everything was removed.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, bed],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd="/", start_new_session=True,
    )  # fmt: skip


def _guard(bed: str) -> None:
    match = _NAMES.fullmatch(bed)
    assert match is not None
    pid, started = int(match.group(2)), int(match.group(3))
    with contextlib.suppress(ProcessLookupError):
        maker = os.pidfd_open(pid)
        if _start_time(pid) == started:
            select.select([sys.stdin, maker], [], [])
    remove(bed)
    if _start_time(pid) != started:  # a tool that the creator started may still have been running
        time.sleep(1.0)
        remove(bed)


def run_tool(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Returns the output of a command with `lines` as input. Raises RuntimeError with its errors if it fails."""
    try:
        done = subprocess.run(
            command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True,
            timeout=_TOOL_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)} did not end within {_TOOL_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {' '.join(done.stderr.split())}")
    return done.stdout


if __name__ == "__main__":
    _guard(sys.argv[1])
