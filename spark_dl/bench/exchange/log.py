"""What a long measurement says while it runs, and what it had to leave out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Log:
    """Shows lines to whoever waits, and keeps what is left out with its reason, for the report. Used on the driver."""

    def __init__(self, show: Callable[[str], None] = lambda line: None):
        self.show = show
        self.left_out: list[str] = []
        """Lines of `what: why`."""

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Leaves out what raises in the block: what came before is not lost, and what comes after may do."""
        try:
            yield
        except Exception as error:
            self.leave_out(what, str(error).strip() or type(error).__name__)

    def leave_out(self, what: str, reason: str) -> None:
        """Shows the whole reason; the first line of it is kept."""
        self.show(f"left out: {what}: {reason}")
        self.left_out.append(f"{what}: {reason.splitlines()[0]}")
