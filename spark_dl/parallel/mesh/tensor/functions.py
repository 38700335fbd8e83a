"""Exchanges of activations between tensor ranks, with their gradients.

As in Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198.

A tensor is whole, the same on all ranks; or each rank has a slice of it; or it is the sum of one part per rank. An
exchange turns one of these into another, and its gradient turns them back:

    function       activations         gradients
    copied         whole               parts are summed
    summed         parts are summed    whole
    sliced         whole to slices     slices are joined
    joined         slices are joined   whole to slices
    gathered       slices are joined   parts are summed to slices
    scattered      parts are summed to slices    slices are joined

What activations are, at a point of the forward pass: whole, or slices of features, heads or sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from spark_dl.parallel.async_collectives import start_reduce_scatter


def bounds(length: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Returns the range of a rank's slice of an axis. The lengths of the slices differ by at most 1."""
    base, rest = divmod(length, num_ranks)
    start = rank * base + min(rank, rest)
    return start, start + base + (rank < rest)


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that have slices of the same layers, or of the same rows, seen by one of them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorRanks:
        """Returns the ranks of a mesh with one axis."""
        group = mesh.get_group()
        return cls(group, group.rank(), group.size())

    def bounds(self, length: int) -> tuple[int, int]:
        """Returns the range of this rank's slice of an axis."""
        return bounds(length, self.size, self.rank)


