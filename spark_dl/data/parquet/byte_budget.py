"""Limits on the memory of several threads: a thread takes bytes before it allocates, and waits until they are free."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class ByteBudget:
    """A limit on the total bytes of several threads."""

    def __init__(self, size: int):
        self.size = size
        self._used = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until `size` bytes are free. If no bytes are taken, any size is granted.

        Raises RuntimeError after `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._used or self._used + size <= self.size)
            if self._is_closed:
                raise RuntimeError("the consumer has stopped")
            self._used += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Takes bytes for the block."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def close(self) -> None:
        """Raises RuntimeError in all waiting threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class PrefetchBudget(ByteBudget):
    """A limit on the bytes of a queue: one thread takes bytes, another releases them in the same order."""

    def __init__(self, size: int):
        super().__init__(size)
        self._held: deque[int] = deque()

    def take(self, size: int) -> None:
        super().take(size)
        self._held.append(size)

    def release_first(self) -> None:
        """Releases the bytes that were taken first."""
        self.give_back(self._held.popleft())
