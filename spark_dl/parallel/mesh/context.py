"""Ranks that have slices of the same rows (`parallel.context`): each computes the positions of its slice, and attends
to the keys and values of all of them (Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2, arXiv:2407.21783).

The keys and values of a layer are gathered before its attention, and their gradients summed after it. All other layers
compute a slice alone. torch's own ring attention (`torch.distributed.tensor.experimental.context_parallel`) has none
for CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spark_dl.nn.packed import offset_by
from spark_dl.parallel.loss import Call
from spark_dl.parallel.mesh.tensor.functions import TensorRanks, gathered, summed
from spark_dl.spec import Batch


class Context:
    """The slices of the ranks that have the same rows. Called on each of them."""

    def __init__(self, group: dist.ProcessGroup, features: Sequence[str]):
        """features: the columns of which the first with positions says how many there are."""
        self._ranks, self._features = TensorRanks(group, group.rank(), group.size()), features
        self.size = group.size()
        self._length = 0
        """Positions of the slice that is computed; 0 outside a forward pass."""

    def own_part(self, batch: Batch) -> Batch:
        """Returns this rank's slice of a batch: of each tensor with as many positions as the first feature has.

        Raises ValueError for a batch without positions, or with a number of them that the ranks cannot divide.
        """
        name = self._with_positions(batch)
        length = batch[name].shape[1]
        if length % self.size:
            raise ValueError(
                f"parallel.context: expected a multiple of {self.size} positions, found {length} in the feature "
                f"{name!r}; pad rows to such lengths (loader.pad_to)"
            )
        start, stop = self._ranks.bounds(length)
        return {k: v[:, start:stop] if v.ndim > 1 and v.shape[1] == length else v for k, v in batch.items()}

    def _with_positions(self, batch: Batch) -> str:
        for name in self._features:
            if name in batch and batch[name].ndim > 1:
                return name
        raise ValueError(
            "parallel.context: expected a feature with an axis of positions, [rows, positions, ...], found none among "
            f"{', '.join(self._features)}"
        )

    def inside(self, call: Call) -> Call:
        """Returns what calls a function with the model and a slice, with the attention to all slices."""

        def called(function: Any, batch: Batch) -> Any:
            with self._attending(batch[self._with_positions(batch)].shape[1]):
                return call(function, batch)

        return called

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor over the slices. Collective."""
        return summed(tensor, self._ranks)

    def again(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of this moment, for layers that are computed again in the backward pass."""
        return self._attending(self._length) if self._length else contextlib.nullcontext()

    @contextlib.contextmanager
    def _attending(self, length: int) -> Iterator[None]:
        before, self._length = self._length, length
        try:
            with offset_by(self._ranks.rank * length), _Attention(self._ranks):
                yield
        finally:
            self._length = before


class _Attention(TorchFunctionMode):
    """Lets `scaled_dot_product_attention` see the keys and values of all ranks."""

    def __init__(self, ranks: TensorRanks):
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(func, *args, **(kwargs or {}))

    def _attend(
        self, func: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None:
            raise ValueError(
                "parallel.context: an attention with a mask (attn_mask) is not supported, as the mask is that of a "
                "slice; use is_causal=True, or no mask"
            )
        queries, whole = query.shape[-2], key.shape[-2] * self._ranks.size
        key, value = (gathered(each, each.ndim - 2, whole, self._ranks) for each in (key, value))
        if is_causal:
            if queries * self._ranks.size != whole:
                raise ValueError("parallel.context: a causal attention to keys of another length is not supported")
            rows = torch.arange(queries, device=query.device)[:, None] + self._ranks.rank * queries
            attn_mask = rows >= torch.arange(whole, device=query.device)
        return func(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **more)
