"""How a model is cut: the chain of its layers, stages of near-equal times, and experts on different ranks.

A chain is a list of layers which, called in order on each other's output, are the model. The first layer is called
with the arguments of the model. A layer whose output is a tuple passes it on as one argument, as in `nn.Sequential`.

Of every `MoE` layer, each rank keeps some experts, and the ranks exchange tokens.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from spark_dl.nn.moe import MoE, Peers, moe_layers
from spark_dl.parallel.mesh.groups import Groups
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.pieces import Layout, of_boxes

if TYPE_CHECKING:
    from spark_dl.parallel.exchange_clock import ExchangeClock


class Layer(NamedTuple):
    """A layer of a chain."""

    name: str
    """Its name in the model, such as `layers.3`."""
    module: nn.Module


class Tied(NamedTuple):
    """A parameter that layers share."""

    names: tuple[str, ...]
    """Its names in the model, in the order of the chain."""
    layers: tuple[int, ...]
    """The layers that have it, as positions in the chain."""


def build_chain(model: nn.Module, layers: Sequence[str] | None = None) -> list[Layer]:
    """Returns the layers that are the model, in the order in which they are called. On any side.

    Args:
        layers: names or patterns, such as `["embed", "layers.*", "norm", "head"]`. A `*` stands for one part of a name,
            or within it. The default is the children of an `nn.Sequential`, also of those within it.

    Raises:
        ValueError: For a pattern without a match, a layer listed twice, parameters or buffers that no layer has, and a
            model without a default.
    """
    if layers is None:
        chain = list(_of_sequential(model, ""))
        if not _is_sequential(model):
            raise ValueError(
                f"spec.layers: expected the names of the layers which, called in order on each other's output, are the "
                f"model, such as ['embed', 'layers.*', 'head']; only an nn.Sequential has a default, found "
                f"{type(model).__name__} with the modules {_children(model)}"
            )
    else:
        chain = _matched(model, layers)
    if not chain:
        raise ValueError(f"spec.layers: expected at least one layer, found none in {type(model).__name__}")
    _check_once(chain)
    _check_whole(model, chain)
    return chain


def _is_sequential(module: nn.Module) -> bool:
    """Whether calling the module is calling its children, one after the other, and nothing else."""
    has_hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and not has_hooks
        and not module._backward_pre_hooks
    )


def _of_sequential(module: nn.Module, prefix: str) -> Iterable[Layer]:
    for name, child in module._modules.items():
        assert child is not None
        if _is_sequential(child):
            yield from _of_sequential(child, f"{prefix}{name}.")
        else:
            yield Layer(prefix + name, child)


def _matched(model: nn.Module, patterns: Sequence[str]) -> list[Layer]:
    if isinstance(patterns, str):
        raise ValueError(f"spec.layers: expected a list of names or patterns, found the string {patterns!r}")
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    chain = []
    for pattern in patterns:
        layers = [Layer(name, module) for name, module in named if matches(name, pattern)]
        if not layers:
            raise ValueError(
                f"spec.layers: no module of {type(model).__name__} matches {pattern!r}; it has {_children(model)}"
            )
        chain += layers
    return chain


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of names of modules fits a name. A `*` stands for one part of a name, or within it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_once(chain: Sequence[Layer]) -> None:
    for name, count in Counter(layer.name for layer in chain).items():
        if count > 1:
            raise ValueError(f"spec.layers: the layer {name!r} is listed {count} times; list each layer once")
    names = {layer.name for layer in chain}
    for name in names:
        parts = name.split(".")
        for outer in (".".join(parts[:i]) for i in range(1, len(parts))):
            if outer in names:
                raise ValueError(
                    f"spec.layers: the layer {name!r} is listed twice, as it is a part of the layer {outer!r}; list "
                    "one of them"
                )


def _check_whole(model: nn.Module, chain: Sequence[Layer]) -> None:
    held = tuple(f"{layer.name}." for layer in chain)
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    left_out = [name for name, _ in named if not name.startswith(held)]
    if left_out:
        raise ValueError(
            f"spec.layers: a layer is left out: no layer of {_short(layer.name for layer in chain)} has the "
            f"parameters or buffers {_short(left_out)}"
        )


def _children(model: nn.Module) -> str:
    return _short(name for name, _ in model.named_children())


def _short(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def find_tied(chain: Sequence[Layer]) -> list[Tied]:
    """Returns the parameters that several layers have, such as the weight of an embedding and of the last layer."""
    places: dict[int, tuple[list[str], list[int]]] = {}
    for i, layer in enumerate(chain):
        for name, parameter in layer.module.named_parameters():
            names, positions = places.setdefault(id(parameter), ([], []))
            names.append(f"{layer.name}.{name}")
            positions.append(i)
    return [Tied(tuple(names), tuple(layers)) for names, layers in places.values() if len(layers) > 1]


def tensors_of(value: object) -> tuple[Tensor, ...] | None:
    """Returns the tensors of what a layer passes on: one, or a tuple or list of them. None for anything else."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple | list) and value and all(isinstance(each, Tensor) for each in value):
        return tuple(value)
    return None


