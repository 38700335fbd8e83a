"""Ranks that wait for each other in different collective operations, by what each of them has begun last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SAME = "all ranks must call the same ones in the same order, with tensors of the same shapes and types"


def in_words(collective: Mapping[str, Any]) -> str:
    """Returns for example `all_reduce [[3, 4] Float]`."""
    return f"{collective['name']} [{collective['tensors']}]"


def mismatch(known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns which ranks are in different operations of the same number; empty if none are.

    known: what each task has reported, with `rank` and, after a stall, its last `collective`.
    """
    numbers: dict[tuple[str, int], dict[str, list[int]]] = {}
    for who in sorted((who for who in known.values() if who.get("rank") is not None), key=lambda who: who["rank"]):
        if (last := who.get("collective")) is not None:
            operations = numbers.setdefault((last["group"], last["number"]), {})
            operations.setdefault(in_words(last), []).append(who["rank"])
    for (_, number), operations in numbers.items():
        if len(operations) > 1:
            return different(number, operations)
    return ""


def different(number: int, operations: Mapping[str, list[int]]) -> str:
    """Returns the error about ranks that called different operations. operations: the ranks of each operation."""
    called = "; ".join(f"{_ranks(ranks)} {operation}" for operation, ranks in operations.items())
    return f"the ranks called different collective operations as number {number}: {called}; {_SAME}"


def behind(tasks: list[int], known: Mapping[int, Mapping[str, Any]]) -> str:
    """Returns by which collective operations some tasks are behind the others; empty if that is not known."""
    own, first = known[tasks[0]].get("collective"), None
    for task, who in known.items():
        last = who.get("collective")
        if task not in tasks and last is not None and (first is None or last["number"] > first["number"]):
            first = last
    if first is None or (own is not None and own["number"] >= first["number"]):
        return ""
    done = "none yet" if own is None else f"number {own['number']}, {in_words(own)}"
    return f"; the others wait in collective number {first['number']}, {in_words(first)}, and its last is {done}"


def aborted_by_gloo(crash: str, raised: Sequence[Mapping[str, Any]]) -> str:
    """Returns why a process that was in a collective operation has probably aborted itself; empty if it was in none.

    crash: its stacks. raised: the failures of other tasks.
    """
    if "torch/distributed/" not in crash:
        return ""
    other = next((who for who in raised if who.get("collective") and "rank" in who), None)
    told = "" if other is None else f"; rank {other['rank']} had called {in_words(other['collective'])}"
    return (
        "; Gloo aborts the process of a rank that gives a smaller tensor to a collective operation than another rank: "
        f"{_SAME}{told}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
