"""Which network the groups of a mesh use, and how many of them share a host's link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.dims import Dims, Place
from spark_dl.parallel.mesh.planner.records import Cluster


@dataclass(frozen=True)
class Links:
    """The networks of a mesh on a cluster, as the groups of one stage see them.

    Groups that cross hosts at the same time share the link of a host equally. Only the groups of one stage are counted,
    because stages exchange gradients at different times.
    """

    dims: Dims
    cluster: Cluster

    @cached_property
    def data(self) -> tuple[Network, ...]:
        """Of the data groups of each stage, in rings."""
        return tuple(self._data(stage) for stage in range(self.dims.pipeline))

    @cached_property
    def pipeline(self) -> tuple[Network, ...]:
        """From each stage to the next."""
        return tuple(self._boundary(stage) for stage in range(self.dims.pipeline - 1))

    def _data(self, stage: int) -> Network:
        crossings: Counter[int] = Counter()
        for group in self.dims.data_groups():
            if self.dims.place(group[0]).pipeline == stage:
                hosts = {self._host(rank) for rank in group}
                crossings.update(hosts if len(hosts) > 1 else ())  # a ring enters and leaves each of its hosts once
        return self._shared(crossings.values())

    def _boundary(self, stage: int) -> Network:
        crossings: Counter[int] = Counter()
        for data in range(self.dims.data):
            for tensor in range(self.dims.tensor):
                source, target = (self.dims.rank(Place(each, data, tensor)) for each in (stage, stage + 1))
                if self._host(source) != self._host(target):
                    crossings[self._host(source)] += 1
        return self._shared(crossings.values())

    def _shared(self, crossings: Iterable[int]) -> Network:
        most = max(crossings, default=0)
        between = self.cluster.between
        return replace(between, bytes_per_s=between.bytes_per_s / most) if most else self.cluster.within

    def _host(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_host
