"""Artificial delays before every gradient computation, to measure what slow ranks cost each strategy."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from spark_dl.parallel.loss import Count
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import Batch

if TYPE_CHECKING:
    from spark_dl.config import Config


def delay_s(config: Config, rank: int, computation: int) -> float:
    """Returns the seconds that a rank waits before its n-th gradient computation, by the `faults.straggler*` settings.

    Depends only on its arguments and `train.seed`. The mean of each distribution is `straggler_s`. Dutta et al. 2018
    (Slow and Stale Gradients Can Win the Race, section 3) use the exponential and the shifted exponential.
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
    """Returns the trainable with the configured delay before each gradient computation."""
    computations = 0

    def forward_backward(micro_batches: Sequence[Batch], count: Count) -> Tensor:
        nonlocal computations
        time.sleep(delay_s(config, rank, computations))
        computations += 1
        return trainable.forward_backward(micro_batches, count)

    return dataclasses.replace(trainable, forward_backward=forward_backward)
