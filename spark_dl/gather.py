"""Sums, and gathers of JSON values, of tensors of any shape and of rows with gradients, over all ranks.

All data are sent as tensors, because `all_gather_object` would unpickle data of peers. A single rank needs no process
group.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    return [part.cpu() for part in _gather_parts(data.to(device))]


def _gather_parts(rows: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gathers tensors that differ in their first axis alone, on their device, by rank. # rows: (rows of a rank, ...)"""
    if rows.dtype == torch.bool:  # which not all backends send
        return [part.bool() for part in _gather_parts(rows.byte(), group)]
    length = torch.tensor([len(rows)], device=rows.device)
    gathered_lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered_lengths, length, group=group)
    lengths = [int(each) for each in gathered_lengths]
    padded = rows.new_zeros((max(1, *lengths), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


@dataclass(frozen=True)
class RowRanks:
    """The ranks that compute the same step on different rows, over which `gather_rows` gathers."""

    num: int
    group: dist.ProcessGroup | None = None
    """None: all ranks."""


_NOT_TOGETHER = "the ranks of this parallel.strategy do not compute a step together; use ddp or mesh"


@dataclass
class _Step:
    """What `gather_rows` needs to know of the step, or of the evaluation, that this process computes."""

    ranks: RowRanks | str
    """Or why there are none."""
    several: str = ""
    """The setting by which a step has several micro-batches; empty if it has one."""
    weight: Tensor | None = None
    """Weights of the batch of which `spec.batch_loss` has the true rows first; None elsewhere."""
    calls: int = 0


_step: _Step | None = None


@contextlib.contextmanager
def gathering(ranks: RowRanks | str | None, *, several: str = "") -> Iterator[None]:
    """Says what `gather_rows` gathers over if a function of the user calls it in this block. Used on a rank.

    Args:
        ranks: a string says why it is an error. None: the ranks of the strategy do not compute a step together.
        several: the setting by which the step has several micro-batches, such as "loader.max_tokens=4096".
    """
    global _step
    before, _step = _step, _Step(_NOT_TOGETHER if ranks is None else ranks, several)
    try:
        yield
    finally:
        _step = before


def gathered() -> bool:
    """Whether `gather_rows` was called in the block of `gathering` that this process is in."""
    return _step is not None and _step.calls > 0


@contextlib.contextmanager
def of_true_rows(weight: Tensor) -> Iterator[None]:
    """The user's function in this block gets the true rows of a batch, or all of them if there are none.

    Args:
        weight: of the whole batch, [rows]. It is looked at only if the function calls `gather_rows`.
    """
    if _step is None:
        yield
        return
    before, _step.weight = _step.weight, weight
    try:
        yield
    finally:
        _step.weight = before


def gather_rows(tensor: Tensor, batch: Mapping[str, Tensor] | None = None) -> Tensor:
    """Returns a tensor's rows of all ranks, for a loss that compares the rows of a global batch. Collective.

    Called in `ModelSpec.batch_loss`, in the `training_step` of a LightningModule, or in `ModelSpec.loss`, for example
    on the embeddings of a contrastive loss. The loss of each rank is then that of the whole global batch, and gradients
    flow to the rows of all ranks, so the trained weights do not depend on the number of ranks. Padding is left out. One
    process, such as the driver that tries the loss, has its own rows alone.

    Args:
        tensor: one entry per row of the batch, [rows, ...]. The other axes are the same on all ranks.
        batch: the batch of the call. Only `ModelSpec.loss` needs it, whose batches have rows of weight 0.

    Returns:
        [rows of all ranks, ...], by rank.

    Raises:
        ValueError: With `train.accumulation_steps` above 1, or `loader.max_tokens`, whose micro-batches are computed
            one after another; for a strategy whose ranks do not compute a step together; and for a tensor without an
            entry for each row.

    Example:
        >>> def contrastive(model, batch):
        ...     images, texts = (spark_dl.gather_rows(x) for x in model(batch["image"], batch["text"]))
        ...     return torch.nn.functional.cross_entropy(images @ texts.T, torch.arange(len(images)))
        >>> spark_dl.ModelSpec(build=lambda: torch.nn.Identity(), batch_loss=contrastive)
    """
    rows = _true_rows_of(tensor, batch)
    if _step is not None and _step.several:
        raise ValueError(
            f"spark_dl.gather_rows: found {_step.several}, expected one micro-batch: the rows of the others are not "
            "there when the loss of one of them is computed; return the rows from ModelSpec(embed=...) and compare "
            "them in ModelSpec(global_loss=...) with train.accumulation_steps, use more ranks, or a smaller "
            "train.global_batch_size"
        )
    ranks = _ranks_of_step()
    return rows if ranks.num == 1 else _GatherRows.apply(rows, ranks.group)  # type: ignore[no-any-return, no-untyped-call]


def gather_all_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Returns the rows of all ranks, without a gradient, and the place of this rank's among them. Collective.

    Raises ValueError for a strategy whose ranks do not compute a step together.
    """
    ranks = _ranks_of_step()
    if ranks.num == 1:
        return rows.detach(), 0
    parts = _gather_parts(rows.detach(), ranks.group)
    return torch.cat(parts), sum(map(len, parts[: dist.get_rank(ranks.group)]))


def _ranks_of_step() -> RowRanks:
    if _step is None:
        return RowRanks(dist.get_world_size() if dist.is_initialized() else 1)
    _step.calls += 1
    if isinstance(_step.ranks, str):
        raise ValueError(f"spark_dl.gather_rows: {_step.ranks}")
    return _step.ranks


def _true_rows_of(tensor: Tensor, batch: Mapping[str, Tensor] | None) -> Tensor:
    weight = None if batch is None else batch.get("weight")
    if weight is not None and tensor.ndim and len(tensor) != len(weight):
        raise ValueError(
            f"spark_dl.gather_rows: expected one entry for each of the {len(weight)} rows, found shape "
            f"{tuple(tensor.shape)}"
        )
    if not tensor.ndim:
        raise ValueError("spark_dl.gather_rows: expected one entry per row, found a tensor without axes")
    if _step is not None and _step.weight is not None:
        return tensor[: int((_step.weight > 0).sum())]
    return tensor if weight is None else tensor[weight > 0]


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks. Each rank's gradient is the sum of what all ranks have for its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        parts = _gather_parts(rows, group)
        ctx.group, ctx.start, ctx.rows = group, sum(map(len, parts[: dist.get_rank(group)])), len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        summed = gradient.float().contiguous() if gradient.dtype.itemsize < 4 else gradient.clone().contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.start : ctx.start + ctx.rows].to(gradient.dtype), None
