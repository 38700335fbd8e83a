"""Trial passes of a chain of layers on one batch: is it the model, and how long does each layer take?"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.generators import generators_kept
from spark_dl.nn.moe import moe_layers
from spark_dl.parallel.layout import to_device
from spark_dl.parallel.loss import autocast
from spark_dl.parallel.mesh.layers import Layer, tensors_of
from spark_dl.parallel.mesh.stage import enter, forward_replaced
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config


def check_chain(spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config) -> None:
    """Checks that a chain gives the outputs of the model, bit for bit, in training and in evaluation. On any side.

    Buffers, generators and modes stay as they are. batch: on the device of the model, as a loader gives it.
    Raises ValueError, with the mode and the difference, or the layer that cannot be called.
    """
    for mode in ("training", "evaluation"):
        with contextlib.nullcontext() if mode == "training" else _in_evaluation_mode(model):
            expected = _output(spec, model, batch, config)
            found = _output(spec, model, batch, config, chain)
        difference = _difference(found, expected)
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
        found = measure_passes(spec, model, chain, to_device(batch, device, config), config, repeats=repeats)
        times.copy_(torch.tensor([layer.seconds for layer in found]))
    if is_distributed:
        dist.broadcast(times, 0)
    return [float(seconds) for seconds in times]


def measure_passes(
    spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config, *, repeats: int = 3
) -> list[LayerPass]:  # fmt: skip
    """Measures the layers for one micro-batch: medians of the repeats. Not collective.

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
    found = []
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
            found.append(LayerPass(forward_s, backward_s, sum(t.nbytes for t in tensors), sum(kept.values())))
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
    return found


def _bytes_kept(module: nn.Module, kept: dict[int, int]) -> contextlib.AbstractContextManager[Any]:
    """Collects the bytes of the memory that forward passes keep for backward passes, by its address."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
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
