"""Plans as rows of tables, as text, and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import yaml

from spark_dl.cli.tables import text_table
from spark_dl.parallel.mesh.dims import Place
from spark_dl.parallel.mesh.planner.choices import Problem
from spark_dl.parallel.mesh.planner.search import Plan

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


def settings(plan: Plan) -> dict[str, dict[str, Any]]:
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


def text(problem: Problem, plans: Sequence[Plan]) -> Iterator[str]:
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


def summary(plan: Plan) -> str:
    choice, dims = plan.choice, plan.choice.dims
    sizes = f"pipeline {dims.pipeline}, data {dims.data}, tensor {dims.tensor}, ZeRO stage {choice.zero_stage}"
    micro_batches, rows = counted(choice.micro_batches, "micro-batch", "es"), counted(choice.rows, "row", "s")
    how = f", {choice.schedule}" if dims.pipeline > 1 else ""
    return f"{sizes}{how}, {micro_batches} of {rows}: {seconds(plan.step_s)} s per step, bubble {plan.bubble:.1%}"


def counted(number: int, word: str, plural: str) -> str:
    return f"{number} {word}{plural * (number != 1)}"


def stage_rows(problem: Problem, plan: Plan) -> list[list[str]]:
    """Returns a row of `STAGE_COLUMNS` for each stage."""
    limit = problem.cluster.memory_bytes
    found = []
    for i, stage in enumerate(plan.stages):
        held = gib(stage.memory.total)
        found.append([
            str(i), _layers(problem, plan, i), _ranks(plan, i), tensor_plan(stage.segment.kinds),
            seconds(stage.forward_s), seconds(stage.backward_s), seconds(stage.transfer_s), seconds(stage.sync_s),
            held if math.isinf(limit) else f"{held} of {gib(limit)}",
        ])  # fmt: skip
    return found


def plan_rows(plans: Sequence[Plan]) -> list[list[str]]:
    """Returns a row of `PLAN_COLUMNS` for each plan."""
    found = []
    for plan in plans:
        choice, dims = plan.choice, plan.choice.dims
        rows = choice.rows * choice.micro_batches * dims.data
        sizes = (dims.pipeline, dims.data, dims.tensor, choice.zero_stage)
        schedule = choice.schedule if dims.pipeline > 1 else ""
        rate = f"{rows / plan.step_s:.4g}" if plan.step_s else ""
        found.append([*map(str, sizes), schedule, str(choice.micro_batches), str(choice.rows), seconds(plan.step_s),
                      rate, f"{plan.bubble:.1%}", gib(plan.memory_bytes)])  # fmt: skip
    return found


def as_dict(problem: Problem, plan: Plan) -> dict[str, Any]:
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


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "gathered")


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


def _layers(problem: Problem, plan: Plan, stage: int) -> str:
    names = [problem.layers[plan.starts[stage] + k].name for k in range(plan.cut[stage])]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"


def _ranks(plan: Plan, stage: int) -> str:
    dims = plan.choice.dims
    first, last = dims.rank(Place(stage, 0, 0)), dims.rank(Place(stage, dims.data - 1, dims.tensor - 1))
    return str(first) if first == last else f"{first} to {last}"
