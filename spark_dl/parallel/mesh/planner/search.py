"""Searches the meshes, schedules, micro-batches, ZeRO stages and cuts for the plans with the shortest steps.

The meshes are uniform: all stages have the same number of data ranks and of tensor ranks. `pipedream.py` has a
planner whose stages have different numbers of replicas; the ranks cannot run such a plan. If no plan fits, the error
names the plan that needs the least memory.

The passes of a step over time, for pictures: which stage works on which micro-batch, and when. GPipe: Huang et al.
2019, arXiv:1811.06965, figure 2. 1F1B: Narayanan et al. 2021, arXiv:2104.04473, figure 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.records import (
    GPIPE,
    ONE_F_ONE_B,
    ZERO_STAGES,
    Cluster,
    LayerProfile,
    MemoryUse,
    States,
)
from spark_dl.parallel.mesh.planner.stages import PlanChoice, Segments, StageCost, StageCosts, best_cuts, step_s

FORWARD, BACKWARD, SYNC = "forward", "backward", "sync"
WEIGHTS = "weights"
"""The gradients of weights, where they are computed apart from the backward pass."""

_BETTER = 1 - 1e-9
"""A plan replaces another that is simpler only if its step is shorter by more than rounding."""


class Pass(NamedTuple):
    """One bar of the picture."""

    stage: int
    kind: str
    micro_batch: int
    """-1 for `sync`."""
    start_s: float
    end_s: float


class StageTimes(NamedTuple):
    """Seconds of a stage."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    """To the next stage, of the output of a micro-batch. Its gradient takes as long to come back."""
    sync_s: float = 0.0
    """Exchange of gradients after the last backward pass."""


def order(schedule: str, stage: int, num_stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Returns the passes of a stage in their order, as (kind, micro-batch)."""
    first = micro_batches if schedule == GPIPE else min(micro_batches, num_stages - stage)
    passes = [(FORWARD, i) for i in range(first)]
    for done in range(micro_batches):
        passes.append((BACKWARD, done))
        if first + done < micro_batches:
            passes.append((FORWARD, first + done))
    return passes


def timeline(stages: Sequence[StageTimes], schedule: str, micro_batches: int) -> list[Pass]:
    """Returns all passes of a step, by start.

    A pass starts when its stage is free and its input has arrived: from the stage before it for a forward pass, from
    the stage after it for a backward pass. Sends take time, but do not occupy a stage.
    """
    num_stages = len(stages)
    waiting = [order(schedule, i, num_stages, micro_batches)[::-1] for i in range(num_stages)]
    free_s = [0.0] * num_stages
    ends: dict[tuple[int, str, int], float] = {}
    passes: list[Pass] = []
    while any(waiting):
        moved = False
        for stage in range(num_stages):
            while waiting[stage]:
                kind, micro_batch = waiting[stage][-1]
                arrived_s = _arrival(ends, stages, stage, kind, micro_batch)
                if arrived_s is None:
                    break
                waiting[stage].pop()
                start_s = max(free_s[stage], arrived_s)
                free_s[stage] = start_s + (stages[stage].forward_s if kind == FORWARD else stages[stage].backward_s)
                ends[stage, kind, micro_batch] = free_s[stage]
                passes.append(Pass(stage, kind, micro_batch, start_s, free_s[stage]))
                moved = True
        assert moved, "a schedule in which stages wait for each other"
    passes += [Pass(i, SYNC, -1, free_s[i], free_s[i] + each.sync_s) for i, each in enumerate(stages) if each.sync_s]
    return sorted(passes, key=lambda each: (each.start_s, each.stage))


def end_s(passes: Sequence[Pass]) -> float:
    """Returns when the last pass ends."""
    return max((each.end_s for each in passes), default=0.0)


