"""One self-contained HTML page about a plan: the timeline of its stages, their memory, and the other plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.parallel.mesh.planner.choices import Problem
from spark_dl.parallel.mesh.planner.search import Plan
from spark_dl.planning import figures, tables
from spark_dl.track import plots

_MARK = "<!-- a plan of spark_dl -->"


def check(url: str) -> None:
    """Raises ValueError for a file that is no plan, and ModuleNotFoundError without matplotlib or Jinja."""
    plots.check_packages("the page of a plan")
    plots.check_replaceable(url, _MARK, "a plan of spark_dl", key="page")


def write(url: str, name: str, problem: Problem, plans: Sequence[Plan], about: Mapping[str, Any]) -> None:
    """Writes the page. about: the options that the records do not have, by name."""
    best, dims = plans[0], plans[0].choice.dims
    passes = figures.passes_of(best)
    title = f"Timeline of {tables.counted(dims.pipeline, 'stage', 's')}"
    html = plots.render_page(
        "spark_dl.planning", "plan.html",
        mark=_MARK, model=name, summary=tables.summary(best), facts=_facts(problem, best),
        timeline=figures.draw_timeline(passes, dims.pipeline, title=title),
        shown_micro_batches=min(best.choice.micro_batches, figures.MOST_MICRO_BATCHES),
        micro_batches=best.choice.micro_batches,
        memory=figures.draw_memory(best, tables.MEMORY_PARTS, problem.cluster.memory_bytes),
        stage_columns=tables.STAGE_COLUMNS, stages=tables.stage_rows(problem, best),
        plan_columns=tables.PLAN_COLUMNS, plans=tables.plan_rows(plans),
        settings=yaml.safe_dump(tables.settings(best), sort_keys=False, default_flow_style=None),
        about={"ranks": problem.cluster.num_ranks, "hosts": problem.cluster.hosts,
               "global_batch_size": problem.global_batch_size, **about},
        version=__version__,
    )  # fmt: skip
    storage.make_folder(storage.dirname(url))
    storage.write_bytes(url, html.encode())


def _facts(problem: Problem, plan: Plan) -> list[tuple[str, str]]:
    dims, choice = plan.choice.dims, plan.choice
    return [
        ("mesh", f"{dims.pipeline} × {dims.data} × {dims.tensor}"),
        ("ZeRO stage", str(choice.zero_stage)),
        ("schedule", choice.schedule if dims.pipeline > 1 else "none"),
        ("micro-batches", f"{choice.micro_batches} of {tables.counted(choice.rows, 'row', 's')}"),
        ("step", f"{tables.seconds(plan.step_s)} s"),
        ("exchange left at the end", f"{tables.seconds(plan.exposed_s)} s"),
        ("rows per second", f"{problem.global_batch_size / plan.step_s:,.4g}" if plan.step_s else ""),
        ("bubble", f"{plan.bubble:.1%}"),
        ("fullest rank", f"{tables.gib(plan.memory_bytes)} GiB"),
    ]
