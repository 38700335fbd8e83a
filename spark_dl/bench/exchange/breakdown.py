"""Where the time of a training step goes, as in Figure 6 of Li et al. 2020, "PyTorch Distributed" (VLDB 13(12)).

Times are `time.perf_counter` seconds. On Linux that is one clock for all processes of a host, network namespaces
included, so ranks that share a kernel can be compared.
"""

# Without `from __future__ import annotations`: DDP looks at the annotations of its hooks, and wants types, not names.

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from spark_dl.bench.exchange.accelerator import StepTimes

Interval = tuple[float, float]
"""Start and end."""
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class BucketTimes:
    """One bucket's all-reduce on one rank."""

    index: int
    num_bytes: int
    start: float
    """When this rank handed it over."""
    end: float


def recording_hook(records: list[BucketTimes], hook: Hook = allreduce_hook) -> Hook:
    """A communication hook that does what `hook` does and appends each bucket's times, in the order of their ends.

    For `DistributedDataParallel.register_comm_hook(state, ...)`; the state is passed on. Called on a worker.
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
    """Seconds of one step on one rank. All but `hidden_s` add up to the step."""

    forward_s: float
    backward_s: float
    """Computing gradients, with what was communicated meanwhile."""
    hidden_s: float
    """Communication that took place while the rank computed."""
    exposed_s: float
    """Communication for which the rank had to wait."""
    wait_s: float
    """Neither computing nor communicating, because another rank had not come to the same bucket."""
    optimizer_s: float
    other_s: float
    """All the rest, such as waiting for data."""

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.exposed_s + self.wait_s + self.optimizer_s + self.other_s


def break_down(
    step: Interval, times: StepTimes, communication: Iterable[Interval], *, waits: Iterable[Interval] = (),
    optimizer: Interval | None = None,
) -> Breakdown:  # fmt: skip
    """Splits one step of one rank.

    communication: from when all ranks had handed a bucket over to its end; `shared_intervals` finds it. With a rank's
        own records alone, waiting for others counts as communication.
    waits: from when this rank had handed a bucket over to when all had.
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
    """The communication and the waits of a rank in one step, from the records of all ranks, [ranks][buckets].

    A bucket's all-reduce can begin when the last rank has handed it over. Raises ValueError if the ranks have not the
    same buckets.
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
    """Seconds of communication within and outside of computing. Intervals may overlap, and count once."""
    compute, communication = list(compute), list(communication)
    computed_s, all_s = covered_s(compute), covered_s([*compute, *communication])
    exposed_s = all_s - computed_s
    return covered_s(communication) - exposed_s, exposed_s


def covered_s(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
