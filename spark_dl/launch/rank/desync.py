"""Finds ranks that call different collective operations, before these begin.

Gloo aborts a process that gets a larger tensor than its own, and otherwise waits until the time limit. So the first
operations of each process group are compared. The first rank writes what it calls to the store of the group, and the
others read it there. No rank waits for another one. A rank that calls something else raises before it sends anything.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

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

_UNEVEN = "_match_unused_params_allreduce"
"""The method of DDP by which a rank without more rows answers what DDP does in C++ on the other ranks (`join`)."""
_Counts = weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]]


class DesyncError(RuntimeError):
    """The ranks called different collective operations at the same place."""

    is_retryable = False
    """The code does so again."""


@contextlib.contextmanager
def first_compared(world: World) -> Iterator[None]:
    """Compares the first collective operations of each process group with those of the other ranks, in the block.

    Only those that Python code calls: DDP itself compares the parameters of its ranks. An operation then raises
    DesyncError, on the ranks that come after the first one and call something else.
    """
    if world.world_size == 1:
        yield
        return
    counts: _Counts = weakref.WeakKeyDictionary()
    own = vars(dist.ProcessGroup)  # what `getattr` returns is a function that does not get `self` if it is set again
    methods = {name: own[name] for name in _OPERATIONS if name in own}
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, _compared(world.rank, counts, name, method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(dist.ProcessGroup, name, method)


def _compared(rank: int, counts: _Counts, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    pid = os.getpid()

    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        in_fork = os.getpid() != pid  # whose groups are of its own
        if not in_fork and group.size() > 1 and sys._getframe(1).f_code.co_name != _UNEVEN:
            _compare(rank, counts.setdefault(group, Counter()), group, name, args)
        return method(group, *args, **kwargs)

    return call


def _compare(rank: int, counts: Counter[str], group: dist.ProcessGroup, name: str, args: tuple[Any, ...]) -> None:
    """Raises DesyncError if another rank has called something else as the operation of the same number."""
    tensors = _tensors(name, args)
    device = "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"
    if counts[device] >= COMPARED or (entry := distributed_c10d._world.pg_map.get(group)) is None:
        return
    counts[device] += 1
    if name == "allgather" and device == "cuda":  # NCCL gathers tensors of different sizes
        tensors = []
    roots = [f" of rank {arg.rootRank} of the group" for arg in args if hasattr(arg, "rootRank")]
    what = [_OPERATIONS[name][0], *(f"{t.numel()} {t.dtype}" for t in tensors), *roots]
    shapes = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
    words = f"{_OPERATIONS[name][0]}{f' [{shapes}]' if shapes else ''}{''.join(roots)} at {_called_from()}"
    own = [rank, what, words]
    first = json.loads(entry[1].compare_set(f"collective/{device}/{counts[device]}", "", json.dumps(own)))
    if first[1] != what:
        from spark_dl.launch.failures.root_cause import different

        raise DesyncError(different(counts[device], {called: [caller] for caller, _, called in sorted([first, own])}))


def _tensors(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Returns the tensors of a call that have the same number of elements and type on all ranks."""
    alike = _OPERATIONS[name][1]
    if alike is None or len(args) <= alike:
        return []
    return [args[alike]] if isinstance(args[alike], Tensor) else list(args[alike])


def _called_from() -> str:
    """Returns the file and line that has called an operation of torch."""
    frame = sys._getframe(3)
    of_torch = os.sep + os.path.join("torch", "")
    while frame.f_back and (frame.f_code.co_filename == __file__ or of_torch in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
