"""What a notebook shows: the loss while a run goes on, and the result. HTML and SVG, without scripts and widgets."""

from __future__ import annotations

import html
import importlib.util
import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from spark_dl.track.events import is_number

if TYPE_CHECKING:
    from spark_dl.driver import TrainResult

Point = tuple[float, float]
MAX_POINTS = 256
"""Points of a line that are kept and drawn."""
TRAINING, VALIDATION = "#2f81f7", "#e8730c"
"""Colors of the lines. They can be seen on white and on black."""
_WIDTH, _HEIGHT, _MARGIN = 1000, 300, 12
"""Of the drawing, in its own units. It is stretched to the width of the page."""

_STROKE = 'fill="none" vector-effect="non-scaling-stroke"'
_FRAME = "max-width:42em;font-size:13px;line-height:1.5"
_LEGEND = "display:flex;flex-wrap:wrap;column-gap:1.5em"
_GRID = "display:grid;grid-template-columns:auto minmax(0,1fr);column-gap:.6em"
_Y_LABELS = "display:flex;flex-direction:column;justify-content:space-between;text-align:right;opacity:.7"
_X_LABELS = "display:flex;justify-content:space-between;opacity:.7"
_PICTURE = "display:block;width:100%;height:11em"

_BAR_S = 0.1
"""Seconds between two states of a bar of text."""
_STEP_S, _EPOCH_S = 1.0, 0.25
"""Seconds between two pictures, for the loss of steps and of validation."""

_ENDS = 25
"""Epochs at each end of the table."""


class Points:
    """The points of a line. Neighbors are merged, so that there are at most `MAX_POINTS`, and that none weighs less.

    The loss of a few steps at the end of an epoch varies more than the mean of many: it is merged with the next one.
    """

    def __init__(self) -> None:
        self._merged: list[tuple[Point, float]] = []
        """Points, with their weights."""
        self._open: tuple[Point, float] | None = None
        """The mean of the last points, if it weighs less than a merged point."""
        self._weight = 0.0
        """The weight of a merged point."""
        self.last: Point | None = None

    def add(self, x: float, y: float, weight: float = 1.0) -> None:
        """Adds a point at the end. Ignores NaN and Inf. weight: such as the number of steps of which it is the mean."""
        if not math.isfinite(y):
            return
        self.last = (x, y)
        self._weight = max(self._weight, weight)
        added = (self.last, weight)
        self._open = added if self._open is None else _merge(self._open, added)
        if self._open[1] >= self._weight:
            self._merged.append(self._open)
            self._open = None
        if len(self._merged) == MAX_POINTS:
            self._merged = [_merge(*self._merged[i : i + 2]) for i in range(0, MAX_POINTS, 2)]
            self._weight *= 2

    def all(self) -> list[Point]:
        """Returns the points, in order. A point that stands for several has the mean of their values."""
        return [point for point, _ in (*self._merged, *([self._open] if self._open else []))]


def _merge(first: tuple[Point, float], second: tuple[Point, float]) -> tuple[Point, float]:
    (_, y), weight = first
    (x, other_y), other = second
    share = other / (weight + other)
    return (x, y * (1 - share) + other_y * share), weight + other


@dataclass(frozen=True)
class Line:
    """A line of a picture. `label` is its name, with the last value."""

    label: str
    color: str
    points: Sequence[Point]
    has_dots: bool = False
    """Whether each point has a dot."""


def draw(lines: Sequence[Line], *, x_name: str, x_end: float = 0) -> str:
    """Returns the HTML of a picture: the names of the lines, the axes and the lines. Empty without points.

    The vertical axis is logarithmic if all values are above 0. x_end: the horizontal axis reaches at least so far.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    x_values = [x for line in lines for x, _ in line.points]
    y_values = [y for line in lines for _, y in line.points]
    left, right = min(0.0, *x_values), max(x_end, *x_values)
    is_log = min(y_values) > 0
    low, high = _range(y_values, is_log=is_log)

    def place(point: Point) -> Point:
        across = (point[0] - left) / (right - left or 1)
        up = _share(point[1], low, high, is_log=is_log)
        return _MARGIN + across * (_WIDTH - 2 * _MARGIN), _MARGIN + (1 - up) * (_HEIGHT - 2 * _MARGIN)

    marks = "".join(_mark(line, [place(point) for point in line.points]) for line in lines)
    grid = "".join(f"M0 {y}H{_WIDTH}" for y in (_MARGIN, _HEIGHT // 2, _HEIGHT - _MARGIN))
    middle = math.exp((math.log(low) + math.log(high)) / 2) if is_log else (low + high) / 2
    labels = "".join(f"<span>{value:.3g}</span>" for value in (high, middle, low))
    names = "".join(
        f'<span><span style="color:{line.color}">&#9679;</span> {html.escape(line.label)}</span>' for line in lines
    )
    scale = '<span style="opacity:.7">logarithmic scale</span>' if is_log else ""
    return (
        f'<div style="{_FRAME}"><div style="{_LEGEND}">{names}{scale}</div><div style="{_GRID}">'
        f'<div style="{_Y_LABELS}">{labels}</div>'
        f'<svg role="img" aria-label="{html.escape("; ".join(line.label for line in lines))}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" style="{_PICTURE}">'
        f'<path d="{grid}" stroke="currentColor" stroke-opacity="0.25" {_STROKE}/>{marks}</svg>'
        f'<div></div><div style="{_X_LABELS}"><span>{left:g}</span><span>{html.escape(x_name)}</span>'
        f"<span>{right:g}</span></div></div></div>"
    )


def _mark(line: Line, places: Sequence[Point]) -> str:
    """Returns the SVG of a line and of its dots, which are lines of no length, so that they stay round."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    svg = f'<path d="{path}" stroke="{line.color}" stroke-width="1.5" stroke-linejoin="round" {_STROKE}/>'
    if line.has_dots or len(places) == 1:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        svg += f'<path d="{dots}" stroke="{line.color}" stroke-width="6" stroke-linecap="round" {_STROKE}/>'
    return svg


def _range(values: Sequence[float], *, is_log: bool) -> Point:
    """Returns the ends of the vertical axis. They differ."""
    low, high = min(values), max(values)
    if low < high:
        return low, high
    return (low / 2, high * 2) if is_log else (low - 1, high + 1)


def _share(value: float, low: float, high: float, *, is_log: bool) -> float:
    """Returns the place of a value between the ends of the axis, from 0 to 1."""
    if is_log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low or 1)


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
        if kind not in ("step", "validation", "epoch"):
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
