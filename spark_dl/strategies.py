"""The table of strategies. The settings and requirements of each strategy are in its module.

Other packages add strategies by entry points of the group `spark_dl.strategies`, whose values are `Strategy` objects.
Such a package must be installed on the driver and on executors.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from spark_dl.baselines.driver_loop import loop as driver_loop
from spark_dl.baselines.driver_loop import shuffle_reduce, tree_reduce
from spark_dl.baselines.servers import loop as parameter_server
from spark_dl.baselines.servers.settings import ParameterServer
from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.config.parallel import Parallel
from spark_dl.parallel import ddp, hvd, local_sgd, single
from spark_dl.parallel.mesh.settings import Mesh, check_version
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import ModelSpec, Run
from spark_dl.world import World

GROUP = "spark_dl.strategies"

Parallelize: TypeAlias = Callable[[ModelSpec, World, Config], Trainable]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A row of the table. Exactly one of the three training functions is set."""

    settings: type[Parallel]
    """Frozen dataclass of the settings. Its class variables declare what the strategy needs."""
    parallelize: Parallelize | None = None
    """Prepares the model for `spark_dl.loop` on each rank. Collective."""
    train_on_ranks: Callable[[Run, World], dict[str, Any]] | None = None
    """Trains on each rank with another loop. Collective."""
    train_from_driver: Callable[..., dict[str, Any]] | None = None
    """Trains from the driver, `(spark, run, *, report)`."""
    check: Callable[[Any, Config], None] = lambda spark, config: None
    """Raises ValueError if the machine or the session cannot run the strategy. Called on the driver before any job."""


def _by_spark(settings: type[Parallel], aggregate: driver_loop.Aggregate) -> Strategy:
    train = functools.partial(driver_loop.train, aggregate=aggregate)
    return Strategy(settings=settings, train_from_driver=train, check=driver_loop.check)


def _mesh(spec: ModelSpec, world: World, config: Config) -> Trainable:
    from spark_dl.parallel.mesh import mesh  # a second of imports, which only its ranks need

    return mesh.parallelize(spec, world, config)


STRATEGIES = (
    Strategy(settings=ddp.DDP, parallelize=ddp.parallelize),
    Strategy(
        settings=hvd.Horovod, parallelize=hvd.parallelize, check=lambda spark, config: hvd.check_available(config)
    ),
    Strategy(settings=local_sgd.LocalSGD, parallelize=local_sgd.parallelize),
    Strategy(settings=single.Single, parallelize=single.parallelize),
    Strategy(settings=single.DPSingleProcess, parallelize=single.parallelize_over_gpus),
    Strategy(settings=Mesh, parallelize=_mesh, check=lambda spark, config: check_version(torch.__version__)),
    _by_spark(tree_reduce.TreeReduce, tree_reduce.aggregate),
    _by_spark(shuffle_reduce.ShuffleReduce, shuffle_reduce.aggregate),
    Strategy(settings=ParameterServer, train_on_ranks=parameter_server.train),
)


def find(name: str) -> Strategy:
    """Returns the strategy of this name, from the table or from an installed package.

    Raises ValueError for an unknown name, with the closest known name, and for an entry point of another type.
    """
    for strategy in STRATEGIES:
        if strategy.settings.strategy == name:
            return strategy
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name:
            return _load(point)
    raise ValueError(f"parallel.strategy: no strategy {name!r}{suggestion(str(name), names())}")


def names() -> list[str]:
    """Returns the names of all strategies, those of other packages last."""
    points = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    return [*(strategy.settings.strategy for strategy in STRATEGIES), *points]


def _load(point: importlib.metadata.EntryPoint) -> Strategy:
    try:
        found = point.load()
    except Exception as error:
        raise ValueError(f"parallel.strategy: cannot load {point.name!r} from {point.value}: {error}") from error
    if not isinstance(found, Strategy) or found.settings.strategy != point.name:
        raise ValueError(
            f"parallel.strategy: expected a spark_dl.Strategy with settings named {point.name!r} at the entry point "
            f"{point.value}, found {found!r:.200}"
        )
    return found
