"""Ranks that wait for each other in different collective operations, by what each of them has begun last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DEFAULT_GROUP = "default_pg"
"""Torch's name of the default process group."""
_SAME = "all ranks must call the same ones in the same order, with tensors of the same shapes and types"


def in_words(collective: Mapping[str, Any]) -> str:
    """Returns for example `all_reduce [[3, 4] Float]`."""
    return f"{collective['name']} [{collective['tensors']}]"


def numbered(collective: Mapping[str, Any]) -> str:
    """Returns for example `number 7, all_reduce [[3, 4] Float]`."""
    return f"number {collective['number']}, {in_words(collective)}"


def last_number(who: Mapping[str, Any]) -> int | None:
    """Returns the number of the last collective operation of a task; None if it is not known.

    The one that it has sent with its stacks or its error, or that of its last heartbeat, which is of the default group.
    """
    last = who.get("collective") or who.get("progress")
    number: int | None = last["number"] if last else None
    return number


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
    who, first = known.get(tasks[0], {}), None
    for task, other in known.items():
        last = other.get("collective")
        if task not in tasks and last is not None and (first is None or last["number"] > first["number"]):
            first = last
    if first is None:
        return ""
    own, number = who.get("collective"), last_number(who)
    if own is None and first["group"] != _DEFAULT_GROUP:
        number = None  # that of a heartbeat is of another group
    if number is not None and number >= first["number"]:
        return ""
    done = ""
    if own or number:
        done = f", and its last is {numbered(own) if own else f'number {number}, by its last heartbeat'}"
    elif number == 0 or "collective" in who:
        done = ", and its last is none yet"
    return f"; the others wait in collective {numbered(first)}{done}"


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
