"""Reduce-scatter and all-gather of flat tensors, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def start_reduce_scatter(flat: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Starts to sum the parts of a flat tensor over a group. Returns a function that waits, and returns the sum of this
    rank's part, a new tensor. Collective. # flat: [ranks * n] -> [n]

    NOTE: Gloo's own reduce-scatter is an all-reduce per part, and sends 1.5 times the tensor with 4 ranks where 0.75
    are enough (pytorch/pytorch#149869). So each rank sends the parts to those that sum them, at the cost of a buffer of
    the tensor's size.
    """
    ranks = group.size()
    if dist.get_backend(group) != "gloo":
        own = flat.new_empty(len(flat) // ranks)
        work = dist.reduce_scatter_tensor(own, flat, group=group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return own

        return finish
    received = torch.empty_like(flat)
    work = dist.all_to_all_single(received, flat, group=group, async_op=True)

    def finish_sum() -> Tensor:
        work.wait()
        return received.view(ranks, -1).sum(0)

    return finish_sum


def start_sum(flat: Tensor, group: dist.ProcessGroup | None) -> Callable[[], Tensor]:
    """Starts to sum a tensor over a group, in place. Returns a function that waits, and returns it. Collective."""
    work = None if group is None else dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return flat

    return finish


def gather_parts(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fills a flat tensor with the parts of all ranks of a group, in place. Collective. # flat: [ranks * n]"""
    length = len(flat) // group.size()
    own = flat[group.rank() * length : (group.rank() + 1) * length].clone()
    dist.all_gather_single(flat, own, group=group)