def _arrival(
    ends: dict[tuple[int, str, int], float], stages: Sequence[StageTimes], stage: int, kind: str, micro_batch: int
) -> float | None:
    """Returns when the input of a pass is there, or None if the pass before it has not been placed yet."""
    if kind == FORWARD:
        if stage == 0:
            return 0.0
        end = ends.get((stage - 1, FORWARD, micro_batch))
        return None if end is None else end + stages[stage - 1].send_s
    if stage == len(stages) - 1:
        return ends.get((stage, FORWARD, micro_batch))
    end = ends.get((stage + 1, BACKWARD, micro_batch))
    return None if end is None else end + stages[stage].send_s


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Raises ValueError for no layers, and for sizes that no mesh has.
    """

    layers: tuple[LayerProfile, ...]
    cluster: Cluster
    states: States
    global_batch_size: int
    zero_stages: tuple[int, ...] = ZERO_STAGES
    schedules: tuple[str, ...] = (ONE_F_ONE_B, GPIPE)
    allows: Callable[[PlanChoice], bool] = lambda choice: True
    """Which choices the model, the data and the settings of a run allow."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: expected at least one, found none")
        for key, found, known in (
            ("zero_stages", self.zero_stages, ZERO_STAGES), ("schedules", self.schedules, (ONE_F_ONE_B, GPIPE)),
        ):  # fmt: skip
            if not found or not set(found) <= set(known):
                raise ValueError(f"{key}: expected some of {', '.join(map(str, known))}, found {found}")
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size: expected at least 1, found {self.global_batch_size}")


def choices(problem: Problem) -> Iterator[PlanChoice]:
    """Returns all choices but those of the cuts, simple ones first.

    Tensor ranks are on one host. There are as many stages as layers at most. 1F1B needs a micro-batch for each stage.
    There is no ZeRO-2 in a pipeline, whose micro-batches in flight need whole gradients.
    """
    return filter(problem.allows, _choices(problem))


