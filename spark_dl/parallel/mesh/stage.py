"""One stage of a pipeline: consecutive layers, which the user's `spec.forward` calls as if they were the model.

On every stage, `spec.output` is called with the model and the batch, and the call of the model runs the layers of the
stage: the first stage on the arguments, the others on what they received. What comes before that call, such as a cast,
so takes effect in the first stage, and what comes after it in the last one, as only there the call returns. Contexts
around it, such as `torch.autocast`, are entered on every stage.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spark_dl.generators import generators_kept
from spark_dl.nn.moe import note_rows
from spark_dl.parallel.loss import autocast, misfits_named, weighted_loss_sum
from spark_dl.parallel.mesh.layers import Layer, tensors_of
from spark_dl.spec import Batch, ModelSpec, Output

if TYPE_CHECKING:
    from spark_dl.config import Config

Weights = Sequence[Mapping[str, Tensor]]
"""Weights to use instead of those of the modules: of each layer, by their names in the layer."""


class _Left(BaseException):
    """The stage is done: carries what it passes on out of `spec.forward`. No `except Exception` there catches it."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value


def run_layers(layers: Sequence[Layer], *args: Any, weights: Weights | None = None, **kwargs: Any) -> Any:
    """Calls layers, the first with the arguments, and each other one with the output of the one before it."""
    for i, layer in enumerate(layers):
        if weights is None:
            value = layer.module(*args, **kwargs)
        else:
            value = functional_call(layer.module, dict(weights[i]), args, kwargs)
        args, kwargs = (value,), {}
    (out,) = args
    return out


@contextlib.contextmanager
def forward_replaced(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces what a call of the model does, for the block. Raises ValueError if it is not called exactly once."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError("spec.forward: expected one call of the model in a pipeline, found a second one")
        return forward(*args, **kwargs)

    own = vars(model).get("forward")
    model.forward = call
    try:
        yield
        if not calls:
            raise ValueError("spec.forward: expected one call of the model in a pipeline, found none")
    finally:
        vars(model).pop("forward", None)
        if own is not None:
            model.forward = own


class Stage:
    """Consecutive layers of a model.

    Args:
        model: the object that `spec.forward` is called with. Its own forward pass is not used.
    """

    def __init__(
        self, spec: ModelSpec, model: nn.Module, config: Config, layers: Sequence[Layer], *,
        is_first: bool, is_last: bool,
    ):  # fmt: skip
        self._spec, self._model, self._config = spec, model, config
        self.layers = list(layers)
        self.is_first, self.is_last = is_first, is_last

    def activation(self, batch: Batch, received: Any = None, weights: Weights | None = None) -> Any:
        """Returns what this stage passes on to the next one. Not for the last stage.

        Args:
            received: what the stage before it has passed on; not used by the first stage.
        """
        assert not self.is_last
        note_rows(self._model, batch["weight"])
        try:
            with misfits_named(batch), autocast(batch, self._config), self._in_place_of_model(received, weights):
                self._spec.output(self._model, batch, self._config.inputs)
        except _Left as left:
            return left.value
        raise AssertionError  # forward_replaced has raised

    def loss_sum(self, batch: Batch, received: Any = None, weights: Weights | None = None) -> Tensor:
        """Returns the sum of losses over the true rows, a float32 scalar. For the last stage."""
        assert self.is_last
        with misfits_named(batch), self._in_place_of_model(received, weights):
            return weighted_loss_sum(self._spec, self._model, batch, self._config)[1]

    def output(self, batch: Batch, received: Any = None) -> Output:
        """Returns the output of the model. For the last stage."""
        assert self.is_last
        with autocast(batch, self._config), self._in_place_of_model(received, None):
            return self._spec.output(self._model, batch, self._config.inputs)

    def _in_place_of_model(
        self, received: Any, weights: Weights | None
    ) -> contextlib.AbstractContextManager[None]:  # fmt: skip
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.is_first:
                value = run_layers(self.layers, *args, weights=weights, **kwargs)
            else:
                value = run_layers(self.layers, received, weights=weights)
            if self.is_last:
                return value
            raise _Left(value)

        return forward_replaced(self._model, forward)


class Boundary(NamedTuple):
    """What a stage passes on to the next one."""

    layer: str
    """The last layer of the stage."""
    is_tuple: bool
    tensors: tuple[Tensor, ...]
    """Shapes, dtypes, and whether there is a gradient, on the meta device."""

    def wrap(self, tensors: Sequence[Tensor]) -> Any:
        """Returns tensors as the stage has passed them on."""
        return tuple(tensors) if self.is_tuple else tensors[0]

    def unwrap(self, value: Any) -> tuple[Tensor, ...]:
        """Returns the tensors to send, contiguous. Raises RuntimeError if they differ from those that are expected."""
        tensors = tensors_of(value) or ()
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in self.tensors]:
            raise RuntimeError(
                f"the layer {self.layer!r} at the end of a pipeline stage returned {_describe(tensors)}, and "
                f"{_describe(self.tensors)} for the first batch; in a pipeline, shapes and dtypes must not depend on "
                "the values of a batch"
            )
        return tuple(t.contiguous() for t in tensors)


