"""How long an exchange of gradients takes: the alpha-beta-gamma model of Hockney 1994 and Thakur et al. 2005.

    seconds = overhead * calls + alpha * messages + bytes / rate + gamma * bytes touched

What an exchange does is counted in `work.py`; what the network and the machine make of it, four numbers per method, is
fitted to measured points and checked against others. Pure: only numpy, no I/O.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_dl.bench.model.work import BY_SPARK, Exchange, work


@dataclass(frozen=True)
class Network:
    """A network, and the software on it, as one method finds it."""

    alpha_s: float
    """Latency of a message."""
    bytes_per_s: float
    """Rate of a host's link in each direction; may be infinite. The model's beta is its inverse."""
    gamma_s_per_byte: float = 0.0
    """Time to add, or for Python to serialize, a byte."""
    overhead_s: float = 0.0
    """Of each all-reduce, or of each Spark stage."""


@dataclass(frozen=True)
class Cost:
    """Of one exchange."""

    seconds: float
    bytes_per_rank: float
    """Sent by a rank, on average."""
    busiest_link_bytes: float
    """Through the busiest host's link, in the direction in which it carries more."""


@dataclass(frozen=True)
class Point:
    """A measured exchange."""

    exchange: Exchange
    seconds: float


def cost(exchange: Exchange, network: Network) -> Cost:
    """Time and traffic of an exchange."""
    done = work(exchange)
    seconds = (
        network.overhead_s * done.calls
        + network.alpha_s * done.messages
        + done.link_bytes / network.bytes_per_s
        + network.gamma_s_per_byte * done.touched_bytes
    )
    return Cost(seconds, done.bytes_per_rank, done.busiest_link_bytes)


def fit(points: Sequence[Point]) -> Network:
    """The network that explains measured exchanges of one method best: least squares of the relative errors.

    No number is negative. Where two networks explain the points equally well, as where bytes sent and bytes touched are
    in proportion (in a ring they always are), the one with fewer numbers above 0 is returned: it predicts the same. And
    where latency and overhead cannot be told apart, as by points of one number of ranks, it is latency, which grows
    with the ranks; of Spark's stages it is overhead, which does not.
    Raises ValueError for no points, for points of several methods, and for seconds that are not above 0.
    """
    methods = {point.exchange.method for point in points}
    if len(methods) != 1:
        raise ValueError(f"expected points of one method, found {sorted(methods) or 'no points'}")
    if not all(0 < point.seconds < math.inf for point in points):
        raise ValueError("expected seconds above 0 of every point")
    counts = np.array([_counts(point.exchange) for point in points])  # (points, 4)
    relative = counts / np.array([[point.seconds] for point in points])
    first = [0, 1] if methods <= BY_SPARK else [1, 0]  # the earlier of two columns that explain as much
    order = [*first, 2, 3]
    found = _non_negative_least_squares(relative[:, order])
    overhead_s, alpha_s, s_per_byte, gamma = (found[order.index(i)] for i in range(4))
    return Network(alpha_s, 1 / s_per_byte if s_per_byte else math.inf, gamma, overhead_s)


def _counts(exchange: Exchange) -> tuple[float, float, float, float]:
    done = work(exchange)
    return done.calls, done.messages, done.link_bytes, done.touched_bytes


def _non_negative_least_squares(a: np.ndarray[Any, Any]) -> list[float]:
    """x >= 0 with the least |a x - 1|; a is [points, numbers].

    The best x is the plain least squares solution in the columns in which it is not 0, so all sets of columns are
    tried: with four there are 15.
    """
    target, scale = np.ones(len(a)), np.abs(a).max(axis=0)
    best, best_error = [0.0] * a.shape[1], math.inf
    for num_columns in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(np.flatnonzero(scale), num_columns):
            kept = list(columns)
            scaled = a[:, kept] / scale[kept]
            found, _, rank, _ = np.linalg.lstsq(scaled, target, rcond=1e-9)
            error = float(np.linalg.norm(scaled @ found - target))
            if rank < num_columns or (found < 0).any() or error >= best_error - 1e-9:
                continue
            best, best_error = [0.0] * a.shape[1], error
            for column, value in zip(kept, found / scale[kept], strict=True):
                best[column] = float(value)
    return best


def server_bytes_per_s(num_workers: int, gradient_bytes: float, steps_per_s: float, *, servers: int = 1) -> float:
    """What each server must receive, and send, for all workers to take so many steps per second."""
    return num_workers * gradient_bytes * steps_per_s / servers
