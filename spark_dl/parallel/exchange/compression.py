"""Compressed gradients with error feedback: what was not sent is kept in a residual and added to the next gradient.

Sparse gradients: for `threshold` Strom 2015, "Scalable distributed DNN training using commodity GPU cloud computing";
for `topk` Aji and Heafield 2017 (arXiv:1704.05021), with the convergence proof of Stich et al. 2018
(arXiv:1809.07599). Gradients are scaled as in DDP: the sum over a rank's rows, times ranks / rows of the global
batch. If all ranks have equally many rows, this is the gradient of the mean loss over the rank's rows. So its size
does not depend on the number of ranks.

PowerSGD: gradients as products of two thin matrices (Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2). Not
torch's `powerSGD_hook`, for three reasons. It starts a bucket's second and third all-reduce from callbacks, in an
order that differs between ranks, so a model of several buckets hangs over Gloo. It seeds the global generators, and
divides by zero if a whole gradient is zero. Its state depends on the layout of the buckets.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

_SAMPLE = 1 << 16
"""Elements of the sample from which `largest` estimates the smallest of the largest elements."""


@dataclass(frozen=True)
class Bucket:
    """Concatenated gradients that are exchanged together, and their residuals."""

    gradient: Tensor
    """[elements]: of this rank; to be replaced by the mean over the ranks."""
    residual: Tensor
    """[elements]: the part that this rank has not sent yet."""
    shapes: Mapping[str, torch.Size]
    """Parameter name -> shape, in the order of the gradient."""


Average: TypeAlias = Callable[[Bucket, dist.ProcessGroup], None]
"""Replaces a bucket's gradient by the mean over the ranks of the parts that are sent. Collective."""


def average_thresholded(bucket: Bucket, group: dist.ProcessGroup, *, threshold: float) -> None:
    """Sends `threshold`, with the sign, for each element of gradient + residual that is larger in size. Collective.

    Sends 4 bytes per element to every other rank. NaN is never sent; the caller must check for it.
    """
    bucket.residual.add_(bucket.gradient)
    sent = take_above(bucket.residual, threshold)
    bucket.gradient.zero_()
    for received in all_gather(sent, group):
        add_above(received, bucket.gradient, threshold)
    bucket.gradient.div_(group.size())


def average_largest(bucket: Bucket, group: dist.ProcessGroup, *, ratio: float) -> None:
    """Sends the given fraction of the elements of gradient + residual, the largest in size. Collective.

    Sends 8 bytes per element to every other rank.
    """
    bucket.residual.add_(bucket.gradient)
    sent = take_largest(bucket.residual, math.ceil(ratio * bucket.residual.numel()))
    bucket.gradient.zero_()
    for received in all_gather(sent, group, same_length=True):
        add_largest(received, bucket.gradient)
    bucket.gradient.div_(group.size())