def copied(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Returns a whole tensor of which each rank computes a part of the gradient. Collective in the backward pass."""
    return _exchange(x, lambda x: x.view_as(x), lambda grad: _sum(grad, ranks))


def summed(x: Tensor, ranks: TensorRanks) -> Tensor:
    """Returns the sum of a tensor over the ranks. Collective."""
    return _exchange(x, lambda x: _sum(x, ranks), lambda grad: grad)


def sliced(x: Tensor, axis: int, ranks: TensorRanks) -> Tensor:
    """Returns this rank's slice of a whole tensor. Collective in the backward pass."""
    length = x.shape[axis]
    return _exchange(x, lambda x: _slice(x, axis, ranks), lambda grad: _join(grad, axis, length, ranks))


def joined(x: Tensor, axis: int, length: int, ranks: TensorRanks) -> Tensor:
    """Returns the whole tensor, with which all ranks compute the same. Collective.

    Args:
        x: this rank's slice.
        length: of the whole axis.
    """
    return _exchange(x, lambda x: _join(x, axis, length, ranks), lambda grad: _slice(grad, axis, ranks))


def gathered(x: Tensor, axis: int, length: int, ranks: TensorRanks) -> Tensor:
    """Returns the whole tensor, of which each rank computes a part of the gradient. Collective in both passes.

    Args:
        x: this rank's slice.
        length: of the whole axis.
    """
    return _exchange(x, lambda x: _join(x, axis, length, ranks), lambda grad: _sum_slice(grad, axis, ranks))


def scattered(x: Tensor, axis: int, ranks: TensorRanks) -> Tensor:
    """Returns this rank's slice of the sum of a tensor over the ranks. Collective in both passes."""
    length = x.shape[axis]
    return _exchange(x, lambda x: _sum_slice(x, axis, ranks), lambda grad: _join(grad, axis, length, ranks))


def with_equal_gradients(tensors: Sequence[Tensor], ranks: TensorRanks, *, sums: bool) -> list[Tensor]:
    """Returns whole weights whose gradients are exchanged, all of them at once. Collective in the backward pass.

    Args:
        sums: whether each rank computes a part of the gradients, and they are summed. Otherwise they are averaged:
            ranks compute the same, but processors of different kinds round differently, and their weights would drift
            apart.
    """
    return list(cast("tuple[Tensor, ...]", _EqualGradients.apply(ranks, sums, *tensors)))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def _exchange(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return cast("Tensor", _Exchange.apply(x, there, back))


class _EqualGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: TensorRanks, sums: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.sums = ranks, sums
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        present = [grad for grad in grads if grad is not None]
        exchanged: list[Tensor] = []
        if present:
            flat = torch.cat([grad.reshape(-1) for grad in present])
            dist.all_reduce(flat, group=ctx.ranks.group)
            if not ctx.sums:
                flat /= ctx.ranks.size
            parts = flat.split([grad.numel() for grad in present])
            exchanged = [part.view(grad.shape) for part, grad in zip(parts, present, strict=True)]
        left = iter(exchanged)
        return None, None, *(None if grad is None else next(left) for grad in grads)


def _sum(x: Tensor, ranks: TensorRanks) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=ranks.group)
    return total


def _slice(x: Tensor, axis: int, ranks: TensorRanks) -> Tensor:
    start, stop = ranks.bounds(x.shape[axis])
    return x.narrow(axis, start, stop - start).contiguous()


def _join(x: Tensor, axis: int, length: int, ranks: TensorRanks) -> Tensor:
    own = _padded(x, axis, -(-length // ranks.size)).contiguous()
    slices = [torch.empty_like(own) for _ in range(ranks.size)]
    dist.all_gather(slices, own, group=ranks.group)
    ends = [bounds(length, ranks.size, rank) for rank in range(ranks.size)]
    return torch.cat([s.narrow(axis, 0, stop - start) for s, (start, stop) in zip(slices, ends, strict=True)], axis)


def _sum_slice(x: Tensor, axis: int, ranks: TensorRanks) -> Tensor:
    length = x.shape[axis]
    ends = [bounds(length, ranks.size, rank) for rank in range(ranks.size)]
    longest = -(-length // ranks.size)
    slices = torch.stack([_padded(x.narrow(axis, start, stop - start), axis, longest) for start, stop in ends])
    own = start_reduce_scatter(slices.view(-1), ranks.group)().view(slices.shape[1:])
    start, stop = ends[ranks.rank]
    return own.narrow(axis, 0, stop - start)


def _padded(x: Tensor, axis: int, length: int) -> Tensor:
    missing = length - x.shape[axis]
    if not missing:
        return x
    shape = list(x.shape)
    shape[axis] = missing
    return torch.cat([x, x.new_zeros(shape)], axis)


@dataclass
class Flow:
    """The state of the forward pass of one model on one rank. The cut layers keep it up to date as they are called."""

    ranks: TensorRanks
    columns: torch.Size | None = None
    """Shape of the last output of a layer that is cut by columns, until a layer that is cut by rows takes it."""
    columns_of: str = ""
    """Name of this layer."""
    sequence: int | None = None
    """Axis of which activations are slices, between layers that are cut. None: they are whole."""
    length: int = 0
    """Length of this axis of the whole activations."""
    entered: tuple[Tensor, int, Tensor] | None = None
    """The last tensor that entered layers cut by columns, its version, and what these layers got for it."""

    def enter(self, x: Tensor, *, axis: int | None = None) -> Tensor:
        """Returns the input of layers that are cut by columns.

        Several layers with the same input, such as the projections of an attention, share one exchange. Collective.

        Args:
            x: whole, or with an axis this rank's slice.
        """
        has_version = not x.is_inference()  # without one, a change in place would not be seen
        if has_version and self.entered is not None and self.entered[0] is x and self.entered[1] == x._version:
            return self.entered[2]
        entered = copied(x, self.ranks) if axis is None else gathered(x, axis, self.length, self.ranks)
        self.entered = (x, x._version, entered) if has_version else None
        return entered

    def kept(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the state of now, for layers that are called again in the backward pass."""
        then = dataclasses.replace(self, entered=None)

        @contextlib.contextmanager
        def with_it() -> Iterator[None]:
            before = dict(vars(self))
            vars(self).update(vars(then))
            try:
                yield
            finally:
                vars(self).update(before)

        return with_it()

    def leave(self, *, sequence: int | None) -> None:
        """Notes that slices of features or heads end here. sequence: axis of which the activations are slices now."""
        self.columns, self.sequence, self.entered = None, sequence, None

    def cut_axis(self, x: Tensor) -> tuple[int, int] | None:
        """Returns the axis of which an activation is a slice, and its whole length; None if the activation is whole.

        The axis is -1 with the length 0 if activations are slices, but of what cannot be told from the shape.
        """
        size, columns = self.ranks.size, self.columns
        if columns is None:
            start, stop = self.ranks.bounds(self.length)
            if self.sequence is None or x.ndim <= self.sequence or x.shape[self.sequence] != stop - start:
                return None
            return self.sequence, self.length
        if x.shape[:-1] == columns[:-1]:  # [..., features]
            return x.ndim - 1, x.shape[-1] * size
        if x.ndim == 4 and len(columns) == 3:  # scores [rows, heads, length, length], or [rows, length, heads, size]
            axis = 1 if x.shape[2] == columns[1] else 2
            return axis, x.shape[axis] * size
        return -1, 0


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Makes a module call `around(forward, *args, **kwargs)` instead of its `forward`."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    vars(module)["forward"] = forward


def map_input(change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the arguments of a layer with its input, the first tensor among them, changed."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and (not args or args[0] is None):
            return args, {**kwargs, name: change(value)}
    raise ValueError(f"expected a tensor as the first argument, found {[type(a).__name__ for a in args]}, {[*kwargs]}")
