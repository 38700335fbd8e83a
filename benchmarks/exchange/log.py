"""Log of a long measurement: progress lines, and the parts that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Log:
    """Prints progress lines, and collects the parts that are left out, with reasons, for the report. For the driver."""

    def __init__(self, show: Callable[[str], None] = lambda line: None):
        self.show = show
        self.left_out: list[str] = []
        """Lines `what: why`."""

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Catches an error of the block and records the part as left out, so that other parts still run."""
        try:
            yield
        except Exception as error:
            self.leave_out(what, str(error).strip() or type(error).__name__)

    def leave_out(self, what: str, reason: str) -> None:
        """Prints the whole reason and keeps its first line."""
        self.show(f"left out: {what}: {reason}")
        self.left_out.append(f"{what}: {reason.splitlines()[0]}")
