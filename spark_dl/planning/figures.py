"""Figures of a plan: the timeline of its stages, as the papers draw it, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_dl.parallel.mesh.planner.search import Plan
from spark_dl.parallel.mesh.planner.timeline import (
    BACKWARD,
    FORWARD,
    SYNC,
    WEIGHTS,
    Pass,
    StageTimes,
    end_s,
    timeline,
)
from spark_dl.track import plots

COLORS = {
    "forward": "#00a031", "backward": "#00a032", "sync": "#00a033", "number": "#00a034", "weights": "#00a041",
    "gradients": "#00a042", "optimizer": "#00a043", "activations": "#00a044", "gathered": "#00a045",
}  # fmt: skip
MOST_MICRO_BATCHES = 32
_MOST_NUMBERS = 400
_LABELS = {FORWARD: "forward pass", BACKWARD: "backward pass", WEIGHTS: "gradients of weights",
           SYNC: "exchange of gradients"}  # fmt: skip


def passes_of(plan: Plan) -> list[Pass]:
    """Returns the passes of a step, of the first micro-batches if there are many."""
    stages = [StageTimes(stage.forward_s, stage.backward_s, stage.after_s, stage.sync_s) for stage in plan.stages]
    return timeline(stages, plan.choice.schedule, min(plan.choice.micro_batches, MOST_MICRO_BATCHES))


def draw_timeline(passes: Sequence[Pass], num_stages: int, *, title: str, row: str = "stage") -> str:
    """Draws bars by stage and time, with the numbers of micro-batches where there is room. Returns an SVG element.

    row: what a row is called, with its number.
    """
    total_s = end_s(passes) or 1.0

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for kind, label in _LABELS.items():
            of_kind = [each for each in passes if each.kind == kind]
            for stage in range(num_stages):
                bars = [(each.start_s, each.end_s - each.start_s) for each in of_kind if each.stage == stage]
                axes.broken_barh(bars, (stage - 0.42, 0.84), facecolor=COLORS[kind], edgecolor="none", linewidth=0)
            if of_kind:
                axes.broken_barh([], (0, 1), facecolor=COLORS[kind], label=label)
        _number(axes, passes, total_s)
        axes.set_ylim(num_stages - 0.5, -0.5)
        axes.set_yticks(range(num_stages), [f"{row} {i}" for i in range(num_stages)])
        axes.set_xlim(0, total_s)
        axes.set_xlabel("seconds")
        axes.spines[["top", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(_LABELS), frameon=False)

    return plots.draw_for_page(plot, title=title, colors=COLORS, width=10, height=1.1 + 0.36 * num_stages)


def _number(axes: Any, passes: Sequence[Pass], total_s: float) -> None:
    shown = [each for each in passes if each.kind != SYNC and each.end_s - each.start_s > 0.012 * total_s]
    if len(shown) > _MOST_NUMBERS:
        return
    for each in shown:
        at = (each.start_s + each.end_s) / 2
        axes.text(at, each.stage, str(each.micro_batch), color=COLORS["number"], ha="center", va="center", fontsize=7)


def draw_memory(plan: Plan, parts: Sequence[str], limit_bytes: float) -> str:
    """Draws the GiB of a rank of each stage, by part. Returns an SVG element."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        left = [0.0] * len(plan.stages)
        for part in parts:
            widths = [getattr(stage.memory, part) / 2**30 for stage in plan.stages]
            if any(widths):
                axes.barh(range(len(left)), widths, 0.7, left=left, color=COLORS[part], label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        if limit_bytes < float("inf"):
            axes.axvline(limit_bytes / 2**30, linestyle="--", linewidth=1, label="limit", color=plots.TEXT)
        axes.set_ylim(len(left) - 0.5, -0.5)
        axes.set_yticks(range(len(left)), [f"stage {i}" for i in range(len(left))])
        axes.set_xlim(left=0)
        axes.set_xlabel("GiB of a rank")
        axes.spines[["top", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False)

    return plots.draw_for_page(
        plot, title="Memory of the stages", colors=COLORS, width=10, height=1.1 + 0.36 * len(plan.stages)
    )
