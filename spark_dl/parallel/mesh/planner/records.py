"""What the planner is given: the profile of a chain of layers, and the ranks with their network and memory.

Bytes that a rank holds: weights, gradients and the optimizer's state by ZeRO's formulas (Rajbhandari et al. 2020,
arXiv:1910.02054, sections 3 and 5), and activations (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). The
groups of a mesh use the network within hosts or between them, and share a host's link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.dims import Dims, Place

REPLICATED, COLWISE, ROWWISE, SEQUENCE, SPLIT, BLOCK = (
    "replicated", "colwise", "rowwise", "sequence", "split", "block",
)  # fmt: skip
KINDS = (COLWISE, ROWWISE, SEQUENCE, SPLIT, BLOCK)
"""How a layer can be cut over tensor ranks, in the order of preference between cuts that cost the same (`tensor.py`
describes them). Every layer can also be replicated."""
WHOLE_WEIGHTS = (REPLICATED, SEQUENCE)
"""With these, each tensor rank has all weights of the layer."""

GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Seconds:
    """Time of a pass over a micro-batch: `fixed` + `per_row` * rows."""

    fixed: float = 0.0
    per_row: float = 0.0

    def of(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class LayerProfile:
    """One layer of a chain, measured on one device."""

    name: str
    forward: Seconds
    backward: Seconds
    parameter_bytes: int = 0
    output_bytes: float = 0.0
    """Bytes of the output, per row. The gradient of the output has as many."""
    kept_bytes: float = 0.0
    """Bytes that a forward pass keeps for the backward pass, per row."""
    tensor: tuple[str, ...] = ()
    """How it can be cut over tensor ranks, of `KINDS`."""
    can_be_whole: bool = True
    """Whether several tensor ranks can also have the layer replicated."""
    whole_bytes: int = 0
    """Of a `block`: those of `parameter_bytes` that each tensor rank has."""
    all_reduces: int = 2
    """Of a `block`: in each pass. A Transformer layer has one of attention and one of the linear layers."""


@dataclass(frozen=True)
class Cluster:
    """The ranks. Equal hosts have equal numbers of ranks, with consecutive numbers."""

    num_ranks: int
    hosts: int
    within: Network
    """Network between two ranks of a host."""
    between: Network
    """Network of hosts: `bytes_per_s` is the rate of a host's link in each direction, which its ranks share."""
    memory_bytes: float = math.inf
    """Of the device of a rank."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.num_ranks < 1 or self.num_ranks % self.hosts:
            raise ValueError(
                f"hosts: expected a divisor of the number of ranks, {self.num_ranks}, so that all hosts have equally "
                f"many; found {self.hosts}"
            )

    @property
    def ranks_per_host(self) -> int:
        return self.num_ranks // self.hosts


@dataclass(frozen=True)
class States:
    """Bytes per parameter of one copy of the model."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


STATES = {
    "adam": States(4, 4, 8),
    "momentum": States(4, 4, 4),
    "sgd": States(4, 4, 0),
    "mixed_adam": States(2, 2, 12),
}
"""By optimizer: in float32; and Adam in mixed precision, which has weights and gradients of two bytes, and weights and
two moments of four."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a rank holds at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float = 0.0
    gathered: float = 0.0
    """Weights and gradients of one layer, which ZeRO-3 puts together while the layer is used."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered


def held(num_parameters: float, states: States, zero_stage: int, num_shards: int) -> MemoryUse:
    """Returns weights, gradients and optimizer's state of a rank.

    Args:
        zero_stage: 1 shards the optimizer's state over `num_shards` data ranks, 2 also the gradients, 3 also the
            weights.
    """
    weights, gradients, optimizer = (
        num_parameters * each / (num_shards if zero_stage >= first else 1)
        for each, first in ((states.weights, 3), (states.gradients, 2), (states.optimizer, 1))
    )
    return MemoryUse(weights, gradients, optimizer)


def micro_batches_kept(schedule: str, micro_batches: int, stages_left: int) -> int:
    """Returns of how many micro-batches a stage keeps activations at the same time.

    Args:
        stages_left: number of stages from this one to the last, p - i.
    """
    return micro_batches if schedule == GPIPE else min(micro_batches, stages_left)


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
