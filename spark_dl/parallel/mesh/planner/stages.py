"""Time and memory of one stage of a pipeline: the layers between two cuts, on the ranks of a mesh.

Cuts a chain of layers into the stages of a pipeline: dynamic programming, exact.

The time of a step is that of Alpa (Zheng et al. 2022, arXiv:2201.12023, section 5), with the gradient exchange that is
left when the first stage ends:

    sum t_i + (m - 1) max T_i + max(0, max (sync_i - sum over j < i of behind_j))

t_i is what stage i adds to the time of the first of m micro-batches, and T_i its time for each further one. Stage i
ends its last backward pass earlier than the first stage does, by the sum of `behind`, and then exchanges its gradients.

Alpa tries each value of the maximum. Here, each suffix of the layers keeps the cuts of which none is better in all of:
sum t, sum t with the exchange, max T. The time of a step grows with each of them, so no other cuts can be best.

The tensor plan of consecutive layers: how each is cut over the tensor ranks, found exactly by Viterbi's algorithm.

Alpa (Zheng et al. 2022, arXiv:2201.12023, section 4) finds such a plan with an integer program. For a chain it is a
shortest path: a layer adds its time, and two neighbors add the time of the collectives between them.

    replicated   every tensor rank does all of it
    colwise      the weights are cut by their outputs: takes whole rows, gives a part of the features
    rowwise      the weights are cut by their inputs: takes a part of the features, gives partial sums
    sequence     whole weights; takes and gives a part of the sequence (normalization, dropout)
    split        takes and gives a part of the features (activation functions)
    block        has its own plan inside, such as a whole Transformer layer; takes and gives whole rows, with
                 `all_reduces` of its output in each pass

`colwise`, `rowwise` and `block`: Shoeybi et al. 2019, arXiv:1909.08053, section 3. `sequence`: Korthikanti et al. 2022,
arXiv:2205.05198. Stages begin and end with whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from spark_dl.parallel.cost.cost import Network, all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, send_s
from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.records import (
    BLOCK,
    COLWISE,
    GPIPE,
    KINDS,
    REPLICATED,
    ROWWISE,
    SEQUENCE,
    SPLIT,
    WHOLE_WEIGHTS,
    Cluster,
    LayerProfile,
    Links,
    MemoryUse,
    States,
    held,
    micro_batches_kept,
)

Collective = Callable[[int, float, Network], float]
"""(ranks, bytes, network) -> seconds."""

_WHOLE, _PART, _SUMS, _ROWS = "whole", "part of the features", "partial sums", "part of the sequence"
_WHOLE_TO_PART = "whole, with partial gradients"
_GIVES = {REPLICATED: _WHOLE, COLWISE: _PART, ROWWISE: _SUMS, SEQUENCE: _ROWS, SPLIT: _PART, BLOCK: _WHOLE}
_TAKES = {REPLICATED: _WHOLE, COLWISE: _WHOLE_TO_PART, ROWWISE: _PART, SEQUENCE: _ROWS, SPLIT: _PART, BLOCK: _WHOLE}

_BETWEEN: dict[tuple[str, str], tuple[Collective | None, Collective | None]] = {
    (_WHOLE, _WHOLE): (None, None),
    (_WHOLE, _WHOLE_TO_PART): (None, all_reduce_s),
    (_WHOLE, _PART): (None, all_gather_s),
    (_WHOLE, _ROWS): (None, all_gather_s),
    (_PART, _WHOLE): (all_gather_s, None),
    (_PART, _WHOLE_TO_PART): (all_gather_s, reduce_scatter_s),
    (_PART, _PART): (None, None),
    (_PART, _ROWS): (all_to_all_s, all_to_all_s),
    (_SUMS, _WHOLE): (all_reduce_s, None),
    (_SUMS, _WHOLE_TO_PART): (all_reduce_s, all_reduce_s),
    (_SUMS, _PART): (reduce_scatter_s, all_gather_s),
    (_SUMS, _ROWS): (reduce_scatter_s, all_gather_s),
    (_ROWS, _WHOLE): (all_gather_s, None),
    (_ROWS, _WHOLE_TO_PART): (all_gather_s, reduce_scatter_s),
    (_ROWS, _PART): (all_to_all_s, all_to_all_s),
    (_ROWS, _ROWS): (None, None),
}
"""From what a layer gives to what the next takes: the collective of the forward pass on the output, and that of the
backward pass on its gradient. A slice of what a rank has takes no time."""

_BLOCK_WHOLE = 10 / 34
"""Part of a block's kept bytes that every tensor rank has: 10 of 34 (Korthikanti et al. 2022, equation 2)."""


