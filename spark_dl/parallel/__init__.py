"""Seam 1: how the ranks share a step. A strategy is a function `parallelize(spec, world, config) -> Trainable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from spark_dl.config import Config
from spark_dl.parallel import ddp
from spark_dl.parallel.stragglers import delayed
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from spark_dl.launch.rendezvous import World

Parallelize: TypeAlias = "Callable[[ModelSpec, World, Config], Trainable]"
PARALLELIZE: dict[str, Parallelize] = {"ddp": ddp.parallelize}


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """The model as `parallel.strategy` trains it. Collective; raises as the strategy's own function does."""
    return delayed(PARALLELIZE[config.parallel.strategy](spec, world, config), config, world.rank)
