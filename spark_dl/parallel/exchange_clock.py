"""Measures how long a rank is blocked in exchanges with other ranks, on CPUs, without a message of its own."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from spark_dl.world import World


Seconds = float | npt.NDArray[np.float64]
"""Seconds of this rank; on a driver that trains for all ranks, an array of theirs. # [ranks]"""


class StepClock(Protocol):
    """A clock that a training loop reads after every step."""

    def take_step(self) -> tuple[Seconds, Seconds]:
        """Returns the times since the last call: waiting for data, beside the loop's own wait for its loader; and
        blocked in exchanges."""


class ExchangeClock:
    """Seconds for which a rank was blocked in exchanges: collectives that it waits for.

    As a context manager, it counts the time in its block. In DDP, exchanges run while the backward pass computes. What
    counts is the time from the last gradient of this rank until the backward pass returns, which waits for all
    exchanges.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Sum since the last `take_step`."""
        self._entered_at = 0.0
        self._last_gradient_at: float | None = None

    def __enter__(self) -> None:
        self._entered_at = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._entered_at

    def take_step(self) -> tuple[float, float]:
        """See `StepClock`."""
        seconds, self.seconds = self.seconds, 0.0
        return 0.0, seconds

    def watch_backward(self, loss: Tensor) -> None:
        """Notes when the backward pass of this loss has computed all gradients."""
        if loss.requires_grad:  # otherwise `backward` raises, with a better message
            loss.register_hook(self._queue_note)

    def _queue_note(self, grad: Tensor) -> None:
        # NOTE: torch calls queued functions after all gradients, in the order of the calls of `queue_callback`. DDP
        # queues its wait for the exchanges with the last gradient, so after this one. Costs 2 us per backward pass.
        torch.autograd.Variable._execution_engine.queue_callback(self._note)  # type: ignore[attr-defined]

    def _note(self) -> None:
        self._last_gradient_at = time.perf_counter()

    def end_backward(self) -> None:
        """Counts the time since the last gradient of a watched backward pass, which has just returned."""
        if self._last_gradient_at is not None:
            self.seconds += time.perf_counter() - self._last_gradient_at
            self._last_gradient_at = None

    def watch_buffers(self, wrapped: DistributedDataParallel) -> None:
        """Counts the time in which DDP sends the buffers of rank 0, before each forward pass."""
        if next(wrapped.buffers(), None) is None:
            return
        started_at: float | None = None

        def start(*_: Any) -> None:
            nonlocal started_at
            started_at = time.perf_counter()

        def end(*_: Any) -> None:
            nonlocal started_at
            if started_at is not None:  # else what it wraps is called without the wrapper
                self.seconds += time.perf_counter() - started_at
                started_at = None

        wrapped.register_forward_pre_hook(start)
        wrapped.module.register_forward_pre_hook(end, prepend=True)


def build_clock(world: World) -> ExchangeClock | None:
    """Returns a clock; None on a GPU, where the host does not wait for exchanges, so its times would say nothing."""
    return ExchangeClock() if world.device.type == "cpu" else None
