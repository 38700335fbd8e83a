"""A short job of the ranks before the training: on which hosts they are, and how fast the network is."""

from __future__ import annotations

import datetime
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spark_dl.config import Launch
from spark_dl.gather import gather_json
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.task import RankResult
from spark_dl.parallel.cost.cost import Network, Point, fit
from spark_dl.parallel.cost.work import Exchange
from spark_dl.world import World

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the all-reduces that are measured."""
_REPEATS = 5


@dataclass(frozen=True)
class Probed:
    """What the ranks have found."""

    ranks_of_hosts: tuple[int, ...]
    """Number of ranks of each host, in the order of the ranks."""
    within: Network | None
    """Between the ranks of a host; None if each host has one."""
    between: Network | None
    """Between hosts; None if there is one."""


def probe(spark: Any, launch: Launch, *, description: str) -> Probed:
    """Starts the ranks, and measures all-reduces within hosts and between hosts. Called on the driver.

    Raises as `run_barrier` does.
    """
    found: list[Mapping[str, Any]] = run_barrier(
        spark, measure_as_rank, launch, launch=launch, description=description
    )  # fmt: skip
    first = found[0]
    hosts = Counter(first["hosts"])  # keeps the order in which the ranks have them
    within = [points for rank in found if (points := rank["within"])]
    between = [points for rank in found if (points := rank["between"])]
    return Probed(tuple(hosts.values()), fit_slowest(within), fit_slowest(between))


def fit_slowest(points: Sequence[Sequence[Sequence[float]]]) -> Network | None:
    """Returns the network that fits what the ranks measured; None without measurements. Pure.

    points: of each rank, (ranks, bytes, seconds) for each size. Of all ranks, the slowest counts.
    """
    if not points:
        return None
    slowest = [max(of_size, key=lambda point: point[2]) for of_size in zip(*points, strict=True)]
    return fit([Point(Exchange("ring", int(ranks), size), seconds) for ranks, size, seconds in slowest])


def measure_as_rank(launch: Launch, *, report: Any = None) -> RankResult:
    """Measures as one rank. Collective."""
    with rendezvous.join(launch, report=report) as world:
        hosts = gather_json(f"{world.host}") if world.world_size > 1 else [world.host]
        timeout = datetime.timedelta(seconds=launch.collective_timeout_s)
        by_host = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        firsts = [ranks[0] for ranks in by_host]
        within = between = None
        for ranks in by_host:
            group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
            if group is not None and world.rank in ranks:
                within = group
        if len(firsts) > 1:
            between = dist.new_group(firsts, timeout=timeout)
        found: dict[str, Any] = {"hosts": hosts, "within": [], "between": []}
        if within is not None:
            found["within"] = _measure(within, world)
        if world.world_size > 1:
            dist.barrier()
        if between is not None and world.rank in firsts:
            found["between"] = _measure(between, world)
        return RankResult(world.rank, found)


def _measure(group: dist.ProcessGroup, world: World) -> list[list[float]]:
    """Returns (ranks, bytes, seconds) for each size: the medians of all-reduces, after a first one."""
    found = []
    for size in SIZES:
        tensor = torch.zeros(size // 4, device=world.device)
        seconds = []
        for _ in range(_REPEATS + 1):
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            seconds.append(time.perf_counter() - start)
        found.append([float(group.size()), float(size), statistics.median(seconds[1:])])
    return found
