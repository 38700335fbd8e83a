"""Measures training steps of a simulated accelerator on ranks, and their parts.

Ranks are barrier tasks, started by `run_barrier(spark, time_steps, ...)`, or processes with torchrun's environment:

    python -m benchmarks.exchange.steps '<settings as JSON>' result.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exchange.accelerator import Accelerator, StepTimes, build_accelerator
from benchmarks.exchange.breakdown import BucketTimes, break_down, recording_hook, shared_intervals
from benchmarks.model.profiles import PROFILES
from spark_dl.config import Launch
from spark_dl.gather import gather_json
from spark_dl.launch.rank.rendezvous import join
from spark_dl.launch.rank.task import RankResult
from spark_dl.parallel.ddp import DDP
from spark_dl.parallel.exchange.exchange import build_exchange
from spark_dl.world import World


@dataclass(frozen=True)
class Steps:
    """Settings of the measurement, sent as JSON."""

    profile: str = "resnet50"
    scale: float = 1.0
    """Fraction of the profile's parameters."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `parallel` for DDP."""
    bucket_mib: float = 25.0
    warm_ups: int = 2
    num_steps: int = 5
    same_clock: bool = True
    """Whether all ranks run on one machine, so that their clocks can be compared."""
    timeout_s: float = 600.0


def time_steps(settings: Mapping[str, Any], report: Any = None) -> RankResult:
    """Returns median seconds of a DDP step and of its parts, the same on all ranks. Collective."""
    steps = Steps(**settings)
    launch = Launch(device="cpu", collective_timeout_s=steps.timeout_s, start_timeout_s=steps.timeout_s)
    with join(launch, report=report) as world:
        return RankResult(world.rank, _measure(steps, world))


def _measure(steps: Steps, world: World) -> dict[str, Any]:
    # NOTE: a separate function, so that DDP's objects are freed before the process group: see `parallel.ddp`.
    with contextlib.ExitStack() as until_done:
        records: list[BucketTimes] = []
        model = build_accelerator(
            PROFILES[steps.profile](), forward_s=steps.forward_s, backward_s=steps.backward_s, scale=steps.scale,
            seed=world.rank,
        )  # fmt: skip
        wrapped = DistributedDataParallel(model, bucket_cap_mb=steps.bucket_mib, gradient_as_bucket_view=True)
        exchange = build_exchange(model, world, DDP(**steps.parallel), timeout_s=steps.timeout_s)
        if exchange is None:
            hook = recording_hook(records)
        else:
            until_done.callback(exchange.close)
            hook = recording_hook(records, lambda _, bucket: exchange.hook(bucket))
        wrapped.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        taken = [_step(wrapped, model, optimizer, records) for _ in range(steps.warm_ups + steps.num_steps)]
        return _medians(taken[steps.warm_ups :], world.rank, steps.same_clock)


@dataclass(frozen=True)
class _Taken:
    start: float
    end: float
    times: StepTimes
    optimizer: tuple[float, float]
    buckets: list[BucketTimes]


def _step(
    wrapped: DistributedDataParallel, model: Accelerator, optimizer: torch.optim.Optimizer, records: list[BucketTimes]
) -> _Taken:
    column = torch.zeros(1, 1)
    dist.barrier()
    records.clear()
    start = time.perf_counter()
    wrapped(column).sum().backward()
    reduced = time.perf_counter()
    optimizer.step()
    end = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    return _Taken(start, end, model.steps[-1], (reduced, end), list(records))


def _medians(taken: Sequence[_Taken], rank: int, same_clock: bool) -> dict[str, Any]:
    """Returns the median step time (of the slowest rank), and that step's parts as means over the ranks."""
    own = [[dataclasses.asdict(bucket) for bucket in step.buckets] for step in taken]
    everyones = gather_json(own) if same_clock else None
    parts = []
    for i, step in enumerate(taken):
        records = [[BucketTimes(**b) for b in steps[i]] for steps in everyones] if everyones else [step.buckets]
        communication, waits = shared_intervals(records, rank if everyones else 0)
        found = break_down((step.start, step.end), step.times, communication, waits=waits, optimizer=step.optimizer)
        parts.append({**dataclasses.asdict(found), "step_s": step.end - step.start})
    slowest = [max(rank) for rank in zip(*gather_json([part["step_s"] for part in parts]), strict=True)]
    median = parts[slowest.index(statistics.median_low(slowest))]
    of_ranks = gather_json(median)
    means = {name: statistics.mean(rank[name] for rank in of_ranks) for name in median}
    return {**means, "step_s": max(rank["step_s"] for rank in of_ranks)}


if __name__ == "__main__":
    done = time_steps(json.loads(sys.argv[1]))
    if done.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(done.result))
