"""Seconds of the collectives of model parallelism, on rings. Pure functions.

An all-reduce on a ring is a reduce-scatter and an all-gather, each with half of its messages and bytes (Thakur,
Rabenseifner and Gropp 2005). In an all-to-all, each rank sends one message to each other rank.
"""

from __future__ import annotations

from spark_dl.parallel.cost.cost import Network, cost
from spark_dl.parallel.cost.work import Exchange


def all_reduce_s(num_ranks: int, num_bytes: float, network: Network) -> float:
    """Sums `num_bytes` on all ranks."""
    if num_ranks == 1 or num_bytes == 0:
        return 0.0
    return cost(Exchange("ring", num_ranks, num_bytes), network).seconds


def all_gather_s(num_ranks: int, num_bytes: float, network: Network) -> float:
    """All ranks get `num_bytes`, of which each had an equal part."""
    if num_ranks == 1 or num_bytes == 0:
        return 0.0
    part = (num_ranks - 1) / num_ranks * num_bytes
    return network.overhead_s + (num_ranks - 1) * network.alpha_s + part / network.bytes_per_s


def reduce_scatter_s(num_ranks: int, num_bytes: float, network: Network) -> float:
    """Each rank gets the sum of its part of `num_bytes`."""
    if num_ranks == 1 or num_bytes == 0:
        return 0.0
    part = (num_ranks - 1) / num_ranks * num_bytes
    return all_gather_s(num_ranks, num_bytes, network) + network.gamma_s_per_byte * part


def all_to_all_s(num_ranks: int, num_bytes: float, network: Network) -> float:
    """Each rank sends an equal part of its `num_bytes` to each rank."""
    return all_gather_s(num_ranks, num_bytes, network)


def send_s(num_bytes: float, network: Network) -> float:
    """One message from one rank to another."""
    return network.overhead_s + network.alpha_s + num_bytes / network.bytes_per_s
