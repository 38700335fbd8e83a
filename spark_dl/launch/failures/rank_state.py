"""What a rank tells of itself, for heartbeats and errors: phase and step, memory, the last collective operation.

The kernel counts the processes that it kills for want of memory for each control group, such as a container. A rank
sends the count with its heartbeats. If the process is killed, and the count has then risen, it was out of memory.
Without such a count, nobody can tell. Collective operations are those of torch's flight recorder, which also records
Gloo's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

STARTING, READING, TRAINING, VALIDATING, SAVING, LOADING = (
    "starting", "reading rows", "training", "validating", "saving a checkpoint", "loading a checkpoint",
)  # fmt: skip


PLANNED = "SIGTERM, as planned"
"""Text in place of the stacks of a rank that ends as planned. They would show threads that wait for the end."""

_now: Status = {"phase": STARTING, "step": None}
_since = time.monotonic()
_began_ns = time.time_ns()

_MIB = 1 << 20
_NEXT_BEAT_S = 1.5
"""In this time the next heartbeat of another rank comes."""
_CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Limits above it are none: version 1 of control groups gives a number near 2^63."""


class Status(TypedDict):
    """As events and failures have it."""

    phase: str
    step: int | None
    """Optimizer step that the rank is in, from 1; None if it has taken none."""


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


def place_now() -> Status:
    """Returns what the process does now."""
    return {**_now}


def began_ns() -> int:
    """Returns when this task has begun, in nanoseconds of the wall clock."""
    return _began_ns


def since() -> float:
    """Returns when this process has noted something the last time, by the monotonic clock."""
    return _since


def place_in_words(phase: str | None, step: int | None) -> str:
    """Returns for example ` in step 12 (training)`; empty without a step."""
    return "" if step is None else f" in step {step} ({phase})"


class RankMemory(TypedDict):
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


def memory_now() -> RankMemory:
    """Returns the memory of this process."""
    import resource  # not on Windows, where drivers can run

    unit = 1 if sys.platform == "darwin" else 1024
    memory: RankMemory = {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "limit": None, "group": "", "events": "",
        "oom_kills": 0,
    }  # fmt: skip
    for folder, events, limit in _groups():
        if (kills := _oom_kills(folder / events)) is not None:
            memory |= {"events": str(folder / events), "group": _identity(folder / events), "oom_kills": kills}
            memory["limit"] = _limit(folder / limit)
            break
    return memory


def memory_in_words(memory: RankMemory | None) -> str:
    """Returns for example `, with a peak memory of 800 MiB of 1024 MiB`; empty for None."""
    if memory is None:
        return ""
    limit = "" if memory["limit"] is None else f" of {memory['limit'] / _MIB:.0f} MiB"
    return f", with a peak memory of {memory['peak'] / _MIB:.0f} MiB{limit}"


def killed_by_kernel(task: int, memories: Mapping[int, RankMemory]) -> bool:
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


def wait_for_count_s(task: int, memories: Mapping[int, RankMemory]) -> float:
    """Returns how long to wait for a count of kills after a task was killed: for a heartbeat of its control group."""
    last = memories.get(task)
    if last is None or not last["group"] or _is_here(last):
        return 0.0
    shared = any(other["group"] == last["group"] for at, other in memories.items() if at != task)
    return _NEXT_BEAT_S if shared else 0.0


def _is_here(memory: RankMemory) -> bool:
    """Whether this process can read the count of kills of a control group, because it runs on the same host."""
    return _identity(Path(memory["events"])) == memory["group"]


def _groups() -> list[tuple[Path, str, str]]:
    """Returns where this process's control group can be: folder, file with the count of kills, file with the limit.

    In a container the folder is often the root of what the container sees.
    """
    groups = []
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
            groups += [(folder, events, limit) for folder in (root / path.lstrip("/"), root)]
    return groups


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


class RankProgress(TypedDict):
    """The progress of a rank in its collective operations, which is in each heartbeat."""

    number: int
    """Number of the last operation of the default process group, from 1; 0 before the first one."""


def progress() -> RankProgress | None:
    """Returns how far this process has come; None without a process group. Takes less than a millisecond.

    NOTE: `last_collective` reads all that the flight recorder has kept, which takes some ten milliseconds.
    """
    dist: Any = sys.modules.get("torch.distributed")  # an import statement would wait while another thread imports it
    with contextlib.suppress(Exception):  # the group ends meanwhile
        if dist is not None and (group := dist.group.WORLD) is not None:
            return {"number": int(group._get_sequence_number_for_group())}
    return None


def last_collective() -> dict[str, Any] | None:
    """Returns the last collective operation that this task has begun; None without one.

    `number` counts the operations of a process group, from 1; `name` is its name, `tensors` their shapes and types.
    `is_open` says whether an operation of any group has begun and has not ended, by what is recorded of each of them.
    The counts of a group (`pg_status`) do not tell: each thread of Gloo sets the last one that ended when it gets to
    it, and the number of an earlier operation can replace that of a later one.
    """
    if "torch.distributed" not in sys.modules:
        return None
    with contextlib.suppress(Exception):  # the format of the recorder is not that of a stable interface
        from torch._C import _distributed_c10d

        trace = json.loads(_distributed_c10d._dump_fr_trace_json(includeCollectives=True))  # type: ignore[attr-defined]
        of_attempt = [e for e in trace["entries"] if not e["is_p2p"] and e["time_created_ns"] >= began_ns()]
        last = max(of_attempt, key=lambda entry: entry["record_id"], default=None)
        if last is not None:
            tensors = zip(last["input_sizes"], last["input_dtypes"], strict=False)
            return {
                "group": last["process_group"][1], "number": last["collective_seq_id"],
                "name": last["profiling_name"].rpartition(":")[2],
                "tensors": ", ".join(f"{sizes} {dtype}" for sizes, dtype in tensors),
                "is_open": any(not entry["retired"] for entry in of_attempt),
            }  # fmt: skip
    return None
