"""Seam 1: how the ranks share a step. A strategy is a function `parallelize(spec, world, config) -> Trainable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from spark_dl.config import Config, Parallel
from spark_dl.parallel import ddp
from spark_dl.parallel.stragglers import delayed
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from spark_dl.launch.rendezvous import World

Parallelize: TypeAlias = "Callable[[ModelSpec, World, Config], Trainable]"
PARALLELIZE: dict[str, Parallelize] = {"ddp": ddp.parallelize}


def check_known(config: Config) -> None:
    """Raises ValueError for what the settings know and this version does not do. On the driver, and on every rank."""
    parallel, defaults = config.parallel, Parallel()
    for name in ("strategy", "compression", "all_reduce", "sync_batchnorm"):
        found, known = getattr(parallel, name), getattr(defaults, name)
        if found != known and found not in PARALLELIZE:
            raise ValueError(f"parallel.{name}: {found!r} is planned and not in this version; set it to {known!r}")


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """The model as `parallel.strategy` trains it. Collective; raises as the strategy's own function does."""
    check_known(config)
    return delayed(PARALLELIZE[config.parallel.strategy](spec, world, config), config, world.rank)
