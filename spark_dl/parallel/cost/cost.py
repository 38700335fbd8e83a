"""Predicts the time of exchanges: the alpha-beta-gamma model of Hockney 1994 and Thakur et al. 2005. Pure functions.

    seconds = overhead * calls + alpha * messages + bytes / rate + gamma * bytes touched

The calls, messages and bytes of each method of gradient exchange are counted. Its four parameters are fitted to
measured points and checked on other points. Hosts have one rank each and a full-duplex link on which they send one
message and receive one message at a time, the one-port model of Hockney 1994, "The communication challenge for MPP",
and Chan et al. 2007, "Collective communication: theory, practice, and experience". Counts are of the critical path,
which ends at the last rank. N is the bytes of the gradient, and P the number of ranks. Blocks are assumed to be
equal, as P nearly divides N.

Collectives of model parallelism run on rings. An all-reduce on a ring is a reduce-scatter and an all-gather, each
with half of its messages and bytes (Thakur, Rabenseifner and Gropp 2005). In an all-to-all, each rank sends one
message to each other rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

BY_SPARK = frozenset({"tree_reduce", "shuffle_reduce"})
"""Methods whose calls are Spark stages."""

BLOCK_BYTES = 4 << 20
"""`spark.broadcast.blockSize`."""


def all_reduce_s(num_ranks: int, num_bytes: float, network: Network) -> float:
    """Sums `num_bytes` on all ranks."""
    if num_ranks == 1 or num_bytes == 0:
        return 0.0
    return cost(ExchangeSize("ring", num_ranks, num_bytes), network).seconds


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


@dataclass(frozen=True)
class ExchangeSize:
    """One exchange of gradients: method, number of ranks, and bytes.

    Raises ValueError for an unknown method, and if all ranks are parameter servers.
    """

    method: str
    num_ranks: int
    gradient_bytes: float
    servers: int = 1
    """Ranks that are parameter servers, each for an equal part of the gradient. All others compute."""
    depth: int = 2
    """Of treeReduce."""
    bucket_bytes: float = math.inf
    """Size of buckets. Each bucket has its own calls and messages."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method: unknown {self.method!r}; expected one of {', '.join(METHODS)}")
        if self.num_ranks < 1 or self.gradient_bytes < 0 or self.servers < 1 or self.depth < 1:
            raise ValueError(f"expected at least one rank, one server, depth 1 and no negative size, found {self}")
        if not self.bucket_bytes > 0:
            raise ValueError(f"bucket_bytes: expected more than 0, found {self.bucket_bytes}")
        if self.method == "parameter_server" and self.num_ranks <= self.servers:
            raise ValueError(
                f"parameter_server: found {self.servers} servers, expected fewer than the {self.num_ranks} ranks"
            )


@dataclass(frozen=True)
class Work:
    """Work of an exchange, independent of the network."""

    calls: int
    """All-reduces, or Spark stages. Each has a cost that does not depend on the size."""
    messages: float
    """One after another on the critical path."""
    link_bytes: float
    """One after another on the critical path."""
    touched_bytes: float
    """Bytes added, or serialized or deserialized in Python, sequentially on the critical path."""
    bytes_per_rank: float
    """Bytes sent by a rank, on average over the ranks."""
    busiest_link_bytes: float
    """Bytes over the busiest host's link (including the Spark driver's), in its busier direction."""


def work(exchange: ExchangeSize) -> Work:
    """Returns the work of an exchange."""
    summed = METHODS[exchange.method](exchange)
    buckets = max(1, math.ceil(exchange.gradient_bytes / exchange.bucket_bytes))
    return replace(summed, calls=buckets * summed.calls, messages=buckets * summed.messages)


def _naive(exchange: ExchangeSize) -> Work:
    """Every rank sends its gradient to all others, and adds the received gradients."""
    others, size = exchange.num_ranks - 1, exchange.gradient_bytes
    return Work(1, others, others * size, others * size, others * size, others * size)


def _reduce_broadcast(exchange: ExchangeSize) -> Work:
    """A star: rank 0 receives the gradients of the others one by one, and sends them the sum."""
    others, size = exchange.num_ranks - 1, exchange.gradient_bytes
    sent = 2 * others * size / exchange.num_ranks
    return Work(1, 2 * others, 2 * others * size, others * size, sent, others * size)


