"""How the time of an interval is split: the parts add up, and the slowest rank of a step waits for nobody."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spark_dl.training.step_times import StepTimer, num_groups, split_times


def measured(data_s, compute_s, exchange_s, *, reduce_s=0.0, groups=None):
    """What ranks measure whose steps have these times; and the duration. # compute_s: (ranks, steps), data_s as well

    exchange_s: seconds of each step's exchange, after the slowest rank has come.
    """
    data_s, compute_s = np.asarray(data_s, float), np.asarray(compute_s, float)
    busy = data_s + compute_s
    blocked = busy.max(axis=0) - busy + np.asarray(exchange_s, float)
    elapsed = (busy + blocked).sum(axis=1)
    steps = blocked.shape[1]
    grouped = np.zeros((len(blocked), groups or steps))
    for step in range(steps):
        grouped[:, step * grouped.shape[1] // steps] += blocked[:, step]
    return np.column_stack([data_s.sum(axis=1), elapsed, grouped]), float(elapsed.max()) + reduce_s


seconds = st.floats(0, 10, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def intervals(draw):
    ranks, steps = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    grid = st.lists(st.lists(seconds, min_size=steps, max_size=steps), min_size=ranks, max_size=ranks)
    return draw(grid), draw(grid), draw(st.lists(seconds, min_size=steps, max_size=steps)), draw(seconds)


@given(intervals())
def test_what_each_rank_did_is_found_again(interval):
    data_s, compute_s, exchange_s, reduce_s = interval
    times, duration = measured(data_s, compute_s, exchange_s, reduce_s=reduce_s)
    found = split_times(times, duration)
    busy = np.add(data_s, compute_s)
    assert found["ranks"]["data_s"] == pytest.approx(np.sum(data_s, axis=1), abs=1e-5)
    assert found["ranks"]["compute_s"] == pytest.approx(np.sum(compute_s, axis=1), abs=1e-5)
    assert found["ranks"]["wait_s"] == pytest.approx((busy.max(axis=0) - busy).sum(axis=1), abs=1e-5)
    assert found["communication_s"] == pytest.approx(sum(exchange_s) + reduce_s, abs=1e-5)


@given(intervals(), st.integers(1, 3))
def test_the_parts_add_up_to_the_interval_also_if_steps_share_a_value(interval, groups):
    data_s, compute_s, exchange_s, reduce_s = interval
    times, duration = measured(data_s, compute_s, exchange_s, reduce_s=reduce_s, groups=groups)
    found = split_times(times, duration)
    for rank in range(len(times)):
        parts = [values[rank] for values in found["ranks"].values()] + [found["communication_s"]]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(duration, abs=1e-4)


def test_ranks_that_are_slow_in_turn_wait_for_each_other():
    times, duration = measured([[0, 0], [0, 0]], [[3, 1], [1, 3]], [0.5, 0.5])
    found = split_times(times, duration)
    assert found["ranks"]["wait_s"] == [2.0, 2.0]
    assert found["communication_s"] == 1.0
    # In one value for both steps, the ranks look the same: the wait counts as communication.
    times, duration = measured([[0, 0], [0, 0]], [[3, 1], [1, 3]], [0.5, 0.5], groups=1)
    assert split_times(times, duration)["communication_s"] == 3.0


def test_without_a_clock_only_the_data_is_known():
    assert split_times(np.array([[0.25, 1.0], [0.5, 1.0]]), 1.5) == {"ranks": {"data_s": [0.25, 0.5]}}


def test_a_single_rank_has_nobody_to_wait_for():
    found = split_times(np.array([[0.25, 1.0, 0.0, 0.0]]), 1.5)
    assert found == {"ranks": {"data_s": [0.25], "compute_s": [1.25], "wait_s": [0.0]}, "communication_s": 0.0}


@pytest.mark.parametrize(("ranks", "every", "expected"), [(2, 10, 10), (1, 100_000, 4096), (512, 10, 8), (9999, 10, 1)])
def test_what_travels_with_a_log_line_is_bounded(ranks, every, expected):
    assert num_groups(ranks, every) == expected


class Clock:
    """Was blocked for one second more in each step."""

    def __init__(self):
        self.steps = 0

    def take_step(self):
        self.steps += 1
        return 0.0, float(self.steps)


@pytest.mark.parametrize("losses", [1 / 3, float("nan")])
def test_the_sum_of_losses_travels_with_the_times_of_each_rank(losses):
    timers = [StepTimer(rank, 3, log_every=4, clock=Clock()) for rank in range(3)]
    for timer in timers:
        for _ in timer.timed(x for x in (1, 2)):
            timer.end_step()
    losses_of = torch.tensor(losses, dtype=torch.float64)
    sent = [timer.with_losses(losses_of, must_end=rank != 1) for rank, timer in enumerate(timers)]
    assert {len(vector) for vector in sent} == {2 + 3 * (2 + 4)}
    reduced = torch.stack(sent).sum(0)
    assert reduced[:2].tolist() == pytest.approx([3 * losses, 2], nan_ok=True)
    times = timers[0].times_of(reduced)
    assert times.shape == (3, 6)
    assert times[:, 2:].tolist() == [[1.0, 2.0, 0.0, 0.0]] * 3
    assert (times[:, 1] > times[:, 0]).all()
    timers[0].reset()
    assert timers[0].with_losses(torch.zeros((), dtype=torch.float64))[3 + 1 :].sum() == 0


def test_more_steps_than_values_share_them():
    timer = StepTimer(0, 1024, log_every=8, clock=Clock())
    for _ in range(8):
        timer.end_step()
    times = timer.times_of(timer.with_losses(torch.zeros((), dtype=torch.float64)))
    assert times[0, 2:].tolist() == [1 + 2, 3 + 4, 5 + 6, 7 + 8]
    assert not times[1:].any()
