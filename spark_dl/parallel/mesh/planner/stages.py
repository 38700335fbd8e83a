"""Time and memory of one stage of a pipeline: the layers between two cuts, on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_dl.parallel.cost.collectives import all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.links import Links
from spark_dl.parallel.mesh.planner.memory import GPIPE, Memory, States, held, micro_batches_kept
from spark_dl.parallel.mesh.planner.records import REPLICATED, WHOLE_WEIGHTS, Cluster, Layer
from spark_dl.parallel.mesh.planner.tensor import Segment, Segments

Collective = Callable[[int, float, Network], float]
"""(ranks, bytes, network) -> seconds."""


@dataclass(frozen=True)
class Choice:
    """All of a plan except its cuts."""

    dims: Dims
    zero_stage: int
    schedule: str
    micro_batches: int
    """Of each rank in a step."""
    rows: int
    """Of a micro-batch."""


class StageCost(NamedTuple):
    """One stage. Seconds are those of a micro-batch, except `sync_s`."""

    segment: Segment
    before_s: float
    """A transfer from or to the stage before it: of the output of a micro-batch, or of its gradient."""
    after_s: float
    """The same with the stage after it."""
    zero_forward_s: float
    """Collectives of ZeRO-3 in a forward pass."""
    zero_backward_s: float
    """Collectives of ZeRO-2 and ZeRO-3 in a backward pass."""
    period_s: float
    """How often the stage can do a micro-batch."""
    behind_s: float
    """From the end of the last backward pass of the next stage to that of its own."""
    sync_s: float
    """Exchange of gradients after its last backward pass, once per step."""
    memory: Memory

    @property
    def forward_s(self) -> float:
        return self.segment.forward_s + self.zero_forward_s

    @property
    def backward_s(self) -> float:
        return self.segment.backward_s + self.zero_backward_s

    @property
    def transfer_s(self) -> float:
        return self.before_s + self.after_s

    @property
    def seconds(self) -> float:
        """What the stage adds to the time of the first micro-batch. Each transfer is counted at one end on the way
        forward, and at the other on the way back."""
        return self.forward_s + self.backward_s + self.transfer_s


class Stages:
    """Costs of the stages of one choice. `segments` are those of the layers, and are shared between choices."""

    def __init__(
        self,
        layers: Sequence[Layer],
        cluster: Cluster,
        states: States,
        choice: Choice,
        segments: Segments,
    ):
        self._layers, self._cluster, self._states, self._choice = layers, cluster, states, choice
        self._segments, self._links = segments, Links(choice.dims, cluster)

    def fastest(self, start: int, end: int) -> Segment:
        """Returns the fastest tensor plan of layers `start` to `end` - 1."""
        return self._segments.fastest(start, end, rows=self._choice.rows, tensor=self._choice.dims.tensor)

    def cost(self, stage: int, start: int, end: int) -> StageCost | None:
        """Returns the cost of layers `start` to `end` - 1 as a stage: with the fastest tensor plan, or that with the
        fewest bytes if only this one fits; None if none fits."""
        found = self._cost(stage, start, end, self.fastest(start, end))
        if found.memory.total > self._cluster.memory_bytes and self._choice.dims.tensor > 1:
            found = self.least_memory(stage, start, end)
        return None if found.memory.total > self._cluster.memory_bytes else found

    def least_memory(self, stage: int, start: int, end: int) -> StageCost:
        """Returns the cost of a stage with the tensor plan of the fewest bytes, whether it fits or not."""
        choice = self._choice
        per_parameter = held(1, self._states, choice.zero_stage, choice.dims.data).total
        segment = self._segments.smallest(
            start,
            end,
            rows=choice.rows,
            tensor=choice.dims.tensor,
            bytes_per_weight_byte=per_parameter / self._states.weights,
            micro_batches=self._kept(stage),
        )
        return self._cost(stage, start, end, segment)

    def _kept(self, stage: int) -> int:
        choice = self._choice
        return micro_batches_kept(choice.schedule, choice.micro_batches, choice.dims.pipeline - stage)

    def _cost(self, stage: int, start: int, end: int, segment: Segment) -> StageCost:
        before_s = self._send_s(stage - 1, start) if stage else 0.0
        after_s = self._send_s(stage, end) if stage < self._choice.dims.pipeline - 1 else 0.0
        zero_forward_s, zero_backward_s, sync_s = self._zero(stage, segment)
        forward_s, backward_s = segment.forward_s + zero_forward_s, segment.backward_s + zero_backward_s
        if self._choice.schedule == GPIPE:  # sends while the next micro-batch is computed
            period_s = max(forward_s, after_s) + max(backward_s, before_s)
        else:  # waits for its neighbors between a forward and a backward pass
            period_s = forward_s + backward_s + before_s + after_s
        return StageCost(
            segment,
            before_s=before_s,
            after_s=after_s,
            zero_forward_s=zero_forward_s,
            zero_backward_s=zero_backward_s,
            period_s=period_s,
            behind_s=after_s + backward_s,
            sync_s=sync_s,
            memory=self._memory(stage, start, end, segment),
        )

    def _send_s(self, boundary: int, end: int) -> float:
        num_bytes = self._layers[end - 1].output_bytes * self._choice.rows
        return send_s(num_bytes, self._links.pipeline[boundary])

    def _zero(self, stage: int, segment: Segment) -> tuple[float, float, float]:
        """Returns the seconds of data ranks in a forward pass, a backward pass, and once per step."""
        data, zero, network = self._choice.dims.data, self._choice.zero_stage, self._links.data[stage]
        weights = segment.weight_bytes
        gradients = weights * self._states.gradients / self._states.weights
        shared = segment.shared_bytes * self._states.gradients / self._states.weights
        sync_s = all_reduce_s(self._choice.dims.tensor, shared, self._cluster.within)
        if zero == 3:
            gathered_s = _by_unit(all_gather_s, segment.units, data, weights, network)
            return gathered_s, gathered_s + _by_unit(reduce_scatter_s, segment.units, data, gradients, network), sync_s
        collective = reduce_scatter_s if zero else all_reduce_s
        if self._choice.dims.pipeline == 1:
            summed_s = self._exposed_s(segment.kinds, collective, network)
        else:
            summed_s = collective(data, gradients, network)
        if zero == 2:
            return 0.0, summed_s, sync_s + all_gather_s(data, weights, network)
        return 0.0, 0.0, sync_s + summed_s + (all_gather_s(data, weights, network) if zero else 0.0)

    def _exposed_s(self, kinds: Sequence[str], collective: Collective, network: Network) -> float:
        """Returns the seconds of the sums of gradients that are left when the last backward pass ends.

        Without a pipeline, the gradients of a layer are sent while the layers before it are computed (Li et al. 2020,
        arXiv:2006.15704), one layer at a time. What follows the backward pass of layer k takes as long as the
        collectives of layers 0 to k, less the backward passes of layers 0 to k - 1.
        """
        exposed_s = sent_s = computed_s = 0.0
        for layer, kind in zip(self._layers, kinds, strict=True):
            gradients = layer.parameter_bytes * self._states.gradients / self._states.weights
            cut = 1 if kind in WHOLE_WEIGHTS else self._choice.dims.tensor
            sent_s += collective(self._choice.dims.data, gradients / cut, network)
            exposed_s = max(exposed_s, sent_s - computed_s)
            computed_s += layer.backward.of(self._choice.rows / (1 if kind == REPLICATED else self._choice.dims.tensor))
        return exposed_s

    def _memory(self, stage: int, start: int, end: int, segment: Segment) -> Memory:
        choice, states = self._choice, self._states
        parameters = segment.weight_bytes / states.weights
        by_zero = held(parameters, states, choice.zero_stage, choice.dims.data)
        gathered = 0.0
        if choice.zero_stage == 3 and choice.dims.data > 1:
            largest = max(
                layer.parameter_bytes / (1 if kind in WHOLE_WEIGHTS else choice.dims.tensor)
                for layer, kind in zip(self._layers[start:end], segment.kinds, strict=True)
            )
            gathered = largest * (1 + states.gradients / states.weights)
        return Memory(
            by_zero.weights, by_zero.gradients, by_zero.optimizer, segment.kept_bytes * self._kept(stage), gathered
        )


def _by_unit(collective: Collective, units: int, data: int, num_bytes: float, network: Network) -> float:
    """Returns the seconds of one collective for each layer with weights. Only their total size matters."""
    return units * collective(data, num_bytes / units, network) if units else 0.0
