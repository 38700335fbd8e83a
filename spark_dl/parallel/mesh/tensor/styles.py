"""How a module is cut and called: one of torch's parallel styles for each word of a tensor plan.

The parameters stay plain tensors: a rank's slices. torch's own styles make them DTensors, which `clip_grad_norm_`
does not take together with other tensors, and send three all-reduces in the backward pass where three projections
have the same input.

torch's MultiheadAttention has its heads cut over tensor ranks. Dropout on slices: each rank draws the mask of the
whole activation and takes its slice of it. All tensor ranks have the same seed, so the masks are the masks of a
single rank, and random numbers stay in step. torch's DTensor does this on GPUs only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from spark_dl.parallel.mesh.tensor.functions import (
    Flow,
    joined,
    map_input,
    scattered,
    sliced,
    summed,
    with_equal_gradients,
    wrap_forward,
)
from spark_dl.parallel.mesh.tensor.words import COLUMNS, is_conv1d, outputs


class Columns(ParallelStyle):
    """A linear layer whose outputs are cut.

    Args:
        enter: turns the input into what the layer gets, whose gradient is summed over the ranks.
    """

    def __init__(self, name: str, word: str, flow: Flow, enter: Callable[[Tensor], Tensor]):
        self.name, self.word, self.flow, self.enter = name, word, flow, enter

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        flow, features = self.flow, outputs(module)
        parts = COLUMNS[self.word]
        if is_conv1d(module):
            vars(module)["nf"] = features // flow.ranks.size
        gathers = self.word == "colwise_gather_output"

        def around(inner: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            args, kwargs = map_input(self.enter, args, kwargs)
            out = _packed(module, args[0]) if parts > 1 and is_conv1d(module) else inner(*args, **kwargs)
            if gathers:
                flow.leave(sequence=None)
                return joined(out, out.ndim - 1, features, flow.ranks)
            flow.columns, flow.columns_of = out.shape, self.name
            return out

        wrap_forward(module, around)
        return module


class RowParallelInput(ParallelStyle):
    """A linear layer whose inputs are cut, and whose outputs are summed over the ranks.

    Args:
        sequence: axis of the output of which this rank gets a slice; None: it gets the whole output.
    """

    def __init__(self, name: str, word: str, flow: Flow, sequence: int | None):
        self.name, self.splits, self.flow, self.sequence = name, word == "rowwise_split_input", flow, sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        flow, is_conv = self.flow, is_conv1d(module)

        def multiply(x: Tensor) -> Tensor:
            if self.splits:
                x = sliced(x, x.ndim - 1, flow.ranks)
            weight: Any = module.weight.t() if is_conv else module.weight  # type: ignore[operator]
            if x.shape[-1] != weight.shape[1]:
                raise ValueError(
                    f"spec.tensor_plan: expected {weight.shape[1]} inputs for {self.name!r}, this rank's slice of what "
                    f"a layer before has cut, found {x.shape[-1]}; 'rowwise_split_input' takes whole inputs"
                )
            return end_rows(F.linear(x, weight), module.bias, flow, self.sequence)  # type: ignore[arg-type]

        wrap_forward(module, lambda inner, x: multiply(x))
        return module


class Vocabulary(ParallelStyle):
    """An embedding of which each rank has some rows."""

    def __init__(self, flow: Flow):
        self.flow = flow

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        ranks = self.flow.ranks
        start, stop = ranks.bounds(module.num_embeddings)
        if module.padding_idx is not None:
            padding = module.padding_idx - start
            module.padding_idx = padding if 0 <= padding < stop - start else None

        def around(inner: Callable[..., Tensor], ids: Tensor) -> Tensor:
            if ids.device.type == "cpu" and not ((ids >= 0) & (ids < module.num_embeddings)).all():
                low, high = ids.aminmax()
                raise IndexError(f"expected indices in [0, {module.num_embeddings}), found {int(low)} to {int(high)}")
            own = (ids >= start) & (ids < stop)
            out = inner((ids - start).where(own, 0))
            return summed(out.masked_fill(~own.unsqueeze(-1), 0), ranks)

        wrap_forward(module, around)
        return module


def end_rows(out: Tensor, bias: Tensor | None, flow: Flow, sequence: int | None) -> Tensor:
    """Returns the output of a layer that is cut by rows, from this rank's part of the sum. Collective."""
    flow.leave(sequence=sequence)
    if sequence is None:
        out = summed(out, flow.ranks)
    else:
        flow.length = out.shape[sequence]
        out = scattered(out, sequence, flow.ranks)
    if bias is None:
        return out
    if torch.is_grad_enabled() and bias.requires_grad:
        (bias,) = with_equal_gradients([bias], flow.ranks, sums=sequence is not None)
    return out + bias.to(out.dtype)


