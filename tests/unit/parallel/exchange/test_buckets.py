"""Buckets as DDP fills them, the times of their all-reduces, and the size that is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.model.profiles import PROFILES
from spark_dl.parallel.exchange.buckets import (  # fmt: skip
    CANDIDATES_MIB,
    MIB,
    all_reduce_times,
    assign_buckets,
    backward_s,
    choose_bucket_mib,
    interpolate_all_reduce_s,
)

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 2000))
def test_buckets_hold_all_in_order_and_close_when_full(sizes, bucket_bytes):
    buckets = assign_buckets(sizes, bucket_bytes)
    assert [i for bucket in buckets for i in bucket] == list(range(len(sizes)))
    for bucket in buckets[:-1]:
        assert sum(sizes[i] for i in bucket) >= bucket_bytes
    for bucket in buckets:
        assert sum(sizes[i] for i in bucket[:-1]) < bucket_bytes


@given(SIZES, st.integers(1, 2000), st.floats(0, 10), st.floats(0, 0.1))
def test_all_reduces_wait_for_gradients_and_for_each_other(sizes, bucket_bytes, latency_s, s_per_byte):
    ready = [float(i) for i in range(1, len(sizes) + 1)]
    buckets = assign_buckets(sizes, bucket_bytes)
    times = all_reduce_times(ready, sizes, bucket_bytes, lambda n: latency_s + n * s_per_byte)
    assert len(times) == len(buckets)
    free = 0.0
    for bucket, (start, end) in zip(buckets, times, strict=True):
        assert start == max(free, ready[bucket[-1]])
        assert end == pytest.approx(start + latency_s + sum(sizes[i] for i in bucket) * s_per_byte)
        free = end
    total = backward_s(ready, sizes, bucket_bytes, lambda n: latency_s + n * s_per_byte)
    assert total >= max(ready[-1], len(buckets) * latency_s + sum(sizes) * s_per_byte)
    assert total <= ready[-1] + len(buckets) * latency_s + sum(sizes) * s_per_byte + 1e-6


def test_by_hand():
    # Three gradients of 10, 20 and 30 bytes come after 1, 2 and 3 s; an all-reduce takes 1 s and 0.1 s per byte.
    def all_reduce_s(num_bytes):
        return 1 + num_bytes / 10

    def times(bucket_bytes):
        return all_reduce_times([1, 2, 3], [10, 20, 30], bucket_bytes, all_reduce_s)

    assert times(10) == [(1, 3), (3, 6), (6, 10)]
    assert times(30) == [(2, 6), (6, 10)]
    assert times(60) == [(3, 10)]
    candidates = [10 / MIB, 30 / MIB, 60 / MIB]
    chosen = choose_bucket_mib([1, 2, 3], [10, 20, 30], all_reduce_s, candidates_mib=candidates)
    assert chosen == candidates[2]  # all end at 10 s: the fewest all-reduces


@pytest.mark.parametrize("name", PROFILES)
def test_the_best_size_lies_in_the_middle(name):
    """With computing and communicating about equal, as Li et al. 2020 found in their figures 7 and 8."""
    profile = PROFILES[name]()
    sizes = [layer.gradient_bytes for layer in profile.backward_layers()]
    ready = profile.ready_s(1.0)

    def all_reduce_s(num_bytes):
        return 0.01 + num_bytes / profile.gradient_bytes

    seconds = {mib: backward_s(ready, sizes, int(mib * MIB), all_reduce_s) for mib in CANDIDATES_MIB}
    chosen = choose_bucket_mib(ready, sizes, all_reduce_s)
    assert seconds[chosen] == min(seconds.values())
    assert min(CANDIDATES_MIB) < chosen < max(CANDIDATES_MIB)
    assert seconds[chosen] < seconds[min(CANDIDATES_MIB)]
    assert seconds[chosen] < seconds[max(CANDIDATES_MIB)]


def test_extremes_of_the_network_choose_extremes_of_the_size():
    profile = PROFILES["resnet50"]()
    sizes, ready = [layer.gradient_bytes for layer in profile.backward_layers()], profile.ready_s(1.0)
    assert choose_bucket_mib(ready, sizes, lambda _: 1.0) == max(CANDIDATES_MIB)  # latency alone
    # Rate alone: nothing is gained by waiting, so nothing ends sooner than with the smallest buckets.
    chosen, smallest, largest = (
        backward_s(ready, sizes, int(mib * MIB), lambda n: n / 100e6)
        for mib in (choose_bucket_mib(ready, sizes, lambda n: n / 100e6), min(CANDIDATES_MIB), max(CANDIDATES_MIB))
    )
    assert chosen == pytest.approx(smallest)
    assert chosen < largest


def test_measured_all_reduces_are_joined_by_lines():
    all_reduce_s = interpolate_all_reduce_s([10, 20, 40], [1.0, 2.0, 6.0])
    assert [all_reduce_s(n) for n in (10, 15, 20, 30, 40, 50, 5, 0)] == pytest.approx([1, 1.5, 2, 4, 6, 8, 0.5, 0])
    for sizes in ([10], [20, 10], [10, 10]):
        with pytest.raises(ValueError, match="ascending order"):
            interpolate_all_reduce_s(sizes, [1.0] * len(sizes))
