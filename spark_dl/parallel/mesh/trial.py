"""The stages of a pipeline that one rank has, and the trial passes by which the layers are divided among them.

A trial pass of one batch answers: is the chain of layers the model, and how long does each layer take?
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.generators import generators_kept
from spark_dl.nn.moe import moe_layers
from spark_dl.parallel.loss import autocast
from spark_dl.parallel.mesh.flat import local
from spark_dl.parallel.mesh.layers import Layer, Tied, check_cut, cut_chain, find_tied, tensors_of
from spark_dl.parallel.mesh.stage import (
    Boundary,
    Stage,
    UnknownShape,
    boundary_of,
    enter,
    find_boundaries,
    forward_replaced,
    remove_layer,
    to_meta,
    without_storage,
)
from spark_dl.parallel.modules import to_device
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config

_log = logging.getLogger("spark_dl")
_HEADER = 64
"""Numbers that are sent before tensors of unknown shape."""
_TAG, _TIED_TAG = 11, 12
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


def check_chain(spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config) -> None:
    """Checks that a chain gives the outputs of the model, bit for bit, in training and in evaluation. On any side.

    Buffers, generators and modes stay as they are. batch: on the device of the model, as a loader gives it.
    Raises ValueError, with the mode and the difference, or the layer that cannot be called.
    """
    for mode in ("training", "evaluation"):
        with contextlib.nullcontext() if mode == "training" else _in_evaluation_mode(model):
            expected = _output(spec, model, batch, config)
            chained = _output(spec, model, batch, config, chain)
        difference = _difference(chained, expected)
        if difference:
            raise ValueError(
                f"spec.layers: the layers, called in order on each other's output, give another output than the model "
                f"in {mode} mode: {difference}. Each layer must get the output of the layer before it and nothing "
                "else: connections that skip layers must be within one layer"
            )


def _output(
    spec: ModelSpec, model: nn.Module, batch: Batch, config: Config, chain: Sequence[Layer] | None = None
) -> Output:  # fmt: skip
    layer = ""

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal layer
        assert chain is not None
        for each in chain:
            layer = each.name
            args, kwargs = (each.module(*args, **kwargs),), {}
        layer = ""
        return args[0]

    replaced = contextlib.nullcontext() if chain is None else forward_replaced(model, forward)
    try:
        with state_kept(model), torch.no_grad(), autocast(batch, config), replaced:
            return spec.output(model, batch, config.inputs)
    except Exception as error:
        if not layer:
            raise
        raise ValueError(
            f"spec.layers: the layer {layer!r} cannot be called on the output of the layer before it: "
            f"{type(error).__name__}: {error}"
        ) from error


def _difference(found: Output, expected: Output) -> str:
    """Returns in which way an output differs, or an empty string."""
    from torch.utils._pytree import tree_flatten

    (a, structure), (b, other) = tree_flatten(found), tree_flatten(expected)
    if structure != other:
        return f"its structure is {structure} and not {other}"
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            return f"found {tuple(x.shape)} {x.dtype}, expected {tuple(y.shape)} {y.dtype}"
        if not torch.equal(x, y) and not (x.is_floating_point() and torch.allclose(x, y, 0.0, 0.0, equal_nan=True)):
            return f"the largest difference is {float((x.double() - y.double()).abs().max()):.3g}"
    return ""


class LayerPass(NamedTuple):
    """What one layer took and kept in a forward and a backward pass of one micro-batch."""

    forward_s: float
    backward_s: float
    output_bytes: int
    kept_bytes: int
    """Memory that the forward pass keeps for the backward pass, without parameters and buffers; 0 if not counted."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def measure_layers(
    spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config, *,
    device: torch.device, repeats: int = 3,
) -> list[float]:  # fmt: skip
    """Measures the seconds of each layer, forward and backward, for one micro-batch. Collective: rank 0 measures.

    The model must be whole and on `device`. Returns the median of the repeats, the same numbers on all ranks, so that
    all ranks cut the model alike. Gradients, buffers and generators stay as they are. Without a process group, this
    process measures.
    """
    times = torch.zeros(len(chain), dtype=torch.float64, device=device)
    is_distributed = dist.is_initialized()
    if not is_distributed or dist.get_rank() == 0:
        passes = measure_passes(spec, model, chain, to_device(batch, device, config), config, repeats=repeats)
        times.copy_(torch.tensor([layer.seconds for layer in passes]))
    if is_distributed:
        dist.broadcast(times, 0)
    return [float(seconds) for seconds in times]


