"""Collectives beside the backward pass, one after another, so that they have the same order on all ranks."""

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
    """Does one piece of work after another, each with collectives of one group: in a thread, on GPUs in a stream.

    The group is its own, over all ranks: Gloo pairs what the ranks send by its order within a group, and the thread and
    the backward pass, with DDP's and BatchNorm's collectives, take turns by chance.
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
        """A future of `result`, which is there when `work` is done; returns at once.

        An error of one piece of work is the error of all after it.
        """
        assert self._group is not None, "it is closed"
        if result.is_cuda:
            return self._run_in_stream(work, result, self._group)
        if self._thread is None:
            # A daemon: a process whose peer is lost need not wait for it to end.
            self._thread = threading.Thread(
                target=self._serve, args=(self._group,), name="spark_dl exchange", daemon=True
            )
            self._thread.start()
        future: Future[Tensor] = Future()
        # DDP waits in C++, where the exception of a Python future is a value like any other; one that a callback raises
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
                    _abort(group)  # so that the other ranks need not wait until they time out
                future.set_exception(error)  # type: ignore[arg-type] # typed as a result

    def _run_in_stream(self, work: Work, result: Tensor, group: dist.ProcessGroup) -> Future[Tensor]:
        # Where collectives are only put into streams, the backward pass itself can do so, and their order is its own.
        self._stream = self._stream or torch.cuda.Stream(result.device)
        self._stream.wait_stream(torch.cuda.current_stream(result.device))
        future: Future[Tensor] = Future(devices=[result.device])
        with torch.cuda.stream(self._stream), torch.no_grad():
            work(group)
            future.set_result(result)  # whoever waits for it waits for the stream
        return future

    def close(self) -> None:
        """Ends the thread and the group. Not collective; what is under way then, as after an error, is broken off."""
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
        if dist.is_initialized():  # else its groups are gone, too
            dist.destroy_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Breaks off the waits of all threads on a group, of this rank and of those that wait for it."""
    if dist.get_backend(group) != "gloo":
        group.abort()
        return
    # NOTE: Gloo cannot interrupt a wait, but when one times out, it closes all connections of the group, and with that
    # ends all others. So this waits for a message that nobody sends.
    peer = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # the timeout, or what has closed the connections before
        group.recv([torch.empty(1)], peer, 0).wait(datetime.timedelta(milliseconds=1))
