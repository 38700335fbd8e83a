"""The experts: feed-forward networks whose weights are stacked along a leading axis."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """Feed-forward networks of two matrices without biases, one network per expert.

    num_experts: number of networks.
    width: size of a token.
    hidden: size of the layer between the two matrices. The default is 4 times `width`.
    activation: function of the hidden layer.
    gated: multiply the hidden layer by a further matrix, as in SwiGLU (Shazeer 2020, arXiv:2002.05202).
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        *,
        hidden: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
    ):
        super().__init__()
        hidden = hidden or 4 * width
        self.activation = activation
        self.up = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.gate = nn.Parameter(torch.empty(num_experts, width, hidden)) if gated else None
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        for matrices in self.parameters():
            bound = 1 / math.sqrt(matrices.shape[1])  # as nn.Linear
            nn.init.uniform_(matrices, -bound, bound)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Returns the outputs of tokens that are sorted by expert. # tokens: [tokens, width], counts: [experts]"""
        hidden = grouped_matmul(tokens, self.up, counts)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            hidden = self.activation(grouped_matmul(tokens, self.gate, counts)) * hidden
        return grouped_matmul(hidden, self.down, counts)


def grouped_matmul(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiplies the first counts[0] rows by the first matrix, the next counts[1] by the second one, and so on.

    # rows: [rows, n], matrices: [groups, n, m], counts: [groups] int64 -> [rows, m]
    """
    if torch.is_autocast_enabled(rows.device.type):  # torch's grouped_mm is not in the lists of autocast
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, matrices = rows.to(dtype), matrices.to(dtype)
    if _can_group(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=counts.cumsum(0).to(torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.unbind(), strict=True)])


def _can_group(rows: Tensor, matrices: Tensor) -> bool:
    """Whether torch multiplies these in one call. It fails for no rows, for rows that are not aligned, and in
    `torch.compile` for numbers of rows that vary."""
    grouped = ("float32", "bfloat16", "float16") if rows.device.type == "cpu" else ("bfloat16",)
    return (
        hasattr(F, "grouped_mm")
        and not torch.compiler.is_compiling()
        and len(rows) > 0
        and rows.dtype == matrices.dtype
        and str(rows.dtype).removeprefix("torch.") in grouped
        and all(size * rows.element_size() % 16 == 0 for size in matrices.shape[1:])
    )
