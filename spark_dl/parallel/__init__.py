"""Seam 1: how the ranks share a step. A strategy is a function `parallelize(spec, world, config) -> Trainable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from spark_dl.config import Config
from spark_dl.parallel import ddp, hvd, local_sgd, single
from spark_dl.parallel.stragglers import delayed
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from spark_dl.world import World

Parallelize: TypeAlias = "Callable[[ModelSpec, World, Config], Trainable]"
PARALLELIZE: dict[str, Parallelize] = {
    "ddp": ddp.parallelize,
    "horovod": hvd.parallelize,
    "local_sgd": local_sgd.parallelize,
    "single": single.parallelize,
    "data_parallel": single.parallelize_over_gpus,
}
CHECKS: dict[str, Callable[[Config], None]] = {"horovod": hvd.check_available}


def check_available(config: Config) -> None:
    """Raises ValueError if this machine lacks what `parallel.strategy` needs. Called on the driver."""
    if config.parallel.strategy in CHECKS:
        CHECKS[config.parallel.strategy](config)


def parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    """The model as `parallel.strategy` trains it. Collective; raises as the strategy's own function does."""
    return delayed(PARALLELIZE[config.parallel.strategy](spec, world, config), config, world.rank)
