"""Cuts the layers of a model over tensor ranks, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from spark_dl.parallel.mesh.tensor.functions import (
    Flow,
    TensorRanks,
    joined,
    map_input,
    sliced,
    with_equal_gradients,
    wrap_forward,
)
from spark_dl.parallel.mesh.tensor.sequence import KEY as SEQUENCE_KEY
from spark_dl.parallel.mesh.tensor.sequence import Stack, find_stacks
from spark_dl.parallel.mesh.tensor.styles import Columns, Heads, RowParallelInput, Vocabulary, slice_dropout
from spark_dl.parallel.mesh.tensor.words import COLUMNS, ROWS, Box, cuts, is_norm, take
from spark_dl.parallel.modules import check_hooks, names_of
from spark_dl.parallel.recompute import keep_states

_SUMS = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Slice:
    """The elements of a parameter that this rank has."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    boxes: tuple[Box, ...]
    """In row-major order, the elements of the rank's parameter are those of the boxes, one box after another."""
    is_replicated: bool
    """Whether all tensor ranks have the same: the whole parameter."""


def parallelize_tensors(
    model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, *, sequence: bool = False
) -> dict[str, Slice]:
    """Cuts the layers of a model over the ranks of a mesh, in place. Returns what this rank has, by parameter name.

    The parameters keep their names. They are plain tensors: slices of those of the first tensor rank. The model takes
    and returns whole tensors, the same on all tensor ranks. The gradient of a parameter is that of a single rank, or
    its slice, so the loss counts once, not once per tensor rank. Collective.

    All tensor ranks must draw the same random numbers. Then dropout has the masks of a single rank. Only the fused
    attention of GPUs draws its masks for its own heads alone.

    An attention of your own must take the number of heads from its projections' outputs, as in
    `q_proj(x).unflatten(-1, (-1, head_size))`.

    Args:
        plan: words by modules' names, as `resolve_tensor_plan` returns them; of the modules that this model has.
        mesh: of one axis, with a group that has our timeout.
        sequence: keep activations between the layers of a stack as slices of the sequence axis, whose norms and dropout
            are then computed once.
    """
    ranks = TensorRanks.of(mesh)
    slices = {
        name: Slice(tuple(p.shape), (Box((0,) * p.ndim, tuple(p.shape)),), True)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    if ranks.size == 1:
        return slices
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group_src=0, group=ranks.group)
    flow = Flow(ranks)
    keep_states(model, flow.kept)
    stacks = find_stacks(model, plan) if sequence else []
    slices |= _cut_parameters(model, plan, ranks)
    styles = {name: style for name, word in plan.items() if (style := _style(name, word, model, flow, stacks))}
    parallelize_module(model, mesh, styles, src_data_rank=None)
    _correct_sizes(model, plan, ranks)
    for name, module in [*model.named_modules()]:
        does_itself = plan.get(name) in ROWS or plan.get(name.rpartition(".")[0]) == "heads"
        if not does_itself and any(slices[full].is_replicated for full in _own_names(name, module)):
            _equalize(name, module, plan, flow, stacks, sequence=sequence)
    for stack in stacks:
        _slice_sequences(model, stack, flow)
    _slice_dropouts(model, plan, flow)
    _avoid_fused_layers(model, plan)
    _check_output(model, flow)
    return slices


def _own_names(name: str, module: nn.Module) -> list[str]:
    prefix = f"{name}." if name else ""
    return [prefix + own for own, parameter in module._parameters.items() if parameter is not None]


def _cut_parameters(model: nn.Module, plan: Mapping[str, str], ranks: TensorRanks) -> dict[str, Slice]:
    """Replaces the parameters that the plan cuts by this rank's slices, in all modules that share them."""
    names = names_of(model)
    slices: dict[str, Slice] = {}
    for module_name, word in plan.items():
        for parameter_name, cut in cuts(word, model.get_submodule(module_name)).items():
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            parent, _, attribute = name.rpartition(".")
            whole = model.get_submodule(parent)._parameters.get(attribute)
            check_hooks(model, {name}, "parallel.tensor")
            if whole is None or name in slices:  # a bias that is off, or cut with the one that shares it
                continue
            shape = tuple(whole.shape)
            boxes = cut.boxes(shape, ranks.size, ranks.rank)
            mine = nn.Parameter(take(whole.detach(), boxes), requires_grad=whole.requires_grad)
            for sharing in names[id(whole)]:
                parent, _, attribute = sharing.rpartition(".")
                model.get_submodule(parent)._parameters[attribute] = mine
                slices[sharing] = Slice(shape, boxes, False)
    return slices


def _style(name: str, word: str, model: nn.Module, flow: Flow, stacks: Sequence[Stack]) -> ParallelStyle | None:
    stack = next((s for s in stacks if s.has(name)), None)
    axis = None if stack is None else stack.axis
    if word in COLUMNS:
        if stack is None or name in stack.gathering:
            return Columns(name, word, flow, lambda x: flow.enter(x, axis=axis))
        if stack.gathers(name):
            return Columns(name, word, flow, lambda x: x)
        return Columns(name, word, flow, flow.enter)
    if word in ROWS:
        return RowParallelInput(name, word, flow, axis)
    if word == "vocab":
        return Vocabulary(flow)
    if word == "heads":
        return Heads(flow, axis)
    return None


