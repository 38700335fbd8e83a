"""The choice of experts for each token."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Score = Literal["softmax", "sigmoid"]


class Choice(NamedTuple):
    """The experts of some tokens."""

    experts: Tensor
    """Numbers of the chosen experts, best first. # [tokens, top_k] int64"""
    weights: Tensor
    """Factors of their outputs, in at least float32. # [tokens, top_k]"""
    scores: Tensor
    """Scores of all experts, which add up to 1 for each token. # [tokens, num_experts]"""


class Router(nn.Module):
    """Gives each token a score for each expert, and chooses the `top_k` best (Shazeer et al. 2017, arXiv:1701.06538).

    The output of an expert is multiplied by its score. With several experts per token, their scores are divided by
    their sum. With one they are not: the factor would be 1, and the router would get no gradient.

    bias: added to the scores for the choice alone, not in the weights. It has no gradient. None without such a bias.
    """

    def __init__(self, width: int, num_experts: int, *, top_k: int, score: Score, has_bias: bool):
        super().__init__()
        self.top_k, self.score = top_k, score
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(num_experts) if has_bias else None)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear

    def forward(self, tokens: Tensor) -> Choice:
        """# tokens: [tokens, width]"""
        with torch.autocast(tokens.device.type, enabled=False):  # in bf16, different experts would get equal scores
            dtype = torch.promote_types(tokens.dtype, torch.float32)
            logits = F.linear(tokens.to(dtype), self.weight.to(dtype))
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            _, experts = (scores if self.bias is None else scores + self.bias).topk(self.top_k, dim=-1)
            weights = scores.gather(-1, experts)
            if self.top_k > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            if self.score == "sigmoid":
                scores = scores / scores.sum(-1, keepdim=True)
        return Choice(experts, weights, scores)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float) -> None:
        """Adds `rate` to the bias of each expert that got fewer tokens than the mean, and subtracts it from the others
        (Wang et al. 2024, arXiv:2408.15664, algorithm 1). # counts: [num_experts]"""
        assert self.bias is not None
        counts = counts.to(torch.float64)
        self.bias += rate * torch.sign(counts.mean() - counts).to(self.bias)
