"""A number of bytes that threads share: who is to make something asks first, and waits until there is room for it."""

from __future__ import annotations

import threading
from collections import deque


class Memory:
    """Bytes that things of one thread may have, which another one takes from it in their order."""

    def __init__(self, size: int):
        self._size = size
        self._held: deque[int] = deque()
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until there are `size` bytes; where nothing is held there are, whatever the size.

        Raises RuntimeError once it is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._held or sum(self._held) + size <= self._size)
            if self._is_closed:
                raise RuntimeError("nobody takes what is made any more")
            self._held.append(size)

    def give_back(self) -> None:
        """Gives back what was taken first, of what is held."""
        with self._changed:
            self._held.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
