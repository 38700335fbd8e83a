"""Intervals of computing and communicating, split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.exchange.accelerator import StepTimes
from benchmarks.exchange.breakdown import BucketTimes, break_down, covered_s, hidden_and_exposed_s, shared_intervals

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=8)


def seconds_of(intervals):
    """The whole seconds that intervals between whole seconds cover, one by one."""
    return {t for start, end in intervals for t in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_hidden_and_exposed_are_what_counting_seconds_gives(compute, communication):
    hidden, exposed = hidden_and_exposed_s(compute, communication)
    assert hidden == len(seconds_of(communication) & seconds_of(compute))
    assert exposed == len(seconds_of(communication) - seconds_of(compute))
    assert covered_s(compute) == len(seconds_of(compute))


@given(INTERVALS, INTERVALS)
def test_all_parts_but_the_hidden_one_add_up_to_the_step(communication, waits):
    times = StepTimes(forward_start=2.0, forward_end=5.0, backward_start=6.0, ready=[8.0, 12.0])
    found = break_down((0, 40), times, communication, waits=waits, optimizer=(31.0, 33.0))
    assert found.step_s == pytest.approx(40)
    busy = seconds_of([(2, 5), (6, 12), (31, 33)])
    assert found.wait_s == len(seconds_of(waits) - seconds_of(communication) - busy)
    assert found.other_s == 40 - len(busy | seconds_of(communication) | seconds_of(waits))
    assert (found.forward_s, found.backward_s, found.optimizer_s) == (3, 6, 2)


def test_a_bucket_s_communication_begins_when_the_last_rank_has_come():
    records = [
        [BucketTimes(0, 4, 1.0, 5.0), BucketTimes(1, 4, 2.0, 6.0)],
        [BucketTimes(1, 4, 2.5, 6.1), BucketTimes(0, 4, 4.0, 5.2)],
    ]
    assert shared_intervals(records, 0) == ([(4.0, 5.0), (2.5, 6.0)], [(1.0, 4.0), (2.0, 2.5)])
    assert shared_intervals(records, 1) == ([(2.5, 6.1), (4.0, 5.2)], [(2.5, 2.5), (4.0, 4.0)])


def test_an_end_before_another_rank_s_start_is_not_negative_communication():
    records = [[BucketTimes(0, 4, 1.0, 2.0)], [BucketTimes(0, 4, 3.0, 4.0)]]
    assert shared_intervals(records, 0) == ([(2.0, 2.0)], [(1.0, 2.0)])


def test_ranks_with_different_buckets_are_refused():
    with pytest.raises(ValueError, match=r"different buckets: \[\[0\], \[0, 1\]\]"):
        shared_intervals([[BucketTimes(0, 4, 1.0, 2.0)], [BucketTimes(i, 4, 1.0, 2.0) for i in (0, 1)]], 0)
