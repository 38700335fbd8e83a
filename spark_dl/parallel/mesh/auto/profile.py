"""The profile of a model for the planner: the layers of its chain, measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from spark_dl.parallel.mesh import layers, trial
from spark_dl.parallel.mesh.build import units_of
from spark_dl.parallel.mesh.planner.records import BLOCK, LayerProfile, Seconds
from spark_dl.parallel.mesh.tensor.words import ROWS, cuts
from spark_dl.parallel.mesh.trial import LayerPass
from spark_dl.parallel.trainable import build_optimizer
from spark_dl.spec import Batch, ModelSpec

if TYPE_CHECKING:
    from spark_dl.config import Config

MOST_ROWS = 16
"""Rows of the larger of the two batches that are measured."""


def measure_profile(
    spec: ModelSpec, model: nn.Module, chain: Sequence[layers.Layer], plan: Mapping[str, str], batch: Batch,
    config: Config,
) -> tuple[LayerProfile, ...]:  # fmt: skip
    """Returns the layers of a model as the planner knows them. Layers that one stage must have are one of them.

    Seconds are fitted to batches of two sizes, on the device of the model. The loss and the optimizer are not measured.

    Args:
        plan: the word of each module that tensor ranks cut, by name; empty if there can be none.
        batch: of as many rows as a rank can have, as a loader gives it.
    """
    rows = min(MOST_ROWS, len(batch["weight"]))
    sizes = sorted({max(1, rows // 4), rows})
    measured = [
        trial.measure_passes(spec, model, chain, {name: t[:size] for name, t in batch.items()}, config)
        for size in sizes
    ]
    profiles, start = [], 0
    for size in units_of(chain, plan):
        unit = range(start, start + size)
        of_sizes = [[passes[i] for i in unit] for passes in measured]
        profiles.append(_layer(model, [chain[i] for i in unit], plan, of_sizes, sizes))
        start += size
    return tuple(profiles)


def _layer(
    model: nn.Module, unit: Sequence[layers.Layer], plan: Mapping[str, str], measured: Sequence[Sequence[LayerPass]],
    sizes: Sequence[int],
) -> LayerProfile:  # fmt: skip
    """Returns layers that are always in one stage as one layer. # measured: for each size, the passes of each layer"""
    of_unit = tuple(f"{layer.name}." for layer in unit)
    words = {name: word for name, word in plan.items() if f"{name}.".startswith(of_unit)}
    parameters = {
        f"{layer.name}.{name}": parameter for layer in unit for name, parameter in layer.module.named_parameters()
    }
    cut = {
        id(parameter)
        for name, word in plan.items()
        for own in cuts(word, model.get_submodule(name))
        if (parameter := dict(model.get_submodule(name).named_parameters()).get(own)) is not None
    }
    largest = measured[-1]
    return LayerProfile(
        name=unit[0].name if len(unit) == 1 else f"{unit[0].name} to {unit[-1].name}",
        forward=fit_line(sizes, [sum(each.forward_s for each in passes) for passes in measured]),
        backward=fit_line(sizes, [sum(each.backward_s for each in passes) for passes in measured]),
        parameter_bytes=sum(p.nbytes for p in parameters.values()),
        output_bytes=largest[-1].output_bytes / sizes[-1],
        kept_bytes=sum(each.kept_bytes for each in largest) / sizes[-1],
        tensor=(BLOCK,) if words else (),
        can_be_whole=not words,
        whole_bytes=sum(p.nbytes for p in parameters.values() if id(p) not in cut),
        all_reduces=sum(word in (*ROWS, "heads", "vocab", "colwise_gather_output") for word in words.values()),
    )


def fit_line(rows: Sequence[int], seconds: Sequence[float]) -> Seconds:
    """Returns `fixed` + `per_row` * rows through the first and the last of the measurements, both >= 0. Pure."""
    if len(rows) == 1:
        return Seconds(0.0, seconds[0] / rows[0])
    per_row = max(0.0, (seconds[-1] - seconds[0]) / (rows[-1] - rows[0]))
    fixed = max(0.0, seconds[-1] - per_row * rows[-1])
    return Seconds(fixed, (seconds[-1] - fixed) / rows[-1])


def state_bytes(spec: ModelSpec, config: Config) -> float:
    """Returns the bytes of the optimizer's state per parameter. With `spec.optimizer`, those of Adam.

    One step of the optimizer on two elements shows it.
    """
    if spec.optimizer is not None:
        return 8.0
    model = nn.Linear(1, 2, bias=False)
    optimizer = build_optimizer(model, config, 1)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = optimizer.state[model.weight].values()
    return sum(t.nbytes for t in state if isinstance(t, torch.Tensor) and t.shape == model.weight.shape) / 2
