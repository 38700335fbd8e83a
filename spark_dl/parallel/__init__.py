"""Seam 1: how the ranks share a step. A strategy is a function `parallelize(spec, world, config) -> Trainable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from spark_dl.config import Config, suggestion
from spark_dl.parallel import ddp
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from spark_dl.launch.rendezvous import World

PARALLELIZE: dict[str, Callable[[ModelSpec, World, Config], Trainable]] = {"ddp": ddp.parallelize}


def strategy(name: str) -> Callable[[ModelSpec, World, Config], Trainable]:
    """The `parallelize` function of a strategy. Raises ValueError for an unknown name."""
    if name not in PARALLELIZE:
        raise ValueError(f"parallel.strategy: unknown strategy {name!r}{suggestion(name, list(PARALLELIZE))}")
    return PARALLELIZE[name]