class StageTimes(Protocol):
    """What the cuts need to know of a stage."""

    @property
    def seconds(self) -> float: ...
    @property
    def period_s(self) -> float: ...
    @property
    def behind_s(self) -> float: ...
    @property
    def sync_s(self) -> float: ...


@dataclass(frozen=True)
class Cuts:
    """The best cuts."""

    step_s: float
    starts: tuple[int, ...]
    """First layer of each stage."""


class _Suffix(NamedTuple):
    """Stages of the last layers, and the time of a step that consists of them alone."""

    seconds: float
    with_sync_s: float
    period_s: float
    starts: tuple[int, ...]


def step_s(stages: Sequence[StageTimes], micro_batches: int) -> tuple[float, float]:
    """Returns the time of a pipeline without the exchange of gradients, and the exchange that is left after it."""
    pipeline_s = sum(stage.seconds for stage in stages) + (micro_batches - 1) * max(stage.period_s for stage in stages)
    exposed_s = hidden_s = 0.0
    for stage in stages:
        exposed_s = max(exposed_s, stage.sync_s - hidden_s)
        hidden_s += stage.behind_s
    return pipeline_s, exposed_s


def best_cuts(
    num_layers: int,
    num_stages: int,
    micro_batches: int,
    cost: Callable[[int, int, int], StageTimes | None],
    *,
    prefix_s: Sequence[float] | None = None,
    limit_s: float = math.inf,
) -> Cuts | None:
    """Returns the cuts with the shortest step; None if there are none, or none that takes less than `limit_s`.

    Args:
        cost: (stage, start, end) -> the cost of layers `start` to `end` - 1 as this stage, or None if it does not fit.
        prefix_s: for each number of layers, the least seconds of a micro-batch in this many first layers. It only saves
            time.
    """
    least_s = prefix_s or [0.0] * (num_layers + 1)
    suffixes: dict[int, list[_Suffix]] = {num_layers: [_Suffix(0.0, 0.0, 0.0, ())]}
    for stage in reversed(range(num_stages)):
        starts = range(stage, num_layers - (num_stages - 1 - stage)) if stage else range(1)
        reached: dict[int, list[_Suffix]] = {}
        for start in starts:
            front: list[_Suffix] = []
            for end, suffix in suffixes.items():
                if end <= start or (own := cost(stage, start, end)) is None:
                    continue
                for after in suffix:
                    new = _before(own, after, start)
                    period_s = max(new.period_s, least_s[start] / stage if stage else 0.0)
                    once_s = max(least_s[start] + new.seconds, new.with_sync_s)
                    if once_s + (micro_batches - 1) * period_s < limit_s:
                        _insert(front, new)
            if front:
                reached[start] = front
        suffixes = reached
    whole = [Cuts(each.with_sync_s + (micro_batches - 1) * each.period_s, each.starts) for each in suffixes.get(0, [])]
    return min(whole, key=lambda cuts: cuts.step_s, default=None)


def _before(own: StageTimes, after: _Suffix, start: int) -> _Suffix:
    seconds = own.seconds + after.seconds
    return _Suffix(
        seconds,
        max(seconds + own.sync_s, own.seconds - own.behind_s + after.with_sync_s),
        max(own.period_s, after.period_s),
        (start, *after.starts),
    )


def _insert(front: list[_Suffix], new: _Suffix) -> None:
    """Adds a suffix unless another is as good in all respects, and removes those that it makes needless."""
    if any(_is_as_good(each, new) for each in front):
        return
    front[:] = [each for each in front if not _is_as_good(new, each)]
    front.append(new)


def _is_as_good(one: _Suffix, other: _Suffix) -> bool:
    return one.seconds <= other.seconds and one.with_sync_s <= other.with_sync_s and one.period_s <= other.period_s


@dataclass(frozen=True)
class PlanChoice:
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

    segment: LayerSegment
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
    memory: MemoryUse

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


