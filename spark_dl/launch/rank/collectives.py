"""The last collective operation of this process, from torch's flight recorder, which also records Gloo's."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, TypedDict

from spark_dl.launch.rank import status


class Progress(TypedDict):
    """The progress of a rank in its collective operations, which is in each heartbeat."""

    number: int
    """Number of the last operation of the default process group, from 1; 0 before the first one."""
    is_open: bool | None
    """Whether an operation of any group has begun and has not ended; None if the flight recorder has none of them."""


_earlier: dict[str, Any] = {}
"""Counts of the process groups of earlier tasks of this process, by group."""


def reset() -> None:
    """Forgets the operations of earlier tasks of this process, of which some can look as if they had not ended."""
    _earlier.clear()
    _earlier.update(_counts())


def _counts() -> dict[str, Any]:
    """Returns how many operations of each process group have begun and ended, of all that this process has had."""
    if "torch.distributed" not in sys.modules:
        return {}
    with contextlib.suppress(Exception):  # another version of torch has other names
        from torch._C import _distributed_c10d

        found = json.loads(_distributed_c10d._dump_fr_trace_json(includeCollectives=False))  # type: ignore[attr-defined]
        return dict(found.get("pg_status", {}))
    return {}


def progress() -> Progress | None:
    """Returns how far this process has come; None without a process group. Takes less than a millisecond.

    NOTE: `last_collective` reads all that the flight recorder has kept, which takes some ten milliseconds.
    """
    dist: Any = sys.modules.get("torch.distributed")  # an import statement would wait while another thread imports it
    with contextlib.suppress(Exception):  # the group ends meanwhile
        if dist is None or (group := dist.group.WORLD) is None:
            return None
        number = int(group._get_sequence_number_for_group())
        own = [counts for name, counts in _counts().items() if counts != _earlier.get(name)]
        is_open = any(int(c["last_enqueued_collective"]) > int(c["last_completed_collective"]) for c in own)
        return {"number": number, "is_open": is_open if own or not number else None}
    return None


def last_collective() -> dict[str, Any] | None:
    """Returns the last collective operation that this task has begun; None without one.

    `number` counts the operations of a process group, from 1; `name` is its name, `tensors` their shapes and types.
    """
    if "torch.distributed" not in sys.modules:
        return None
    with contextlib.suppress(Exception):  # the format of the recorder is not that of a stable interface
        from torch._C import _distributed_c10d

        trace = json.loads(_distributed_c10d._dump_fr_trace_json(includeCollectives=True))  # type: ignore[attr-defined]
        own = [e for e in trace["entries"] if not e["is_p2p"] and e["time_created_ns"] >= status.began_ns()]
        last = max(own, key=lambda entry: entry["record_id"], default=None)
        if last is not None:
            tensors = zip(last["input_sizes"], last["input_dtypes"], strict=False)
            return {
                "group": last["process_group"][1], "number": last["collective_seq_id"],
                "name": last["profiling_name"].rpartition(":")[2],
                "tensors": ", ".join(f"{sizes} {dtype}" for sizes, dtype in tensors),
            }  # fmt: skip
    return None
