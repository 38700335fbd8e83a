"""Sparse gradients with error feedback: what a step leaves out waits in a residual and is added to the next gradient.

`threshold` is that of Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing"; `topk` of
Aji and Heafield 2017 (arXiv:1704.05021), with the convergence proof of Stich et al. 2018 (arXiv:1809.07599). Gradients
are as DDP has them: each rank's sum over its rows times ranks / rows of the global batch, which is the gradient of the
mean loss over its own rows where all have as many. So their size does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_SAMPLE = 1 << 16
"""Elements by which the search for the largest ones estimates where they begin."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together, laid end to end, and what earlier steps left out of them."""

    gradient: Tensor
    """[elements]: this rank's; the mean over the ranks is to take its place."""
    residual: Tensor
    """[elements]: what this rank has not sent yet."""
    shapes: Mapping[str, torch.Size]
    """By name, in their order."""


Average: TypeAlias = Callable[[Bucket, dist.ProcessGroup], None]
"""Puts the mean over the ranks in the place of a bucket's gradient, or what is sent of it. Collective."""


def average_thresholded(bucket: Bucket, group: dist.ProcessGroup, *, threshold: float) -> None:
    """Sends `threshold`, with the sign, for each element whose gradient and residual together are above it. Collective.

    4 bytes per element that is sent, to every other rank. NaN is never sent: who computes gradients must look for it.
    """
    bucket.residual.add_(bucket.gradient)
    sent = take_above(bucket.residual, threshold)
    bucket.gradient.zero_()
    for received in all_gather(sent, group):
        add_above(received, bucket.gradient, threshold)
    bucket.gradient.div_(group.size())


def average_largest(bucket: Bucket, group: dist.ProcessGroup, *, ratio: float) -> None:
    """Sends the given part of the elements, those whose gradient and residual together are the largest. Collective.

    8 bytes per element that is sent, to every other rank.
    """
    bucket.residual.add_(bucket.gradient)
    sent = take_largest(bucket.residual, math.ceil(ratio * bucket.residual.numel()))
    bucket.gradient.zero_()
    for received in all_gather(sent, group, same_length=True):
        add_largest(received, bucket.gradient)
    bucket.gradient.div_(group.size())


def take_above(residual: Tensor, threshold: float) -> Tensor:
    """Takes `threshold`, with the sign, from each element that is larger in size. Returns what was taken, [n] int32.

    One number per element, as Strom packs them: its index, or for a negative one the index with all bits inverted.
    """
    index = _indices(residual.abs() > threshold)
    is_negative = residual[index] < 0
    residual.index_add_(0, index, _signed(threshold, is_negative, residual.dtype), alpha=-1)
    return torch.where(is_negative, ~index, index).to(torch.int32)


def add_above(taken: Tensor, out: Tensor, threshold: float) -> None:
    """Adds what `take_above` returned to a flat tensor."""
    is_negative = taken < 0
    out.index_add_(0, torch.where(is_negative, ~taken, taken), _signed(threshold, is_negative, out.dtype))


def _signed(size: float, is_negative: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(is_negative.shape, size, dtype=dtype, device=is_negative.device).mul_(
        1 - 2 * is_negative.to(dtype)
    )


def take_largest(residual: Tensor, count: int) -> Tensor:
    """Takes the `count` elements that are largest in size. Returns what was taken, [2 * count] int32.

    First their indices, then the bits of their values as float32; what rounding to float32 loses stays in the residual.
    """
    index = largest(residual.abs(), count)
    values = residual[index].float()
    residual.index_add_(0, index, values.to(residual.dtype), alpha=-1)
    return torch.cat([index.to(torch.int32), values.view(torch.int32)])


def add_largest(taken: Tensor, out: Tensor) -> None:
    """Adds what `take_largest` returned to a flat tensor."""
    index, values = taken.chunk(2)
    out.index_add_(0, index, values.view(torch.float32).to(out.dtype))


def largest(sizes: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest elements, in any order. # sizes: (n,), none negative

    NOTE: on a CPU, torch.topk of 6.5 million elements takes 113 ms. A sample tells about where the largest begin, and
    only what is above that is searched: 9 ms for 1 %. The result is the same, as all are searched where the sample
    misleads.
    """
    wanted = math.ceil(1.25 * count / len(sizes) * _SAMPLE) + 64
    if not sizes.is_cuda and len(sizes) > 4 * _SAMPLE and wanted < _SAMPLE // 4:
        sample = sizes[:: len(sizes) // _SAMPLE | 1]  # odd: no multiple of the usual widths of a layer
        above = _indices(sizes >= sample.topk(min(wanted, len(sample))).values[-1])
        if count <= len(above) < len(sizes) // 2:
            return above[sizes[above].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def _indices(mask: Tensor) -> Tensor:
    """Where a mask is true. NOTE: on a CPU, NumPy finds out five times as fast as torch. # mask: (n,) bool"""
    return mask.nonzero().squeeze(1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


def all_gather(part: Tensor, group: dist.ProcessGroup, *, same_length: bool = False) -> list[Tensor]:
    """The flat tensors of all ranks, by rank, each of its own length. Collective.

    They travel padded to the longest, and to one element at least: Gloo was seen to hang where all are empty
    (github.com/sands-lab/grace/issues/16).
    """
    num_ranks = group.size()
    lengths = [len(part)] * num_ranks
    if not same_length:
        told = torch.empty(num_ranks, 1, dtype=torch.int64, device=part.device)
        dist.all_gather(list(told), torch.tensor([len(part)], device=part.device), group=group)
        lengths = told.flatten().tolist()
    padded = part.new_zeros(max(1, *lengths))
    padded[: len(part)] = part
    parts = torch.empty(num_ranks, len(padded), dtype=part.dtype, device=part.device)
    dist.all_gather(list(parts), padded, group=group)
    return [row[:length] for row, length in zip(parts, lengths, strict=True)]
