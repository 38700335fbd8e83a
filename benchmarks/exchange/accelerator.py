"""A simulated accelerator: a module that sleeps for given times and produces gradients of real sizes.

Two cores cannot compute like sixteen GPUs, but they can load the network like them. The forward and backward passes
sleep layer by layer, and each layer's gradient is ready at the end of its time. Gradients are random, have the layer's
exact shape, and go through autograd. So DDP's hooks, buckets and all-reduces run at the same times as for a real model.
"""

from __future__ import annotations

import collections
import functools
import itertools
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.model.profiles import Profile
from spark_dl.spec import ModelSpec

_NAP_S = 1e-3
"""Shorter times are added up and slept together, as a sleep takes about 60 microseconds too long."""
_SLACK = 1 << 20
GRADIENT_STD = 1e-3
"""Standard deviation of the gradients: small, so that the weights stay finite in a long run."""
_KEPT_STEPS = 1000


@dataclass
class StepTimes:
    """Times of the events of one step, by `time.perf_counter`."""

    forward_start: float
    forward_end: float = 0.0
    backward_start: float = 0.0
    ready: list[float] = field(default_factory=list)
    """Time of each layer's gradient, in backward order."""

    @property
    def backward_end(self) -> float:
        """Time of the last gradient. DDP's remaining communication is not included."""
        return self.ready[-1]


class Accelerator(nn.Module):
    """One parameter per layer of a profile. Columns (the first has shape [rows, ...]) -> losses [rows], all 0.

    Gradients do not depend on the weights or the loss. In each step they are drawn from `seed`, the step and the first
    bytes of the first column, so ranks with different rows have different gradients.
    """

    def __init__(self, profile: Profile, *, forward_s: float, backward_s: float, seed: int = 0):
        super().__init__()
        self.profile, self.forward_s, self.backward_s, self.seed = profile, forward_s, backward_s, seed
        self.steps: collections.deque[StepTimes] = collections.deque(maxlen=_KEPT_STEPS)
        """Times of the last 1000 steps. During a backward pass, a step has fewer `ready` times than layers."""
        self._num_steps = 0
        generator = torch.Generator().manual_seed(seed)
        for layer in profile.layers:
            weight = torch.empty(layer.shape).normal_(std=0.02, generator=generator)
            self.register_parameter(layer.name.replace(".", "_"), nn.Parameter(weight))
        # NOTE: gradients are slices of this buffer, as drawing 100 MB of random numbers takes longer than many a
        # simulated step. A slice may repeat, but farther away than the 64 KiB window of LZ4, Spark's codec.
        # It is not registered as a buffer, as DDP would broadcast it before each forward pass.
        largest = max(layer.num_parameters for layer in profile.layers)
        self._pool = torch.empty(largest + _SLACK).normal_(std=GRADIENT_STD, generator=generator)
        self._ends = list(itertools.accumulate(layer.share for layer in profile.layers))

    def forward(self, *columns: Tensor) -> Tensor:
        losses = torch.zeros(columns[0].shape[0], device=columns[0].device)
        step = _Step(self, columns[0])
        for index, parameter in enumerate(self.parameters()):
            losses = _LayerFunction.apply(losses, parameter, step, index)  # type: ignore[no-untyped-call]
        step.times.forward_end = time.perf_counter()
        if losses.requires_grad:
            self._num_steps += 1
            self.steps.append(step.times)
        return losses

    def pool(self, like: Tensor) -> Tensor:
        """Returns random numbers, at least as many as the largest parameter has, with dtype and device of `like`."""
        self._pool = self._pool.to(like)
        return self._pool

    def draw_offsets(self, column: Tensor) -> list[int]:
        """Returns the offset in the pool of each layer's gradient in this step."""
        first = column[:64].reshape(-1)[:1024].detach().cpu().contiguous().view(torch.uint8)
        rng = np.random.default_rng((self.seed, self._num_steps, zlib.crc32(first.numpy().tobytes())))
        return [int(offset) for offset in rng.integers(0, _SLACK, len(self.profile.layers))]


class _Step:
    """One forward and backward pass: the end time of each layer, and the offset of its gradient."""

    def __init__(self, model: Accelerator, column: Tensor):
        self._model = model
        self._offsets = model.draw_offsets(column)
        self.times = StepTimes(forward_start=time.perf_counter())

    def pass_forward(self, index: int) -> None:
        model = self._model
        is_last = index == len(self._offsets) - 1
        _sleep_until(self.times.forward_start + model.forward_s * (1.0 if is_last else model._ends[index]), is_last)

    def pass_backward(self, index: int) -> None:
        model = self._model
        if index == len(self._offsets) - 1:
            self.times.backward_start = time.perf_counter()
        left = model._ends[index - 1] if index else 0.0
        _sleep_until(self.times.backward_start + model.backward_s * (1.0 - left), index == 0)

    def gradient(self, index: int, parameter: Tensor) -> Tensor:
        start = self._offsets[index]
        # A copy: autograd would keep a view, and code that scales .grad in place would scale the pool.
        gradient = self._model.pool(parameter)[start : start + parameter.numel()].view(parameter.shape).clone()
        self.times.ready.append(time.perf_counter())
        return gradient


class _LayerFunction(torch.autograd.Function):
    """Sleeps for a layer's time, forward and backward, and returns its gradient. Losses [rows] pass through."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, parameter: Tensor, step: _Step, index: int) -> Tensor:
        ctx.step, ctx.index = step, index
        ctx.save_for_backward(parameter)
        step.pass_forward(index)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None]:
        (parameter,) = ctx.saved_tensors
        ctx.step.pass_backward(ctx.index)
        return gradients[0], ctx.step.gradient(ctx.index, parameter), None, None


def _sleep_until(end: float, is_last: bool) -> None:
    """Sleeps until `until`, or not at all if it is near and `more` follows.

    The times are those of a device beside its host. Work of the host does not delay them.
    """
    left = end - time.perf_counter()
    if left > _NAP_S or (is_last and left > 0):
        time.sleep(left)


def build_accelerator(
    profile: Profile, *, forward_s: float, backward_s: float, scale: float = 1.0, seed: int = 0
) -> Accelerator:
    """Returns a module that takes these seconds and produces gradients of the profile's shapes. Called on a worker.

    # scale: fraction of the parameters, for slower networks and less memory; it does not change times
    Raises ValueError for a time below 0 or a scale outside of (0, 1].
    """
    for name, value in (("forward_s", forward_s), ("backward_s", backward_s)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}: expected seconds >= 0, found {value!r}")
    return Accelerator(profile.shrunk(scale), forward_s=forward_s, backward_s=backward_s, seed=seed)


def accelerator_spec(
    profile: Profile, *, forward_s: float, backward_s: float, scale: float = 1.0, seed: int = 0
) -> ModelSpec:
    """Returns a spec for `spark_dl.train` that trains the accelerator on any dataset. The loss of every row is 0."""
    build = functools.partial(
        build_accelerator, profile, forward_s=forward_s, backward_s=backward_s, scale=scale, seed=seed
    )
    return ModelSpec(build=build, loss=_losses)


def _losses(output: Tensor, target: Any) -> Tensor:
    return output
