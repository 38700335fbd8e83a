"""Dropout on slices: each rank draws the mask of the whole activation and takes its slice of it.

All tensor ranks have the same seed, so the masks are those of a single rank, and random numbers stay in step. torch's
DTensor does this on GPUs only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spark_dl.parallel.mesh.tensor.flow import Flow, wrap_forward


def slice_dropout(module: nn.Module, flow: Flow) -> None:
    """Makes the dropout in the forward pass of a module use slices of whole masks, where activations are slices.

    This is `torch.nn.functional.dropout`, and on CPUs `scaled_dot_product_attention` with dropout. The fused attention
    of GPUs draws its masks itself, for the heads of the rank, so those of all ranks have the same masks.
    """

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        with _SlicedDropout(flow):
            return inner(*args, **kwargs)

    wrap_forward(module, around)


def sliced_dropout(x: Tensor, p: float, axis: int, length: int, flow: Flow) -> Tensor:
    """Dropout of an activation of which this rank has a slice.

    length: of the whole axis; 0 if it is not known which axis is cut. Then each rank takes one of as many masks as
        there are ranks.
    """
    if not length:
        masks = torch.dropout(x.new_ones((flow.ranks.size, *x.shape)), p, train=True)
        return x * masks[flow.ranks.rank]
    # Random numbers fill a mask in the order of its memory, so its axes lie there as those of the activation.
    order = sorted(range(x.ndim), key=lambda i: x.stride(i), reverse=True)
    ones = x.new_ones([length if i == axis else x.shape[i] for i in order])
    start, stop = flow.ranks.bounds(length)
    mask = torch.dropout(ones.permute([order.index(i) for i in range(x.ndim)]), p, train=True)
    return x * mask.narrow(axis, start, stop - start)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, flow: Flow, *,
    is_causal: bool = False, scale: float | None = None, heads_axis: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of this rank's heads, whose dropout uses slices of whole masks. Returns the output and the scores.

    q, k, v: [..., heads, length, size of a head]. mask: True where to attend, or values that are added to the scores.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # As torch does without a fused kernel: both factors get the root of the scale.
    scores = (q * math.sqrt(scale)) @ (k * math.sqrt(scale)).transpose(-2, -1)
    if is_causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    scores = scores.softmax(-1)
    if p > 0:
        scores = sliced_dropout(scores, p, heads_axis, scores.shape[heads_axis] * flow.ranks.size, flow)
    return scores @ v, scores


class _SlicedDropout(TorchFunctionMode):
    def __init__(self, flow: Flow):
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        cut = self._flow.cut_axis(x)
        if not training or p == 0 or cut is None:
            return F.dropout(x, p, training, inplace)
        return sliced_dropout(x, p, *cut, self._flow)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p == 0 or query.device.type != "cpu" or self._flow.columns is None:
            fused = functools.partial(F.scaled_dot_product_attention, query, key, value, attn_mask, dropout_p)
            return fused(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            times = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        return attention(
            query, key, value, attn_mask, dropout_p, self._flow, is_causal=is_causal, scale=scale,
            heads_axis=query.ndim - 3,
        )[0]  # fmt: skip
