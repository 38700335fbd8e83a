"""Calls that may never end, such as those that use files on a dead mount. Used on ranks and on the driver."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Calls:
    """Runs calls one after another in a thread, until the `with` block ends.

    A call that does not end holds up the later ones. They run if it ends after all, also after the block.
    """

    # NOTE: no ThreadPoolExecutor, whose threads the end of the process waits for.
    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def __enter__(self) -> Calls:
        threading.Thread(target=self._work, name="spark_dl doctor", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            call()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Starts a call after the earlier ones. Does not wait."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # raised by `within`
                future.set_exception(error)

        self._waiting.put(run)
        return future


def within(call: Future[T], limit_s: float, late: T) -> T:
    """Returns the result of a call, or `late` if it does not end within `limit_s`. Raises what the call has raised."""
    wait([call], limit_s)
    return call.result() if call.done() else late