def take_above(residual: Tensor, threshold: float) -> Tensor:
    """Subtracts `threshold`, with the sign, from each element that is larger in size. Returns them, [n] int32.

    Each is one number, as in Strom: the index of the element, with all bits inverted if the element is negative.
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
    """Subtracts the `count` elements that are largest in size. Returns them, [2 * count] int32.

    First their indices, then the bits of their float32 values. The rounding error of float32 stays in the residual.
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
    """Returns the indices of the `count` largest elements, in any order. # sizes: (n,), none negative

    NOTE: on a CPU, torch.topk of 6.5 million elements takes 113 ms. A lower bound, estimated from a sample, leaves
    fewer elements to search: 9 ms for 1 %. If the estimate is bad, all elements are searched: the result is the same.
    """
    wanted = math.ceil(1.25 * count / len(sizes) * _SAMPLE) + 64
    if not sizes.is_cuda and len(sizes) > 4 * _SAMPLE and wanted < _SAMPLE // 4:
        sample = sizes[:: len(sizes) // _SAMPLE | 1]  # odd: not a multiple of usual layer widths
        above = _indices(sizes >= sample.topk(min(wanted, len(sample))).values[-1])
        if count <= len(above) < len(sizes) // 2:
            return above[sizes[above].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def _indices(mask: Tensor) -> Tensor:
    """Returns the indices of true elements. NOTE: on a CPU, NumPy is five times as fast as torch. # mask: (n,) bool"""
    return mask.nonzero().squeeze(1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


def all_gather(part: Tensor, group: dist.ProcessGroup, *, same_length: bool = False) -> list[Tensor]:
    """Returns the flat tensors of all ranks, by rank. Their lengths may differ. Collective.

    They are sent padded to the longest, and to at least one element, as Gloo can hang if all are empty
    (github.com/sands-lab/grace/issues/16).
    """
    num_ranks = group.size()
    lengths = [len(part)] * num_ranks
    if not same_length:
        gathered = torch.empty(num_ranks, 1, dtype=torch.int64, device=part.device)
        dist.all_gather(list(gathered), torch.tensor([len(part)], device=part.device), group=group)
        lengths = gathered.flatten().tolist()
    padded = part.new_zeros(max(1, *lengths))
    padded[: len(part)] = part
    parts = torch.empty(num_ranks, len(padded), dtype=part.dtype, device=part.device)
    dist.all_gather(list(parts), padded, group=group)
    return [row[:length] for row, length in zip(parts, lengths, strict=True)]


class PowerSgd:
    """PowerSGD with warm start: the factor Q of each matrix is kept as the start of the next step."""

    def __init__(self, rank: int):
        """rank: number of columns of the factors."""
        self._rank = rank
        self._q: dict[str, Tensor] = {}
        self._noise: dict[str, Tensor] = {}

    def average(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        """Averages a bucket. Sends factors of a matrix if `is_worthwhile`, and other parameters whole. Collective.

        Sends 4 * rank * (rows + columns) bytes for a float32 matrix, in two all-reduces. A parameter of more than two
        axes is a matrix: its first axis by all other axes. All ranks get the same product P Q^T of the mean. The
        residual is this rank's gradient minus that product.
        """
        flat = bucket.gradient.add_(bucket.residual)
        sizes = [shape.numel() for shape in bucket.shapes.values()]
        parts = dict(zip(bucket.shapes, flat.split(sizes), strict=True))
        residuals = dict(zip(bucket.shapes, bucket.residual.split(sizes), strict=True))
        matrices = {
            name: part.view(bucket.shapes[name][0], -1)
            for name, part in parts.items()
            if is_worthwhile(bucket.shapes[name], self._rank)
        }
        for name in matrices:
            residuals[name].copy_(parts[name])
        ps = {name: matrix @ self.start(name, matrix) for name, matrix in matrices.items()}
        _all_reduce([*ps.values(), *(part for name, part in parts.items() if name not in matrices)], group)
        ps = {name: orthonormal(p) for name, p in ps.items()}
        qs = {name: matrix.T @ ps[name] for name, matrix in matrices.items()}
        _all_reduce([*qs.values()], group)
        for name, matrix in matrices.items():
            torch.mm(ps[name], qs[name].T, out=matrix)
            residuals[name].sub_(parts[name])
        self._q |= qs

    def start(self, name: str, matrix: Tensor) -> Tensor:
        """Returns the last step's factor, orthonormal. Random in the first step and after a step without gradient."""
        columns = matrix.shape[1]
        if name not in self._noise:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same on all ranks
            noise = torch.randn(columns, min(self._rank, *matrix.shape), generator=generator)
            # NOTE: too small to change the factor of a gradient. Without it, a Q of zeros would stay zero.
            self._noise[name] = 1e-20 * noise.to(matrix.device)
        noise = self._noise[name]
        return orthonormal(noise + self._q[name].to(noise) if name in self._q else noise).to(matrix.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"q": dict(self._q)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._q = dict(state["q"])


def is_worthwhile(shape: Sequence[int], rank: int) -> bool:
    """Returns whether the two factors of a parameter of this shape have at most half its elements."""
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    return 0 < 2 * min(rank, rows, columns) * (rows + columns) <= rows * columns


def orthonormal(matrix: Tensor) -> Tensor:
    """Returns an orthonormal basis of a matrix's columns. # matrix: (n, r), n >= r

    By QR, because Gram-Schmidt divides by zero for a column of zeros.
    """
    q: Tensor = torch.linalg.qr(matrix.to(torch.promote_types(matrix.dtype, torch.float32))).Q
    return q.to(matrix.dtype)


def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces tensors by their mean over the ranks, in one all-reduce. Collective: the same shapes on all ranks."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat.div_(group.size())
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
