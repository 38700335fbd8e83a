"""Saves, restores and compares the random number generators of a process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def generators_kept(gpus: Iterable[int]) -> Iterator[None]:
    """Restores the states of Python's, NumPy's and PyTorch's generators (for the CPU and these GPUs) on exit.

    Called on the driver or a rank.
    """
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def generator_states() -> tuple[Any, ...]:
    """Returns the states of Python's, NumPy's and PyTorch's generators, to compare them."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes()