def measure_passes(
    spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config, *, repeats: int = 3
) -> list[LayerPass]:  # fmt: skip
    """Measures the layers for one micro-batch: medians of the repeats. Not collective.

    Args:
        batch: on the device of the model, which must be whole. Gradients, buffers and generators stay as they are.
    """
    counted = _passes(spec, model, chain, batch, config, counts=True)  # warms up
    measured = [_passes(spec, model, chain, batch, config) for _ in range(repeats)]
    return [
        LayerPass(
            statistics.median(each.forward_s for each in of_layer),
            statistics.median(each.backward_s for each in of_layer),
            first.output_bytes,
            first.kept_bytes,
        )
        for first, *of_layer in zip(counted, *measured, strict=True)
    ]


def _passes(
    spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config, *, counts: bool = False
) -> list[LayerPass]:  # fmt: skip
    passes = []
    device = batch["weight"].device

    def forward(*args: Any, **kwargs: Any) -> Any:
        for layer in chain:
            kept: dict[int, int] = {}
            with _bytes_kept(layer.module, kept) if counts else contextlib.nullcontext():
                forward_s, value = _timed(functools.partial(layer.module, *args, **kwargs), device)
            tensors = tensors_of(value) or ()
            outputs = [t for t in tensors if t.requires_grad]
            backward_s = 0.0
            if outputs:
                ones = [torch.ones_like(t) for t in outputs]
                backward_s, _ = _timed(functools.partial(torch.autograd.backward, outputs, ones), device)
            passes.append(LayerPass(forward_s, backward_s, sum(t.nbytes for t in tensors), sum(kept.values())))
            args, kwargs = (_leaves(value),), {}
        return args[0]

    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with state_kept(model), torch.enable_grad(), autocast(batch, config), forward_replaced(model, forward):
            spec.output(model, batch, config.inputs)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return passes


def _bytes_kept(module: nn.Module, kept: dict[int, int]) -> contextlib.AbstractContextManager[Any]:
    """Collects the bytes of the memory that forward passes keep for backward passes, by its address."""
    not_kept = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_kept:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


def _leaves(value: Any) -> Any:
    """The values of a layer's output, as if they had been received."""
    tensors = tensors_of(value)
    if tensors is None:
        return value
    entered = tuple(enter(t.detach().clone().requires_grad_(t.requires_grad)) for t in tensors)
    return entered[0] if isinstance(value, Tensor) else entered


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    value = function()
    return now() - start, value


