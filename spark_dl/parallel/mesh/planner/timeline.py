"""The passes of a step over time: which stage works on which micro-batch, and when. Pure arithmetic, for pictures.

GPipe: Huang et al. 2019, arXiv:1811.06965, figure 2. 1F1B: Narayanan et al. 2021, arXiv:2104.04473, figure 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spark_dl.parallel.mesh.planner.memory import GPIPE

FORWARD, BACKWARD, SYNC = "forward", "backward", "sync"
WEIGHTS = "weights"
"""The gradients of weights, where they are computed apart from the backward pass."""


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
    found: list[Pass] = []
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
                found.append(Pass(stage, kind, micro_batch, start_s, free_s[stage]))
                moved = True
        assert moved, "a schedule in which stages wait for each other"
    found += [Pass(i, SYNC, -1, free_s[i], free_s[i] + each.sync_s) for i, each in enumerate(stages) if each.sync_s]
    return sorted(found, key=lambda each: (each.start_s, each.stage))


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