def _correct_sizes(model: nn.Module, plan: Mapping[str, str], ranks: TensorRanks) -> None:
    """Corrects the size by which Hugging Face's GPT-2 splits the output of a projection to queries, keys and values."""
    for name, word in plan.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        if word == "colwise_qkv" and isinstance(vars(parent).get("split_size"), int):
            vars(parent)["split_size"] //= ranks.size


def _equalize(
    name: str, module: nn.Module, plan: Mapping[str, str], flow: Flow, stacks: Sequence[Stack], *, sequence: bool
) -> None:
    """Makes the gradients of a module's whole parameters the same on all ranks."""
    stack = next((s for s in stacks if s.has(name)), None)
    is_alone = stack is None and sequence and plan.get(name) == "sequence"
    sums = stack is not None or is_alone or plan.get(name) == _SUMS
    on_slices = stack is not None and not stack.gathers(name) and is_norm(module)

    def call(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in plan and flow.columns is not None and _first_size(args, kwargs) == flow.columns.numel():
            raise ValueError(
                f"spec.tensor_plan: {name!r} has whole parameters and gets a slice, the outputs of "
                f"{flow.columns_of!r}, so each rank has a part of their gradients; set {_SUMS!r} for it"
            )
        if on_slices and stack is not None:
            map_input(lambda x: _expect_slice(x, name, stack.axis, flow), args, kwargs)
        trained = {key: p for key, p in module._parameters.items() if p is not None and p.requires_grad}
        if not trained or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        equal = with_equal_gradients([*trained.values()], flow.ranks, sums=sums)
        parameters: dict[str, Any] = module._parameters
        parameters.update(zip(trained, equal, strict=True))
        try:
            return inner(*args, **kwargs)
        finally:
            parameters.update(trained)

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_alone:
            return call(inner, args, kwargs)
        lengths: list[int] = []

        def slice_input(x: Tensor) -> Tensor:
            lengths.append(x.shape[1])
            return sliced(x, 1, flow.ranks)

        return joined(call(inner, *map_input(slice_input, args, kwargs)), 1, lengths[0], flow.ranks)

    wrap_forward(module, around)


def _first_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Returns the number of elements of the first tensor of a call; 0 without any."""
    return next((value.numel() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)


def _expect_slice(x: Tensor, name: str, axis: int, flow: Flow) -> Tensor:
    start, stop = flow.ranks.bounds(flow.length)
    if x.ndim <= axis or x.shape[axis] != stop - start:
        raise ValueError(
            f"{SEQUENCE_KEY}: expected {stop - start} of {flow.length} positions in the input of {name!r}, along axis "
            f"{axis}, found the shape {tuple(x.shape)}; these layers do not suit slices of sequences, set it to false"
        )
    return x


def _slice_sequences(model: nn.Module, stack: Stack, flow: Flow) -> None:
    """Makes the first layer of a stack take slices of its input, and the last one return whole outputs."""
    axis, ranks = stack.axis, flow.ranks

    def cut(x: Tensor) -> Tensor:
        if x.ndim < 3:
            raise ValueError(
                f"{SEQUENCE_KEY}: expected [rows, positions, features] in {stack.layers[0]!r}, found the shape "
                f"{tuple(x.shape)}; set it to false"
            )
        flow.length = x.shape[axis]
        return sliced(x, axis, ranks)

    def wrap(layer: nn.Module, *, is_first: bool, is_last: bool) -> None:
        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_first:
                args, kwargs = map_input(cut, args, kwargs)
            flow.leave(sequence=axis)
            out = inner(*args, **kwargs)
            if not is_last:
                return out
            flow.leave(sequence=None)
            first = out if isinstance(out, Tensor) else out[0]
            first = joined(_expect_slice(first, stack.layers[-1], axis, flow), axis, flow.length, ranks)
            return first if isinstance(out, Tensor) else (first, *out[1:])

        wrap_forward(layer, around)

    def gather(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_input(lambda x: flow.enter(x, axis=axis), args, kwargs)
        flow.leave(sequence=None)
        return inner(*args, **kwargs)

    for name in stack.layers:
        is_first, is_last = name == stack.layers[0], name == stack.layers[-1]
        wrap(model.get_submodule(name), is_first=is_first, is_last=is_last)
    for name in stack.gathering:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear) and next(module.children(), None) is not None:
            wrap_forward(module, gather)


def _slice_dropouts(model: nn.Module, plan: Mapping[str, str], flow: Flow) -> None:
    """Makes dropout suit slices: in modules of dropout, and in attentions that call it as a function."""
    parents = {name.rpartition(".")[0] for name, word in plan.items() if word in COLUMNS}
    chains = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) or (name in parents and not isinstance(module, chains)):
            slice_dropout(module, flow)


def _avoid_fused_layers(model: nn.Module, plan: Mapping[str, str]) -> None:
    """NOTE: in evaluation mode torch's Transformer layers call a fused kernel with all weights of a layer, and nested
    tensors where rows are padded. These attributes turn that off, at the cost of evaluations as slow as training."""
    for name, module in model.named_modules():
        if not any(not name or n.startswith(f"{name}.") for n in plan):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _check_output(model: nn.Module, flow: Flow) -> None:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        flow.leave(sequence=None)
        out = inner(*args, **kwargs)
        if flow.columns is not None:
            raise ValueError(
                f"spec.tensor_plan: expected a layer that is cut by rows after {flow.columns_of!r}, whose outputs are "
                "slices, found none before the model's end; use 'colwise_gather_output'"
            )
        return out

    wrap_forward(model, around)
