"""The state of single ranks in a checkpoint: random number generators, and what a strategy keeps on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spark_dl.config import Config
from spark_dl.rundir import rank_state
from spark_dl.rundir.checkpoint import Saved, load
from spark_dl.rundir.checkpoint_files import rank_file

_PLACES = ("pipeline", "tensor")
"""Settings that say which place in a mesh a rank has."""


def load_rank_state(
    saved: Saved, rank: int, world_size: int, saved_rank: Callable[[int], int] | None = None
) -> dict[str, Any]:
    """Returns the state of this rank, by name; if the number of ranks has changed, the mean state of all saved ranks.

    The mean is taken of floating point tensors, each over the ranks that have it; other values are of the first rank.
    saved_rank: maps the number of saved ranks to the saved rank that this rank takes its state from.
    """
    ranks: int = saved.manifest["world_size"]
    if saved_rank is not None:
        return _state_of_rank(saved, saved_rank(ranks))
    if ranks == world_size:
        return _state_of_rank(saved, rank)
    return rank_state.mean_of(_state_of_rank(saved, other) for other in range(ranks))


def _state_of_rank(saved: Saved, rank: int) -> dict[str, Any]:
    """Returns the state of one rank of the checkpoint, by name."""
    state: dict[str, Any] = load(saved, rank_file(rank))["state"]
    return state


def settings_of_ranks(saved: Saved, rank: int) -> Iterator[dict[str, Any]]:
    """Yields the settings of the ranks' optimizers (`saving.contents`), first of this rank, if it was one."""
    ranks: int = saved.manifest["world_size"]
    for other in sorted(range(ranks), key=lambda other: other != rank):
        yield load(saved, rank_file(other))["settings"]


def restore_random_state(saved: Saved, rank: int, world_size: int, config: Config) -> bool:
    """Puts the random number generators of a rank back; False if the checkpoint was of other ranks, or another mesh."""
    before, now = saved.manifest["config"]["parallel"], config.to_dict()["parallel"]
    if saved.manifest["world_size"] != world_size or any(before.get(key) != now.get(key) for key in _PLACES):
        return False
    rank_state.set_random_state(load(saved, rank_file(rank))["random"])
    return True
