"""The exchange of tokens between ranks that have different experts (Lepikhin et al. 2020, arXiv:2006.16668)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Peers:
    """The ranks among which the experts of a layer are divided, in the order of the experts, equally."""

    group: dist.ProcessGroup
    clock: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """Measures the exchanges."""

    def compute(self, experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, counts: Tensor) -> Tensor:
        """Sends tokens to the ranks of their experts, and returns the outputs in the order of the tokens. Collective.

        A forward and a backward pass each send the tokens that leave this rank twice.

        experts: this rank's experts, called with tokens sorted by expert, and their number for each expert.
        tokens, counts: sorted by expert, over all experts. # [tokens, width], [num_experts] int64
        """
        ranks = self.group.size()
        received = torch.empty_like(counts)
        with self.clock:
            dist.all_to_all_single(received, counts, group=self.group)
        by_rank = received.view(ranks, -1)  # the tokens of each rank for each expert of this one
        sent, got = counts.view(ranks, -1).sum(1).tolist(), by_rank.sum(1).tolist()
        arrived: Tensor = _AllToAll.apply(tokens, sent, got, self)
        expert = torch.arange(by_rank.shape[1], device=tokens.device).repeat(ranks).repeat_interleave(received)
        order = expert.argsort(stable=True)
        done = experts(arrived.index_select(0, order), by_rank.sum(0))
        as_arrived = torch.zeros_like(done).index_copy(0, order, done)
        back: Tensor = _AllToAll.apply(as_arrived, got, sent, self)
        return back


class _AllToAll(torch.autograd.Function):
    """Sends `sent[i]` rows to rank i of the group, and receives `got[i]`. Gradients go back. Collective."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], got: Sequence[int], peers: Peers) -> Tensor:
        ctx.sent, ctx.got, ctx.peers = sent, got, peers
        return _exchange(rows, sent, got, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _exchange(grad, ctx.got, ctx.sent, ctx.peers), None, None, None


def _exchange(rows: Tensor, sent: Sequence[int], got: Sequence[int], peers: Peers) -> Tensor:
    received = rows.new_empty(sum(got), *rows.shape[1:])
    with peers.clock:
        dist.all_to_all_single(received, rows.contiguous(), list(got), list(sent), group=peers.group)
    return received
