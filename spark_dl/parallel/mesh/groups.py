"""The process groups of a mesh."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spark_dl.parallel.mesh.dims import Dims, Place

if TYPE_CHECKING:
    from spark_dl.world import World


@dataclass(frozen=True)
class Holders:
    """Ranks that have the same parameters and train on different rows. They sum the gradients."""

    everyone: dist.ProcessGroup | None
    """All of them. None: this rank alone."""
    shards: dist.ProcessGroup | None
    """Those with different shards of the state of these parameters. None: this rank has all of it."""
    replicas: dist.ProcessGroup | None
    """Those with the same shard. None: this rank alone."""

    @property
    def num_shards(self) -> int:
        """Number of shards of the state."""
        return 1 if self.shards is None else self.shards.size()


@dataclass(frozen=True)
class Groups:
    """The groups of one rank: the ranks with which it exchanges along each axis. None where it would be alone."""

    dims: Dims
    at: Place
    pipeline: dist.ProcessGroup | None
    data: dist.ProcessGroup | None
    tensor: dist.ProcessGroup | None
    shards: dist.ProcessGroup | None
    """Ranks with different shards of the same state."""
    replicas: dist.ProcessGroup | None
    """Ranks with the same shards."""
    experts: dist.ProcessGroup | None
    """Ranks with different experts of the same layers, which exchange tokens."""
    expert_replicas: dist.ProcessGroup | None
    """Ranks with the same experts."""
    expert_shards: dist.ProcessGroup | None
    """Ranks with different shards of the state of the same experts."""
    context: dist.ProcessGroup | None = None
    """Ranks with slices of the same rows."""

    @property
    def counts(self) -> bool:
        """Whether this rank is the first of those that have the same rows."""
        return self.at.tensor == 0 and self.at.data % self.dims.context == 0

    def holders(self, *, of_experts: bool = False) -> Holders:
        """Returns the ranks with the parameters of this one: of its experts, or all others."""
        everyone, shards = self.data, self.shards
        if of_experts:
            everyone, shards = self.expert_replicas, self.expert_shards
        return Holders(everyone, shards, None if shards is None else self.replicas)

    def device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Returns torch's mesh of the ranks of this pipeline stage, with those of the axes `replicas`, `shards` and
        `tensor` that have several ranks; None if there are none. Not collective."""
        dims = self.dims
        by_place = [
            [
                [dims.rank(Place(self.at.pipeline, replica * dims.shards + shard, t)) for t in range(dims.tensor)]
                for shard in range(dims.shards)
            ]
            for replica in range(dims.data // dims.shards)
        ]  # fmt: skip
        axes = [("replicas", self.replicas), ("shards", self.shards), ("tensor", self.tensor)]
        named = [(name, group) for name, group in axes if group is not None]
        if not named:
            return None
        names, groups = tuple(name for name, _ in named), [group for _, group in named]
        ranks = torch.tensor(by_place)
        if "replicas" not in names:  # replicas without shards exchange gradients, which torch's mesh is not used for
            ranks = ranks[self.at.data // dims.shards]
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, mesh=ranks.squeeze(), mesh_dim_names=names)


def build_groups(world: World, dims: Dims, timeout_s: float) -> Groups:
    """Creates the process groups of a mesh. Collective.

    NOTE: the groups of torch's `init_device_mesh` wait for 30 minutes, whatever the timeout of the default group is.
    """
    timeout = datetime.timedelta(seconds=timeout_s)

    def build(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        own = None
        if len(groups[0]) == 1:
            return None
        for ranks in groups:  # every rank must call new_group for all of them
            group = dist.new_group(list(ranks), timeout=timeout)
            if world.rank in ranks:
                own = group
        return own

    data = build(dims.data_groups())
    is_hybrid = 1 < dims.shards < dims.data
    expert_replicas = data if dims.experts == 1 else build(dims.expert_replica_groups())
    expert_shards = None
    if dims.shards > 1:
        expert_shards = build(dims.expert_shard_groups()) if is_hybrid else expert_replicas
    return Groups(
        dims=dims,
        at=dims.place(world.rank),
        pipeline=build(dims.pipeline_groups()),
        data=data,
        tensor=build(dims.tensor_groups()),
        shards=build(dims.shard_groups()) if is_hybrid else data if dims.shards > 1 else None,
        replicas=build(dims.replica_groups()) if is_hybrid else None,
        experts=build(dims.expert_groups()),
        expert_replicas=expert_replicas,
        expert_shards=expert_shards,
        context=build(dims.context_groups()),
    )
