"""Experts on different ranks: each rank keeps some experts of every `MoE` layer, and the ranks exchange tokens."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from spark_dl.nn.exchange import Peers
from spark_dl.nn.moe import MoE, moe_layers
from spark_dl.parallel.mesh.groups import Groups
from spark_dl.parallel.mesh.pieces import Layout, of_boxes

if TYPE_CHECKING:
    from spark_dl.parallel.exchange_clock import ExchangeClock


def divide_experts(
    model: nn.Module, patterns: Sequence[str] | None, groups: Groups, clock: ExchangeClock | None
) -> dict[str, Layout]:
    """Cuts the experts of the `MoE` layers of a model to those of this rank, in place. Not collective.

    Returns the layouts of the parameters that are cut, by name. A rank keeps consecutive experts.
    patterns: `ModelSpec.experts`.

    Raises ValueError if there is no such layer, or if its experts cannot be divided equally.
    """
    if groups.experts is None:
        return {}
    layers, ranks, index = _matching(model, patterns), groups.experts.size(), groups.experts.rank()
    found = {}
    for name, layer in layers.items():
        count, rest = divmod(layer.num_experts, ranks)
        if rest:
            raise ValueError(
                f"parallel.experts: expected a divisor of the number of experts of {name!r}, {layer.num_experts}, "
                f"found {ranks}; change one of them, or name other layers in spec.experts"
            )
        layer.peers = Peers(groups.experts, clock or contextlib.nullcontext())
        for inner, parameter in layer.experts.named_parameters():
            offsets = (index * count, *[0] * (parameter.ndim - 1))
            layout = of_boxes(parameter.shape, [(offsets, (count, *parameter.shape[1:]))])
            found[f"{name}.experts.{inner}".lstrip(".")] = layout
            parameter.data = parameter.data[index * count : (index + 1) * count].clone()
    return found


def release_peers(model: nn.Module) -> None:
    """Makes the layers of a model forget their process group."""
    for layer in moe_layers(model).values():
        layer.peers = layer.sum_over_data = None


def _matching(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, MoE]:
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            "parallel.experts: expected 1, as the model has no spark_dl.nn.MoE layer; experts of other layers cannot "
            "be divided among ranks"
        )
    if patterns is None:
        return layers
    modules = dict(model.named_modules())
    found: dict[str, MoE] = {}
    for pattern in patterns:
        names = fnmatch.filter(modules, pattern)
        own = {name: layers[name] for name in names if name in layers}
        if not own:
            kind = f"{names[0]!r}, a {type(modules[names[0]]).__name__}" if names else "no module"
            raise ValueError(
                f"spec.experts: expected the name or a pattern of spark_dl.nn.MoE layers, such as "
                f"{next(iter(layers))!r}, found {pattern!r}, which matches {kind}"
            )
        found |= own
    return found