@contextlib.contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restores the buffers of a model and the generators on exit."""
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with generators_kept(sorted(gpu for gpu in gpus if gpu is not None)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for layer in moe_layers(model).values():
            layer.take_counts()  # only steps count


@contextlib.contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class RankStages:
    """The stages of one rank. Its pipeline has the ranks of `group`, in their order.

    Raises ValueError, on all ranks, for stages of several ranks that share buffers, and for a rank that has no
    parameter to train.

    Args:
        model: built on the CPU, on every rank with the same weights. It keeps only the layers of this rank, with their
            names, on `device`. The storage of all other layers is freed.
        chain: from `build_chain(model)`.
        cut: number of layers of each stage.
        rank_of: rank in the group that has a stage.
    """

    def __init__(
        self, spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], cut: Sequence[int], config: Config, *,
        group: dist.ProcessGroup, device: torch.device, rank_of: Callable[[int], int],
    ):  # fmt: skip
        cut = check_cut(cut, len(chain), len(cut))
        self.rank, self.num_stages = dist.get_rank(group), len(cut)
        self.ranks = [rank_of(stage) for stage in range(self.num_stages)]
        self.group, self.device, self.module = group, device, model
        self._spec, self._config, self._chain = spec, config, chain
        self._layers = cut_chain(chain, cut)
        rank_of_layer = [rank for rank, size in zip(self.ranks, cut, strict=True) for _ in range(size)]
        self.tied = [
            Tied(tied.names, ranks)
            for tied in find_tied(chain)
            if len(ranks := tuple(sorted({rank_of_layer[i] for i in tied.layers}, key=rank_of_layer.index))) > 1
        ]
        """The parameters that several ranks have a copy of, with these ranks instead of layers."""
        _check_buffers(chain, rank_of_layer)
        check_trained(self._layers, self.ranks)
        self._without_storage = [
            [Layer(each.name, without_storage(each.module)) for each in own] for own in self._layers
        ]
        """Copies of all layers as they were built, whole and without hooks, to find what stages pass on."""
        self._keep_own([layer for layer, rank in zip(chain, rank_of_layer, strict=True) if rank == self.rank])
        self.stages = {
            i: Stage(spec, model, config, layers, is_first=i == 0, is_last=i == self.num_stages - 1)
            for i, layers in enumerate(self._layers)
            if self.ranks[i] == self.rank
        }
        """The stages of this rank, by their index in the pipeline."""
        self._shapes: list[dict[str, torch.Size]] | None = None
        self.boundaries: dict[int, Boundary] = {}
        """What stages pass on, by their index: at least those of this rank and before them. Known after `take`."""

    def _keep_own(self, own: Sequence[Layer]) -> None:
        kept = [layer.module for layer in own]
        names = {layer.name for layer in own}
        for layer in self._chain:
            if layer.name not in names:
                to_meta(layer.module, kept)
                remove_layer(self.module, layer.name)
        self.module.to(self.device)

    @property
    def last_rank(self) -> int:
        """The rank in the group that has the last stage."""
        return self.ranks[-1]

    def _tied_here(self) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
        """Returns the tied parameters of this rank, with the ranks that have a copy."""
        # By name, as tensor ranks and shards replace parameters after this object is built.
        named = dict(self.module.named_parameters(remove_duplicate=False))
        return [
            (next(named[name] for name in tied.names if name in named), tied.layers)
            for tied in self.tied
            if self.rank in tied.layers
        ]

    def counted_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that this rank counts in a norm over the model: of a tied one, one rank has it."""
        others = {id(parameter) for parameter, ranks in self._tied_here() if ranks[0] != self.rank}
        return [p for p in self.module.parameters() if id(p) not in others]

    def take(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """Returns the micro-batches of a step on the device. Finds the boundaries for the first one. Collective.

        Raises ValueError on all ranks if their shapes differ from each other, or from those of the first step.
        """
        shapes = [{name: tensor.shape for name, tensor in batch.items()} for batch in micro_batches]
        expected = (self._shapes or shapes)[0]
        for shape in shapes:
            _check_shapes(shape, expected)
        batches = [to_device(batch, self.device, self._config) for batch in micro_batches]
        if self._shapes is None:
            self.boundaries = self._find_boundaries(batches[0])
            self._shapes = shapes[:1]
        return batches

    def _find_boundaries(self, batch: Batch) -> dict[int, Boundary]:
        try:
            return dict(enumerate(find_boundaries(self._spec, self.module, self._config, self._without_storage, batch)))
        except UnknownShape as reason:  # on all ranks, as all have the same layers and the same batch
            _log.info("the first batch is computed once more, to find the shapes that stages pass on: %s", reason)
        boundaries = {}
        with state_kept(self.module), torch.enable_grad():
            received: Any = None
            for index, stage in sorted(self.stages.items()):
                if index and self.ranks[index - 1] != self.rank:
                    received = self._receive(self.ranks[index - 1])
                    boundaries[index - 1] = boundary_of(self._layers[index - 1][-1].name, received)
                if stage.is_last:
                    break
                received = stage.activation(batch, received)
                boundaries[index] = boundary_of(stage.layers[-1].name, received)
                if self.ranks[index + 1] != self.rank:
                    self._send(received, self.ranks[index + 1])
        return boundaries

    def forward(self, batch: Batch) -> Output | None:
        """Computes the output of the model for a batch with any number of rows. Collective over the pipeline.

        Returns it on the rank of the last stage, and None on the others.
        """
        moved = to_device(batch, self.device, self._config)
        received: Any = None
        for index, stage in sorted(self.stages.items()):
            if index and self.ranks[index - 1] != self.rank:
                received = self._receive(self.ranks[index - 1])
            if stage.is_last:
                return stage.output(moved, received)
            received = stage.activation(moved, received)
            if self.ranks[index + 1] != self.rank:
                self._send(received, self.ranks[index + 1])
        return None

    def sum_tied_gradients(self) -> None:
        """Gives all copies of a tied parameter the sum of their gradients, with the same bits. Collective.

        The gradients are added in the order of the stages on each rank.
        """
        for parameter, ranks in self._tied_here():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)  # of shards, what this rank has: the other copies have the same shards
            own = gradient.contiguous()
            parts = {rank: own if rank == self.rank else torch.empty_like(own) for rank in ranks}
            works = [
                work
                for rank, part in parts.items()
                if rank != self.rank
                for work in (
                    dist.isend(own, group=self.group, group_dst=rank, tag=_TIED_TAG),
                    dist.irecv(part, group=self.group, group_src=rank, tag=_TIED_TAG),
                )
            ]
            for work in works:
                assert work is not None
                work.wait()
            total = parts[ranks[0]].clone()
            for rank in ranks[1:]:
                total += parts[rank]
            gradient.copy_(total)  # in place, as it can be a view of a bucket

    def _send(self, value: Any, rank: int) -> None:
        """Sends a tensor or a tuple of tensors, with their shapes."""
        tensors = [value] if isinstance(value, Tensor) else list(value)
        numbers = [0 if isinstance(value, Tensor) else 1, len(tensors)]
        for tensor in tensors:
            numbers += [_DTYPES.index(tensor.dtype), tensor.requires_grad, tensor.ndim, *tensor.shape]
        assert len(numbers) <= _HEADER
        header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=self.device)
        for tensor in (header, *tensors):
            dist.send(tensor.detach().contiguous(), group=self.group, group_dst=rank, tag=_TAG)

    def _receive(self, rank: int) -> Any:
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=rank, tag=_TAG)
        numbers = iter(header.tolist())
        is_tuple, count = next(numbers), next(numbers)
        tensors = []
        for _ in range(count):
            dtype, has_gradient, ndim = _DTYPES[next(numbers)], bool(next(numbers)), next(numbers)
            tensor = torch.empty(list(itertools.islice(numbers, ndim)), dtype=dtype, device=self.device)
            dist.recv(tensor, group=self.group, group_src=rank, tag=_TAG)
            tensors.append(enter(tensor.requires_grad_(has_gradient)))
        return tuple(tensors) if is_tuple else tensors[0]