def _choices(problem: Problem) -> Iterator[PlanChoice]:
    for dims in meshes(problem.cluster, problem.layers):
        if problem.global_batch_size % dims.data:
            continue
        of_rank = problem.global_batch_size // dims.data
        for zero_stage in problem.zero_stages:
            if zero_stage and (dims.data == 1 or (zero_stage == 2 and dims.pipeline > 1)):
                continue
            for schedule in problem.schedules if dims.pipeline > 1 else problem.schedules[:1]:
                for micro_batches in _divisors(of_rank):
                    if schedule == GPIPE or dims.pipeline == 1 or micro_batches >= dims.pipeline:
                        yield PlanChoice(dims, zero_stage, schedule, micro_batches, of_rank // micro_batches)


def meshes(cluster: Cluster, layers: Sequence[LayerProfile]) -> Iterator[Dims]:
    """Returns the meshes of the ranks. There are several tensor ranks only if a layer can be cut over them."""
    can_cut = any(layer.tensor for layer in layers)
    for tensor in _divisors(cluster.ranks_per_host) if can_cut else [1]:
        for pipeline in _divisors(cluster.num_ranks // tensor):
            if pipeline <= len(layers):
                yield Dims(pipeline, cluster.num_ranks // tensor // pipeline, tensor)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True)
class Least:
    """A plan, and the memory of its fullest rank."""

    choice: PlanChoice
    starts: tuple[int, ...]
    memory: MemoryUse


def least_memory(problem: Problem) -> Least | None:
    """Returns the plan whose fullest rank holds the fewest bytes, however long its step is.

    None if the ranks, the layers and the batch allow no mesh.
    """
    segments = Segments(problem.layers, problem.cluster.within)
    best: Least | None = None
    for choice in choices(problem):
        stages = StageCosts(problem.layers, problem.cluster, problem.states, choice, segments)
        least = _least(stages, choice, len(problem.layers))
        if best is None or least.memory.total < best.memory.total:
            best = least
    return best


def _least(stages: StageCosts, choice: PlanChoice, num_layers: int) -> Least:
    """Returns the best cuts of a choice: for each suffix of the layers, those whose fullest stage holds least."""
    pipeline = choice.dims.pipeline
    suffixes = {num_layers: Least(choice, (), MemoryUse(0, 0, 0))}
    for stage in reversed(range(pipeline)):
        reached: dict[int, Least] = {}
        for start in range(stage, num_layers - (pipeline - 1 - stage)) if stage else range(1):
            for end, after in suffixes.items():
                if end <= start:
                    continue
                own = stages.least_memory(stage, start, end).memory
                fullest = max(own, after.memory, key=lambda memory: memory.total)
                if start not in reached or fullest.total < reached[start].memory.total:
                    reached[start] = Least(choice, (start, *after.starts), fullest)
        suffixes = reached
    return suffixes[0]


def why_none_fits(problem: Problem) -> str:
    """Returns what was found, and what to change."""
    least, cluster = least_memory(problem), problem.cluster
    if least is None:
        return (
            f"no mesh has {cluster.num_ranks} ranks on {cluster.hosts} hosts for {len(problem.layers)} layers and a "
            f"global batch of {problem.global_batch_size} rows. Each stage needs a layer, data ranks need equally many "
            "rows, tensor ranks are on one host, and 1f1b needs a micro-batch for each stage: change "
            "global_batch_size, the number of ranks, or schedules"
        )
    choice, dims, memory = least.choice, least.choice.dims, least.memory
    states = memory.total - memory.activations
    help_for_states = "more ranks, an optimizer with less state, or layers that can be cut over tensor ranks"
    hint = "a smaller global_batch_size, or more ranks" if memory.activations > states else help_for_states
    return (
        f"no plan fits into memory_gib={cluster.memory_bytes / 2**30:.4g} of a rank. The smallest needs "
        f"{memory.total / 2**30:.4g} GiB: {states / 2**30:.4g} for weights, gradients and optimizer, and "
        f"{memory.activations / 2**30:.4g} for activations, with pipeline={dims.pipeline}, data={dims.data}, "
        f"tensor={dims.tensor}, zero_stage={choice.zero_stage}, micro_batches={choice.micro_batches}, "
        f"rows={choice.rows}. Use devices with more memory, {hint}"
    )


@dataclass(frozen=True)
class MeshPlan:
    """How a model is laid out on the ranks, with its predicted cost."""

    choice: PlanChoice
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


def search(problem: Problem) -> list[MeshPlan]:
    """Returns the best plan of each mesh that fits into memory, the shortest step first.

    If plans have equal times, the one with a lower ZeRO stage, 1F1B and fewer micro-batches is returned.
    Raises ValueError, with what to change, if no plan fits.
    """
    segments = Segments(problem.layers, problem.cluster.within)
    best: dict[Dims, MeshPlan] = {}
    for choice in choices(problem):
        known = best.get(choice.dims)
        limit_s = known.step_s * _BETTER if known else math.inf
        if found := _plan(problem, choice, segments, limit_s):
            best[choice.dims] = found
    if not best:
        raise ValueError(why_none_fits(problem))
    return sorted(best.values(), key=lambda plan: plan.step_s)


def plans_of_choices(problem: Problem) -> list[MeshPlan]:
    """Returns the plan with the best cuts of each choice that fits into memory, the shortest step first."""
    segments = Segments(problem.layers, problem.cluster.within)
    plans = (_plan(problem, choice, segments, math.inf) for choice in choices(problem))
    return sorted((plan for plan in plans if plan is not None), key=lambda plan: plan.step_s)


def plan_of(problem: Problem, choice: PlanChoice, starts: Sequence[int]) -> MeshPlan | None:
    """Returns the plan of a choice and cuts, or None if it does not fit into memory."""
    stages = StageCosts(
        problem.layers, problem.cluster, problem.states, choice, Segments(problem.layers, problem.cluster.within)
    )
    return _with_cuts(stages, choice, tuple(starts), len(problem.layers))


def _plan(problem: Problem, choice: PlanChoice, segments: Segments, limit_s: float) -> MeshPlan | None:
    stages = StageCosts(problem.layers, problem.cluster, problem.states, choice, segments)
    num_layers, pipeline = len(problem.layers), choice.dims.pipeline
    prefix_s = [0.0, *(stages.fastest(0, end).seconds for end in range(1, num_layers + 1))]
    if prefix_s[-1] * (1 + (choice.micro_batches - 1) / pipeline) >= limit_s:
        return None
    cuts = best_cuts(num_layers, pipeline, choice.micro_batches, stages.cost, prefix_s=prefix_s, limit_s=limit_s)
    return _with_cuts(stages, choice, cuts.starts, num_layers) if cuts else None


def _with_cuts(stages: StageCosts, choice: PlanChoice, starts: tuple[int, ...], num_layers: int) -> MeshPlan | None:
    ends = (*starts[1:], num_layers)
    costs = [stages.cost(i, start, end) for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
    fitting = tuple(cost for cost in costs if cost is not None)
    if len(fitting) < len(costs):
        return None
    return MeshPlan(choice, starts, fitting, *step_s(fitting, choice.micro_batches))
