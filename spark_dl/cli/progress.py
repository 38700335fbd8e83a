"""A progress bar on the driver, in terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm


class ProgressBar:
    """Shows steps, loss, rows per second, and the validation metrics of the last epoch."""

    def __init__(self, name: str, *, enabled: bool = True):
        # disable=None: tqdm writes nothing if standard error is not a terminal
        self._bar = tqdm(desc=name, unit="step", file=sys.stderr, disable=None if enabled else True)
        self._shown: dict[str, str] = {}

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.close()

    def show(self, event: Mapping[str, Any]) -> None:
        """Shows one event of `run_barrier`."""
        if event["kind"] == "metrics step":
            self._shown |= {"loss": f"{event['loss']:.4g}", "rows/s": f"{event['rows_per_s']:,.0f}"}
        elif event["kind"] == "metrics epoch":
            numbers = {k: v for k, v in event["metrics"].items() if isinstance(v, (int, float))}
            self._shown |= {f"val {name}": f"{value:.4g}" for name, value in numbers.items()}
        else:
            return
        if not self._bar.disable:
            self._bar.total = event["steps"]
            self._bar.n = event["step"]
            self._bar.set_postfix(self._shown)