def _tree(exchange: ExchangeSize) -> Work:
    """Binomial trees: reduce to rank 0, then broadcast. Thakur et al. 2005, sections 4.2 and 4.4; Chan et al. 2007."""
    rounds, size = math.ceil(math.log2(exchange.num_ranks)), exchange.gradient_bytes
    sent = 2 * (exchange.num_ranks - 1) * size / exchange.num_ranks
    return Work(1, 2 * rounds, 2 * rounds * size, rounds * size, sent, rounds * size)


def _ring(exchange: ExchangeSize) -> Work:
    """Reduce-scatter and all-gather around a ring: 2N(P-1)/P per rank, the least possible.

    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    others = exchange.num_ranks - 1
    part = others * exchange.gradient_bytes / exchange.num_ranks
    return Work(1, 2 * others, 2 * part, part, 2 * part, 2 * part)


def _halving_doubling(exchange: ExchangeSize) -> Work:
    """Recursive halving, then recursive doubling; Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
    communication operations in MPICH", section 4.5.

    If P is not a power of two, the surplus ranks first send their gradient to a neighbor, and get the result from it at
    the end: two more messages, and 2N more over the neighbor's link.
    """
    ranks, size = exchange.num_ranks, exchange.gradient_bytes
    rounds = int(math.log2(ranks))
    core = 2**rounds
    part = (core - 1) * size / core
    sent = 2 * (ranks - 1) * size / ranks
    if core == ranks:
        return Work(1, 2 * rounds, 2 * part, part, sent, 2 * part)
    return Work(1, 2 * rounds + 2, 2 * part + 2 * size, part + size, sent, 2 * part + size)


def _parameter_server(exchange: ExchangeSize) -> Work:
    """Synchronous: every computing rank sends its gradient to the servers, and gets the weights when all have sent.

    With one server, 2N(P-1) bytes pass its link, half in each direction. Li et al. 2014, "Scaling distributed machine
    learning with the parameter server". The slower of the servers' links and the ranks' links counts.
    """
    workers, size = exchange.num_ranks - exchange.servers, exchange.gradient_bytes
    at_server = workers * size / exchange.servers
    way = max(size, at_server)
    messages = 2 * max(workers, exchange.servers)
    return Work(1, messages, 2 * way, at_server, 2 * workers * size / exchange.num_ranks, way)


def _tree_reduce(exchange: ExchangeSize) -> Work:
    """Weights by Spark's broadcast, gradients by `RDD.treeReduce`, which ends at the driver.

    Each level of the tree is a shuffle, and so a stage. Python pickles a gradient whenever it leaves a process.
    """
    ranks, size = exchange.num_ranks, exchange.gradient_bytes
    copies = driver_copies(ranks, size)
    levels = tree_levels(ranks, exchange.depth)
    fan_ins = [math.ceil(before / after) for before, after in itertools.pairwise(levels)]
    remote = (ranks - 1) / ranks  # one of P blocks is on its reader's host
    through_shuffles = sum(fan_ins) * remote
    at_driver = levels[-1]
    total = (ranks - copies) + sum(levels[:-1]) * remote + at_driver
    touched = 1 + sum(fan_in + 1 for fan_in in fan_ins) + at_driver + 2
    return Work(
        calls=len(levels),
        messages=copies + sum(fan_ins) + at_driver,
        link_bytes=(copies + through_shuffles + at_driver) * size,
        touched_bytes=touched * size,
        bytes_per_rank=total * size / ranks,
        busiest_link_bytes=max(copies, at_driver, 1 + through_shuffles) * size,
    )


def _shuffle_reduce(exchange: ExchangeSize) -> Work:
    """Weights by Spark's broadcast; gradients cut into P blocks, which a shuffle reduces and the driver collects."""
    ranks, size = exchange.num_ranks, exchange.gradient_bytes
    copies, part = driver_copies(ranks, size), (ranks - 1) / ranks
    total = (ranks - copies) + (ranks - 1) + 1
    return Work(
        calls=2,
        messages=copies + 2 * ranks,
        link_bytes=(copies + part + 1) * size,
        touched_bytes=(1 + 1 + 1 / ranks + 1 + 2) * size,
        bytes_per_rank=total * size / ranks,
        busiest_link_bytes=max(copies, 1 + part) * size,
    )


