"""State of one rank: its random number generators, and means of the states of several ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def mean_of(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the means of floating point tensors over the states that have them; other values of the first state."""
    total: Any = {}
    for state in states:
        total = _added(total, state)
    mean: dict[str, Any] = _means(total)
    return mean


@dataclass(frozen=True)
class _Sum:
    tensor: torch.Tensor
    count: int


def _added(total: Any, state: Any) -> Any:
    """Adds a state to a sum of states, which is None at first."""
    if isinstance(state, Mapping):
        before = total or {}
        return {**before, **{key: _added(before.get(key), value) for key, value in state.items()}}
    if isinstance(state, torch.Tensor) and state.is_floating_point():
        return _Sum(state, 1) if total is None else _Sum(total.tensor + state, total.count + 1)
    return state if total is None else total


def _means(total: Any) -> Any:
    if isinstance(total, Mapping):
        return {key: _means(value) for key, value in total.items()}
    return total.tensor / total.count if isinstance(total, _Sum) else total


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the generators of this process from `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def random_state() -> dict[str, Any]:
    """Returns the state of the generators of this process, as plain data and tensors."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": (version, list(internal), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }
