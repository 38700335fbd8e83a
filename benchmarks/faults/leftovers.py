"""What a run has left on the hosts of a testbed: processes, ports, shared memory and temporary files. Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from benchmarks.faults.killer import parent_of
from spark_dl.launch.rank.marked import MARK, command_of

_LISTEN = "0A"  # as in proc_net_tcp(5)
_TEMPORARY = ("spark_dl-*", "*.tmp-*", "torch_*", "tmp*")
"""Names of temporary files of spark_dl, torch and Python."""


def left_processes(by_host: Mapping[str, Collection[int]], ended: Iterable[int]) -> set[str]:
    """Returns what still runs of the processes of a run: ranks that must have ended, and what ranks have started.

    by_host: ids of all processes of each host. ended: ids of the ranks of attempts that have failed.
    Spark keeps its daemons, executors, and Python workers that have done their task.
    """
    found, dead = set(), set(ended)
    for host, pids in by_host.items():
        for pid in pids:
            command = command_of(pid)
            kind = _kind(pid)
            if kind == "other" and _watched(command) in set(pids) - dead:
                continue  # it ends with the worker, which Spark keeps
            if pid in dead and kind == "worker":
                found.add(f"process on {host}: the rank {pid} of a failed attempt")
            elif kind == "other":
                found.add(f"process on {host}: {pid} {command[:80]}")
            for port in _listening(pid) if kind in ("worker", "other") else ():
                found.add(f"port on {host}: {port} of {pid} {command[:80]}")
    return found


def left_files(folders: Iterable[Path]) -> set[str]:
    """Returns the temporary files below folders."""
    found = set()
    for folder in folders:
        for pattern in _TEMPORARY:
            with contextlib.suppress(FileNotFoundError):  # Spark deletes a folder of its own meanwhile
                found |= {f"file {path}" for path in folder.rglob(pattern)}
    return found


def shared_memory(by_host: Mapping[str, Iterable[int]]) -> set[str]:
    """Returns the files in the shared memory of the hosts."""
    found = set()
    for host, pids in by_host.items():
        for pid in pids:
            with contextlib.suppress(OSError):
                found |= {f"shared memory on {host}: {name}" for name in os.listdir(f"/proc/{pid}/root/dev/shm")}
    return found


def _kind(pid: int) -> str:
    """Returns what a process is: `spark` (a JVM, or its Python daemon), `worker`, `other`, or `ended`."""
    command = command_of(pid)
    if not command:
        return "ended"
    if "/java " in command or command.startswith("java ") or "org.apache.spark" in command:
        return "spark"
    if ".daemon" not in command:
        return "other"
    with contextlib.suppress(OSError):
        return "worker" if ".daemon" in command_of(parent_of(pid)) else "spark"
    return "ended"


def _watched(command: str) -> int | None:
    """Returns the rank whose end a process waits for, to end what the rank has started (`launch.rank.children`)."""
    words = command.split()
    is_watcher = len(words) > 1 and words[-1].isdigit() and words[-2].startswith(f"{MARK}=")
    return int(words[-1]) if is_watcher else None


def _listening(pid: int) -> set[int]:
    """Returns the TCP ports that a process listens on."""
    ports: set[int] = set()
    with contextlib.suppress(OSError):
        own = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                own.add(os.readlink(link))
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in own:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