def balance(times: Sequence[float], num_stages: int) -> list[int]:
    """Cuts a chain into stages so that the slowest stage is as fast as possible. Pure.

    Dynamic programming over (stages, layers): exact, O(stages * layers^2). Of equal cuts, the one with more layers in
    the first stages. Raises ValueError if there are fewer layers than stages.

    Args:
        times: seconds, or any cost, of each layer. Returns the number of layers of each stage, at least one.
    """
    check_enough(len(times), num_stages)
    before = [0.0, *itertools.accumulate(float(time) for time in times)]
    slowest = [[float("inf")] * (len(times) + 1) for _ in range(num_stages + 1)]
    cut_at = [[0] * (len(times) + 1) for _ in range(num_stages + 1)]
    slowest[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, len(times) + 1):
            for start in range(end - 1, stage - 2, -1):
                cost = max(slowest[stage - 1][start], before[end] - before[start])
                if cost < slowest[stage][end]:
                    slowest[stage][end], cut_at[stage][end] = cost, start
    sizes, end = [], len(times)
    for stage in range(num_stages, 0, -1):
        sizes.append(end - cut_at[stage][end])
        end = cut_at[stage][end]
    return sizes[::-1]


def check_enough(num_layers: int, num_stages: int) -> None:
    """Raises ValueError if there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ValueError(
            f"parallel.pipeline: expected at least one layer for each of {num_stages} stages, found {num_layers} "
            "layers; use fewer stages, or list more and smaller layers in spec.layers"
        )


def check_cut(cut: Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    """Returns the numbers of layers per stage that a user has set. Raises ValueError if they do not fit the chain."""
    if len(cut) != num_stages:
        raise ValueError(f"parallel.stages: expected {num_stages} numbers, one for each stage, found {list(cut)}")
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in cut):
        raise ValueError(f"parallel.stages: expected whole numbers >= 1, found {list(cut)}")
    if sum(cut) != num_layers:
        raise ValueError(
            f"parallel.stages: expected numbers with the sum {num_layers}, the number of layers of the model, found "
            f"{list(cut)} with the sum {sum(cut)}"
        )
    return list(cut)


def cut_chain(chain: Sequence[Layer], cut: Sequence[int]) -> list[list[Layer]]:
    """Returns the layers of each stage. # cut: number of layers of each stage"""
    bounds = [0, *itertools.accumulate(cut)]
    assert bounds[-1] == len(chain)
    return [list(chain[a:b]) for a, b in itertools.pairwise(bounds)]


def find_experts(model: nn.Module, patterns: Sequence[str] | None, settings: Mesh) -> list[str]:
    """Returns the names of the `MoE` layers of a whole model whose experts are divided among ranks. On any side.

    Args:
        patterns: `ModelSpec.experts`.

    Raises:
        ValueError: If there is no such layer, if its experts cannot be divided equally, and for an auxiliary loss in a
            pipeline.
    """
    layers = moe_layers(model)
    for name, layer in layers.items():
        if settings.pipeline > 1 and layer.balance == "loss":
            raise ValueError(
                f"parallel.pipeline: expected 1 with balance='loss' in the MoE layer {name!r}, found "
                f"{settings.pipeline}: its stage does not compute the loss; use balance='bias'"
            )
    if settings.experts == 1:
        return []
    names = _matching(model, layers, patterns)
    for name in names:
        if layers[name].num_experts % settings.experts:
            raise ValueError(
                f"parallel.experts: expected a divisor of the number of experts of {name!r}, "
                f"{layers[name].num_experts}, found {settings.experts}; change one of them, or name other layers in "
                "spec.experts"
            )
    return names


def _matching(model: nn.Module, layers: Collection[str], patterns: Sequence[str] | None) -> list[str]:
    if not layers:
        raise ValueError(
            "parallel.experts: expected 1, as the model has no spark_dl.nn.MoE layer; experts of other layers cannot "
            "be divided among ranks"
        )
    if patterns is None:
        return list(layers)
    modules = dict(model.named_modules())
    matching: list[str] = []
    for pattern in patterns:
        names = [name for name in modules if matches(name, pattern)]
        experts = [name for name in names if name in layers]
        if not experts:
            kind = f"{names[0]!r}, a {type(modules[names[0]]).__name__}" if names else "no module"
            raise ValueError(
                f"spec.experts: expected the name or a pattern of spark_dl.nn.MoE layers, such as "
                f"{next(iter(layers))!r}, found {pattern!r}, which matches {kind}"
            )
        matching += [name for name in experts if name not in matching]
    return matching


def cut_experts(model: nn.Module, names: Collection[str], groups: Groups) -> dict[str, Layout]:
    """Cuts the experts of layers to those of this rank, in place. Each rank keeps consecutive experts. Not collective.

    Args:
        names: from `find_experts`. Returns what this rank has of the parameters that are cut, by name.
    """
    ranks, index = groups.dims.experts, groups.at.data % groups.dims.experts
    layouts = {}
    for name, layer in _layers(model, names).items():
        count = layer.num_experts // ranks
        for inner, parameter in layer.experts.named_parameters():
            boxes = [((index * count, *[0] * (parameter.ndim - 1)), (count, *parameter.shape[1:]))]
            layouts[f"{name}.experts.{inner}".lstrip(".")] = of_boxes(parameter.shape, boxes)
            parameter.data = parameter.data[index * count : (index + 1) * count].clone()
    return layouts


def connect_experts(model: nn.Module, names: Collection[str], groups: Groups, clock: ExchangeClock | None) -> None:
    """Tells layers with which ranks they exchange tokens. Not collective.

    Args:
        model: with the layers of this rank.
        names: from `find_experts`.
        clock: measures the exchange of tokens.
    """
    if groups.experts is not None:
        for layer in _layers(model, names).values():
            layer.peers = Peers(groups.experts, clock or contextlib.nullcontext())


def release_peers(model: nn.Module) -> None:
    """Makes the layers of a model forget their process group."""
    for layer in moe_layers(model).values():
        layer.peers = layer.sum_over_data = None


def _layers(model: nn.Module, names: Collection[str]) -> dict[str, MoE]:
    return {name: layer for name, layer in moe_layers(model).items() if name in names}