def _packed(module: Any, x: Tensor) -> Tensor:
    """Calls Hugging Face's Conv1D with slices of the matrices in its weight, [matrices, inputs, outputs / matrices]."""
    weight = module.weight.transpose(0, 1).flatten(1)
    out = torch.addmm(module.bias, x.reshape(-1, x.shape[-1]), weight)
    return out.view(*x.shape[:-1], out.shape[-1])


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

    Args:
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

    Args:
        q, k, v: [..., heads, length, size of a head].
        mask: True where to attend, or values that are added to the scores.
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


class Heads(ParallelStyle):
    """`nn.MultiheadAttention` of which each rank has some heads: their rows of the packed or separate projections, and
    their columns of `out_proj`.

    Args:
        sequence: axis of which query, key and value are slices.
    """

    def __init__(self, flow: Flow, sequence: int | None):
        self.flow, self.sequence = flow, sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.MultiheadAttention)

        def forward(
            query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
            need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
            is_causal: bool = False,
        ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
            is_batched = query.ndim == 3
            if not is_batched and key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)

            def enter(x: Tensor) -> Tensor:
                x = self.flow.enter(x, axis=self.sequence)
                return x.unsqueeze(1) if not is_batched else x.transpose(0, 1) if module.batch_first else x

            q, k, v = self._each(enter, query, key, value)
            # q, k, v: [length, rows, features]
            q, k, v = (self._heads_of(module, x) for x in _project(module, q, k, v))
            mask = self._mask(attn_mask, key_padding_mask, module.num_heads, q)
            p = module.dropout if module.training else 0.0
            if p or need_weights:
                out, scores = attention(q, k, v, mask, p, self.flow)
            else:
                out = F.scaled_dot_product_attention(q, k, v, mask)
            out = out.permute(2, 0, 1, 3).flatten(2)  # [length, rows, features of this rank's heads]
            out = F.linear(out, module.out_proj.weight)
            out = end_rows(out, module.out_proj.bias, self.flow, None if self.sequence is None else 0)
            out = out.squeeze(1) if not is_batched else out.transpose(0, 1) if module.batch_first else out
            self.flow.sequence = self.sequence
            if not need_weights:
                return out, None
            return out, self._weights(scores, average=average_attn_weights, is_batched=is_batched)

        wrap_forward(module, lambda inner, *args, **kwargs: forward(*args, **kwargs))
        return module

    def _each(self, enter: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
        """Returns what the projections get for query, key and value: the same for those that are the same tensor."""
        of_heads: dict[int, Tensor] = {}
        for x in tensors:
            if id(x) not in of_heads:
                of_heads[id(x)] = enter(x)
        if self.sequence is not None and len(of_heads) > 1:
            raise ValueError(
                "parallel.sequence: expected attention of a sequence to itself, found a key or a value that is another "
                "tensor than the query; set it to false"
            )
        return [of_heads[id(x)] for x in tensors]

    def _heads_of(self, module: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """Returns [rows, heads, length, size of a head] of [length, rows, features]."""
        heads = module.num_heads // self.flow.ranks.size
        return x.view(*x.shape[:2], heads, module.head_dim).permute(1, 2, 0, 3)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, heads: int, q: Tensor) -> Tensor | None:
        """Returns what is added to the scores of this rank's heads.

        Args:
            mask, padding: True where not to attend, or values to add.
        """
        masks: list[Tensor] = []
        if mask is not None:
            added = _added(mask, q.dtype)
            if mask.ndim == 3:
                start, stop = self.flow.ranks.bounds(heads)
                added = added.unflatten(0, (q.shape[0], -1))  # [rows, heads or 1, length, length]
                added = added[:, start:stop] if added.shape[1] == heads else added
            masks.append(added)
        if padding is not None:
            masks.append(_added(padding, q.dtype)[:, None, None])
        return sum(masks[1:], masks[0]) if masks else None

    def _weights(self, scores: Tensor, *, average: bool, is_batched: bool) -> Tensor:
        """Returns the scores of all heads, [rows, heads, length, length], or their mean, [rows, length, length]."""
        ranks = self.flow.ranks
        if average:
            weights = summed(scores.mean(1), ranks) / ranks.size
        else:
            weights = joined(scores, 1, scores.shape[1] * ranks.size, ranks)
        return weights if is_batched else weights.squeeze(0)


def _project(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return tuple(F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))  # type: ignore[arg-type]
    if q is k is v:
        return F.linear(q, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    return tuple(F.linear(x, w, b) for x, w, b in zip((q, k, v), module.in_proj_weight.chunk(3), biases, strict=True))


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
