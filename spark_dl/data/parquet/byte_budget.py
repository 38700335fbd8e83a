"""A number of bytes that threads share: who is to make something asks first, and waits until there is room for it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class ByteBudget:
    """Bytes that several threads may hold, all of them together."""

    def __init__(self, size: int):
        self.size = size
        self._used = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until there are `size` bytes; where nothing is held there are, whatever the size.

        Raises RuntimeError once it is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._used or self._used + size <= self.size)
            if self._is_closed:
                raise RuntimeError("nobody takes what is made any more")
            self._used += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Takes bytes and gives them back at the end."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class PrefetchBudget(ByteBudget):
    """Of things that one thread makes, and another one takes from it in their order."""

    def __init__(self, size: int):
        super().__init__(size)
        self._held: deque[int] = deque()

    def take(self, size: int) -> None:
        super().take(size)
        self._held.append(size)

    def release_first(self) -> None:
        """Gives back what was taken first, of what is held."""
        self.give_back(self._held.popleft())
