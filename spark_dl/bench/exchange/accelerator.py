"""A simulated accelerator: a module that computes nothing, takes a set time, and yields gradients of real sizes.

Sixteen ranks with a GPU each cannot be had on two cores, but what their gradients ask of the network can: forward and
backward pass their time asleep, layer by layer, and at the end of each layer's time its gradient is there. It is
random, of the layer's exact shape, and goes through autograd, so DDP's hooks fire, buckets fill and all-reduces run as
they would behind a real model, at the same moments.
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

from spark_dl.bench.model.profiles import Profile
from spark_dl.spec import ModelSpec

_NAP_S = 1e-3
"""Times shorter than this are slept together: a sleep overshoots by some 60 microseconds."""
_SLACK = 1 << 20
GRADIENT_STD = 1e-3
"""Standard deviation of the gradients: small, so that the weights stay finite in a long run."""
_KEPT_STEPS = 1000


@dataclass
class StepTimes:
    """When what happened in one step, by `time.perf_counter`."""

    forward_start: float
    forward_end: float = 0.0
    backward_start: float = 0.0
    ready: list[float] = field(default_factory=list)
    """When each layer's gradient came, in backward order."""

    @property
    def backward_end(self) -> float:
        """When the last gradient came. What DDP still sends then is not part of it."""
        return self.ready[-1]


class Accelerator(nn.Module):
    """One parameter per layer of a profile. Columns, of which the first has [rows, ...], -> losses [rows], all 0.

    The gradients do not depend on the weights or the loss. They are drawn anew in each step, from `seed`, the number of
    the step and the first bytes of the first column: ranks that have other rows have other gradients.
    """

    def __init__(self, profile: Profile, *, forward_s: float, backward_s: float, seed: int = 0):
        super().__init__()
        self.profile, self.forward_s, self.backward_s, self.seed = profile, forward_s, backward_s, seed
        self.steps: collections.deque[StepTimes] = collections.deque(maxlen=_KEPT_STEPS)
        """Times of the latest 1000 steps. One whose backward pass has not ended has fewer `ready` than layers."""
        self._num_steps = 0
        generator = torch.Generator().manual_seed(seed)
        for layer in profile.layers:
            weight = torch.empty(layer.shape).normal_(std=0.02, generator=generator)
            self.register_parameter(layer.name.replace(".", "_"), nn.Parameter(weight))
        # NOTE: gradients are pieces of this one buffer, since drawing 100 MB of random numbers takes longer than many a
        # simulated step. A piece may come again, but further away than the 64 KiB in which LZ4, Spark's codec, looks.
        # It is not a buffer of the module, which DDP would broadcast before each forward pass.
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
        """The random numbers, [at least as many as the largest parameter has], with dtype and device of `like`."""
        self._pool = self._pool.to(like)
        return self._pool

    def draw_offsets(self, column: Tensor) -> list[int]:
        """Where in the pool each layer's gradient begins in this step."""
        first = column[:64].reshape(-1)[:1024].detach().cpu().contiguous().view(torch.uint8)
        rng = np.random.default_rng((self.seed, self._num_steps, zlib.crc32(first.numpy().tobytes())))
        return [int(offset) for offset in rng.integers(0, _SLACK, len(self.profile.layers))]


class _Step:
    """One forward pass and its backward pass: until when each layer takes, and where its gradient is."""

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
        # A copy: autograd would keep a view as it is, and who scales .grad in place would scale the pool.
        gradient = self._model.pool(parameter)[start : start + parameter.numel()].view(parameter.shape).clone()
        self.times.ready.append(time.perf_counter())
        return gradient


class _LayerFunction(torch.autograd.Function):
    """Takes a layer's time, forward and backward, and yields its gradient. Losses [rows] pass through."""

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
    """Sleeps up to that time, or not at all if it is near and there is more to come.

    The times are those of a device that runs beside its host: what the host does meanwhile does not delay them.
    """
    left = end - time.perf_counter()
    if left > _NAP_S or (is_last and left > 0):
        time.sleep(left)


def build_accelerator(
    profile: Profile, *, forward_s: float, backward_s: float, scale: float = 1.0, seed: int = 0
) -> Accelerator:
    """A module that takes these seconds and yields gradients of the profile's shapes. Called on a worker.

    scale: fraction of the parameters, for slower networks and less memory; times stay as they are.
    Raises ValueError for a time below 0 or a scale outside of (0, 1].
    """
    for name, value in (("forward_s", forward_s), ("backward_s", backward_s)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}: expected seconds from 0 on, found {value!r}")
    return Accelerator(profile.shrunk(scale), forward_s=forward_s, backward_s=backward_s, seed=seed)


def accelerator_spec(
    profile: Profile, *, forward_s: float, backward_s: float, scale: float = 1.0, seed: int = 0
) -> ModelSpec:
    """A spec with which `spark_dl.train` trains the accelerator on any dataset. The loss of every row is 0."""
    build = functools.partial(
        build_accelerator, profile, forward_s=forward_s, backward_s=backward_s, scale=scale, seed=seed
    )
    return ModelSpec(build=build, loss=_losses)


def _losses(output: Tensor, target: Any) -> Tensor:
    return output
