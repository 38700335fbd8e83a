"""What activations are, at a point of the forward pass: whole, or slices of features, heads or sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spark_dl.parallel.mesh.tensor.functions import TensorRanks, copied, gathered


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

        x: whole, or with an axis this rank's slice.
        """
        has_version = not x.is_inference()  # without one, a change in place would not be seen
        if has_version and self.entered is not None and self.entered[0] is x and self.entered[1] == x._version:
            return self.entered[2]
        entered = copied(x, self.ranks) if axis is None else gathered(x, axis, self.length, self.ranks)
        self.entered = (x, x._version, entered) if has_version else None
        return entered

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
