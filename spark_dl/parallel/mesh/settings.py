"""Settings of the strategy `mesh`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from spark_dl.config.checks import check_bool, check_choices, check_number
from spark_dl.config.conflicts import ELEMENTWISE, Conflict
from spark_dl.config.fields import may_change
from spark_dl.config.parallel import Parallel
from spark_dl.parallel.mesh.dims import Dims, mesh_of

if TYPE_CHECKING:
    from spark_dl.config import Config
    from spark_dl.world import World

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"]


def _mesh(config: Config) -> Mesh:
    assert isinstance(config.parallel, Mesh)
    return config.parallel


def _cuts(config: Config) -> bool:
    mesh = _mesh(config)
    return mesh.zero_stage > 0 or mesh.model > 1 or mesh.experts > 1


EXCLUDES = (
    Conflict("train.optimizer", lambda c: _cuts(c) and c.train.optimizer not in ELEMENTWISE,
             f"expected one of {', '.join(ELEMENTWISE)} with parallel.strategy='mesh', whose ranks have parts of the "
             "weights, found {c.train.optimizer!r}"),
    Conflict("train.precision", lambda c: _cuts(c) and c.train.precision == "fp16",
             "expected float32 or bf16 with parallel.strategy='mesh', where ranks would use different loss scales, "
             "found fp16"),
    Conflict("train.compile", lambda c: _cuts(c) and c.train.compile,
             "not supported with parallel.strategy='mesh', which cuts the model; set it to false, or use ddp"),
    Conflict("train.channels_last", lambda c: _cuts(c) and c.train.channels_last,
             "not supported with parallel.strategy='mesh', whose ranks have flat parts of the weights; set it to "
             "false, or use ddp"),
    Conflict("shards.storage", lambda c: _mesh(c).model > 1 and c.shards.storage == "local",
             "expected 'shared' with parallel.pipeline or parallel.tensor above 1, found 'local', which keeps the rows "
             "of a rank on its host alone: all ranks of a copy of the model read the same rows"),
    Conflict("loader.reader", lambda c: _mesh(c).model > 1 and c.loader.reader == "petastorm",
             "expected 'spark_dl' with parallel.pipeline or parallel.tensor above 1, found 'petastorm', whose order "
             "is not the same on all ranks of a copy of the model"),
    Conflict("parallel.zero_stage", lambda c: _mesh(c).experts > 1 and _mesh(c).zero_stage == 3,
             "expected 0, 1 or 2 with parallel.experts above 1, as experts are not gathered for each layer, found 3"),
    Conflict("loader.ragged", lambda c: _mesh(c).pipeline > 1 and c.loader.ragged == "offsets",
             "expected 'pad' with parallel.pipeline above 1, where stages exchange tensors with one entry per row, "
             "found 'offsets'"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mesh(Parallel):
    """Models larger than one device: pipeline stages, slices of layers, and shards of weights and optimizer states.

    `launch.num_ranks` / (`pipeline` * `tensor`) ranks train on different rows, the data ranks.
    """

    strategy: ClassVar[str] = "mesh"
    excludes: ClassVar[tuple[Conflict, ...]] = EXCLUDES

    pipeline: int = may_change(1)
    """Number of ranks that have different layers."""
    tensor: int = may_change(1)
    """Number of ranks that have slices of the same layers. They exchange activations in each layer, so they should be
    on one host."""
    experts: int = may_change(1)
    """Number of ranks that have different experts of `spark_dl.nn.MoE` layers. They are data ranks, too, and exchange
    tokens in each of these layers."""
    zero_stage: Literal[0, 1, 2, 3] = may_change(0)
    """What each data rank has only a shard of (ZeRO, Rajbhandari et al. 2020): 1: the optimizer's state; 2: also the
    gradients; 3: also the weights."""
    replicas: int = may_change(1)
    """With `zero_stage` above 0: number of copies of all shards. With one copy per host, shards are exchanged within
    hosts (hybrid sharding)."""
    bucket_mib: float = may_change(25.0)
    """Size of one exchange of gradients, in MiB."""

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "experts", "replicas"):
            check_number(self, name, 1, whole=True)
        check_number(self, "bucket_mib", 0, above=True)
        check_choices(self)
        check_bool(self)
        if self.replicas > 1 and not self.zero_stage:
            raise ValueError(
                f"parallel.replicas: only supported with parallel.zero_stage above 0, found {self.replicas}; without "
                "shards every data rank has a copy"
            )

    @property
    def model(self) -> int:
        """Number of ranks that together have one copy of the model."""
        return self.pipeline * self.tensor

    def dims(self, num_ranks: int) -> Dims:
        """Returns the mesh of a number of ranks. Raises ValueError if the sizes do not divide it."""
        return mesh_of(
            num_ranks, pipeline=self.pipeline, tensor=self.tensor, experts=self.experts, replicas=self.replicas,
            shard=self.zero_stage > 0,
        )  # fmt: skip

    def data_size(self, num_ranks: int) -> int:
        return self.dims(num_ranks).data

    def place(self, world: World) -> World:
        dims = self.dims(world.world_size)
        at = dims.place(world.rank)
        # Ranks of a tensor group must draw the same random numbers, as they compute the same layers.
        return replace(world, part=at.data, num_parts=dims.data, seed_part=at.data * dims.pipeline + at.pipeline)
