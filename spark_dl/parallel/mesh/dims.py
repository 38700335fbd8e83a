"""The mesh of ranks: pipeline stages, data ranks and tensor ranks. Pure arithmetic.

    rank = (pipeline * data_size + data) * tensor_size + tensor

The ranks of a tensor group are consecutive, because they exchange most, and consecutive ranks are on one host. As in
Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473, section 3) the ranks of a pipeline are furthest apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """The place of a rank in the mesh: one index per axis."""

    pipeline: int
    """Rank within the pipeline, in [0, Dims.pipeline)."""
    data: int
    """Which part of each global batch the rank trains on, in [0, Dims.data)."""
    tensor: int
    """Which slices of the layers the rank has, in [0, Dims.tensor)."""


@dataclass(frozen=True)
class Dims:
    """The sizes of a mesh. Their product is the number of ranks.

    Args:
        pipeline: number of ranks that have different layers.
        data: number of parts of each global batch.
        tensor: number of ranks that have slices of the same layers.
        experts: number of ranks that have different experts; they are data ranks, too, so `data` is a multiple of it.
        context: number of ranks that have slices of the same rows. To gradients and shards they are data ranks, so
            `data` is a multiple of it.
        shards: number of data ranks that have different shards of the weights and the optimizer's state. `data` is a
            multiple of it. If it is less, the shards have replicas (HSDP).
    """

    pipeline: int
    data: int
    tensor: int
    experts: int = 1
    shards: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        assert min(self.pipeline, self.data, self.tensor, self.experts, self.shards, self.context) >= 1
        assert self.data % self.context == 0
        assert self.data % self.experts == 0
        assert self.data % self.shards == 0
        assert self.shards == 1 or self.shards % self.experts == 0

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def parts(self) -> int:
        """Number of parts of each global batch."""
        return self.data // self.context

    @property
    def model(self) -> int:
        """Number of ranks that together have one copy of the model, and train on the same rows."""
        return self.pipeline * self.tensor

    def place(self, rank: int) -> Place:
        """Returns the place of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Place(pipeline, data, tensor)

    def rank(self, place: Place) -> int:
        """Returns the rank at a place."""
        return (place.pipeline * self.data + place.data) * self.tensor + place.tensor

    def tensor_groups(self) -> list[list[int]]:
        """Returns the ranks that have slices of the same layers and train on the same rows, one list per group."""
        return self._groups(lambda at: (at.pipeline, at.data))

    def data_groups(self) -> list[list[int]]:
        """Returns the ranks that have the same slices of the same layers, and train on different rows."""
        return self._groups(lambda at: (at.pipeline, at.tensor))

    def pipeline_groups(self) -> list[list[int]]:
        """Returns the ranks of each pipeline, first stage first."""
        return self._groups(lambda at: (at.data, at.tensor))

    def model_groups(self) -> list[list[int]]:
        """Returns the ranks that together have one copy of the model."""
        return self._groups(lambda at: at.data)

    def shard_groups(self) -> list[list[int]]:
        """Returns the ranks that have different shards of the same state."""
        return self._groups(lambda at: (at.pipeline, at.tensor, at.data // self.shards))

    def replica_groups(self) -> list[list[int]]:
        """Returns the ranks that have the same shards of the same state."""
        return self._groups(lambda at: (at.pipeline, at.tensor, at.data % self.shards))

    def expert_groups(self) -> list[list[int]]:
        """Returns the ranks that have different experts of the same layers, and exchange tokens."""
        return self._groups(lambda at: (at.pipeline, at.tensor, at.data // self.experts))

    def expert_replica_groups(self) -> list[list[int]]:
        """Returns the ranks that have the same experts."""
        return self._groups(lambda at: (at.pipeline, at.tensor, at.data % self.experts))

    def expert_shard_groups(self) -> list[list[int]]:
        """Returns the ranks that have different shards of the state of the same experts."""
        return self._groups(lambda at: (at.pipeline, at.tensor, at.data // self.shards, at.data % self.experts))

    def context_groups(self) -> list[list[int]]:
        """Returns the ranks that have slices of the same rows."""
        return self._groups(lambda at: (at.pipeline, at.tensor, at.data // self.context))

    def _groups(self, key: Callable[[Place], Hashable]) -> list[list[int]]:
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.num_ranks):
            groups.setdefault(key(self.place(rank)), []).append(rank)
        return list(groups.values())


def mesh_of(
    num_ranks: int, *, pipeline: int = 1, tensor: int = 1, experts: int = 1, replicas: int = 1, shard: bool = False,
    context: int = 1,
) -> Dims:  # fmt: skip
    """Returns the mesh of a number of ranks; data ranks are what pipeline and tensor leave.

    Raises ValueError, with the setting, if the sizes do not divide the number of ranks.

    Args:
        replicas: number of copies of sharded state.
        shard: whether the state is sharded over the data ranks at all.
    """
    data, rest = divmod(num_ranks, pipeline * tensor)
    if rest or not data:
        raise ValueError(
            f"parallel.pipeline, parallel.tensor: expected sizes whose product divides launch.num_ranks={num_ranks}, "
            f"found {pipeline} * {tensor} = {pipeline * tensor}"
        )
    for key, size in (("experts", experts), ("replicas", replicas), ("context", context)):
        if data % size:
            raise ValueError(
                f"parallel.{key}: expected a divisor of the number of data ranks, launch.num_ranks={num_ranks} / "
                f"({pipeline} * {tensor}) = {data}, found {size}"
            )
    shards = data // replicas if shard else 1
    if shard and shards % experts:
        raise ValueError(
            f"parallel.experts: expected a divisor of the number of data ranks / parallel.replicas = {data} / "
            f"{replicas} = {shards}, found {experts}"
        )
    return Dims(pipeline, data, tensor, experts=experts, shards=shards, context=context)
