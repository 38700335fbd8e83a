"""Model of DDP's buckets: which gradients share one, how long a step takes, and which bucket size is fastest.

Pure arithmetic. Gradients are in backward order, in which they are ready. Source of the pipeline: Li et al. 2020,
"PyTorch Distributed" (VLDB 13(12)), sections 3.2.2 and 3.2.3. Small buckets start early, but each costs the latency of
an all-reduce. One large bucket starts after the backward pass. The best size lies between them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

CANDIDATES_MIB = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)
MIB = 1 << 20


def assign_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Returns the indices of each bucket's gradients. A bucket with `bucket_bytes` or more is full.

    This is DDP's rule (`compute_bucket_assignment_by_size` in torch's reducer.cpp) for gradients of one dtype on one
    device, with the size given as `bucket_cap_mb`. With DDP's default size the first bucket is smaller.
    """
    buckets: list[list[int]] = []
    filled = bucket_bytes
    for index, size in enumerate(sizes_bytes):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def all_reduce_times(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], bucket_bytes: int, all_reduce_s: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Returns the start and end of each bucket's all-reduce, in seconds from the start of backward.

    A bucket starts when its last gradient is ready and the bucket before it is done.

    Args:
        ready_s: when each gradient is ready.
        all_reduce_s: (bytes) -> seconds of an all-reduce.
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
    """Returns the seconds from the start of backward until all gradients are reduced."""
    return max(ready_s[-1], all_reduce_times(ready_s, sizes_bytes, bucket_bytes, all_reduce_s)[-1][1])


def choose_bucket_mib(
    ready_s: Sequence[float], sizes_bytes: Sequence[int], all_reduce_s: Callable[[float], float], *,
    candidates_mib: Sequence[float] = CANDIDATES_MIB,
) -> float:  # fmt: skip
    """Returns the candidate with the shortest backward pass; of equal ones the largest, which has the fewest messages.

    Times that differ by less than a millionth are equal.
    """

    def seconds(mib: float) -> float:
        return backward_s(ready_s, sizes_bytes, int(mib * MIB), all_reduce_s)

    shortest = min(map(seconds, candidates_mib))
    return max(mib for mib in candidates_mib if seconds(mib) <= shortest * (1 + 1e-6))


def interpolate_all_reduce_s(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Callable[[float], float]:
    """Returns a function (bytes) -> seconds of an all-reduce, by linear interpolation and extrapolation.

    Raises ValueError for fewer than two sizes, or sizes that are not in ascending order.
    """
    if len(sizes_bytes) < 2 or any(a >= b for a, b in itertools.pairwise(sizes_bytes)):
        raise ValueError(f"expected two or more sizes in ascending order, found {list(sizes_bytes)}")

    def all_reduce_s(num_bytes: float) -> float:
        right = min(max(bisect.bisect(sizes_bytes, num_bytes), 1), len(sizes_bytes) - 1)
        (x0, x1), (y0, y1) = sizes_bytes[right - 1 : right + 1], seconds[right - 1 : right + 1]
        return max(0.0, y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0))

    return all_reduce_s
