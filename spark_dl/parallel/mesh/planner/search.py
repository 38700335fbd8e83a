"""Searches the meshes, schedules, micro-batches, ZeRO stages and cuts for the plans with the shortest steps.

The meshes are uniform: all stages have the same number of data ranks and of tensor ranks. `pipedream.py` has a planner
whose stages have different numbers of replicas; the ranks cannot run such a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.choices import Problem, choices
from spark_dl.parallel.mesh.planner.cuts import best_cuts, step_s
from spark_dl.parallel.mesh.planner.least import why_none_fits
from spark_dl.parallel.mesh.planner.stages import Choice, StageCost, Stages
from spark_dl.parallel.mesh.planner.tensor import Segments

_BETTER = 1 - 1e-9
"""A plan replaces another that is simpler only if its step is shorter by more than rounding."""


@dataclass(frozen=True)
class Plan:
    """How a model is laid out on the ranks, with its predicted cost."""

    choice: Choice
    starts: tuple[int, ...]
    """First layer of each stage."""
    stages: tuple[StageCost, ...]
    pipeline_s: float
    """A step without the exchange of gradients."""
    exposed_s: float
    """The exchange of gradients after it."""

    @property
    def cut(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(len(stage.segment.kinds) for stage in self.stages)

    @property
    def step_s(self) -> float:
        return self.pipeline_s + self.exposed_s

    @property
    def bubble(self) -> float:
        """Part of the time of the pipeline in which a stage waits for others, on average.

        (p - 1) / (m + p - 1) for p equal stages, m micro-batches and transfers that take no time (Huang et al. 2019,
        arXiv:1811.06965, section 2.3).
        """
        busy_s = self.choice.micro_batches * sum(stage.seconds - stage.transfer_s for stage in self.stages)
        return 1 - busy_s / (len(self.stages) * self.pipeline_s) if self.pipeline_s else 0.0

    @property
    def memory_bytes(self) -> float:
        """Of the stage that holds most."""
        return max(stage.memory.total for stage in self.stages)


def search(problem: Problem) -> list[Plan]:
    """Returns the best plan of each mesh that fits into memory, the shortest step first.

    If plans have equal times, the one with a lower ZeRO stage, 1F1B and fewer micro-batches is returned.
    Raises ValueError, with what to change, if no plan fits.
    """
    segments = Segments(problem.layers, problem.cluster.within)
    best: dict[Dims, Plan] = {}
    for choice in choices(problem):
        known = best.get(choice.dims)
        limit_s = known.step_s * _BETTER if known else math.inf
        if found := _plan(problem, choice, segments, limit_s):
            best[choice.dims] = found
    if not best:
        raise ValueError(why_none_fits(problem))
    return sorted(best.values(), key=lambda plan: plan.step_s)


def plans_of_choices(problem: Problem) -> list[Plan]:
    """Returns the plan with the best cuts of each choice that fits into memory, the shortest step first."""
    segments = Segments(problem.layers, problem.cluster.within)
    found = (_plan(problem, choice, segments, math.inf) for choice in choices(problem))
    return sorted((plan for plan in found if plan is not None), key=lambda plan: plan.step_s)


def plan_of(problem: Problem, choice: Choice, starts: Sequence[int]) -> Plan | None:
    """Returns the plan of a choice and cuts, or None if it does not fit into memory."""
    stages = Stages(
        problem.layers, problem.cluster, problem.states, choice, Segments(problem.layers, problem.cluster.within)
    )
    return _with_cuts(stages, choice, tuple(starts), len(problem.layers))


def _plan(problem: Problem, choice: Choice, segments: Segments, limit_s: float) -> Plan | None:
    stages = Stages(problem.layers, problem.cluster, problem.states, choice, segments)
    num_layers, pipeline = len(problem.layers), choice.dims.pipeline
    prefix_s = [0.0, *(stages.fastest(0, end).seconds for end in range(1, num_layers + 1))]
    if prefix_s[-1] * (1 + (choice.micro_batches - 1) / pipeline) >= limit_s:
        return None
    found = best_cuts(num_layers, pipeline, choice.micro_batches, stages.cost, prefix_s=prefix_s, limit_s=limit_s)
    return _with_cuts(stages, choice, found.starts, num_layers) if found else None


def _with_cuts(stages: Stages, choice: Choice, starts: tuple[int, ...], num_layers: int) -> Plan | None:
    ends = (*starts[1:], num_layers)
    costs = [stages.cost(i, start, end) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
    fitting = tuple(cost for cost in costs if cost is not None)
    if len(fitting) < len(costs):
        return None
    return Plan(choice, starts, fitting, *step_s(fitting, choice.micro_batches))
