"""What a profile says in a few numbers: how long the device was idle in each step, and why. A pure function of a trace.

The device of a rank on a GPU is the GPU: its kernels and copies. On a CPU it is the operations of torch, in all threads
of the rank, and Python between them is time in which the device is idle.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PARTS = ("compute", "communication", "data", "host")
"""What the time of a step is divided into: the device computes; it sends or waits for other ranks; it is idle as the
rank waits for its loader; it is idle, and the host does something else."""
_STEP = re.compile(r"step \d+")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = re.compile(r"nccl|gloo|c10d::|horovod|mpi:", re.IGNORECASE)
_MOST = 10
_US = 1e-6

Span = tuple[float, float]


def summary_of(events: Iterable[Mapping[str, Any]], wait_for_data: str = "wait for data") -> dict[str, Any]:
    """Returns the summary of the events of a Chrome trace; an empty one without a step.

    Args:
        wait_for_data: name of the spans in which a rank waits for its loader. A step is a span `step <n>`.

    Returns:
        `steps`, their number; `device`, "gpu" or "cpu"; `step_s`, the mean duration of a step, and `<part>_s` of each
        of `PARTS`, which add up to it; `operations`, the number of kernels (of operations on a CPU) in a step, and
        `top`, those that take longest, without what they call, as [name, seconds in a step, number in a step].
    """
    spans = [e for e in events if e.get("ph") == "X" and "ts" in e and "dur" in e]
    steps = [e for e in spans if _STEP.fullmatch(str(e["name"])) and e.get("cat") == "user_annotation"]
    if not steps:
        return {}
    waits = [_span(e) for e in spans if e["name"] == wait_for_data and e.get("cat") == "user_annotation"]
    first, last = min(_span(e) for e in steps)[0], max(_span(e)[1] for e in steps)
    # The wait before the first step is a part of it, and that after the last one is not.
    before = [wait for wait in waits if wait[1] <= first]
    window = (max(before)[0] if before else first, last)
    on_gpu = [e for e in spans if e.get("cat") in _ON_GPU]
    work = on_gpu or [e for e in spans if e.get("cat") == "cpu_op"]
    exchanges = [_span(e) for e in (on_gpu or spans) if _COMMUNICATION.search(str(e["name"]))]
    compute = _union([_span(e) for e in work if not _COMMUNICATION.search(str(e["name"]))], window)
    kinds = [compute, _union(exchanges, window), _union(waits, window)]
    parts = dict(zip(PARTS, _exclusive(kinds, window), strict=True))
    found: dict[str, list[float]] = defaultdict(list)
    for event, own in ((event, event["dur"]) for event in work) if on_gpu else _own_times(work):
        if window[0] <= event["ts"] < window[1]:
            found[str(event["name"])].append(own)
    longest = sorted(found, key=lambda name: -sum(found[name]))[:_MOST]
    count = len(steps)
    return {
        "steps": count,
        "device": "gpu" if on_gpu else "cpu",
        "step_s": _US * (window[1] - window[0]) / count,
        **{f"{part}_s": _US * us / count for part, us in parts.items()},
        "operations": sum(map(len, found.values())) / count,
        "top": [[name, _US * sum(found[name]) / count, len(found[name]) / count] for name in longest],
    }


def _own_times(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yields each event with its duration without that of the events within it, of the same thread."""
    for _, of_thread in itertools.groupby(sorted(events, key=_place), key=lambda event: _place(event)[:2]):
        open_: list[list[Any]] = []  # [event, own duration], the innermost last
        for event in of_thread:
            while open_ and _span(open_[-1][0])[1] <= event["ts"]:
                yield tuple(open_.pop())  # type: ignore[misc]
            if open_:
                open_[-1][1] -= event["dur"]
            open_.append([event, event["dur"]])
        yield from map(tuple, open_)  # type: ignore[misc]


def _place(event: Mapping[str, Any]) -> tuple[str, str, float, float]:
    return str(event.get("pid")), str(event.get("tid")), event["ts"], -event["dur"]


def _span(event: Mapping[str, Any]) -> Span:
    return (event["ts"], event["ts"] + event["dur"])


def _union(spans: Sequence[Span], window: Span) -> list[Span]:
    """Returns the times in the window that some span has, in order and apart."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        start, end = max(start, window[0]), min(end, window[1])
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _exclusive(kinds: Sequence[Sequence[Span]], window: Span) -> list[float]:
    """Returns the time of each kind in which no kind before it is, and last the time that is left."""
    edges = sorted({edge for spans in kinds for span in spans for edge in span} | {*window})
    seconds, at = [0.0] * (len(kinds) + 1), [0] * len(kinds)
    for start, end in itertools.pairwise(edges):
        for kind, spans in enumerate(kinds):
            while at[kind] < len(spans) and spans[at[kind]][1] <= start:
                at[kind] += 1
            if at[kind] < len(spans) and spans[at[kind]][0] <= start:
                seconds[kind] += end - start
                break
        else:
            seconds[-1] += end - start
    return seconds
