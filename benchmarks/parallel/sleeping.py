"""Layers that take a set time, and exchange activations and gradients of true size.

They sleep, so that several ranks on few cores take the time that they would take on devices of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from spark_dl.parallel.mesh.planner.records import Seconds
from spark_dl.parallel.mesh.planner.search import BACKWARD, FORWARD, WEIGHTS, Pass


@dataclass(frozen=True)
class Times:
    """Of a layer, for a micro-batch."""

    forward: Seconds
    inputs: Seconds
    """The gradient of its input."""
    weights: Seconds
    """The gradient of its weights."""

    @classmethod
    def equal(cls, seconds: Seconds) -> Times:
        return cls(seconds, seconds, seconds)

    def total_s(self, rows: int) -> float:
        return self.forward.of(rows) + self.inputs.of(rows) + self.weights.of(rows)


class Sleep(NamedTuple):
    """When a layer has slept, by the clock that all processes of a machine share."""

    kind: str
    start_s: float
    end_s: float


class SleepingLayer(nn.Module):
    """Adds the mean of its weights to its input, and sleeps in each pass.

    The gradients of the input and of the weights are two nodes of autograd, so that a schedule can compute them apart.
    # weight: [n]; input: [rows, ..., features]; output: [rows, ..., out_features], cut off or with zeros at its end
    """

    def __init__(self, times: Times, out_features: int, parameter_bytes: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(1, parameter_bytes // 4)))
        self.times = times
        self.out_features = out_features
        self.is_awake = False
        """Whether it takes no time."""
        self.sleeps: list[Sleep] = []

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        weight = cast("Tensor", _OfWeights.apply(self.weight, self, rows))
        return cast("Tensor", _OfInput.apply(x, self, rows)) + weight.mean()

    def sleep(self, kind: str, seconds: Seconds, rows: int) -> None:
        if not self.is_awake:
            start = time.monotonic()
            time.sleep(seconds.of(rows))
            self.sleeps.append(Sleep(kind, start, time.monotonic()))


class _OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SleepingLayer, rows: int) -> Tensor:
        ctx.layer, ctx.rows, ctx.features = layer, rows, x.shape[-1]
        layer.sleep(FORWARD, layer.times.forward, rows)
        return _with_features(x, layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.layer.sleep(BACKWARD, ctx.layer.times.inputs, ctx.rows)
        return _with_features(grads[0], ctx.features), None, None


def _with_features(x: Tensor, features: int) -> Tensor:
    return x.view_as(x) if x.shape[-1] == features else nn.functional.pad(x, (0, features - x.shape[-1]))


class _OfWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: SleepingLayer, rows: int) -> Tensor:
        ctx.layer, ctx.rows = layer, rows
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.layer.sleep(WEIGHTS, ctx.layer.times.weights, ctx.rows)
        return grads[0], None, None


class Scale(nn.Module):
    """Stands before the first layer, which so computes the gradient of its input as the others do. Takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def build_chain(times: Sequence[Times], features: int, parameter_bytes: int = 0) -> nn.Sequential:
    """Returns `Scale` and equal layers."""
    return nn.Sequential(Scale(), *(SleepingLayer(each, features, parameter_bytes) for each in times))


def layers_of(module: nn.Module) -> dict[int, SleepingLayer]:
    """Returns the layers that this rank has, by their place in the chain."""
    named = ((name, child) for name, child in module.named_modules() if isinstance(child, SleepingLayer))
    return {int(name) - 1: child for name, child in named}


def set_awake(module: nn.Module, is_awake: bool) -> None:
    """Turns the sleep of all layers off or on, and forgets earlier sleeps."""
    for layer in layers_of(module).values():
        layer.is_awake = is_awake
        layer.sleeps.clear()


def passes(module: nn.Module, row: int, start_s: float) -> list[Pass]:
    """Returns the passes of the layers of this rank. A layer computes the micro-batches in their order.

    row: of the picture. start_s: what is 0 there.
    """
    found = []
    for layer in layers_of(module).values():
        counts = {FORWARD: 0, BACKWARD: 0, WEIGHTS: 0}
        for sleep in layer.sleeps:
            found.append(Pass(row, sleep.kind, counts[sleep.kind], sleep.start_s - start_s, sleep.end_s - start_s))
            counts[sleep.kind] += 1
    return sorted(found, key=lambda each: each.start_s)
