"""A mixture of experts: a layer in which each token passes through a few of many networks.

A router chooses the experts of each token. The experts are feed-forward networks whose weights are stacked along a
leading axis. Ranks that have different experts exchange tokens (Lepikhin et al. 2020, arXiv:2006.16668).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Score = Literal["softmax", "sigmoid"]

Balance = Literal["bias", "loss", "none"]


@dataclass(frozen=True)
class Peers:
    """The ranks among which the experts of a layer are divided, in the order of the experts, equally."""

    group: dist.ProcessGroup
    clock: AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    """Measures the exchanges."""

    def compute(self, experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, counts: Tensor) -> Tensor:
        """Sends tokens to the ranks of their experts, and returns the outputs in the order of the tokens. Collective.

        A forward and a backward pass each send the tokens that leave this rank twice.

        Args:
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


class Routing(NamedTuple):
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

    def forward(self, tokens: Tensor) -> Routing:
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
        return Routing(experts, weights, scores)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float) -> None:
        """Adds `rate` to the bias of each expert that got fewer tokens than the mean, and subtracts it from the others
        (Wang et al. 2024, arXiv:2408.15664, algorithm 1). # counts: [num_experts]"""
        assert self.bias is not None
        counts = counts.to(torch.float64)
        self.bias += rate * torch.sign(counts.mean() - counts).to(self.bias)


