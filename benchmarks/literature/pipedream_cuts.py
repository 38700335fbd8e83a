"""PipeDream's planner: stages with different numbers of replicas, for asynchronous pipelines. A cost model only.

Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP), section 3.1. The details
are those of the authors' program, from which their published plans come (github.com/msr-fiddle/pipedream, MIT licence,
optimizer/optimizer_graph_hierarchical.py): a stage takes the sum of its computation and its exchange of gradients,
divided by its replicas; transfers between stages take no time, unless asked for.

The meshes of this package are uniform: ranks cannot run a plan such as 15-1, fifteen replicas and then one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class State:
    """A place to cut a graph of layers, and all that comes before it. A chain has one after each layer."""

    compute_s: float
    """Forward and backward pass of all layers up to here, for a mini-batch."""
    parameter_bytes: float
    """Of all layers up to here."""
    output_bytes: float
    """What is sent on from here, per mini-batch."""
    before: frozenset[int]
    """Indices of the states that are part of this one."""


@dataclass(frozen=True)
class PipeDreamStage:
    """States `start` to `end` - 1, on `replicas` workers."""

    start: int
    end: int
    replicas: int
    compute_s: float
    """Of one replica, for a mini-batch."""


@dataclass(frozen=True)
class PipeDreamPlan:
    """Stages, and the seconds in which the slowest of them does a mini-batch."""

    stages: tuple[PipeDreamStage, ...]
    period_s: float
    data_parallel_s: float
    """The same for data parallelism on all workers."""
    single_s: float
    """The same for one worker."""

    @property
    def times_data_parallel(self) -> float:
        return self.data_parallel_s / self.period_s

    @property
    def replication(self) -> str:
        """For example 3-1; "straight" if no stage has replicas."""
        replicas = [stage.replicas for stage in self.stages]
        return "straight" if max(replicas) == 1 else "-".join(map(str, replicas))


def chain(compute_s: Sequence[float], parameter_bytes: Sequence[float], output_bytes: Sequence[float]) -> list[State]:
    """Returns the states of layers in a row."""
    found, seconds, parameters = [], 0.0, 0.0
    for i, own in enumerate(zip(compute_s, parameter_bytes, output_bytes, strict=True)):
        seconds, parameters = seconds + own[0], parameters + own[1]
        found.append(State(seconds, parameters, own[2], frozenset(range(i))))
    return found


def stage_s(compute_s: float, parameter_bytes: float, replicas: int, bytes_per_s: float) -> float:
    """Returns the seconds of a stage per mini-batch: its replicas take turns, and then exchange their gradients."""
    exchange_s = 4 * (replicas - 1) * parameter_bytes / (bytes_per_s * replicas)
    return (compute_s + exchange_s) / replicas


class _Best(NamedTuple):
    """The best plan of the states up to one, on some workers."""

    seconds: float
    cut: int | None
    """The last state before the last stage; None for a single stage."""
    replicas: int
    """Of the last stage."""


def plan(states: Sequence[State], num_workers: int, bytes_per_s: float, *, transfers: bool = False) -> PipeDreamPlan:
    """Returns the stages whose slowest takes the least time, by dynamic programming.

    Args:
        states: in an order in which each comes after those before it; the last one is the whole network.
        bytes_per_s: rate between two workers.
        transfers: whether the transfers between stages take time, too.
    """
    best: list[list[_Best]] = []  # by last state, and number of workers - 1
    for j in range(len(states)):
        best.append([_best(states, best, j, workers, bytes_per_s, transfers) for workers in range(1, num_workers + 1)])
    whole = states[-1]
    return PipeDreamPlan(
        _stages(states, best, num_workers),
        period_s=best[-1][-1].seconds,
        data_parallel_s=stage_s(whole.compute_s, whole.parameter_bytes, num_workers, bytes_per_s),
        single_s=whole.compute_s,
    )


def _best(
    states: Sequence[State],
    best: Sequence[Sequence[_Best]],
    j: int,
    workers: int,
    bytes_per_s: float,
    transfers: bool,
) -> _Best:
    """Returns the best plan of all up to state j: one stage, or the best plan up to a cut and a last stage after it."""
    state = states[j]
    found = _Best(stage_s(state.compute_s, state.parameter_bytes, workers, bytes_per_s), None, workers)
    output_bytes = state.output_bytes if j < len(states) - 1 else 0.0
    for k in sorted(state.before):
        before = states[k]
        compute_s, parameter_bytes = state.compute_s - before.compute_s, state.parameter_bytes - before.parameter_bytes
        transfer_bytes = 2 * max(before.output_bytes, output_bytes) if transfers else 0.0
        for replicas in range(1, workers):
            last_s = stage_s(compute_s, parameter_bytes, replicas, bytes_per_s)
            seconds = max(best[k][workers - replicas - 1].seconds, last_s, transfer_bytes / (bytes_per_s * replicas))
            if seconds < found.seconds:
                found = _Best(seconds, k, replicas)
    return found


def _stages(states: Sequence[State], best: Sequence[Sequence[_Best]], num_workers: int) -> tuple[PipeDreamStage, ...]:
    found: list[PipeDreamStage] = []
    last, workers = len(states) - 1, num_workers
    while True:
        _, cut, replicas = best[last][workers - 1]
        start, before_s = (0, 0.0) if cut is None else (cut + 1, states[cut].compute_s)
        found.append(PipeDreamStage(start, last + 1, replicas, states[last].compute_s - before_s))
        if cut is None:
            assert replicas == workers
            return tuple(reversed(found))
        last, workers = cut, workers - replicas
