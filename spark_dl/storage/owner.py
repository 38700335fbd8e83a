"""Names that tell which process owns a temporary folder, or the processes of a rank, so that leftovers can be told.

A name begins with the owner: `pid-started-namespace-boot`, three numbers and the first 8 digits of the boot id. Process
ids are used again, so the start time decides whether the owner is alive. Hosts that share a folder have different boot
ids, containers of a host different PID namespaces: about the owners of another place, nothing can be said.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "spark_dl-"
_NAMES = re.compile(r"([0-9]{1,9})-([0-9]{1,19})-([0-9]{1,19})-([0-9a-f]{8})-\w+", re.ASCII)


@dataclass(frozen=True)
class Owner:
    """A process of this or another place."""

    pid: int
    started: int
    """Start time in clock ticks since boot. See proc_pid_stat(5)."""
    namespace: int
    """Inode of the PID namespace in which the process has this `pid`."""
    boot: str
    """The first 8 digits of the boot id of the host."""

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}-{self.namespace}-{self.boot}"

    @property
    def place(self) -> tuple[int, str]:
        """Where the `pid` is valid."""
        return self.namespace, self.boot

    def is_dead(self) -> bool:
        """Whether the process has ended, zombies included. False if it cannot be known here."""
        here = this_process()
        if here is None or here.place != self.place:
            return False
        try:
            return start_time(self.pid) != self.started
        except OSError:
            return False


def this_process() -> Owner | None:
    """Returns the owner of what this process makes; None where there is no /proc of this PID namespace."""
    try:
        pid = int(Path("/proc/self/stat").read_bytes().partition(b" ")[0])
        started = start_time(pid)
        namespace, boot = os.stat("/proc/self/ns/pid").st_ino, Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return None
    return None if started is None or pid != os.getpid() else Owner(pid, started, namespace, boot)


def owner_of(name: str) -> Owner | None:
    """Returns the owner in a name `OWNER-...` without the prefix of folders; None for other names."""
    match = _NAMES.fullmatch(name)
    return Owner(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None


def owner_of_folder(name: str) -> Owner | None:
    """Returns the owner of a folder that begins with `temporary_prefix()`; None for other names."""
    return owner_of(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None


def temporary_prefix() -> str:
    """Returns the beginning of the names of temporary folders of this process, for the functions of `tempfile`.

    All temporary folders of spark_dl have it, so that `diagnose` finds those that killed processes have left.
    """
    here = this_process()
    return f"{_PREFIX}{here}-" if here else _PREFIX


def start_time(pid: int) -> int | None:
    """Returns the start time of a process, in clock ticks since boot; None if it has ended.

    Raises OSError if the process is hidden from this one.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)  # /proc can hide processes (`hidepid`)
            raise PermissionError(f"the process {pid} is hidden") from None
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
