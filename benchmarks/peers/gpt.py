"""GPT-2, as the benchmark of a GPU trains it: tokens to scores of the next. 124 M parameters with 12 blocks of 768."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, CONTEXT, HEAD_DIM = 50_257, 512, 64


class GPT(nn.Module):
    """Tokens [rows, length] -> scores [rows, length, vocabulary]. Without dropout (Radford et al. 2019)."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x


def build_gpt(num_blocks: int, width: int) -> GPT:
    return GPT(num_blocks, width)


def token_losses(scores: Tensor, following: Tensor) -> Tensor:
    """Returns one loss for each token. # scores: [rows, length, vocabulary], following: [rows, length]"""
    losses = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten().long(), reduction="none")
    return losses.view(following.shape)


def flops_per_token(num_blocks: int, width: int) -> float:
    """Returns those of the forward and backward pass: 6 for each parameter, and 12 for each pair of an attention.

    Chowdhery et al. 2022 (PaLM), appendix B. The embedding of the tokens counts as the head, and that of positions not.
    """
    with torch.device("meta"):
        model = GPT(num_blocks, width)
    parameters = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel()
    return 6.0 * parameters + 12.0 * num_blocks * width * CONTEXT
