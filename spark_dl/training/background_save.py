"""Checkpoints that are written while training goes on: a copy of the state first, then a thread that writes it.

The next step changes the weights, so what is written is a copy in the memory of the host. It is kept for the next
checkpoint, and one checkpoint is written at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spark_dl.rundir.plain import plain_state

_LAST_WAIT_S = 5.0


class StateCopy:
    """Copies a state of tensors and plain data to the memory of the host, into the tensors of the last copy."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def of(self, state: Any) -> Any:
        """Returns the copy. It is valid until the next call."""
        before, self._tensors = self._tensors, {}
        done: dict[Any, Tensor] = {}

        def copied(path: str, tensor: Tensor) -> Tensor:
            # Tied weights have two names and one memory, which the file shall have once, too.
            own = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if own not in done or not tensor.numel():
                done[own] = self._tensors[path] = _copy_of(tensor.detach(), before.get(path))
            return done[own]

        found = plain_state(state, "", on_tensor=copied)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return found


def _copy_of(tensor: Tensor, into: Tensor | None) -> Tensor:
    if into is None or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
        on_gpu = tensor.device.type == "cuda"
        into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return into.copy_(tensor, non_blocking=True)


class BackgroundSave:
    """Runs one function at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], Any]) -> None:
        """Starts a function. The result of the one before must have been taken."""
        assert self._thread is None, "one checkpoint is written at a time"
        self._thread = threading.Thread(target=self._run, args=(write,), name="spark_dl checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], Any]) -> None:
        start = time.perf_counter()
        self._result, self._error = None, None
        try:
            self._result = (write(), time.perf_counter() - start)
        except BaseException as error:
            self._error = error

    def take(self, *, wait: bool) -> tuple[Any, float] | None:
        """Returns the result of the function and its seconds, once. None without one, or if it still runs.

        wait: waits for its end. Raises its error.
        """
        if self._thread is None or (not wait and self._thread.is_alive()):
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            raise self._error
        found: tuple[Any, float] = self._result
        return found

    def close(self) -> None:
        """Waits some seconds for the end of the function, after an error of the training, which is raised instead."""
        if self._thread is not None:
            self._thread.join(_LAST_WAIT_S)
            with contextlib.suppress(BaseException):
                self.take(wait=False)
