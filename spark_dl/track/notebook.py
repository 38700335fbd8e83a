"""What a notebook shows: the loss while a run goes on, and the result. Nothing here needs scripts or widgets."""

from __future__ import annotations

import html
import importlib.util
import io
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from spark_dl.track.curve import TRAINING, VALIDATION, Line, Points, draw
from spark_dl.track.values import is_number

if TYPE_CHECKING:
    from spark_dl.driver import TrainResult

_BAR_S = 0.1
"""Seconds between two states of a bar of text."""
_STEP_S, _EPOCH_S = 1.0, 0.25
"""Seconds between two pictures, for the loss of steps and of validation."""


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def build_bar(**options: Any) -> Any:
    """Returns a bar of tqdm, with its arguments, in an output of its own: a widget, or text without ipywidgets."""
    return _widget_bar(options) if importlib.util.find_spec("ipywidgets") is not None else _text_bar(options)


def _text_bar(options: Mapping[str, Any]) -> Any:
    """Returns a bar that replaces its output. A bar on standard error would be cut in two by the curve."""
    from IPython.display import display

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self) -> None:
            self._output: Any = None
            self._shown_at = float("-inf")
            super().__init__(file=io.StringIO(), **options)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Called by tqdm to show the bar; with an empty text to clear it."""
            if msg == "" or time.monotonic() - self._shown_at < _BAR_S:
                return
            self._shown_at = time.monotonic()
            shown = {"text/plain": msg or str(self)}
            if self._output is None:
                self._output = display(shown, raw=True, display_id=True)
            else:
                self._output.update(shown, raw=True)

        def close(self) -> None:
            if not self.disable:
                self._shown_at = float("-inf")
                self.display()
            super().close()

    return Bar()


def _widget_bar(options: Mapping[str, Any]) -> Any:
    """Returns a bar that is a widget. Where no widgets are shown, as in a saved page, its last state is text."""
    from IPython.display import display
    from tqdm.notebook import tqdm as notebook_tqdm

    class Bar(notebook_tqdm):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(display=False, **options)
            self._output = display(self._bundle(), raw=True, display_id=True)

        def _bundle(self) -> dict[str, Any]:
            # NOTE: built here, as ipywidgets 7 displays a widget itself, and again at each update.
            view = {"version_major": 2, "version_minor": 0, "model_id": self.container.model_id}
            return {"application/vnd.jupyter.widget-view+json": view, "text/plain": repr(self.container)}

        def close(self) -> None:
            was_open = not self.disable
            super().close()
            if was_open:
                self._output.update(self._bundle(), raw=True)

    return Bar()


class LiveCurve:
    """The loss of a run in a notebook: one output, which is replaced while the run goes on.

    The output appears with the first loss. It is HTML, with text for clients that show none.
    """

    def __init__(self) -> None:
        self._training, self._validation = Points(), Points()
        self._steps = 0
        self._handle: Any = None
        self._is_drawn = True
        self._drawn_at = float("-inf")

    def show(self, event: Mapping[str, Any]) -> None:
        """Takes an event of a run, and draws the curve if the last picture is old enough."""
        kind = event["kind"]
        if kind not in ("step", "epoch"):
            return
        self._steps = event["steps"]
        if kind == "step":
            last = self._training.last
            self._training.add(event["step"], event["loss"], max(1, event["step"] - last[0]) if last else 1)
        elif isinstance(loss := event["metrics"].get("loss"), (int, float)):
            self._validation.add(event["step"], loss)
        self._is_drawn = False
        if time.monotonic() - self._drawn_at >= (_STEP_S if kind == "step" else _EPOCH_S):
            self._draw()

    def close(self) -> None:
        """Draws what has not been drawn yet."""
        if not self._is_drawn:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        lines = [
            Line(_label("training loss", self._training), TRAINING, self._training.all()),
            Line(_label("validation loss", self._validation), VALIDATION, self._validation.all(), has_dots=True),
        ]
        shown = {
            "text/html": draw(lines, x_name="step", x_end=self._steps),
            "text/plain": ", ".join(line.label for line in lines if line.points),
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
        self._is_drawn, self._drawn_at = True, time.monotonic()


def _label(name: str, points: Points) -> str:
    return "" if points.last is None else f"{name} {points.last[1]:.4g} (step {points.last[0]:,.0f})"


def result_html(result: TrainResult) -> str:
    """Returns the page of a result: its numbers, the loss of each epoch, and where its files are."""
    numbers = {"epochs": f"{result.epochs:,}", "steps": f"{result.steps:,}", "rows": f"{result.rows:,}"}
    if result.train_loss is not None:
        numbers["training loss"] = f"{result.train_loss:.4g}"
    scalars = {name: value for name, value in result.metrics.items() if is_number(value)}
    numbers |= {f"validation {name}": f"{value:.4g}" for name, value in scalars.items()}
    numbers |= {"rows/s": f"{result.rows_per_s:,.0f}", "seconds": f"{result.seconds:,.1f}"}
    if result.staleness is not None:
        numbers["mean staleness"] = f"{result.staleness['mean']:.3g}"
    cards = "".join(
        f'<div><div style="opacity:.7">{html.escape(name)}</div>'
        f'<div style="font-size:1.25em">{html.escape(value)}</div></div>'
        for name, value in numbers.items()
    )
    ended = "<div>The run stopped early (train.early_stop_metric).</div>" if result.stopped_early else ""
    files = "".join(
        f'<div style="overflow-wrap:anywhere"><span style="opacity:.7">{name}</span> {html.escape(str(value))}</div>'
        for name, value in (("run_dir", result.run_dir), ("checkpoint", result.checkpoint))
    )
    return (
        f'<div style="max-width:46em;font-size:13px;line-height:1.5"><b>TrainResult</b>'
        f'<div style="display:flex;flex-wrap:wrap;gap:.4em 2em;margin:.4em 0">{cards}</div>{ended}'
        f"{_curve_of_epochs(result.history)}{files}{_table_of_epochs(result.history)}</div>"
    )


def _curve_of_epochs(history: Sequence[Mapping[str, Any]]) -> str:
    training, validation = Points(), Points()
    for entry in history:
        training.add(entry["epoch"], entry["train_loss"])
        if is_number(loss := entry["metrics"].get("loss")):
            validation.add(entry["epoch"], loss)
    lines = (
        Line("training loss", TRAINING, training.all(), has_dots=len(history) < 50),
        Line("validation loss", VALIDATION, validation.all(), has_dots=len(history) < 50),
    )
    return draw(lines, x_name="epoch")


def _table_of_epochs(history: Sequence[Mapping[str, Any]]) -> str:
    """Returns a folded table with the numbers of the epochs: the first and the last ones, if there are many."""
    if not history:
        return ""
    names = list(dict.fromkeys(name for entry in history for name, v in entry["metrics"].items() if is_number(v)))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("epoch", "train_loss", *names))
    rows = []
    for entry in history if len(history) <= 2 * _ENDS else [*history[:_ENDS], None, *history[-_ENDS:]]:
        if entry is None:
            rows.append(f'<tr><td colspan="{len(names) + 2}">{len(history) - 2 * _ENDS:,} more in `history`</td></tr>')
            continue
        values = (entry["train_loss"], *(entry["metrics"].get(name) for name in names))
        cells = "".join(f"<td>{f'{v:.4g}' if is_number(v) else ''}</td>" for v in values)
        rows.append(f"<tr><td>{entry['epoch']}</td>{cells}</tr>")
    return (
        "<details><summary>Each epoch</summary>"
        '<div style="overflow-x:auto"><table style="font-size:12px">'
        f'<tr style="overflow-wrap:anywhere">{head}</tr>{"".join(rows)}</table></div></details>'
    )


_ENDS = 25
"""Epochs at each end of the table."""
