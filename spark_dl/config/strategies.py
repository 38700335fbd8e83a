"""The table of strategies, and their `Strategy`: settings, and one function that trains.

The settings and requirements of each strategy are in its module, which is imported when the strategy is used. Other
packages add strategies by entry points of the group `spark_dl.strategies`, whose values are `Strategy` objects. Such a
package must be installed on the driver and on executors.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from spark_dl.config.checks import SettingError, suggestion
from spark_dl.config.parallel import Parallel

if TYPE_CHECKING:
    from spark_dl.config.config import Config
    from spark_dl.parallel.trainable import Trainable
    from spark_dl.spec import ModelSpec, Run
    from spark_dl.world import World

DEFAULT = "ddp"
BUILT_IN: Mapping[str, str] = {
    "ddp": "spark_dl.parallel.ddp:STRATEGY",
    "horovod": "spark_dl.parallel.hvd:STRATEGY",
    "local_sgd": "spark_dl.parallel.local_sgd:STRATEGY",
    "single": "spark_dl.parallel.single:SINGLE",
    "dp_single_process": "spark_dl.parallel.single:OVER_GPUS",
    "mesh": "spark_dl.parallel.mesh:STRATEGY",
    "auto": "spark_dl.parallel.mesh.auto.settings:STRATEGY",
    "tree_reduce": "spark_dl.baselines.driver_loop.tree_reduce:STRATEGY",
    "shuffle_reduce": "spark_dl.baselines.driver_loop.shuffle_reduce:STRATEGY",
    "parameter_server": "spark_dl.baselines.servers.loop:STRATEGY",
}
"""The `Strategy` of each name, written as in an entry point: its module and its name in it."""
GROUP = "spark_dl.strategies"

Parallelize: TypeAlias = "Callable[[ModelSpec, World, Config], Trainable]"


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


def find(name: str) -> Strategy:
    """Returns the strategy of this name, from the table or from an installed package.

    Raises ValueError for an unknown name, with the closest known name, and for an entry point of another type.
    """
    if isinstance(name, str) and name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: Strategy = getattr(importlib.import_module(module), attribute)
        return built_in
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name:
            return _load(point)
    raise SettingError("parallel.strategy", f"no strategy {name!r}{suggestion(str(name), names())}")


def settings_of(name: str) -> type[Parallel]:
    """Returns the class of a run's settings; the base class for a strategy that is not installed here."""
    try:
        return find(name).settings
    except ValueError:
        return Parallel


def names() -> list[str]:
    """Returns the names of all strategies, those of other packages last."""
    points = [point.name for point in importlib.metadata.entry_points(group=GROUP)]
    return [*BUILT_IN, *points]


def _load(point: importlib.metadata.EntryPoint) -> Strategy:
    try:
        found = point.load()
    except Exception as error:
        raise SettingError("parallel.strategy", f"cannot load {point.name!r} from {point.value}: {error}") from error
    if not isinstance(found, Strategy) or found.settings.strategy != point.name:
        raise SettingError(
            "parallel.strategy",
            f"expected a spark_dl.Strategy with settings named {point.name!r} at the entry point "
            f"{point.value}, found {found!r:.200}",
        )
    return found
