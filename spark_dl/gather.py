"""Sums, and gathers of JSON values and of tensors of any shape, over all ranks.

All data are sent as tensors, because `all_gather_object` would unpickle data of peers. A single rank needs no process
group.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(tensor: Tensor) -> None:
    """Sums a tensor over the ranks, in place. Collective."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def broadcast_from_rank0(tensor: Tensor) -> None:
    """Broadcasts the tensor of rank 0, in place. Collective."""
    if dist.is_initialized():
        dist.broadcast(tensor, 0)


def gather_json(value: Any) -> list[Any]:
    """Returns the JSON values of all ranks, by rank. Collective."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in _gather_bytes(data)]


def gather_by_store(store: dist.Store, rank: int, world_size: int, name: str, value: Any) -> list[Any]:
    """Returns the JSON values of all ranks, by rank, without a process group. Collective.

    Args:
        name: unique in the store. Raises an error of torch.distributed if a rank does not call it within the store's
            timeout.
    """

    def put(key: str, value: Any) -> None:
        store.set(key, zlib.compress(json.dumps(value).encode()))  # type: ignore[arg-type] # bytes are accepted

    def get(key: str) -> Any:
        return json.loads(zlib.decompress(store.get(key)))

    put(f"{name}/{rank}", value)
    if rank == 0:
        put(name, [get(f"{name}/{r}") for r in range(world_size)])
    values: list[Any] = get(name)
    return values


class StoreGather:
    """Gathers JSON values again and again without a process group, for a thread beside the training.

    The calls of a rank follow each other, in any thread. Keys that all ranks have read are deleted.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, name: str):
        """name: unique in the store."""
        clone = getattr(store, "clone", None)  # a connection of its own, as a wait can hold it
        self._store = store if clone is None else clone()
        self._rank, self._world_size, self._name, self._calls = rank, world_size, name, 0

    def __call__(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank. Collective. Raises as `gather_by_store` does."""
        name, before = f"{self._name}/{self._calls}", f"{self._name}/{self._calls - 1}"
        self._calls += 1
        values = gather_by_store(self._store, self._rank, self._world_size, name, value)
        if self._rank == 0:  # each rank has sent its value after it had read those of the call before
            for key in (*(f"{name}/{rank}" for rank in range(self._world_size)), before):
                self._store.delete_key(key)
        return values


def gather_tensors(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Returns the tensors of all ranks, by rank, which can have different shapes. Collective.

    A tensor without elements is returned with the dtype and the other axes of the tensors with elements, so that they
    can be concatenated. For `dist_sync_fn` of torchmetrics, whose own gather fails in this case.
    """
    about = gather_json({"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")})
    parts = _gather_bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
    model = next((a for a in about if math.prod(a["shape"])), about[0])
    out = []
    for part, has in zip(parts, about, strict=True):
        if not math.prod(has["shape"]) and model["shape"]:
            has = {"shape": [0, *model["shape"][1:]], "dtype": model["dtype"]}
        out.append(part.view(getattr(torch, has["dtype"])).reshape(has["shape"]).to(tensor.device))
    return out


def _gather_bytes(data: Tensor) -> list[Tensor]:
    """Gathers uint8 tensors of any length, on the CPU. # data: (length,)"""
    if not dist.is_initialized():
        return [data]
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(max(1, longest), dtype=torch.uint8, device=device)
    padded[: len(data)] = data.to(device)
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return [part[: int(size)].cpu() for part, size in zip(parts, sizes, strict=True)]
