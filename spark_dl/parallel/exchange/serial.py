"""Collectives during the backward pass, one after another, so that all ranks run them in the same order."""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_CLOSE_WAIT_S = 1.0
_ABORT_WAIT_S = 10.0

Work: TypeAlias = Callable[[dist.ProcessGroup], None]


class SerialCollectives:
    """Runs functions with collectives one after another: on CPUs in a thread, on GPUs in a stream.

    They use a group of their own, over all ranks. Gloo matches messages by their order within a group, but the order of
    this thread and of the backward pass, with DDP's and BatchNorm's collectives, varies.
    """

    def __init__(self, timeout_s: float):
        """Collective. No wait for another rank takes longer than `timeout_s`."""
        group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        self._group: dist.ProcessGroup | None = group
        self._queue: queue.SimpleQueue[tuple[Work, Tensor, Future[Tensor]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._problem: Exception | None = None

    def run(self, work: Work, result: Tensor) -> Future[Tensor]:
        """Starts `work` and returns a future of `result`, which is complete when `work` is done.

        After an error, all later calls fail with the same error.
        """
        assert self._group is not None, "the exchange is closed"
        if result.is_cuda:
            return self._run_in_stream(work, result, self._group)
        if self._thread is None:
            # A daemon, so that a process can exit while the thread waits for a lost peer.
            self._thread = threading.Thread(
                target=self._serve, args=(self._group,), name="spark_dl exchange", daemon=True
            )
            self._thread.start()
        future: Future[Tensor] = Future()
        # DDP waits in C++, where a Python future's exception is an ordinary value. An exception that a callback raises
        # is an error there.
        checked = future.then(lambda done: done.value())
        self._queue.put((work, result, future))
        return checked

    def _serve(self, group: dist.ProcessGroup) -> None:
        while (item := self._queue.get()) is not None:
            work, result, future = item
            try:
                if self._problem is not None:
                    raise self._problem
                with torch.no_grad():
                    work(group)
                future.set_result(result)
            except Exception as error:
                if self._problem is None:
                    self._problem = error
                    _abort(group)  # so that the other ranks do not wait for their timeout
                future.set_exception(error)  # type: ignore[arg-type] # typed as a result

    def _run_in_stream(self, work: Work, result: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
        # On GPUs collectives are only queued in a stream. No thread is needed, and the backward pass sets their order.
        self._stream = self._stream or torch.cuda.Stream(result.device)
        self._stream.wait_stream(torch.cuda.current_stream(result.device))
        future: Future[Tensor] = Future(devices=[result.device])
        with torch.cuda.stream(self._stream), torch.no_grad():
            work(group)
            future.set_result(result)  # a wait for the future waits for the stream
        return future

    def close(self) -> None:
        """Ends the thread and the group. Not collective. Aborts running work, for example after an error."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._thread is not None:
            self._problem = self._problem or RuntimeError("the exchange of gradients is closed")
            self._queue.put(None)
            self._thread.join(_CLOSE_WAIT_S)
            if self._thread.is_alive():
                _abort(group)
                self._thread.join(_ABORT_WAIT_S)
        if dist.is_initialized():  # else the group is already destroyed
            dist.destroy_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Aborts all waits on a group, on this rank and on ranks that wait for it."""
    if dist.get_backend(group) != "gloo":
        group.abort()
        return
    # NOTE: Gloo cannot interrupt a wait. But when one wait times out, Gloo closes all connections of the group, which
    # ends all other waits. So this waits for a message that no rank sends.
    peer = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # the timeout, or an earlier loss of the connections
        group.recv([torch.empty(1)], peer, 0).wait(datetime.timedelta(milliseconds=1))