class StageCosts:
    """Costs of the stages of one choice. `segments` are those of the layers, and are shared between choices."""

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        cluster: Cluster,
        states: States,
        choice: PlanChoice,
        segments: Segments,
    ):
        self._layers, self._cluster, self._states, self._choice = layers, cluster, states, choice
        self._segments, self._links = segments, Links(choice.dims, cluster)

    def fastest(self, start: int, end: int) -> LayerSegment:
        """Returns the fastest tensor plan of layers `start` to `end` - 1."""
        return self._segments.fastest(start, end, rows=self._choice.rows, tensor=self._choice.dims.tensor)

    def cost(self, stage: int, start: int, end: int) -> StageCost | None:
        """Returns the cost of layers `start` to `end` - 1 as a stage: with the fastest tensor plan, or that with the
        fewest bytes if only this one fits; None if none fits."""
        stage_cost = self._cost(stage, start, end, self.fastest(start, end))
        if stage_cost.memory.total > self._cluster.memory_bytes and self._choice.dims.tensor > 1:
            stage_cost = self.least_memory(stage, start, end)
        return None if stage_cost.memory.total > self._cluster.memory_bytes else stage_cost

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

    def _cost(self, stage: int, start: int, end: int, segment: LayerSegment) -> StageCost:
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

    def _zero(self, stage: int, segment: LayerSegment) -> tuple[float, float, float]:
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

    def _memory(self, stage: int, start: int, end: int, segment: LayerSegment) -> MemoryUse:
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
        return MemoryUse(
            by_zero.weights, by_zero.gradients, by_zero.optimizer, segment.kept_bytes * self._kept(stage), gathered
        )


def _by_unit(collective: Collective, units: int, data: int, num_bytes: float, network: Network) -> float:
    """Returns the seconds of one collective for each layer with weights. Only their total size matters."""
    return units * collective(data, num_bytes / units, network) if units else 0.0


