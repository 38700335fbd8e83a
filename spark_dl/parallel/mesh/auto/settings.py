"""Settings of the strategy `auto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from spark_dl.config.checks import check, check_number
from spark_dl.config.conflicts import ELEMENTWISE, Conflict, without_average
from spark_dl.config.fields import may_change, named_settings
from spark_dl.config.parallel import Parallel
from spark_dl.config.strategies import Strategy
from spark_dl.parallel.mesh.planner.records import GPIPE, ONE_F_ONE_B, ZERO_STAGES
from spark_dl.parallel.mesh.settings import Mesh, check_torch

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.parallel.trainable import Trainable
    from spark_dl.spec import ModelSpec
    from spark_dl.world import World


def _conflict(key: str, excluded: object, expected: str) -> Conflict:
    section, name = key.split(".")

    def differs(config: Config) -> bool:
        return bool(getattr(getattr(config, section), name) == excluded)

    return Conflict(
        key, differs,
        f"expected {expected} with parallel.strategy='auto', found {{c.{key}!r}}; or set parallel.strategy to 'mesh'",
    )  # fmt: skip


EXCLUDES = (
    Conflict("train.optimizer", lambda c: not {*c.train.optimizers} <= {*ELEMENTWISE},
             f"expected one of {', '.join(ELEMENTWISE)} with parallel.strategy='auto', whose plans can cut the "
             "weights, found {c.train.optimizers}; or set parallel.strategy to 'mesh'"),
    Conflict("train.param_groups", lambda c: bool(c.train.param_groups),
             "expected none with parallel.strategy='auto', whose plans can have stages with different parameters; set "
             "parallel.strategy to 'mesh'"),
    Conflict("train.lr_scaling", lambda c: c.train.lr_scaling != "none",
             "expected 'none' with parallel.strategy='auto', which chooses the number of data ranks, found "
             "{c.train.lr_scaling!r}; or set parallel.strategy to 'mesh'"),
    Conflict("parallel.hosts", lambda c: bool(c.launch.num_ranks % (getattr(c.parallel, "hosts", None) or 1)),
             "expected a divisor of launch.num_ranks={c.launch.num_ranks}, as hosts have equally many ranks, found "
             "{c.parallel.hosts}"),
    *without_average(lambda c: True, "expected null with parallel.strategy='auto', whose plans have no memory for it"),
    _conflict("checkpoint.weights", "trainable", "'all'"),
    _conflict("train.precision", "fp16-mixed", "float32 or bf16-mixed"),
    _conflict("train.compile", True, "false"),
    _conflict("train.channels_last", True, "false"),
    _conflict("train.random_by", "row", "'rank'"),
    _conflict("shards.storage", "local", "'shared'"),
    _conflict("loader.ragged", "offsets", "'pad'"),
)  # fmt: skip
"""A plan can have stages, tensor ranks and shards. What any of them excludes is excluded here."""


@named_settings
@dataclass(frozen=True, kw_only=True)
class Auto(Parallel):
    """A mesh that the driver plans: it measures the layers of the model and the network, and trains with the mesh whose
    step is predicted to be the shortest. The plan also sets `train.accumulation_steps`.

    Example:
        >>> spark_dl.Config(launch=spark_dl.Launch(num_ranks=8), parallel=spark_dl.Auto())
    """

    strategy: ClassVar[str] = "auto"
    resumes: ClassVar[tuple[str, ...]] = (Mesh.strategy,)
    planned: ClassVar[bool] = True
    excludes: ClassVar[tuple[Conflict, ...]] = EXCLUDES

    memory_gib: float | None = may_change(None)
    """Memory of a rank for weights, gradients, the optimizer's state and activations, in GiB. Null: no limit."""
    hosts: int | None = may_change(None)
    """Number of hosts, with equally many ranks. Null: as the ranks find it in a short job before the training."""
    rate_mbit: float | None = may_change(None)
    """Rate of a host's link in each direction, in Mbit/s. Null: measured, in the same job."""
    latency_ms: float | None = may_change(None)
    """Latency of a message between hosts, in milliseconds. Null: measured."""
    local_rate_mbit: float | None = may_change(None)
    """Rate between two ranks of a host, in Mbit/s. Null: measured."""
    local_latency_ms: float | None = may_change(None)
    """Latency of a message between two ranks of a host, in milliseconds. Null: measured."""
    zero_stages: tuple[int, ...] = may_change(ZERO_STAGES)
    """ZeRO stages to choose from."""
    schedules: tuple[str, ...] = may_change((ONE_F_ONE_B, GPIPE))
    """Schedules of a pipeline to choose from: `1f1b`, `gpipe`."""

    def __post_init__(self) -> None:
        for name in ("memory_gib", "rate_mbit", "local_rate_mbit"):
            if getattr(self, name) is not None:
                check_number(self, name, 0, above=True)
        for name in ("latency_ms", "local_latency_ms"):
            if getattr(self, name) is not None:
                check_number(self, name, 0)
        if self.hosts is not None:
            check_number(self, "hosts", 1, whole=True)
        for name, known in (("zero_stages", ZERO_STAGES), ("schedules", (ONE_F_ONE_B, GPIPE))):
            found = getattr(self, name)
            is_some = isinstance(found, tuple | list) and len(found) > 0 and all(each in known for each in found)
            check(is_some, f"parallel.{name}", f"some of {', '.join(map(str, known))}", found)
            object.__setattr__(self, name, tuple(found))  # YAML has lists

    def data_size(self, num_ranks: int) -> int:
        """Returns 1, what every plan can have: the number is not known before the plan."""
        return 1


def _unplanned(spec: ModelSpec, world: World, config: Config) -> Trainable:
    raise ValueError(
        "parallel.strategy: found 'auto' on a rank; spark_dl.train plans the mesh on the driver. Without a driver, as "
        "under torchrun, set it to 'mesh'"
    )


STRATEGY = Strategy(settings=Auto, parallelize=_unplanned, check=check_torch)
