"""The random number generators of a process, as they were before."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch


@contextlib.contextmanager
def generators_kept(gpus: Iterable[int]) -> Iterator[None]:
    """Afterwards Python's, NumPy's and PyTorch's generators, that of the CPU and those of these GPUs, go on as if
    nothing had been drawn or seeded within. On the driver or a rank.
    """
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
