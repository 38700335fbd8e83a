"""Trial passes of a chain of layers on one batch: is it the model, and how long does each layer take?"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spark_dl.nn.moe import moe_layers
from spark_dl.parallel.generators import generators_kept
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
            return spec.output(model, batch, config.data.features)
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
        moved = to_device(batch, device, config)
        _seconds(spec, model, chain, moved, config)  # warms up
        measured = [_seconds(spec, model, chain, moved, config) for _ in range(repeats)]
        times.copy_(torch.tensor([statistics.median(of_layer) for of_layer in zip(*measured, strict=True)]))
    if is_distributed:
        dist.broadcast(times, 0)
    return [float(seconds) for seconds in times]


def _seconds(
    spec: ModelSpec, model: nn.Module, chain: Sequence[Layer], batch: Batch, config: Config
) -> list[float]:  # fmt: skip
    found = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        for layer in chain:

            def run(layer: Layer = layer, args: Any = args, kwargs: Any = kwargs) -> Any:
                value = layer.module(*args, **kwargs)
                outputs = [t for t in tensors_of(value) or () if t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
                return value

            seconds, value = _timed(run, batch["weight"].device)
            found.append(seconds)
            args, kwargs = (_leaves(value),), {}
        return args[0]

    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with state_kept(model), torch.enable_grad(), autocast(batch, config), forward_replaced(model, forward):
            spec.output(model, batch, config.data.features)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return found


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
