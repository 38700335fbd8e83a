"""PowerSGD: gradients as products of two thin matrices (Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2).

Not torch's `powerSGD_hook`, for three reasons. It starts a bucket's second and third all-reduce from callbacks, in an
order that differs between ranks, so a model of several buckets hangs over Gloo. It seeds the global generators, and
divides by zero if a whole gradient is zero. Its state depends on the layout of the buckets.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spark_dl.parallel.exchange.compression import Bucket


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