def _describe(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors) or "no tensor"


class UnknownShape(Exception):  # noqa: N818 - not a mistake of the user
    """The shape of a layer's output is not known before it is computed."""


def find_boundaries(
    spec: ModelSpec, model: nn.Module, config: Config, stages: Sequence[Sequence[Layer]], batch: Batch,
) -> list[Boundary]:  # fmt: skip
    """Returns what each stage but the last one passes on for a batch, without computing it: with torch's fake tensors.

    The layers can be on the meta device. Their parameters, buffers and the generators stay as they are.
    Raises UnknownShape if a layer computes with the values of tensors; ValueError if a stage passes on anything else.
    """
    passed: list[tuple[Layer, Any]] = []
    device = batch["weight"].device

    def forward(*args: Any, **kwargs: Any) -> Any:
        passed.extend(_fake_pass(stages, device, args, kwargs))
        raise _Left(None)

    gpus = [device.index] if device.type == "cuda" and device.index is not None else []
    try:
        with (
            misfits_named(batch), autocast(batch, config), generators_kept(gpus), torch.enable_grad(),
            forward_replaced(model, forward),
        ):  # fmt: skip
            spec.output(model, batch, config.inputs)
    except _Left:
        pass
    return [boundary_of(layer.name, value) for layer, value in passed]


def _fake_pass(
    stages: Sequence[Sequence[Layer]], device: torch.device, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[Layer, Any]]:
    """Returns the last layer of each stage but the last one, with its fake output."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    passed = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(tensor: Tensor) -> Tensor:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            return made.requires_grad_(tensor.requires_grad)

        args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, dict(kwargs)))
        for layers in stages[:-1]:
            for layer in layers:
                named = [*layer.module.named_parameters(), *layer.module.named_buffers()]
                try:
                    value = functional_call(layer.module, {name: fake(t) for name, t in named}, args, dict(kwargs))
                except Exception as error:
                    raise UnknownShape(f"the layer {layer.name!r}: {type(error).__name__}: {error}") from error
                args, kwargs = (value,), {}
            passed.append((layers[-1], value))
    return passed


def boundary_of(layer: str, value: Any) -> Boundary:
    """Returns the boundary of a stage whose last layer has this output. Raises ValueError if it cannot be sent."""
    tensors = tensors_of(value)
    if tensors is None:
        raise ValueError(
            f"spec.layers: expected a tensor or a tuple of tensors from the layer {layer!r}, which ends a stage, "
            f"found {type(value).__name__}; end the stage at another layer (parallel.stages)"
        )
    metas = [torch.empty(t.shape, dtype=t.dtype, device="meta").requires_grad_(t.requires_grad) for t in tensors]
    return Boundary(layer, not isinstance(value, Tensor), tuple(metas))


class _Enter(torch.autograd.Function):
    """The identity. Layers can change its result in place, and its gradient is contiguous, so that it can be sent."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def enter(tensor: Tensor) -> Tensor:
    """Returns a received tensor so that layers can change it in place, and its gradient is contiguous."""
    return _Enter.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-any-return]


def without_storage(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def to_meta(module: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Frees the storage of the parameters and buffers of a module, except those of modules that are kept."""
    known = {id(each) for keep in kept for each in keep.modules()}
    made: dict[int, Any] = {}
    for each in module.modules():
        if id(each) in known:
            continue
        for name, parameter in each._parameters.items():
            if parameter is not None:
                meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                each._parameters[name] = made.setdefault(id(parameter), meta)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.empty_like(buffer, device="meta")


class OtherStage(nn.Module):
    """The place of a layer that another stage has, so that those of this rank keep theirs: `model[4]`, `model.head`.

    It has no parameters, so that functions such as `requires_grad_` do nothing to it.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        try:
            return super().__getattr__(attribute)
        except AttributeError:
            raise AttributeError(
                f"the layer {self.__dict__.get('name')!r} is on another stage of the pipeline, and has no "
                f"{attribute!r} on this rank; a function that gets the model on each rank, such as spec.set_position, "
                "can look for parameters by their names, model.named_parameters()"
            ) from None


def remove_layer(model: nn.Module, name: str) -> None:
    """Removes a layer from the model, so that parameters, buffers and states of the model are of what is left."""
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent)._modules[last] = OtherStage(name)
