"""The last collective operation of this process, from torch's flight recorder, which also records Gloo's."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, TypedDict

from spark_dl.launch.failures import status


class Progress(TypedDict):
    """The progress of a rank in its collective operations, which is in each heartbeat."""

    number: int
    """Number of the last operation of the default process group, from 1; 0 before the first one."""


def progress() -> Progress | None:
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
        own = [e for e in trace["entries"] if not e["is_p2p"] and e["time_created_ns"] >= status.began_ns()]
        last = max(own, key=lambda entry: entry["record_id"], default=None)
        if last is not None:
            tensors = zip(last["input_sizes"], last["input_dtypes"], strict=False)
            return {
                "group": last["process_group"][1], "number": last["collective_seq_id"],
                "name": last["profiling_name"].rpartition(":")[2],
                "tensors": ", ".join(f"{sizes} {dtype}" for sizes, dtype in tensors),
                "is_open": any(not entry["retired"] for entry in own),
            }  # fmt: skip
    return None
