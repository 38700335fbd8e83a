"""Finds ranks that call different collective operations, before these begin.

Gloo aborts a process that gets a larger tensor than its own, and otherwise waits until the time limit. So the first
operations of each process group are compared: each rank writes what it calls to the store of the ranks, and reads what
the others have written. It waits for none of them. The rank that comes last sees all, and raises before it sends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spark_dl.launch.failures.mismatch import different
from spark_dl.world import World

COMPARED = 64
"""How many operations of each process group are compared. Most mistakes show in the first steps."""
_OPERATIONS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0), "broadcast": ("broadcast", 0), "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1), "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1), "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1), "reduce_scatter": ("reduce_scatter", None),
    "gather": ("gather", None), "scatter": ("scatter", None), "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all_single", None), "all_to_all_single": ("all_to_all_single", None),
    "barrier": ("barrier", None),
}  # fmt: skip
"""Methods of torch's ProcessGroup: the name of the operation, and the argument whose tensors are alike on all ranks."""


class DesyncError(RuntimeError):
    """The ranks called different collective operations at the same place."""

    is_retryable = False
    """The code does so again."""


@contextlib.contextmanager
def first_compared(world: World) -> Iterator[None]:
    """Compares the first collective operations of each process group with those of the other ranks, in the block.

    Only those that Python code calls: DDP itself compares the parameters of its ranks. An operation then raises
    DesyncError, on the ranks that come after the first one with another operation.
    """
    if world.world_size == 1:
        yield
        return
    counts: Counter[str] = Counter()
    own = vars(dist.ProcessGroup)  # what `getattr` returns is a function that does not get `self` if it is set again
    methods = {name: own[name] for name in _OPERATIONS if name in own}
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, _compared(world, counts, name, method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


def _compared(world: World, counts: Counter[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        counts[group.group_name] += 1
        if (number := counts[group.group_name]) <= COMPARED and group.size() > 1:
            _compare(world, f"collective/{group.group_name}/{number}", number, _in_words(name, args))
        return method(group, *args, **kwargs)

    return call


def _compare(world: World, key: str, number: int, operation: str) -> None:
    """Raises DesyncError if another rank has written another operation."""
    world.store.append(key, f"{world.rank}\t{operation}\t{_called_from()}\n")  # type: ignore[attr-defined]
    calls = [line.split("\t") for line in world.store.get(key).decode().splitlines()]
    if any(called != operation for _, called, _ in calls):
        found: dict[str, list[int]] = {}
        for rank, called, where in calls:
            found.setdefault(f"{called} at {where}", []).append(int(rank))
        raise DesyncError(different(number, found))


def _in_words(name: str, args: tuple[Any, ...]) -> str:
    """Returns an operation with what must be the same on all ranks."""
    words, alike = _OPERATIONS[name]
    if alike is not None and len(args) > alike:
        tensors = [args[alike]] if isinstance(args[alike], Tensor) else list(args[alike])
        if name != "allgather" or not tensors[0].is_cuda:  # NCCL gathers tensors of different sizes
            shapes = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
            words += f" [{shapes}]"
    roots = [arg.rootRank for arg in args if hasattr(arg, "rootRank")]
    return words + "".join(f" of rank {root} of the group" for root in roots)


def _called_from() -> str:
    """Returns the file and line that has called an operation of torch."""
    frame = sys._getframe(2)
    of_torch = os.sep + os.path.join("torch", "")
    while frame.f_back and (frame.f_code.co_filename == __file__ or of_torch in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
