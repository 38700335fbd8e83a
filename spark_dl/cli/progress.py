"""Progress on the driver: a bar in a terminal, a bar and the loss in a notebook, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm

from spark_dl.cli.rank_output import show_output
from spark_dl.track.notebook import LiveCurve, build_bar, is_notebook

LINE_S = 5.0
"""Seconds between two lines, where there is no bar."""
_SILENT_S = 60.0
"""Seconds after which a line is repeated, as a sign of life."""
_REFRESH_S = 1.0


class Progress:
    """Shows what a call does: its stages, and in training the steps, loss, rows per second and validation metrics.

    A context manager. Everything is written to standard error. In a notebook, the loss is a picture, too.
    """

    def __init__(self, name: str, *, enabled: bool = True):
        self._name, self._start = name, time.monotonic()
        self._shown: dict[str, str] = {}
        self._place = ""
        self._stage = "starting"
        self._last_line, self._last_line_at = "", -LINE_S
        self._bar = _build_bar(name) if enabled else None
        self._curve = LiveCurve() if enabled and is_notebook() else None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if enabled:
            self._thread = threading.Thread(target=self._tick, name="spark_dl progress", daemon=True)
            self._thread.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed.set()
        if self._thread is None:
            return
        self._thread.join()
        if self._curve is not None:
            self._curve.close()
        if self._bar is not None:
            if kind is None:
                self._describe("" if self._bar.n else "done")
                self._bar.total = self._bar.n or None  # less than planned, if the run stopped early
            self._bar.close()
        else:
            self._stage = "done" if kind is None else "failed"
            self._write_line()

    def stage(self, text: str) -> None:
        """Shows what the call does now, such as `writing shards`."""
        self._describe(text)
        if self._bar is not None:
            self._bar.refresh()
        elif self._thread is not None:
            self._write_line()

    def show(self, event: Mapping[str, Any]) -> None:
        """Shows one event of a run."""
        kind = event["kind"]
        if kind == "output":
            show_output(event, None if self._bar is None else self._write_above)
        elif kind == "step":
            self._shown |= {"loss": f"{event['loss']:.4g}", "rows/s": f"{event['rows_per_s']:,.0f}"}
        elif kind == "epoch":
            numbers = {k: v for k, v in event["metrics"].items() if isinstance(v, (int, float))}
            self._shown |= {f"val {name}": f"{value:.4g}" for name, value in numbers.items()}
        elif kind == "trial":
            self._describe("")
            self._place = f"trial {event['done']}/{event['trials']}"
            if event["best"] is not None:
                self._shown["best"] = f"{event['best']:.6g}"
            if self._bar is not None:
                self._bar.unit, self._bar.total, self._bar.n = "trial", event["trials"], event["done"]
                self._bar.set_postfix(self._shown)
        elif kind == "evaluation":
            self._describe(f"evaluating {event['step']}/{event['steps']}")
        if kind in ("step", "epoch"):
            self._describe("")
            self._place = f"step {event['step']}/{event['steps']}"
            if self._bar is not None:
                self._bar.total, self._bar.n = event["steps"], event["step"]
                self._bar.set_postfix(self._shown)
        if self._curve is not None:
            self._curve.show(event)

    def _write_above(self, line: str, stream: Any) -> None:
        """Writes a line above the bar."""
        assert self._bar is not None
        self._bar.write(line, file=stream)

    def _describe(self, stage: str) -> None:
        self._stage = stage
        if self._bar is not None:
            self._bar.set_description_str(": ".join(filter(None, (self._name, stage))), refresh=False)

    def _tick(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            if self._bar is not None:
                self._bar.refresh()  # the time goes on where no step ends
            elif time.monotonic() - self._last_line_at >= LINE_S:
                self._write_line()

    def _write_line(self) -> None:
        now = time.monotonic()
        found = [self._stage, self._place, *(f"{name} {value}" for name, value in self._shown.items())]
        line = ", ".join(text for text in found if text)
        if line == self._last_line and now - self._last_line_at < _SILENT_S:
            return
        self._last_line, self._last_line_at = line, now
        seconds = int(now - self._start)
        print(f"{self._name}: {line} [{seconds // 60}:{seconds % 60:02}]", file=sys.stderr, flush=True)


def _build_bar(name: str) -> Any:
    """Returns a bar of tqdm for the terminal or the notebook; None if standard error is neither."""
    options: dict[str, Any] = {"desc": name, "unit": "step"}
    if not is_notebook():
        return tqdm(file=sys.stderr, **options) if sys.stderr.isatty() else None
    return build_bar(**options)
