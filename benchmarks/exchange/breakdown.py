"""Splits the time of a training step into parts, as Figure 6 of Li et al. 2020, "PyTorch Distributed" (VLDB 13(12)).

Times are `time.perf_counter` seconds. On Linux, all processes of a machine share this clock, also in network
namespaces, so the times of ranks with the same kernel can be compared.
"""

# Without `from __future__ import annotations`: DDP checks the annotations of its hooks, and needs types, not strings.

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.exchange.accelerator import StepTimes

Interval = tuple[float, float]
"""Start and end."""
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class BucketTimes:
    """All-reduce of one bucket on one rank."""

    index: int
    num_bytes: int
    start: float
    """Time at which this rank started the all-reduce."""
    end: float


def recording_hook(records: list[BucketTimes], hook: Hook = allreduce_hook) -> Hook:
    """Returns a communication hook that calls `hook` and appends each bucket's times, in the order of their ends.

    For `DistributedDataParallel.register_comm_hook(state, ...)`; `state` is passed to `hook`. Called on a worker.
    """

    def recorded(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        index, num_bytes, start = bucket.index(), bucket.buffer().nbytes, time.perf_counter()

        def note(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            records.append(BucketTimes(index, num_bytes, start, time.perf_counter()))
            return future.value()

        return hook(state, bucket).then(note)

    return recorded


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step on one rank. All parts except `hidden_s` add up to the step."""

    forward_s: float
    backward_s: float
    """Computation of gradients, including hidden communication."""
    hidden_s: float
    """Communication during computation."""
    exposed_s: float
    """Communication that the rank waits for."""
    wait_s: float
    """Waiting for another rank to reach the same bucket."""
    optimizer_s: float
    other_s: float
    """The rest, such as waiting for data."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.exposed_s + self.wait_s + self.optimizer_s + self.other_s


def break_down(
    step: Interval, times: StepTimes, communication: Iterable[Interval], *, waits: Iterable[Interval] = (),
    optimizer: Interval | None = None,
) -> Breakdown:  # fmt: skip
    """Splits one step of one rank.

    # communication: intervals from the start of a bucket's all-reduce on the last rank to its end (`shared_intervals`);
    #     with only this rank's records, waiting for other ranks counts as communication
    # waits: intervals from the start of a bucket's all-reduce on this rank to its start on the last rank
    """
    forward, backward = (times.forward_start, times.forward_end), (times.backward_start, times.backward_end)
    compute = [forward, backward]
    busy = [*compute, *([optimizer] if optimizer else [])]
    communication = list(communication)
    hidden_s, exposed_s = hidden_and_exposed_s(compute, communication)
    wait_s = hidden_and_exposed_s([*busy, *communication], waits)[1]
    known = covered_s([*busy, *communication]) + wait_s
    return Breakdown(
        forward_s=forward[1] - forward[0],
        backward_s=backward[1] - backward[0],
        hidden_s=hidden_s,
        exposed_s=exposed_s,
        wait_s=wait_s,
        optimizer_s=optimizer[1] - optimizer[0] if optimizer else 0.0,
        other_s=step[1] - step[0] - known,
    )


def shared_intervals(records: Sequence[Sequence[BucketTimes]], rank: int) -> tuple[list[Interval], list[Interval]]:
    """Returns communication and waits of a rank in one step, from the records of all ranks, [ranks][buckets].

    A bucket's all-reduce starts when the last rank calls it. Raises ValueError if ranks have different buckets.
    """
    by_index = [{bucket.index: bucket for bucket in rank_records} for rank_records in records]
    if any(found.keys() != by_index[0].keys() for found in by_index):
        raise ValueError(f"the ranks recorded different buckets: {[sorted(found) for found in by_index]}")
    communication, waits = [], []
    for index, own in by_index[rank].items():
        joined = min(max(found[index].start for found in by_index), own.end)
        communication.append((joined, own.end))
        waits.append((own.start, joined))
    return communication, waits


def hidden_and_exposed_s(compute: Iterable[Interval], communication: Iterable[Interval]) -> tuple[float, float]:
    """Returns seconds of communication during computation and outside of it. Overlapping intervals count once."""
    compute, communication = list(compute), list(communication)
    computed_s, all_s = covered_s(compute), covered_s([*compute, *communication])
    exposed_s = all_s - computed_s
    return covered_s(communication) - exposed_s, exposed_s


def covered_s(intervals: Iterable[Interval]) -> float:
    """Returns the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
