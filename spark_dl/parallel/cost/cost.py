"""Predicts the time of a gradient exchange: the alpha-beta-gamma model of Hockney 1994 and Thakur et al. 2005.

    seconds = overhead * calls + alpha * messages + bytes / rate + gamma * bytes touched

`work.py` counts the calls, messages and bytes. The four parameters of a method are fitted to measured points and
checked on other points. Pure functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_dl.parallel.cost.work import BY_SPARK, Exchange, work


@dataclass(frozen=True)
class Network:
    """Parameters of a network and its software, for one method."""

    alpha_s: float
    """Latency of a message."""
    bytes_per_s: float
    """Rate of a host's link in each direction; may be infinite. Beta of the model is its inverse."""
    gamma_s_per_byte: float = 0.0
    """Time to add a byte, or to serialize it in Python."""
    overhead_s: float = 0.0
    """Time of each all-reduce, or of each Spark stage."""


@dataclass(frozen=True)
class Cost:
    """Of one exchange."""

    seconds: float
    bytes_per_rank: float
    """Bytes sent by a rank, on average."""
    busiest_link_bytes: float
    """Bytes over the busiest host's link, in its busier direction."""


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
    """Fits the parameters to measured exchanges of one method: least squares of the relative errors.

    All parameters are >= 0. If two solutions are equally good, for example because bytes sent and bytes touched are
    proportional (as in a ring), the solution with fewer positive parameters is returned. It predicts the same. If the
    points cannot separate latency from overhead, for example with one number of ranks, latency is used, which grows
    with the ranks; for Spark's stages, overhead is used, which does not.
    Raises ValueError for no points, for points of several methods, and for seconds that are not above 0.
    """
    methods = {point.exchange.method for point in points}
    if len(methods) != 1:
        raise ValueError(f"expected points of one method, found {sorted(methods) or 'no points'}")
    if not all(0 < point.seconds < math.inf for point in points):
        raise ValueError("expected seconds > 0 for every point")
    counts = np.array([_counts(point.exchange) for point in points])  # (points, 4)
    relative = counts / np.array([[point.seconds] for point in points])
    first = [0, 1] if methods <= BY_SPARK else [1, 0]  # the first of two equally good columns
    order = [*first, 2, 3]
    found = _non_negative_least_squares(relative[:, order])
    overhead_s, alpha_s, s_per_byte, gamma = (found[order.index(i)] for i in range(4))
    return Network(alpha_s, 1 / s_per_byte if s_per_byte else math.inf, gamma, overhead_s)


def _counts(exchange: Exchange) -> tuple[float, float, float, float]:
    done = work(exchange)
    return done.calls, done.messages, done.link_bytes, done.touched_bytes


def _non_negative_least_squares(a: np.ndarray[Any, Any]) -> list[float]:
    """Returns x >= 0 with the least |a x - 1|. # a: [points, parameters]

    The best x is the least squares solution in the columns where it is not 0, so all 15 sets of four columns are
    tried.
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
    """Returns the bytes per second that each server receives, and sends, if all workers take these steps per second."""
    return num_workers * gradient_bytes * steps_per_s / servers