METHODS: dict[str, Callable[[ExchangeSize], Work]] = {
    "naive": _naive,
    "reduce_broadcast": _reduce_broadcast,
    "tree": _tree,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "parameter_server": _parameter_server,
    "tree_reduce": _tree_reduce,
    "shuffle_reduce": _shuffle_reduce,
}


def tree_levels(num_partitions: int, depth: int) -> list[int]:
    """Returns the partitions before each level of PySpark's `RDD.treeReduce` (pyspark/core/rdd.py). The driver gets the
    last ones.
    """
    scale = max(math.ceil(num_partitions ** (1.0 / depth)), 2)
    levels, left = [num_partitions], float(num_partitions)
    while left > scale + left / scale:
        left /= scale
        levels.append(int(left))
    return levels


def driver_copies(num_hosts: int, num_bytes: float) -> float:
    """Returns how often the driver sends each block of a broadcast, on average (Spark's `TorrentBroadcast`).

    Each host fetches the blocks in its own random order, each from a random host that has it. Sequential fetches of a
    block would use the driver with probability 1, 1/2, 1/3 ..., H(P) times in all. But with m blocks, about
    1 + (P-1)/m first fetches come at once, and all use the driver. So a broadcast of one block is sent P times. This is
    an estimate: within 5 % of a simulation with synchronous fetches, and up to 15 % below other simulations.
    """
    at_once = 1 + (num_hosts - 1) / max(1, math.ceil(num_bytes / BLOCK_BYTES))
    return at_once + harmonic(num_hosts) - harmonic(at_once)


def harmonic(n: float) -> float:
    """Returns 1 + 1/2 + ... + 1/n; between integers by the asymptotic series, with an error below 2e-3."""
    if n == int(n):
        return math.fsum(1 / i for i in range(1, int(n) + 1))
    middle = n + 0.5
    return math.log(middle) + 0.57721566490153286 + 1 / (24 * middle**2)


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
class ExchangeCost:
    """Of one exchange."""

    seconds: float
    bytes_per_rank: float
    """Bytes sent by a rank, on average."""
    busiest_link_bytes: float
    """Bytes over the busiest host's link, in its busier direction."""


@dataclass(frozen=True)
class Point:
    """A measured exchange."""

    exchange: ExchangeSize
    seconds: float


def cost(exchange: ExchangeSize, network: Network) -> ExchangeCost:
    """Time and traffic of an exchange."""
    done = work(exchange)
    seconds = (
        network.overhead_s * done.calls
        + network.alpha_s * done.messages
        + done.link_bytes / network.bytes_per_s
        + network.gamma_s_per_byte * done.touched_bytes
    )
    return ExchangeCost(seconds, done.bytes_per_rank, done.busiest_link_bytes)


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
    coefficients = _non_negative_least_squares(relative[:, order])
    overhead_s, alpha_s, s_per_byte, gamma = (coefficients[order.index(i)] for i in range(4))
    return Network(alpha_s, 1 / s_per_byte if s_per_byte else math.inf, gamma, overhead_s)


def _counts(exchange: ExchangeSize) -> tuple[float, float, float, float]:
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
            solution, _, rank, _ = np.linalg.lstsq(scaled, target, rcond=1e-9)
            error = float(np.linalg.norm(scaled @ solution - target))
            if rank < num_columns or (solution < 0).any() or error >= best_error - 1e-9:
                continue
            best, best_error = [0.0] * a.shape[1], error
            for column, value in zip(kept, solution / scale[kept], strict=True):
                best[column] = float(value)
    return best


def server_bytes_per_s(num_workers: int, gradient_bytes: float, steps_per_s: float, *, servers: int = 1) -> float:
    """Returns the bytes per second that each server receives, and sends, if all workers take these steps per second."""
    return num_workers * gradient_bytes * steps_per_s / servers
