"""Lines of a run, such as its loss, as HTML and SVG for notebooks: without scripts, and of bounded size."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
MAX_POINTS = 256
"""Points of a line that are kept and drawn."""
TRAINING, VALIDATION = "#2f81f7", "#e8730c"
"""Colors of the lines. They can be seen on white and on black."""
_WIDTH, _HEIGHT, _MARGIN = 1000, 300, 12
"""Of the drawing, in its own units. It is stretched to the width of the page."""


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


_STROKE = 'fill="none" vector-effect="non-scaling-stroke"'
_FRAME = "max-width:42em;font-size:13px;line-height:1.5"
_LEGEND = "display:flex;flex-wrap:wrap;column-gap:1.5em"
_GRID = "display:grid;grid-template-columns:auto minmax(0,1fr);column-gap:.6em"
_Y_LABELS = "display:flex;flex-direction:column;justify-content:space-between;text-align:right;opacity:.7"
_X_LABELS = "display:flex;justify-content:space-between;opacity:.7"
_PICTURE = "display:block;width:100%;height:11em"


def _mark(line: Line, places: Sequence[Point]) -> str:
    """Returns the SVG of a line and of its dots, which are lines of no length, so that they stay round."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    found = f'<path d="{path}" stroke="{line.color}" stroke-width="1.5" stroke-linejoin="round" {_STROKE}/>'
    if line.has_dots or len(places) == 1:
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        found += f'<path d="{dots}" stroke="{line.color}" stroke-width="6" stroke-linecap="round" {_STROKE}/>'
    return found


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
