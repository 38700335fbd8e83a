"""The tensor plan of consecutive layers: how each is cut over the tensor ranks, found exactly by Viterbi's algorithm.

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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spark_dl.parallel.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.planner.records import (
    BLOCK,
    COLWISE,
    KINDS,
    REPLICATED,
    ROWWISE,
    SEQUENCE,
    SPLIT,
    WHOLE_WEIGHTS,
    Layer,
)  # fmt: skip

_WHOLE, _PART, _SUMS, _ROWS = "whole", "part of the features", "partial sums", "part of the sequence"
_WHOLE_TO_PART = "whole, with partial gradients"
_GIVES = {REPLICATED: _WHOLE, COLWISE: _PART, ROWWISE: _SUMS, SEQUENCE: _ROWS, SPLIT: _PART, BLOCK: _WHOLE}
_TAKES = {REPLICATED: _WHOLE, COLWISE: _WHOLE_TO_PART, ROWWISE: _PART, SEQUENCE: _ROWS, SPLIT: _PART, BLOCK: _WHOLE}

Collective = Callable[[int, float, Network], float]
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


class Segment(NamedTuple):
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


Weigh = Callable[[Segment], Any]
"""A sum over the layers, or a tuple of such sums, to be least."""


def fastest(segment: Segment) -> tuple[float, float]:
    """The time of a micro-batch; of equal times, that with fewer bytes."""
    return segment.seconds, segment.weight_bytes + segment.kept_bytes


def smallest(bytes_per_weight_byte: float, micro_batches: int) -> Weigh:
    """The bytes that a rank holds; of equal ones, the faster.

    bytes_per_weight_byte: of weights, gradients and optimizer's state. micro_batches: whose activations are kept.
    """

    def weigh(segment: Segment) -> tuple[float, float]:
        held = segment.weight_bytes * bytes_per_weight_byte + segment.kept_bytes * micro_batches
        return held, segment.seconds

    return weigh


class TensorChain:
    """Layers on the tensor ranks of a stage: the time of each way to cut each layer, and between two neighbors."""

    def __init__(self, layers: Sequence[Layer], *, rows: float, tensor: int, network: Network):
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

    def best_from(self, start: int, weigh: Weigh = fastest) -> list[Segment]:
        """Returns the best plan of layers `start` to `end` - 1, for each `end` from `start` + 1 to the last."""
        best: dict[str, Segment] = {}  # by the kind of the last layer
        found = []
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
            found.append(min([self._ended(segment, i) for segment in best.values()], key=weigh))
        return found

    def cost(self, start: int, kinds: Sequence[str]) -> Segment:
        """Returns the cost of layers from `start` that are cut in the given ways."""
        found, last = None, REPLICATED
        for i, kind in enumerate(kinds, start=start):
            found, last = self._joined(found, last, i, kind), kind
        assert found is not None
        return self._ended(found, start + len(kinds) - 1)

    def _joined(self, before: Segment | None, last: str, i: int, kind: str) -> Segment:
        """Appends layer i to a segment."""
        own = self._own[i][kind]
        forward_s, backward_s = self._between[i][last, kind]
        if before is None:
            return own._replace(forward_s=own.forward_s + forward_s, backward_s=own.backward_s + backward_s)
        return Segment(
            before.kinds + own.kinds,
            before.forward_s + forward_s + own.forward_s,
            before.backward_s + backward_s + own.backward_s,
            before.weight_bytes + own.weight_bytes,
            before.kept_bytes + own.kept_bytes,
            before.units + own.units,
            before.shared_bytes + own.shared_bytes,
        )

    def _ended(self, segment: Segment, last: int) -> Segment:
        """Adds the collective after which all ranks have whole rows."""
        end_s = self._end_s[last][segment.kinds[-1]]
        return segment._replace(forward_s=segment.forward_s + end_s) if end_s else segment


class Segments:
    """The best segments of a chain of layers. Each is found once, for all plans with as many rows and tensor ranks."""

    def __init__(self, layers: Sequence[Layer], network: Network):
        self._layers, self._network = layers, network
        self._chains: dict[tuple[float, int], TensorChain] = {}
        self._found: dict[tuple[object, ...], list[Segment]] = {}

    def fastest(self, start: int, end: int, *, rows: float, tensor: int) -> Segment:
        """Returns layers `start` to `end` - 1 with the plan that takes the least time."""
        return self._best(start, end, rows, tensor, fastest, "fastest")

    def smallest(
        self, start: int, end: int, *, rows: float, tensor: int, bytes_per_weight_byte: float, micro_batches: int
    ) -> Segment:
        """Returns layers `start` to `end` - 1 with the plan that holds the fewest bytes, as the function `smallest`."""
        by = bytes_per_weight_byte, micro_batches
        return self._best(start, end, rows, tensor, smallest(*by), by)

    def _best(self, start: int, end: int, rows: float, tensor: int, weigh: Weigh, name: object) -> Segment:
        key = (rows, tensor, start, name if tensor > 1 else "")  # without tensor ranks there is one plan
        if key not in self._found:
            chain = self._chains.get((rows, tensor))
            if chain is None:
                chain = TensorChain(self._layers, rows=rows, tensor=tensor, network=self._network)
                self._chains[rows, tensor] = chain
            self._found[key] = chain.best_from(start, weigh)
        return self._found[key][end - start - 1]


def _kinds(layer: Layer, tensor: int) -> list[str]:
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


def _one(layer: Layer, kind: str, rows: float, tensor: int, network: Network) -> Segment:
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
    return Segment((kind,), forward_s, backward_s, weights, kept, units, weights if kind == SEQUENCE else 0.0)
