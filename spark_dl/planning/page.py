"""A plan for people: tables as text, plain data, and one self-contained HTML page.

The page shows the timeline of the stages, as the papers draw it, their memory, and the other plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import yaml

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.cli.progress import text_table
from spark_dl.parallel.mesh.dims import Place
from spark_dl.parallel.mesh.planner.search import (
    BACKWARD,
    FORWARD,
    SYNC,
    WEIGHTS,
    MeshPlan,
    Pass,
    Problem,
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

STAGE_COLUMNS = (
    "stage",
    "layers",
    "ranks",
    "tensor plan",
    "forward s",
    "backward s",
    "transfer s",
    "exchange s",
    "GiB",
)
PLAN_COLUMNS = ("pipeline", "data", "tensor", "ZeRO", "schedule", "micro-batches", "rows", "step s", "rows/s", "bubble",
                "GiB")  # fmt: skip
GIB = 2**30
_MOST_PLANS = 10

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "gathered")

_MARK = "<!-- a plan of spark_dl -->"


def passes_of(plan: MeshPlan) -> list[Pass]:
    """Returns the passes of a step, of the first micro-batches if there are many."""
    stages = [StageTimes(stage.forward_s, stage.backward_s, stage.after_s, stage.sync_s) for stage in plan.stages]
    return timeline(stages, plan.choice.schedule, min(plan.choice.micro_batches, MOST_MICRO_BATCHES))


def draw_timeline(passes: Sequence[Pass], num_stages: int, *, title: str, row: str = "stage") -> str:
    """Draws bars by stage and time, with the numbers of micro-batches where there is room. Returns an SVG element.

    Args:
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


def draw_memory(plan: MeshPlan, parts: Sequence[str], limit_bytes: float) -> str:
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


def settings(plan: MeshPlan) -> dict[str, dict[str, Any]]:
    """Returns the settings of a run with this plan."""
    choice, dims = plan.choice, plan.choice.dims
    parallel: dict[str, Any] = {"strategy": "mesh"}
    if dims.pipeline > 1:
        parallel |= {"pipeline": dims.pipeline, "schedule": choice.schedule, "stages": list(plan.cut)}
    if dims.tensor > 1:
        parallel["tensor"] = dims.tensor
    if choice.zero_stage:
        parallel["zero_stage"] = choice.zero_stage
    return {"parallel": parallel, "train": {"accumulation_steps": choice.micro_batches}}


def text(problem: Problem, plans: Sequence[MeshPlan]) -> Iterator[str]:
    """Returns the lines for a terminal: the stages of the best plan, its settings, and the best plan of each mesh."""
    best = plans[0]
    yield f"{summary(best)}. Stages, with the seconds of a micro-batch:"
    yield ""
    yield from text_table(STAGE_COLUMNS, stage_rows(problem, best))
    yield ""
    yield from yaml.safe_dump(settings(best), sort_keys=False, default_flow_style=None).splitlines()
    yield ""
    yield "The best plan of each mesh:"
    yield ""
    yield from text_table(PLAN_COLUMNS, plan_rows(plans[:_MOST_PLANS]))
    if len(plans) > _MOST_PLANS:
        yield f"... and {len(plans) - _MOST_PLANS} slower ones"


def summary(plan: MeshPlan) -> str:
    choice, dims = plan.choice, plan.choice.dims
    sizes = f"pipeline {dims.pipeline}, data {dims.data}, tensor {dims.tensor}, ZeRO stage {choice.zero_stage}"
    micro_batches, rows = counted(choice.micro_batches, "micro-batch", "es"), counted(choice.rows, "row", "s")
    how = f", {choice.schedule}" if dims.pipeline > 1 else ""
    return f"{sizes}{how}, {micro_batches} of {rows}: {seconds(plan.step_s)} s per step, bubble {plan.bubble:.1%}"


def counted(number: int, word: str, plural: str) -> str:
    return f"{number} {word}{plural * (number != 1)}"


def stage_rows(problem: Problem, plan: MeshPlan) -> list[list[str]]:
    """Returns a row of `STAGE_COLUMNS` for each stage."""
    limit = problem.cluster.memory_bytes
    rows = []
    for i, stage in enumerate(plan.stages):
        held = gib(stage.memory.total)
        rows.append([
            str(i), _layers(problem, plan, i), _ranks(plan, i), tensor_plan(stage.segment.kinds),
            seconds(stage.forward_s), seconds(stage.backward_s), seconds(stage.transfer_s), seconds(stage.sync_s),
            held if math.isinf(limit) else f"{held} of {gib(limit)}",
        ])  # fmt: skip
    return rows


def plan_rows(plans: Sequence[MeshPlan]) -> list[list[str]]:
    """Returns a row of `PLAN_COLUMNS` for each plan."""
    cells = []
    for plan in plans:
        choice, dims = plan.choice, plan.choice.dims
        rows = choice.rows * choice.micro_batches * dims.data
        sizes = (dims.pipeline, dims.data, dims.tensor, choice.zero_stage)
        schedule = choice.schedule if dims.pipeline > 1 else ""
        rate = f"{rows / plan.step_s:.4g}" if plan.step_s else ""
        cells.append([*map(str, sizes), schedule, str(choice.micro_batches), str(choice.rows), seconds(plan.step_s),
                      rate, f"{plan.bubble:.1%}", gib(plan.memory_bytes)])  # fmt: skip
    return cells


