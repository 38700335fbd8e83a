"""A server's block of the weights, and its optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spark_dl.baselines.servers.rules import Gradient
from spark_dl.baselines.servers.wire import Numbers
from spark_dl.config import Config
from spark_dl.parallel.trainable import build_optimizer


class Block(nn.Module):
    """A range of the flat weights, on the CPU, as the one parameter of the configured optimizer. # (elements,)

    An optimizer that treats elements independently does the same with a block as with the original parameters.
    A trainer has an empty block, so that its learning rate schedule is that of the servers.
    """

    def __init__(self, weights: Tensor, config: Config, world_size: int):
        super().__init__()
        self.weights = nn.Parameter(weights.detach().cpu().clone())
        self.optimizer = build_optimizer(self, config, world_size)
        self._snapshot: Numbers | None = None

    def place(self, weights: Tensor) -> None:
        """Replaces the weights. # (elements,)"""
        self.weights.data.copy_(weights)
        self._snapshot = None

    def update(
        self, gradients: Sequence[Numbers], shares: Sequence[float], lr_factor: float, clip: float | None
    ) -> None:
        """Takes an optimizer step with the sum of the gradients times their shares. Overwrites the first gradient.

        `clip` is the largest norm of that sum. Multiplies the optimizer's learning rate by `lr_factor`, so the caller
        must set it before each step. # gradients: each (elements,)
        """
        total = torch.from_numpy(gradients[0]).mul_(shares[0])
        for gradient, share in zip(gradients[1:], shares[1:], strict=True):
            total.add_(torch.from_numpy(gradient), alpha=share)
        self.weights.grad = total
        if clip is not None:
            self.clip_grad_norm(clip)
        self.optimizer.param_groups[0]["lr"] *= lr_factor
        self.optimizer.step()
        self.weights.grad = self._snapshot = None

    def clip_grad_norm(self, norm: float) -> Tensor:
        """Scales the gradient to at most this L2 norm. Returns the norm before the scaling."""
        return nn.utils.clip_grad_norm_([self.weights], norm)

    def snapshot(self) -> Numbers:
        """Returns a copy of the current weights, which updates do not change. # (elements,)"""
        if self._snapshot is None:
            self._snapshot = self.weights.detach().clone().numpy()
        return self._snapshot


def shares_of(
    gradients: Sequence[Gradient], counts: Sequence[float], *, by_staleness: bool
) -> tuple[list[float], float]:  # fmt: skip
    """Returns the shares of the gradients in an update, which sum to 1, and the factor of the learning rate.

    Gradients are weighted by their true rows, or by what their means are over (`counts`). With `by_staleness`, the
    learning rate of a gradient is divided by 1 + its staleness. Zhang, Gupta, Lian and Liu 2016 (Staleness-aware
    Async-SGD for Distributed Deep Learning, IJCAI) divide by the staleness. The weights of the sum are then
    counts / (1 + staleness), and are normalized to 1. The factor makes up for that, so that it also applies to
    optimizers that ignore the size of a gradient, such as Adam.
    """
    weights = [n / (1 + g.staleness) if by_staleness else n for g, n in zip(gradients, counts, strict=True)]
    total = sum(weights)
    if not total:  # no mean is over anything: all gradients are 0
        return [0.0] * len(weights), 1.0
    return [w / total for w in weights], total / sum(counts)
