"""The backends of a user's own process groups: one that is not there is an error that lists those that are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_OF_TORCH: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "mpi": dist.is_mpi_available,
    "nccl": lambda: dist.is_nccl_available() and torch.cuda.device_count() > 0,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}
_NO_CHOICE = ("undefined", "fake")


def available() -> list[str]:
    """Returns the names of the backends that this process can use, also of those that other packages have added."""
    known = [name for name in dist.Backend.backend_list if name not in _NO_CHOICE]
    return sorted(name for name in known if name not in _OF_TORCH or _OF_TORCH[name]())


def check_backend(backend: str | None) -> None:
    """Raises ValueError for a backend that this process does not have. backend: as of `init_process_group`.

    It can have one backend for each type of device: `cpu:gloo,cuda:nccl`.
    """
    for name in (part.rsplit(":", 1)[-1].strip().lower() for part in str(backend or "undefined").split(",")):
        if name in _NO_CHOICE or name in available():
            continue
        why = "torch does not know it"
        if name in _OF_TORCH:
            why = "this build of torch does not have it"
        if name == "nccl" and dist.is_nccl_available():
            why = "this process sees no GPU"
        change = "use gloo on CPUs"
        if name == "nccl":
            change += ", or give each rank a GPU (launch.device: cuda, launch.gpus_per_rank)"
        raise ValueError(
            f"init_process_group: found the backend {name!r}, expected one of {', '.join(available())}: {why}; {change}"
        )


@contextlib.contextmanager
def checked_backends() -> Iterator[None]:
    """Makes `torch.distributed.init_process_group()` raise as `check_backend` does, in the block."""
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        check_backend(backend)
        original(backend, *args, **kwargs)

    modules = (dist, distributed_c10d)
    for module in modules:
        vars(module)["init_process_group"] = init_process_group
    try:
        yield
    finally:
        for module in modules:
            vars(module)["init_process_group"] = original
