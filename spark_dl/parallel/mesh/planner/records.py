"""What the planner is given: the profile of a chain of layers, and the ranks with their network and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_dl.parallel.cost.cost import Network

REPLICATED, COLWISE, ROWWISE, SEQUENCE, SPLIT, BLOCK = (
    "replicated", "colwise", "rowwise", "sequence", "split", "block",
)  # fmt: skip
KINDS = (COLWISE, ROWWISE, SEQUENCE, SPLIT, BLOCK)
"""How a layer can be cut over tensor ranks, in the order of preference between cuts that cost the same (`tensor.py`
describes them). Every layer can also be replicated."""
WHOLE_WEIGHTS = (REPLICATED, SEQUENCE)
"""With these, each tensor rank has all weights of the layer."""


@dataclass(frozen=True)
class Seconds:
    """Time of a pass over a micro-batch: `fixed` + `per_row` * rows."""

    fixed: float = 0.0
    per_row: float = 0.0

    def of(self, rows: float) -> float:
        return self.fixed + self.per_row * rows


@dataclass(frozen=True)
class Layer:
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
