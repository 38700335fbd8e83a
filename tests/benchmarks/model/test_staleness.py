"""Expected times between updates, against workers that are simulated."""

import heapq
import itertools

import numpy as np
import pytest

from benchmarks.model.staleness import MODES, Delay, iteration_s, order_statistic_s

DELAYS = {"constant": Delay(0.5, 0.0), "exponential": Delay(0.0, 0.5), "shifted": Delay(0.3, 0.4)}
NUM_UPDATES = 4000


def simulate(mode, num_workers, k, delay, seed=0):
    """Mean seconds between updates, from the starts and ends of single gradients."""
    rng = np.random.default_rng(seed)
    needed = {"sync": num_workers, "async": 1}.get(mode, k)
    now, in_work, waiting, received, updates = 0.0, [], [], 0, 0

    def start(workers):
        for worker in workers:
            heapq.heappush(in_work, (now + delay.constant_s + rng.exponential(delay.exponential_s), worker))

    start(range(num_workers))
    while updates < NUM_UPDATES:
        now, worker = heapq.heappop(in_work)
        received += 1
        waiting.append(worker)
        if "batch" in mode:
            start([waiting.pop()])  # goes on at once
        if received == needed:
            updates, received = updates + 1, 0
            if mode in ("k_sync", "k_batch_sync"):  # the others give up
                in_work.clear()
                waiting = range(num_workers)
            start(waiting)
            waiting = []
    return now / updates


def cases():
    for mode in MODES:
        for num_workers in (1, 4, 9):
            if mode in ("sync", "async"):
                yield mode, num_workers, None
            else:
                most = 2 * num_workers + 1 if "batch" in mode else num_workers
                yield from ((mode, num_workers, k) for k in sorted({1, (num_workers + 1) // 2, num_workers, most}))


@pytest.mark.sampled(30)
@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize(("mode", "num_workers", "k"), list(cases()))
def test_simulated_workers_update_as_often_as_expected(mode, num_workers, k, delay):
    simulated = simulate(mode, num_workers, k, delay)
    bounds = iteration_s(mode, num_workers, delay, k=k)
    error = 0.06  # of the mean of 4000 updates
    assert bounds.lower_s * (1 - error) <= simulated <= bounds.upper_s * (1 + error)
    is_exact = delay.constant_s == 0 or mode not in ("k_async", "k_batch_sync") or (mode == "k_async" and k == 1)
    if is_exact:
        assert bounds.lower_s == bounds.upper_s


@pytest.mark.parametrize("num_workers", [2, 8, 64])
def test_speed_up_of_async_over_sync_is_p_harmonic_of_p(num_workers):
    """Dutta et al. 2018: P log P, for exponential delays."""
    delay = DELAYS["exponential"]
    ratio = iteration_s("sync", num_workers, delay).lower_s / iteration_s("async", num_workers, delay).lower_s
    assert ratio == pytest.approx(num_workers * sum(1 / i for i in range(1, num_workers + 1)))


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
def test_order_statistics_are_those_of_drawn_times(delay):
    times = delay.constant_s + np.random.default_rng(0).exponential(delay.exponential_s, (20_000, 6))
    drawn = np.sort(times, axis=1).mean(axis=0)
    assert [order_statistic_s(k, 6, delay) for k in range(1, 7)] == pytest.approx(drawn, rel=0.03)


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_in_order_and_more_gradients_take_longer(mode, delay):
    def bounds(k):
        return iteration_s(mode, 8, delay, k=k)

    found = [bounds(k) for k in range(1, 9)] if mode.startswith("k_") else [bounds(None)]
    assert all(0 < b.lower_s <= b.upper_s * (1 + 1e-12) for b in found)
    assert all(a.upper_s <= b.upper_s and a.lower_s <= b.lower_s for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("mode", "k", "message"), [
    ("ksync", 2, "unknown 'ksync'"), ("sync", 2, "expected none for sync"), ("k_sync", None, "from 1 to 4"),
    ("k_async", 5, "from 1 to 4"), ("k_batch_async", 0, "from 1 to any number"),
])  # fmt: skip
def test_errors_name_what_is_wrong(mode, k, message):
    with pytest.raises(ValueError, match=message):
        iteration_s(mode, 4, DELAYS["constant"], k=k)
