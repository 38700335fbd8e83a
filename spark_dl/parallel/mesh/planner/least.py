"""The plan that needs the least memory, for the error that no plan fits."""

from __future__ import annotations

from dataclasses import dataclass

from spark_dl.parallel.mesh.planner.choices import Problem, choices
from spark_dl.parallel.mesh.planner.memory import Memory
from spark_dl.parallel.mesh.planner.stages import Choice, Stages
from spark_dl.parallel.mesh.planner.tensor import Segments


@dataclass(frozen=True)
class Least:
    """A plan, and the memory of its fullest rank."""

    choice: Choice
    starts: tuple[int, ...]
    memory: Memory


def least_memory(problem: Problem) -> Least | None:
    """Returns the plan whose fullest rank holds the fewest bytes, however long its step is.

    None if the ranks, the layers and the batch allow no mesh.
    """
    segments = Segments(problem.layers, problem.cluster.within)
    best: Least | None = None
    for choice in choices(problem):
        stages = Stages(problem.layers, problem.cluster, problem.states, choice, segments)
        found = _least(stages, choice, len(problem.layers))
        if best is None or found.memory.total < best.memory.total:
            best = found
    return best


def _least(stages: Stages, choice: Choice, num_layers: int) -> Least:
    """Returns the best cuts of a choice: for each suffix of the layers, those whose fullest stage holds least."""
    pipeline = choice.dims.pipeline
    suffixes = {num_layers: Least(choice, (), Memory(0, 0, 0))}
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