def as_dict(problem: Problem, plan: MeshPlan) -> dict[str, Any]:
    """Returns a plan as plain data."""
    choice, dims = plan.choice, plan.choice.dims
    return {
        "pipeline": dims.pipeline, "data": dims.data, "tensor": dims.tensor, "zero_stage": choice.zero_stage,
        "schedule": choice.schedule if dims.pipeline > 1 else None, "micro_batches": choice.micro_batches,
        "rows_of_micro_batch": choice.rows,
        "step_s": plan.step_s, "exposed_exchange_s": plan.exposed_s, "bubble": plan.bubble,
        "memory_bytes": plan.memory_bytes,
        "stages": [
            {
                "layers": [problem.layers[start + k].name for k in range(len(stage.segment.kinds))],
                "tensor": list(stage.segment.kinds),
                "forward_s": stage.forward_s, "backward_s": stage.backward_s, "transfer_s": stage.transfer_s,
                "exchange_s": stage.sync_s,
                "memory": {name: getattr(stage.memory, name) for name in MEMORY_PARTS},
            }
            for start, stage in zip(plan.starts, plan.stages, strict=True)
        ],
    }  # fmt: skip


def tensor_plan(kinds: Sequence[str]) -> str:
    """Returns how the layers are cut, such as `replicated, 12 block`; empty if none is."""
    if set(kinds) == {"replicated"}:
        return ""
    runs = [(kind, len(list(group))) for kind, group in groupby(kinds)]
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in runs[:6]) + ", ..." * (len(runs) > 6)


def seconds(value: float) -> str:
    return f"{value:.4g}"


def gib(value: float) -> str:
    return f"{value / GIB:.3g}"


def _layers(problem: Problem, plan: MeshPlan, stage: int) -> str:
    names = [problem.layers[plan.starts[stage] + k].name for k in range(plan.cut[stage])]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _ranks(plan: MeshPlan, stage: int) -> str:
    dims = plan.choice.dims
    first, last = dims.rank(Place(stage, 0, 0)), dims.rank(Place(stage, dims.data - 1, dims.tensor - 1))
    return str(first) if first == last else f"{first} to {last}"


def check(url: str) -> None:
    """Raises ValueError for a file that is no plan, and ModuleNotFoundError without matplotlib or Jinja."""
    plots.check_packages("the page of a plan")
    plots.check_replaceable(url, _MARK, "a plan of spark_dl", key="page")


def write(url: str, name: str, problem: Problem, plans: Sequence[MeshPlan], about: Mapping[str, Any]) -> None:
    """Writes the page. about: the options that the records do not have, by name."""
    best, dims = plans[0], plans[0].choice.dims
    passes = passes_of(best)
    title = f"Timeline of {counted(dims.pipeline, 'stage', 's')}"
    html = plots.render_page(
        "spark_dl.planning", "plan.html",
        mark=_MARK, model=name, summary=summary(best), facts=_facts(problem, best),
        timeline=draw_timeline(passes, dims.pipeline, title=title),
        shown_micro_batches=min(best.choice.micro_batches, MOST_MICRO_BATCHES),
        micro_batches=best.choice.micro_batches,
        memory=draw_memory(best, MEMORY_PARTS, problem.cluster.memory_bytes),
        stage_columns=STAGE_COLUMNS, stages=stage_rows(problem, best),
        plan_columns=PLAN_COLUMNS, plans=plan_rows(plans),
        settings=yaml.safe_dump(settings(best), sort_keys=False, default_flow_style=None),
        about={"ranks": problem.cluster.num_ranks, "hosts": problem.cluster.hosts,
               "global_batch_size": problem.global_batch_size, **about},
        version=__version__,
    )  # fmt: skip
    storage.make_folder(storage.dirname(url))
    storage.write_bytes(url, html.encode())


def _facts(problem: Problem, plan: MeshPlan) -> list[tuple[str, str]]:
    dims, choice = plan.choice.dims, plan.choice
    return [
        ("mesh", f"{dims.pipeline} × {dims.data} × {dims.tensor}"),
        ("ZeRO stage", str(choice.zero_stage)),
        ("schedule", choice.schedule if dims.pipeline > 1 else "none"),
        ("micro-batches", f"{choice.micro_batches} of {counted(choice.rows, 'row', 's')}"),
        ("step", f"{seconds(plan.step_s)} s"),
        ("exchange left at the end", f"{seconds(plan.exposed_s)} s"),
        ("rows per second", f"{problem.global_batch_size / plan.step_s:,.4g}" if plan.step_s else ""),
        ("bubble", f"{plan.bubble:.1%}"),
        ("fullest rank", f"{gib(plan.memory_bytes)} GiB"),
    ]
