"""A server's part of the weights, and the optimizer that works on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spark_dl.baselines.servers.rules import Gradient
from spark_dl.baselines.servers.wire import Numbers
from spark_dl.config import Config
from spark_dl.parallel.trainable import build_optimizer


class Block(nn.Module):
    """Elements of the flat weights, on the CPU, as one parameter of the configured optimizer. # (elements,)

    Optimizers that treat each element by itself do the same with a block as with the parameters that it was cut from.
    A trainer has one without elements, so that its schedule of learning rates is that of the servers.
    """

    def __init__(self, weights: Tensor, config: Config, world_size: int):
        super().__init__()
        self.weights = nn.Parameter(weights.detach().cpu().clone())
        self.optimizer = build_optimizer(self, config, world_size)
        self._snapshot: Numbers | None = None

    def place(self, weights: Tensor) -> None:
        """Goes on from other weights. # (elements,)"""
        self.weights.data.copy_(weights)
        self._snapshot = None

    def update(
        self, gradients: Sequence[Numbers], shares: Sequence[float], lr_factor: float, clip: float | None
    ) -> None:
        """One step of the optimizer with the sum of the gradients, each times its share. Writes into the first of them.

        `clip` is the largest norm of that sum. The learning rate is multiplied by `lr_factor`, for good: whoever sets
        that of each step does so before. # gradients: each (elements,)
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
        """Scales the gradient to at most this L2 norm; returns the norm before."""
        return nn.utils.clip_grad_norm_([self.weights], norm)

    def snapshot(self) -> Numbers:
        """The weights of now, which later updates leave as they are. # (elements,)"""
        if self._snapshot is None:
            self._snapshot = self.weights.detach().clone().numpy()
        return self._snapshot


def shares_of(gradients: Sequence[Gradient], *, by_staleness: bool) -> tuple[list[float], float]:
    """The share of each gradient in the update's, which sum to 1, and the factor of the learning rate.

    Gradients are weighted by their true rows. With `by_staleness` the learning rate of each is divided by one more than
    its staleness, much as in Zhang, Gupta, Lian and Liu 2016 (Staleness-aware Async-SGD for Distributed Deep Learning,
    IJCAI), who divide by the staleness: the sum is then weighted by rows / (1 + staleness), and the factor makes up for
    that, so that optimizers that do not see the length of a gradient, such as Adam, go by the factor too.
    """
    weights = [g.rows / (1 + g.staleness) if by_staleness else float(g.rows) for g in gradients]
    total = sum(weights)
    return [w / total for w in weights], total / sum(g.rows for g in gradients)
