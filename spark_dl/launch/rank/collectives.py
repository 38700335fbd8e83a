"""The last collective operation of this process, from torch's flight recorder, which also records Gloo's."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from spark_dl.launch.rank import status


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
