"""A mixture of experts: a layer in which each token passes through a few of many networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spark_dl.nn.exchange import Peers
from spark_dl.nn.feed_forward import FeedForward
from spark_dl.nn.router import Choice, Router, Score

Balance = Literal["bias", "loss", "none"]


class MoE(nn.Module):
    """A mixture of experts: a router sends each token to `top_k` of `num_experts` networks, and adds up their outputs.

    No token is dropped, unless `capacity_factor` is set. With the strategy `mesh` and `parallel.experts`, ranks have
    different experts and exchange tokens; everywhere else each rank has all experts. The results are the same.

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

    Raises ValueError for arguments that do not fit each other.
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

        mask: which tokens pass through the layer, as bool; the output of the others is 0. For padded sequences.
        # x: [rows, ..., width], mask: [rows, ...] -> [rows, ..., width]
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
        choice: Choice = self.router(tokens)
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

    def _note(self, choice: Choice, pairs: Tensor, is_true: Tensor | None) -> None:
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
    """Returns the mixtures of experts of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def note_rows(model: nn.Module, weight: Tensor) -> None:
    """Tells all mixtures of experts of a model the weights of the rows of the next batch. # weight: [rows]"""
    for module in model.modules():
        if isinstance(module, MoE):
            module.row_weight, module.auxiliary_losses = weight, []


def add_auxiliary_losses(model: nn.Module, losses: Tensor, count: Callable[[], Tensor]) -> Tensor:
    """Adds the auxiliary losses of the last forward pass to the gradient of a sum of losses, and not to its value.

    An auxiliary loss is a mean over the batch, so it is added as often as the batch counts in the mean loss, which is
    once per true row. What divides the sum of losses, or scales it, then does the same to the auxiliary losses.
    count: returns that number. # losses: scalar
    """
    for module in model.modules():
        if isinstance(module, MoE) and module.auxiliary_loss is not None:
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
