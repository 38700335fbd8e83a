"""Times of exchanges between ranks on hosts, and the time that their links allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.testbed.links import LinkBytes, read_link


def time_exchanges(
    exchange: Callable[[], object], barrier: Callable[[], object], *, host: str, repeats: int
) -> tuple[list[float], LinkBytes]:
    """Returns the seconds of each exchange on this rank, and the bytes of all of them through its host's link.

    Called on each rank. Collective.
    """
    barrier()
    before, seconds = read_link(host), []
    for _ in range(repeats):
        barrier()
        start = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - start)
    barrier()
    return seconds, read_link(host) - before


def median_of_slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Returns the median over the repetitions of the time of the slowest rank. # by_rank: [ranks][repeats]"""
    slowest: list[float] = [max(times) for times in zip(*by_rank, strict=True)]
    return statistics.median(slowest)


def all_reduce_limit_s(mib: float, num_hosts: int, rate_mbit: float) -> float:
    """Returns the least seconds of an all-reduce: 2 N (P - 1) / P bytes per rank (Patarasuk & Yuan 2009).

    rate_mbit: rate of each link in each direction.
    """
    return 2 * mib * 2**20 * (num_hosts - 1) / num_hosts / (rate_mbit * 1e6 / 8)
