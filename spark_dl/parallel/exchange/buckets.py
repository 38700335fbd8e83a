"""Which gradients DDP puts into one bucket, how long a step then takes, and which bucket size makes it shortest.

Pure arithmetic. Gradients are given in backward order, the order in which they come. Source of the pipeline: Li et al.
2020, "PyTorch Distributed" (VLDB 13(12)), sections 3.2.2 and 3.2.3: small buckets start early but pay the latency of an
all-reduce each, one large bucket starts when backward has ended, and the best lies between them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

CANDIDATES_MIB = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
MIB = 1 << 20


def assign_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Indices of the gradients in each bucket: one is full once it holds `bucket_bytes` or more.

    This is DDP's rule (`compute_bucket_assignment_by_size` in torch's reducer.cpp) for gradients of one dtype on one
    device, with the size passed as `bucket_cap_mb`; only by its default is the first bucket smaller.
    """
    buckets: list[list[int]] = []
    held = bucket_bytes
    for index, size in enumerate(sizes_bytes):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return buckets


def all_reduce_times(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], bucket_bytes: int, all_reduce_s: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Start and end of each bucket's all-reduce, in seconds from the start of backward.

    ready_s: when each gradient comes.
    all_reduce_s: seconds of an all-reduce of so many bytes.
    Buckets go one after another: each when its last gradient has come and the bucket before it is done.
    """
    times: list[tuple[float, float]] = []
    free = 0.0
    for bucket in assign_buckets(sizes_bytes, bucket_bytes):
        start = max(free, max(ready_s[i] for i in bucket))
        free = start + all_reduce_s(sum(sizes_bytes[i] for i in bucket))
        times.append((start, free))
    return times


def backward_s(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], bucket_bytes: int, all_reduce_s: Callable[[float], float]
) -> float:
    """Seconds from the start of backward until all gradients are reduced."""
    return max(ready_s[-1], all_reduce_times(ready_s, sizes_bytes, bucket_bytes, all_reduce_s)[-1][1])


def choose_bucket_mib(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], all_reduce_s: Callable[[float], float], *,
    candidates_mib: Sequence[float] = CANDIDATES_MIB,
) -> float:  # fmt: skip
    """The candidate with the shortest backward pass. Of equal ones the largest, which has the fewest messages.

    Times that differ by less than a millionth count as equal.
    """

    def seconds(mib: float) -> float:
        return backward_s(ready_s, sizes_bytes, int(mib * MIB), all_reduce_s)

    shortest = min(map(seconds, candidates_mib))
    return max(mib for mib in candidates_mib if seconds(mib) <= shortest * (1 + 1e-6))


def interpolate_all_reduce_s(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Callable[[float], float]:
    """Seconds of an all-reduce from measured ones, straight lines between them and on past the outermost two.

    At least two different sizes in ascending order; otherwise ValueError.
    """
    if len(sizes_bytes) < 2 or any(a >= b for a, b in itertools.pairwise(sizes_bytes)):
        raise ValueError(f"expected two or more sizes in ascending order, found {list(sizes_bytes)}")

    def all_reduce_s(num_bytes: float) -> float:
        right = min(max(bisect.bisect(sizes_bytes, num_bytes), 1), len(sizes_bytes) - 1)
        (x0, x1), (y0, y1) = sizes_bytes[right - 1 : right + 1], seconds[right - 1 : right + 1]
        return max(0.0, y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0))

    return all_reduce_s