class FeedForward(nn.Module):
    """Feed-forward networks of two matrices without biases, one network per expert.

    Args:
        num_experts: number of networks.
        width: size of a token.
        hidden: size of the layer between the two matrices. The default is 4 times `width`.
        activation: function of the hidden layer.
        gated: multiply the hidden layer by a further matrix, as in SwiGLU (Shazeer 2020, arXiv:2002.05202).

    Example:
        >>> experts = spark_dl.nn.FeedForward(8, 64, hidden=256, activation=torch.nn.functional.silu, gated=True)
        >>> spark_dl.nn.MoE(64, num_experts=8, experts=experts)
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


class MoE(nn.Module):
    """A mixture of experts: a router sends each token to `top_k` of `num_experts` networks, and adds up their outputs.

    No token is dropped, unless `capacity_factor` is set. With the strategy `mesh` and `parallel.experts`, ranks have
    different experts and exchange tokens; everywhere else each rank has all experts. The results are the same.

    Args:
        width: size of a token, the last axis of the input and of the output.
        num_experts: number of experts.
        top_k: number of experts of each token.
        hidden, activation, gated: see `FeedForward`, the default for the experts.
        experts: the experts, if they are not a `FeedForward`: a module without buffers, whose parameters all have a
            leading axis of `num_experts`. It is called with tokens sorted by expert, [tokens, width], and the number of
            tokens of each expert, [experts], and returns the outputs, [tokens, width]. With `parallel.experts`, its
            parameters have the experts of one rank.
        score: how the router turns its values into scores.
        balance: what keeps the experts equally busy. `bias`: a bias for the choice of experts, which changes by
            `bias_rate` after each optimizer step, from the tokens of all ranks in that step (Wang et al. 2024,
            arXiv:2408.15664). It has no gradient, so it does not disturb the loss. `loss`: an auxiliary loss with the
            factor `loss_weight` (Fedus et al. 2021, arXiv:2101.03961, equation 4), from the tokens of all ranks in a
            micro-batch. `none`: nothing.
        capacity_factor: in training, an expert takes at most this many times its equal share of the tokens of a
            micro-batch on one rank, rounded up. First choices come before second ones, and earlier tokens before later
            ones. The others are dropped: the expert adds nothing to their output. Results then depend on the number of
            ranks. In evaluation mode nothing is dropped.

    Raises:
        ValueError: For arguments that do not fit each other.

    Example:
        >>> layer = spark_dl.nn.MoE(64, num_experts=8, top_k=2)
        >>> layer(torch.randn(4, 10, 64)).shape  # [rows, tokens, width]
    """

    row_weight: Tensor | None = None
    """Weights of the rows of the next batch: rows of weight 0 are padding, and do not count in the load of experts,
    their balance and their capacity. None: all rows count. Set by `note_rows`. # [rows]"""
    auxiliary_loss: Tensor | None = None
    """The auxiliary loss of the last forward pass in training, with `balance` "loss". A scalar."""
    auxiliary_losses: list[Tensor] | None = None
    """The auxiliary losses of all forward passes of a batch, as a layer can be called twice. Begun by `note_rows`."""
    sum_over_data: Callable[[Tensor], None] | None = None
    """Sums a tensor over the ranks that have other tokens, in place. Collective. None: there are none."""
    peers: Peers | None = None
    """Ranks with the other experts. None: this rank has all experts."""
    exists: ClassVar[bool] = False
    """Whether this process has ever made one, so that models without any are not searched in each pass."""

    def __new__(cls, *args: Any, **kwargs: Any) -> MoE:
        MoE.exists = True  # also of a copy, and of one that was unpickled, for which __init__ is not called
        return super().__new__(cls)

    def __init__(
        self,
        width: int,
        num_experts: int,
        *,
        top_k: int = 2,
        hidden: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        experts: nn.Module | None = None,
        score: Score = "softmax",
        balance: Balance = "bias",
        bias_rate: float = 0.001,
        loss_weight: float = 0.01,
        capacity_factor: float | None = None,
    ):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"MoE: expected a top_k from 1 to num_experts={num_experts}, found {top_k}")
        if score not in ("softmax", "sigmoid"):
            raise ValueError(f"MoE: expected score 'softmax' or 'sigmoid', found {score!r}")
        if balance not in ("bias", "loss", "none"):
            raise ValueError(f"MoE: expected balance 'bias', 'loss' or 'none', found {balance!r}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"MoE: expected a capacity_factor above 0, or None, found {capacity_factor!r}")
        self.width, self.num_experts, self.balance = width, num_experts, balance
        self.bias_rate, self.loss_weight, self.capacity_factor = bias_rate, loss_weight, capacity_factor
        self.router = Router(width, num_experts, top_k=top_k, score=score, has_bias=balance == "bias")
        if experts is None:
            experts = FeedForward(num_experts, width, hidden=hidden, activation=activation, gated=gated)
        else:
            _check_experts(experts, num_experts, hidden)
        self.experts = experts
        self._counts: Tensor | None = None

    def extra_repr(self) -> str:
        return f"{self.width}, {self.num_experts}, top_k={self.router.top_k}, balance={self.balance!r}"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes the outputs of all tokens. Collective in the ranks with the other experts.

        # x: [rows, ..., width], mask: [rows, ...] -> [rows, ..., width]

        Args:
            mask: which tokens pass through the layer, as bool; the output of the others is 0. For padded sequences.
        """
        if not x.ndim or x.shape[-1] != self.width:
            raise ValueError(f"MoE: expected an input [..., width={self.width}], found the shape {tuple(x.shape)}")
        tokens, is_true = x.reshape(-1, self.width), self._true_tokens(x)
        if mask is None:
            return self._route(tokens, is_true).view(x.shape)
        if mask.shape != x.shape[:-1] or mask.dtype != torch.bool:
            raise ValueError(
                f"MoE: expected a mask of bool with the shape {tuple(x.shape[:-1])}, found {mask.dtype} with "
                f"{tuple(mask.shape)}"
            )
        (kept,) = mask.reshape(-1).nonzero(as_tuple=True)
        output = self._route(tokens.index_select(0, kept), None if is_true is None else is_true[kept])
        return output.new_zeros(tokens.shape).index_copy(0, kept, output).view(x.shape)

    def _true_tokens(self, x: Tensor) -> Tensor | None:
        """Returns which tokens count; None if all do. # [tokens] bool"""
        weight = self.row_weight
        if weight is None or x.ndim < 2 or len(weight) != len(x):
            return None
        return (weight > 0).repeat_interleave(math.prod(x.shape[1:-1]))

    def _route(self, tokens: Tensor, is_true: Tensor | None) -> Tensor:
        """# tokens: [tokens, width], is_true: [tokens] -> [tokens, width]"""
        choice: Routing = self.router(tokens)
        top_k = self.router.top_k
        pairs = choice.experts.t().reshape(-1)  # pairs of a token and an expert, all first choices first
        true_pairs = None if is_true is None else is_true.repeat(top_k)
        order, counts = self._order(pairs, true_pairs)
        if self.training:
            self._note(choice, pairs, is_true)
        copies = tokens.expand(top_k, -1, -1).reshape(-1, self.width)
        outputs = self._compute(copies.index_select(0, order), counts)
        by_pair = outputs.new_zeros(copies.shape).index_copy(0, order, outputs)
        weights = choice.weights.t().unsqueeze(-1)
        return (by_pair.view(top_k, len(tokens), self.width) * weights).sum(0).to(outputs.dtype)

    def _compute(self, tokens: Tensor, counts: Tensor) -> Tensor:
        if self.peers is not None:
            return self.peers.compute(self.experts, tokens, counts)
        outputs: Tensor = self.experts(tokens, counts)
        return outputs

    def _order(self, pairs: Tensor, is_true: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns which pairs are computed, sorted by expert, and their number for each expert."""
        counts = pairs.bincount(minlength=self.num_experts)
        if self.capacity_factor is None or not self.training:
            return pairs.argsort(stable=True), counts
        # Padding comes last, so that it does not take the place of a true token.
        order = (pairs if is_true is None else pairs * 2 + ~is_true).argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.arange(len(pairs), device=pairs.device) - first[pairs[order]]
        capacity = self._capacity(len(pairs) if is_true is None else int(is_true.sum()))
        return order[place < capacity], counts.clamp(max=capacity)

    def _capacity(self, num_pairs: int) -> int:
        assert self.capacity_factor is not None
        return math.ceil(self.capacity_factor * num_pairs / self.num_experts)

    def _note(self, choice: Routing, pairs: Tensor, is_true: Tensor | None) -> None:
        """Counts the tokens of each expert, and computes the auxiliary loss."""
        true_pairs = pairs if is_true is None else pairs[is_true.repeat(self.router.top_k)]
        counts = true_pairs.bincount(minlength=self.num_experts).double()
        dropped = counts.new_zeros(1)
        if self.capacity_factor is not None:
            dropped += (counts - self._capacity(len(true_pairs))).clamp(min=0).sum()
        noted = torch.cat([counts, dropped])
        self._counts = noted if self._counts is None else self._counts + noted
        if self.balance == "loss":
            if self.sum_over_data is not None:
                self.sum_over_data(counts)
            share = (counts / counts.sum().clamp(min=1)).to(choice.scores.dtype)
            scores = choice.scores if is_true is None else choice.scores[is_true]
            mean_score = scores.sum(0) / max(len(scores), 1)
            self.auxiliary_loss = self.loss_weight * self.num_experts * (share * mean_score).sum()
            if self.auxiliary_losses is not None:
                self.auxiliary_losses.append(self.auxiliary_loss)

    @property
    def router_is_trained(self) -> bool:
        """Whether a parameter of the router requires a gradient."""
        return any(parameter.requires_grad for parameter in self.router.parameters())

    def take_counts(self) -> Tensor:
        """Returns how often each expert was chosen in training since the last call, and last how often a choice was
        dropped. # [num_experts + 1] float64"""
        counts, self._counts = self._counts, None
        if counts is None:
            return torch.zeros(self.num_experts + 1, dtype=torch.float64, device=self.router.weight.device)
        return counts

    def update_bias(self, counts: Tensor) -> None:
        """Changes the bias of the choice, after an optimizer step. Does nothing without `balance` "bias".

        Args:
            counts: how often all ranks chose each expert in the step. # [num_experts]
        """
        if self.balance == "bias":
            self.router.update_bias(counts, self.bias_rate)


def _check_experts(experts: nn.Module, num_experts: int, hidden: Any) -> None:
    if hidden is not None:
        raise ValueError(f"MoE: hidden={hidden} has no effect with `experts`; remove one of them")
    for name, parameter in experts.named_parameters():
        if not parameter.ndim or len(parameter) != num_experts:
            raise ValueError(
                f"MoE: expected parameters of `experts` with a leading axis of num_experts={num_experts}, found "
                f"{name!r} with the shape {tuple(parameter.shape)}"
            )
    for name, _ in experts.named_buffers():
        raise ValueError(f"MoE: expected `experts` without buffers, found {name!r}")


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Returns the mixtures of experts of a model, by name. No search where none can be, as each pass asks for them."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MoE)} if MoE.exists else {}


def note_rows(model: nn.Module, weight: Tensor) -> None:
    """Tells all mixtures of experts of a model the weights of the rows of the next batch. # weight: [rows]"""
    for module in moe_layers(model).values():
        module.row_weight, module.auxiliary_losses = weight, []


def add_auxiliary_losses(model: nn.Module, losses: Tensor, count: Callable[[], Tensor]) -> Tensor:
    """Adds the auxiliary losses of the last forward pass to the gradient of a sum of losses, and not to its value.

    An auxiliary loss is a mean over the batch, so it is added as often as the batch counts in the mean loss, which is
    once per true row. What divides the sum of losses, or scales it, then does the same to the auxiliary losses.

    Args:
        count: returns that number. # losses: scalar
    """
    for module in moe_layers(model).values():
        if module.auxiliary_loss is not None:
            auxiliary = torch.stack(module.auxiliary_losses or [module.auxiliary_loss]).sum()
            module.auxiliary_loss = module.auxiliary_losses = None
            if losses.requires_grad and not auxiliary.requires_grad and module.router_is_trained:
                raise ValueError(
                    "MoE(balance='loss'): the layer was called without gradients, as in "
                    "checkpoint(..., use_reentrant=True), so that its loss would balance nothing; use "
                    "use_reentrant=False, or balance='bias'"
                )
            losses = _WithGradientOf.apply(losses, (auxiliary * count()).to(losses))
    return losses


class _WithGradientOf(torch.autograd.Function):
    """The first of two scalars, with the gradient of their sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad
