"""Slow ranks on purpose, to see what they cost each strategy: a delay before every gradient computation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import Batch

if TYPE_CHECKING:
    from spark_dl.config import Config


def delay_s(config: Config, rank: int, computation: int) -> float:
    """Seconds that a rank waits before its n-th computation of a gradient, by the `faults.straggler*` settings.

    A function of its arguments and of `train.seed`. The mean is `straggler_s` for each distribution; those of Dutta et
    al. 2018 (Slow and Stale Gradients Can Win the Race, section 3) are exponential and shifted exponential.
    """
    faults = config.faults
    if faults.straggler == "none" or (faults.straggler_ranks and rank not in faults.straggler_ranks):
        return 0.0
    mean = faults.straggler_s
    if faults.straggler == "constant":
        return mean
    drawn = float(np.random.default_rng((config.train.seed, rank, computation, 0x57)).exponential())
    return mean * drawn if faults.straggler == "exponential" else mean * (0.5 + 0.5 * drawn)


def delayed(trainable: Trainable, config: Config, rank: int) -> Trainable:
    """The trainable with the configured delay before each of its steps."""
    if config.faults.straggler == "none":
        return trainable
    computations = 0

    def forward_backward(micro_batches: Sequence[Batch], rows: int) -> Tensor:
        nonlocal computations
        time.sleep(delay_s(config, rank, computations))
        computations += 1
        return trainable.forward_backward(micro_batches, rows)

    return dataclasses.replace(trainable, forward_backward=forward_backward)
