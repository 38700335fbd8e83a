"""Experts on different ranks: each rank keeps some experts of every `MoE` layer, and the ranks exchange tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import nn

from spark_dl.nn.exchange import Peers
from spark_dl.nn.moe import MoE, moe_layers
from spark_dl.parallel.mesh.groups import Groups
from spark_dl.parallel.mesh.layers import matches
from spark_dl.parallel.mesh.pieces import Layout, of_boxes
from spark_dl.parallel.mesh.settings import Mesh

if TYPE_CHECKING:
    from spark_dl.parallel.exchange_clock import ExchangeClock


def find_experts(model: nn.Module, patterns: Sequence[str] | None, settings: Mesh) -> list[str]:
    """Returns the names of the `MoE` layers of a whole model whose experts are divided among ranks. On any side.

    patterns: `ModelSpec.experts`.

    Raises ValueError if there is no such layer, if its experts cannot be divided equally, and for an auxiliary loss in
    a pipeline.
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
    found: list[str] = []
    for pattern in patterns:
        names = [name for name in modules if matches(name, pattern)]
        own = [name for name in names if name in layers]
        if not own:
            kind = f"{names[0]!r}, a {type(modules[names[0]]).__name__}" if names else "no module"
            raise ValueError(
                f"spec.experts: expected the name or a pattern of spark_dl.nn.MoE layers, such as "
                f"{next(iter(layers))!r}, found {pattern!r}, which matches {kind}"
            )
        found += [name for name in own if name not in found]
    return found


def cut_experts(model: nn.Module, names: Collection[str], groups: Groups) -> dict[str, Layout]:
    """Cuts the experts of layers to those of this rank, in place. Each rank keeps consecutive experts. Not collective.

    names: from `find_experts`. Returns what this rank has of the parameters that are cut, by name.
    """
    ranks, index = groups.dims.experts, groups.at.data % groups.dims.experts
    found = {}
    for name, layer in _layers(model, names).items():
        count = layer.num_experts // ranks
        for inner, parameter in layer.experts.named_parameters():
            boxes = [((index * count, *[0] * (parameter.ndim - 1)), (count, *parameter.shape[1:]))]
            found[f"{name}.experts.{inner}".lstrip(".")] = of_boxes(parameter.shape, boxes)
            parameter.data = parameter.data[index * count : (index + 1) * count].clone()
    return found


def connect_experts(model: nn.Module, names: Collection[str], groups: Groups, clock: ExchangeClock | None) -> None:
    """Tells layers with which ranks they exchange tokens. Not collective.

    model: with the layers of this rank. names: from `find_experts`. clock: measures the exchange of tokens.
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
