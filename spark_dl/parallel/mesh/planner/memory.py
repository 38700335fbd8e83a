"""Bytes that a rank holds: weights, gradients and the optimizer's state by ZeRO's formulas, and activations.

ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054, sections 3 and 5. Activations: Narayanan et al. 2021,
arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class States:
    """Bytes per parameter of one copy of the model."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


STATES = {
    "adam": States(4, 4, 8),
    "momentum": States(4, 4, 4),
    "sgd": States(4, 4, 0),
    "mixed_adam": States(2, 2, 12),
}
"""By optimizer: in float32; and Adam in mixed precision, which has weights and gradients of two bytes, and weights and
two moments of four."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    gathered: float = 0.0
    """Weights and gradients of one layer, which ZeRO-3 puts together while the layer is used."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered


def held(num_parameters: float, states: States, zero_stage: int, num_shards: int) -> Memory:
    """Returns weights, gradients and optimizer's state of a rank.

    zero_stage: 1 shards the optimizer's state over `num_shards` data ranks, 2 also the gradients, 3 also the weights.
    """
    weights, gradients, optimizer = (
        num_parameters * each / (num_shards if zero_stage >= first else 1)
        for each, first in ((states.weights, 3), (states.gradients, 2), (states.optimizer, 1))
    )
    return Memory(weights, gradients, optimizer)


def micro_batches_kept(schedule: str, micro_batches: int, stages_left: int) -> int:
    """Returns of how many micro-batches a stage keeps activations at the same time.

    stages_left: number of stages from this one to the last, p - i.
    """
    return micro_batches if schedule == GPIPE else min(micro_batches, stages_left)
