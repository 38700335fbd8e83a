"""Memory of a rank's process: its peak, its limit, and whether the kernel has killed a process for want of memory.

The kernel counts these kills for each control group, such as a container. A rank sends the count with its heartbeats.
If the process is killed, and the count has then risen, it was out of memory. Without such a count, nobody can tell.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

_MIB = 1 << 20
_NEXT_BEAT_S = 1.5
"""In this time the next heartbeat of another rank comes."""
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Limits above it are none: version 1 of control groups gives a number near 2^63."""


class Memory(TypedDict):
    """Memory of a process, as heartbeats have it."""

    peak: int
    """Largest resident memory so far, in bytes."""
    limit: int | None
    """Limit of the control group, in bytes; None if it has none, or it cannot be read."""
    group: str
    """Identity of the control group among all hosts; empty if it cannot be read."""
    events: str
    """File of the control group with the count of kills, on the host of the process."""
    oom_kills: int
    """Processes of the control group that the kernel has killed for want of memory."""


def now() -> Memory:
    """Returns the memory of this process."""
    import resource  # not on Windows, where drivers can run

    unit = 1 if sys.platform == "darwin" else 1024
    found: Memory = {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "limit": None, "group": "", "events": "",
        "oom_kills": 0,
    }  # fmt: skip
    for folder, events, limit in _groups():
        if (kills := _oom_kills(folder / events)) is not None:
            found |= {"events": str(folder / events), "group": _identity(folder / events), "oom_kills": kills}
            found["limit"] = _limit(folder / limit)
            break
    return found


def in_words(memory: Memory | None) -> str:
    """Returns for example `, with a peak memory of 800 MiB of 1024 MiB`; empty for None."""
    if memory is None:
        return ""
    limit = "" if memory["limit"] is None else f" of {memory['limit'] / _MIB:.0f} MiB"
    return f", with a peak memory of {memory['peak'] / _MIB:.0f} MiB{limit}"


def killed_by_kernel(task: int, memories: Mapping[int, Memory]) -> bool:
    """Whether the kernel has killed a process for want of memory in the control group of a task since its heartbeat.

    Called on the driver, with the last memory of each task. The count comes from another task of the control group, or
    from the file itself, if the process ran on this host.
    """
    last = memories.get(task)
    if last is None or not last["group"]:
        return False
    counts = [other["oom_kills"] for other in memories.values() if other["group"] == last["group"]]
    if _is_here(last):
        counts.append(_oom_kills(Path(last["events"])) or 0)
    return max(counts) > last["oom_kills"]


def wait_for_count_s(task: int, memories: Mapping[int, Memory]) -> float:
    """Returns how long to wait for a count of kills after a task was killed: for a heartbeat of its control group."""
    last = memories.get(task)
    if last is None or not last["group"] or _is_here(last):
        return 0.0
    shared = any(other["group"] == last["group"] for at, other in memories.items() if at != task)
    return _NEXT_BEAT_S if shared else 0.0


def _is_here(memory: Memory) -> bool:
    """Whether this process can read the count of kills of a control group, because it runs on the same host."""
    return _identity(Path(memory["events"])) == memory["group"]


def _groups() -> list[tuple[Path, str, str]]:
    """Returns where this process's control group can be: folder, file with the count of kills, file with the limit.

    In a container the folder is often the root of what the container sees.
    """
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            roots, events, limit = [_CGROUPS / "memory"], "memory.oom_control", "memory.limit_in_bytes"
        elif not controllers:
            roots, events, limit = [_CGROUPS, _CGROUPS / "unified"], "memory.events", "memory.max"
        else:
            continue
        for root in roots:
            found += [(folder, events, limit) for folder in (root / path.lstrip("/"), root)]
    return found


def _oom_kills(events: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _identity(events: Path) -> str:
    """Returns the identity of a control group: that of the running kernel, and the file's number."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{os.stat(events).st_ino}"
    except OSError:
        return ""
