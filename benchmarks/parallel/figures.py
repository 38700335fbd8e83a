"""Figures of the report on models that are cut. Each draws the rows of one section as an SVG string."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_dl.parallel.mesh.planner.search import Pass
from spark_dl.planning.page import draw_timeline

Rows = Sequence[Mapping[str, Any]]
_KINDS = {"weights": "#1f4e8c", "gradients": "#5b8fc9", "optimizer": "#7d57b0", "other": "#d98a1f"}
_POINTS = {"built": "built", "backward": "peak of the passes", "stepped": "after the step"}
_COLORS = {"naive": "#7f7f7f", "gpipe": "#1f77b4", "1f1b": "#2ca02c", "interleaved": "#9467bd",
           "zero_bubble": "#d62728", "zbv": "#ff7f0e"}  # fmt: skip


def held(rows: Rows) -> Callable[[Any], None]:
    """Draws the bytes per parameter of each form and point, by kind."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{row['form']}, {_POINTS[row['point']]}" for row in rows]
        left = [0.0] * len(rows)
        for kind, color in _KINDS.items():
            widths = [row[kind] for row in rows]
            axes.barh(names, widths, 0.7, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.plot([row["formula"] for row in rows], names, "k|", markersize=11, label="formula")
        axes.invert_yaxis()
        axes.set_xlabel("bytes per parameter, of the rank that holds most")
        _finish(axes)

    return plot


def sent(rows: Rows) -> Callable[[Any], None]:
    """Draws the bytes that a rank sends, over the formula's."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        names = [row["form"] for row in rows]
        axes.barh(names, [row["sent_bytes"] / 2**20 for row in rows], 0.6, color="#5b8fc9", label="measured")
        axes.plot([row["formula_bytes"] / 2**20 for row in rows], names, "k|", markersize=16, label="formula")
        axes.invert_yaxis()
        axes.set_xlabel("MiB that a rank sends in a step")
        _finish(axes)

    return plot


def bubbles(rows: Rows) -> Callable[[Any], None]:
    """Draws the bubble by the number of micro-batches, with the formulas, and the throughput."""

    def plot(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for schedule in dict.fromkeys(row["schedule"] for row in rows):
            own = [row for row in rows if row["schedule"] == schedule]
            numbers, color = [row["micro_batches"] for row in own], _COLORS.get(schedule, "#555555")
            left.plot(numbers, [row["measured"] for row in own], "o-", markersize=4, color=color, label=schedule)
            if own[0]["formula"] is not None:
                left.plot(numbers, [row["formula"] for row in own], "--", linewidth=1, color=color)
            right.plot(numbers, [row["passes_per_s"] for row in own], "o-", markersize=4, color=color)
        left.set(xlabel="micro-batches", ylabel="bubble (dashed: formula)", ylim=(0, None))
        right.set(xlabel="micro-batches", ylabel="micro-batches through a layer, per second and rank", ylim=(0, None))
        _finish(left)
        _finish(right)

    return plot


def plans(rows: Rows) -> Callable[[Any], None]:
    """Draws the measured time of each plan by the predicted one."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for mesh in dict.fromkeys((row["pipeline"], row["data"]) for row in rows):
            own = [row for row in rows if (row["pipeline"], row["data"]) == mesh]
            axes.plot([row["predicted_s"] for row in own], [row["measured_s"] for row in own], "o", markersize=5,
                      label=f"pipeline {mesh[0]}, data {mesh[1]}")  # fmt: skip
        most = max(max(row["predicted_s"], row["measured_s"]) for row in rows)
        axes.plot([0, most], [0, most], "k:", linewidth=1)
        axes.set(xlabel="predicted, seconds of a step", ylabel="measured", xlim=(0, None), ylim=(0, None))
        _finish(axes)

    return plot


def vgg16(rows: Rows) -> Callable[[Any], None]:
    """Draws the seconds of a mini-batch of each form and rate, measured and predicted."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{row['form']}, {row['rate_gbit']:g} Gbit/s" for row in rows]
        axes.barh(names, [row["mini_batch_s"] for row in rows], 0.6, color="#5b8fc9", label="measured")
        axes.plot([row["predicted_s"] for row in rows], names, "k|", markersize=14, label="predicted")
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a mini-batch of 128 images, on four workers")
        _finish(axes)

    return plot


def timeline(row: Mapping[str, Any], title: str) -> str:
    """Draws what the ranks of a pipeline did, as they have noted it. Returns a caption and an SVG element."""
    drawn = draw_timeline([Pass(*each) for each in row["passes"]], row["stages"], title=title, row="rank")
    return f"<figcaption>{html.escape(title)}</figcaption>{drawn}"


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