def _check_buffers(chain: Sequence[Layer], ranks: Sequence[int]) -> None:
    """Raises ValueError for buffers that change on several ranks, such as those of one BatchNorm that is used twice."""
    seen: dict[int, tuple[str, int]] = {}
    for layer, rank in zip(chain, ranks, strict=True):
        for name, buffer in layer.module.named_buffers():
            other, other_rank = seen.setdefault(id(buffer), (f"{layer.name}.{name}", rank))
            if other_rank != rank:
                raise ValueError(
                    f"spec.layers: the buffers {other!r} and '{layer.name}.{name}' are one tensor, and their layers "
                    "are in stages of different ranks; put them into one stage (parallel.stages)"
                )


def check_trained(stages: Sequence[Sequence[Layer]], ranks: Sequence[int]) -> None:
    """Raises ValueError if a rank would have no parameter to train. On any side.

    Args:
        stages: the layers of each stage.
        ranks: the rank that has it.
    """
    trained = {
        rank
        for layers, rank in zip(stages, ranks, strict=True)
        if any(p.requires_grad for layer in layers for p in layer.module.parameters())
    }
    for layers, rank in zip(stages, ranks, strict=True):
        if rank not in trained:
            raise ValueError(
                f"parallel.stages: expected a parameter that requires a gradient on each rank of a pipeline, found "
                f"none in the stage with the layers {', '.join(layer.name for layer in layers)}; cut the model "
                "elsewhere, or use fewer stages"
            )


def _check_shapes(found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    rows, expected_rows = found["weight"][0], expected["weight"][0]
    if rows != expected_rows:
        raise ValueError(
            f"train.accumulation_steps: expected micro-batches with the same number of rows in a pipeline, found "
            f"{expected_rows} and {rows} rows; set it to a divisor of train.global_batch_size / number of data ranks"
        )
    for name in expected.keys() | found.keys():
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"the column {name!r} has the shape {_shape(found.get(name))} in one micro-batch, and "
                f"{_shape(expected.get(name))} in the first one; in a pipeline, all micro-batches must have the same "
                "shape: cut or pad the values to one length in spec.transform"
            )


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else str(tuple(shape))


def meta_like(boundary: Boundary, device: torch.device) -> Iterator[Tensor]:
    """Yields a new tensor for each one of a boundary. # of its shape and dtype"""
    for tensor in boundary.tensors:
        yield torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
