"""The figures of a run's report, as SVG. Their colors are variables of the page's style, for light and dark."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_dl.track import plots
from spark_dl.track.run_log import Line, number
from spark_dl.track.time_split import PARTS, TimeSplit

Floats = npt.NDArray[np.float64]
MOST_POINTS = 600
"""Points of a curve. With more, neighbors are replaced by their mean."""
_MOST_METRICS = 8
_MOST_TICKS = 8
_COLORS = {
    "training": "#00a011", "epoch": "#00a012", "validation": "#00a013",
    **{part: f"#00a02{i}" for i, part in enumerate(PARTS)},
}  # fmt: skip
"""Colors that matplotlib writes, and that are replaced by variables."""


@dataclass(frozen=True)
class Figure:
    """A figure with its title."""

    title: str
    svg: str


def curves(steps: Sequence[Line], epochs: Sequence[Line], split: TimeSplit | None) -> list[Figure]:
    """Draws loss, metrics, learning rate, rows per second, and the parts of a step, as far as there are lines."""
    found = [
        ("Loss", lambda axes: _loss(axes, steps, epochs)),
        *(
            (f"Validation: {name}", lambda axes, name=name: _metric(axes, name, epochs))
            for name in metric_names(epochs)[:_MOST_METRICS]
        ),
        ("Learning rate", lambda axes: _by_step(axes, steps, "lr")),
        ("Rows per second", lambda axes: _by_step(axes, steps, "rows_per_s", from_zero=True)),
    ]
    if split is not None and len(split.last_steps) > 1:
        found.append(("Seconds per step, mean of the ranks", lambda axes: _parts(axes, split)))
    drawn = [Figure(title, svg) for title, plot in found if (svg := _draw(title, plot))]
    return drawn if steps or epochs else []


def metric_names(epochs: Sequence[Line]) -> list[str]:
    """Returns the names of metrics that are single numbers, except the loss."""
    names = {name: None for line in epochs for name, value in _metrics(line).items() if number(value) is not None}
    return [name for name in names if name != "loss"]


def thin_out(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Returns at most `MOST_POINTS` points: means of neighbors, without those that are not finite."""
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.arange(MOST_POINTS) * len(x) // MOST_POINTS
    counts = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def _draw(title: str, plot: Callable[[Any], bool]) -> str:
    """Returns a figure, or an empty string if `plot` has nothing to draw."""
    has_points = False

    def on(figure: Any) -> None:
        nonlocal has_points
        axes = figure.subplots()
        has_points = plot(axes)
        axes.grid(alpha=0.5, linewidth=0.5)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.02)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has it
        svg = plots.draw_for_page(on, title=title, colors=_COLORS, width=4.8, height=2.9)
    return svg if has_points else ""


def _points(lines: Sequence[Line], value: Callable[[Line], Any]) -> tuple[Floats, Floats]:
    found = [(number(line["step"]), number(value(line))) for line in lines]
    pairs = np.array([(x, y) for x, y in found if x is not None and y is not None], dtype=np.float64).reshape(-1, 2)
    return thin_out(pairs[:, 0], pairs[:, 1])


def _plot(axes: Any, points: tuple[Floats, Floats], color: str, *, label: str | None = None, **style: Any) -> bool:
    x, y = points
    if not len(x):
        return False
    marker = {"marker": "o", "markersize": 3} if len(x) <= 40 else {}
    axes.plot(x, y, color=_COLORS[color], label=label, **{"linewidth": 1.2, **marker, **style})
    return True


def _loss(axes: Any, steps: Sequence[Line], epochs: Sequence[Line]) -> bool:
    curves = [
        (_points(steps, lambda line: line.get("loss")), "training", "training"),
        (_points(epochs, lambda line: line.get("train_loss")), "epoch", "training, mean of an epoch"),
        (_points(epochs, lambda line: _metrics(line).get("loss")), "validation", "validation"),
    ]
    drawn = [
        _plot(axes, points, color, label=label, **({"marker": "", "linewidth": 1} if color == "training" and
              len(points[0]) > 1 else {}))
        for points, color, label in curves
    ]  # fmt: skip
    values = np.concatenate([points[1] for points, *_ in curves])
    if len(values) and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
    _epochs_on_top(axes, epochs)
    return any(drawn)


def _metric(axes: Any, name: str, epochs: Sequence[Line]) -> bool:
    drawn = _plot(axes, _points(epochs, lambda line: _metrics(line).get(name)), "validation")
    _epochs_on_top(axes, epochs)
    return drawn


def _by_step(axes: Any, steps: Sequence[Line], key: str, *, from_zero: bool = False) -> bool:
    drawn = _plot(axes, _points(steps, lambda line: line.get(key)), "training")
    if drawn and from_zero:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return drawn


def _parts(axes: Any, split: TimeSplit) -> bool:
    last = np.array(split.last_steps, dtype=np.float64)
    steps = np.diff(last, prepend=last[0] - (last[1] - last[0]))
    steps = np.where(steps > 0, steps, np.nan)
    parts = [thin_out(last, getattr(split, part).mean(axis=1) / steps) for part in PARTS]
    axes.stackplot(
        parts[0][0], [y for _, y in parts], labels=PARTS, colors=[_COLORS[part] for part in PARTS], linewidth=0
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS))
    return True


def _epochs_on_top(axes: Any, epochs: Sequence[Line]) -> None:
    """Marks the ends of epochs above the figure."""
    ends = [(x, n + 1) for line in epochs if (x := number(line["step"])) is not None
            and (n := number(line.get("epoch"))) is not None]  # fmt: skip
    if not ends:
        return
    every = math.ceil(len(ends) / _MOST_TICKS)
    shown = ends[every - 1 :: every]
    top = axes.secondary_xaxis("top")
    top.set_xticks([x for x, _ in shown], [f"{n:.0f}" for _, n in shown])
    top.set_xlabel("epoch")


def _metrics(line: Line) -> Mapping[str, Any]:
    found = line.get("metrics")
    return found if isinstance(found, dict) else {}
