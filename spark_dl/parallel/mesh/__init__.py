"""The strategy `mesh`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_dl.config.strategies import Strategy
from spark_dl.parallel.mesh.settings import Mesh, check_torch

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.parallel.trainable import Trainable
    from spark_dl.spec import ModelSpec
    from spark_dl.world import World


def _parallelize(spec: ModelSpec, world: World, config: Config) -> Trainable:
    from spark_dl.parallel.mesh import mesh  # a second of imports, which only its ranks need

    return mesh.parallelize(spec, world, config)


STRATEGY = Strategy(settings=Mesh, parallelize=_parallelize, check=check_torch)
