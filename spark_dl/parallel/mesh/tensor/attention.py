"""torch's MultiheadAttention with its heads cut over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from spark_dl.parallel.mesh.tensor.dropout import attention
from spark_dl.parallel.mesh.tensor.flow import Flow, wrap_forward
from spark_dl.parallel.mesh.tensor.functions import joined, summed
from spark_dl.parallel.mesh.tensor.styles import end_rows


class Heads(ParallelStyle):
    """`nn.MultiheadAttention` of which each rank has some heads: their rows of the packed or separate projections, and
    their columns of `out_proj`.

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
        found: dict[int, Tensor] = {}
        for x in tensors:
            if id(x) not in found:
                found[id(x)] = enter(x)
        if self.sequence is not None and len(found) > 1:
            raise ValueError(
                "parallel.sequence: expected attention of a sequence to itself, found a key or a value that is another "
                "tensor than the query; set it to false"
            )
        return [found[id(x)] for x in tensors]

    def _heads_of(self, module: nn.MultiheadAttention, x: Tensor) -> Tensor:
        """Returns [rows, heads, length, size of a head] of [length, rows, features]."""
        heads = module.num_heads // self.flow.ranks.size
        return x.view(*x.shape[:2], heads, module.head_dim).permute(1, 2, 0, 3)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, heads: int, q: Tensor) -> Tensor | None:
        """Returns what is added to the scores of this rank's heads.

        mask, padding: True where not to attend, or values to add.
        """
        found: list[Tensor] = []
        if mask is not None:
            added = _added(mask, q.dtype)
            if mask.ndim == 3:
                start, stop = self.flow.ranks.bounds(heads)
                added = added.unflatten(0, (q.shape[0], -1))  # [rows, heads or 1, length, length]
                added = added[:, start:stop] if added.shape[1] == heads else added
            found.append(added)
        if padding is not None:
            found.append(_added(padding, q.dtype)[:, None, None])
        return sum(found[1:], found[0]) if found else None

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