class LayerSegment(NamedTuple):
    """Consecutive layers on one rank, for a micro-batch. Its numbers are sums over the layers."""

    kinds: tuple[str, ...]
    forward_s: float
    """Computation, and the collectives of the tensor ranks."""
    backward_s: float
    weight_bytes: float
    kept_bytes: float
    """Bytes kept from the forward to the backward pass."""
    units: int
    """Layers with weights."""
    shared_bytes: float
    """Weights of layers in `sequence`, whose gradients are summed over the tensor ranks once per step."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


Weigh = Callable[[LayerSegment], Any]
"""A sum over the layers, or a tuple of such sums, to be least."""


def fastest(segment: LayerSegment) -> tuple[float, float]:
    """The time of a micro-batch; of equal times, that with fewer bytes."""
    return segment.seconds, segment.weight_bytes + segment.kept_bytes


def smallest(bytes_per_weight_byte: float, micro_batches: int) -> Weigh:
    """The bytes that a rank holds; of equal ones, the faster.

    Args:
        bytes_per_weight_byte: of weights, gradients and optimizer's state.
        micro_batches: whose activations are kept.
    """

    def weigh(segment: LayerSegment) -> tuple[float, float]:
        held = segment.weight_bytes * bytes_per_weight_byte + segment.kept_bytes * micro_batches
        return held, segment.seconds

    return weigh


class TensorChain:
    """Layers on the tensor ranks of a stage: the time of each way to cut each layer, and between two neighbors."""

    def __init__(self, layers: Sequence[LayerProfile], *, rows: float, tensor: int, network: Network):
        self._own = [
            {kind: _one(layer, kind, rows, tensor, network) for kind in _kinds(layer, tensor)} for layer in layers
        ]
        kinds = [[REPLICATED], *(list(own) for own in self._own)]  # a stage begins with whole rows
        sizes = [0.0, *(layer.output_bytes * rows for layer in layers)]  # the model's input has no gradient
        self._between = [
            {(last, kind): _between(_GIVES[last], _TAKES[kind], size, tensor, network)
             for last in {REPLICATED, *kinds[i]} for kind in own}
            for i, (own, size) in enumerate(zip(self._own, sizes, strict=False))
        ]  # fmt: skip
        self._end_s = [
            {kind: _between(_GIVES[kind], _WHOLE, size, tensor, network)[0] for kind in own}
            for own, size in zip(self._own, sizes[1:], strict=True)
        ]

    def best_from(self, start: int, weigh: Weigh = fastest) -> list[LayerSegment]:
        """Returns the best plan of layers `start` to `end` - 1, for each `end` from `start` + 1 to the last."""
        best: dict[str, LayerSegment] = {}  # by the kind of the last layer
        segments = []
        for i in range(start, len(self._own)):
            reached = {}
            for kind in self._own[i]:
                if i == start:
                    reached[kind] = self._joined(None, REPLICATED, i, kind)
                else:
                    reached[kind] = min(
                        [self._joined(before, last, i, kind) for last, before in best.items()], key=weigh
                    )
            best = reached
            segments.append(min([self._ended(segment, i) for segment in best.values()], key=weigh))
        return segments

    def cost(self, start: int, kinds: Sequence[str]) -> LayerSegment:
        """Returns the cost of layers from `start` that are cut in the given ways."""
        segment, last = None, REPLICATED
        for i, kind in enumerate(kinds, start=start):
            segment, last = self._joined(segment, last, i, kind), kind
        assert segment is not None
        return self._ended(segment, start + len(kinds) - 1)

    def _joined(self, before: LayerSegment | None, last: str, i: int, kind: str) -> LayerSegment:
        """Appends layer i to a segment."""
        added = self._own[i][kind]
        forward_s, backward_s = self._between[i][last, kind]
        if before is None:
            return added._replace(forward_s=added.forward_s + forward_s, backward_s=added.backward_s + backward_s)
        return LayerSegment(
            before.kinds + added.kinds,
            before.forward_s + forward_s + added.forward_s,
            before.backward_s + backward_s + added.backward_s,
            before.weight_bytes + added.weight_bytes,
            before.kept_bytes + added.kept_bytes,
            before.units + added.units,
            before.shared_bytes + added.shared_bytes,
        )

    def _ended(self, segment: LayerSegment, last: int) -> LayerSegment:
        """Adds the collective after which all ranks have whole rows."""
        end_s = self._end_s[last][segment.kinds[-1]]
        return segment._replace(forward_s=segment.forward_s + end_s) if end_s else segment


class Segments:
    """The best segments of a chain of layers. Each is found once, for all plans with as many rows and tensor ranks."""

    def __init__(self, layers: Sequence[LayerProfile], network: Network):
        self._layers, self._network = layers, network
        self._chains: dict[tuple[float, int], TensorChain] = {}
        self._found: dict[tuple[object, ...], list[LayerSegment]] = {}

    def fastest(self, start: int, end: int, *, rows: float, tensor: int) -> LayerSegment:
        """Returns layers `start` to `end` - 1 with the plan that takes the least time."""
        return self._best(start, end, rows, tensor, fastest, "fastest")

    def smallest(
        self, start: int, end: int, *, rows: float, tensor: int, bytes_per_weight_byte: float, micro_batches: int
    ) -> LayerSegment:
        """Returns layers `start` to `end` - 1 with the plan that holds the fewest bytes, as the function `smallest`."""
        by = bytes_per_weight_byte, micro_batches
        return self._best(start, end, rows, tensor, smallest(*by), by)

    def _best(self, start: int, end: int, rows: float, tensor: int, weigh: Weigh, name: object) -> LayerSegment:
        key = (rows, tensor, start, name if tensor > 1 else "")  # without tensor ranks there is one plan
        if key not in self._found:
            chain = self._chains.get((rows, tensor))
            if chain is None:
                chain = TensorChain(self._layers, rows=rows, tensor=tensor, network=self._network)
                self._chains[rows, tensor] = chain
            self._found[key] = chain.best_from(start, weigh)
        return self._found[key][end - start - 1]


def _kinds(layer: LayerProfile, tensor: int) -> list[str]:
    if tensor == 1:
        return [REPLICATED]
    cut = [each for each in KINDS if each in layer.tensor]
    return [REPLICATED, *cut] if layer.can_be_whole or not cut else cut


def _between(gives: str, takes: str, num_bytes: float, tensor: int, network: Network) -> tuple[float, float]:
    forward, backward = _BETWEEN[gives, takes]
    return (
        forward(tensor, num_bytes, network) if forward else 0.0,
        backward(tensor, num_bytes, network) if backward else 0.0,
    )


def _one(layer: LayerProfile, kind: str, rows: float, tensor: int, network: Network) -> LayerSegment:
    computed = rows if kind == REPLICATED else rows / tensor
    forward_s, backward_s = layer.forward.of(computed), layer.backward.of(computed)
    kept = layer.kept_bytes * rows
    if kind == BLOCK:
        inside = layer.all_reduces * all_reduce_s(tensor, layer.output_bytes * rows, network)
        forward_s, backward_s = forward_s + inside, backward_s + inside
        kept *= _BLOCK_WHOLE + (1 - _BLOCK_WHOLE) / tensor
    elif kind not in (REPLICATED, COLWISE):  # which keep their input, and have all of it
        kept /= tensor
    whole = layer.parameter_bytes if kind in WHOLE_WEIGHTS else layer.whole_bytes if kind == BLOCK else 0
    weights = whole + (layer.parameter_bytes - whole) / tensor
    units = int(layer.parameter_bytes > 0)
    return LayerSegment((kind,), forward_s, backward_s, weights, kept, units, weights if kind == SEQUENCE else 0.0)
