"""Rows that are drawn by weight: as often as their weights say, and a fixed number of them in each epoch."""

import numpy as np
import pytest

from spark_dl.data.plan import Draws, Plan

GROUPS = [7, 0, 1, 30, 12]


def weights_of(seed=0, groups=GROUPS, zeros=0.2):
    """Weights of the rows of each row group, of different sizes, some of them 0."""
    rng = np.random.default_rng(seed)
    return [rng.lognormal(0, 1.5, n) * (rng.random(n) > zeros) for n in groups]


def draws_for(weights, rows, seed=0):
    return Draws(np.array([float(np.cumsum(w)[-1]) if len(w) else 0.0 for w in weights]), rows, seed)


def drawn(draws, weights, epoch):
    """How often each row of each group is drawn in an epoch."""
    return [np.bincount(draws.rows_of(epoch, g, w), minlength=len(w)) for g, w in enumerate(weights)]


@pytest.mark.parametrize("rows", [1, 10, 50, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_each_row_is_drawn_as_often_as_its_weight_says_rounded_up_or_down(rows, seed):
    weights = weights_of(seed)
    draws, total = draws_for(weights, rows, seed), sum(map(sum, weights))
    for epoch in range(20):
        counts = drawn(draws, weights, epoch)
        assert [int(of_group.sum()) for of_group in counts] == draws.group_rows(epoch).tolist()
        assert sum(map(sum, counts)) == rows
        for of_group, of_weights in zip(counts, weights, strict=True):
            exact = of_weights / total * rows
            assert (np.abs(of_group - exact) < 1).all()
            assert (of_group[of_weights == 0] == 0).all()


def test_the_mean_over_epochs_is_that_of_the_weights_and_neighbors_are_not_drawn_together():
    weights = [np.ones(40) * 0.5, np.arange(1, 21) / 10]
    draws, epochs = draws_for(weights, 30), 4000
    found = np.array([np.concatenate(drawn(draws, weights, epoch)) for epoch in range(epochs)])
    exact = np.concatenate(weights) / sum(map(sum, weights)) * 30
    assert np.abs(found.mean(0) - exact).max() < 5 * 0.5 / np.sqrt(epochs)
    pairs = (found[:, :39] * found[:, 1:40]).mean(0)
    assert np.abs(pairs - exact[0] ** 2).max() < 0.05


def test_other_epochs_and_seeds_draw_other_rows():
    weights = weights_of(zeros=0)
    found = {
        tuple(np.concatenate(drawn(draws_for(weights, 20, seed), weights, epoch)))
        for seed in range(3) for epoch in range(3)
    }  # fmt: skip
    assert len(found) == 9
    again = draws_for(weights, 20)
    assert np.array_equal(again.rows_of(2, 3, weights[3]), draws_for(weights, 20).rows_of(2, 3, weights[3]))


@pytest.mark.parametrize("weights", [
    [np.array([1e-300, 1e-300])], [np.array([1e300, 1.0]), np.array([1e-5])], [np.array([3]), np.zeros(4), np.zeros(0)],
    [np.array([True, False, True])], [np.zeros(3), np.array([0.1] * 10)],
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_weights_of_any_size_give_the_number_of_draws(weights, rows):
    draws = draws_for(weights, rows)
    for epoch in range(50):
        counts = drawn(draws, weights, epoch)
        assert sum(int(of_group.sum()) for of_group in counts) == rows == draws.group_rows(epoch).sum()
        assert all((of_group[of_weights == 0] == 0).all() for of_group, of_weights in zip(counts, weights, strict=True))


@pytest.mark.parametrize("rows", [5, 48, 300])
def test_the_streams_of_a_plan_have_all_draws_once(rows):
    weights = weights_of(3)
    plan = Plan(np.array(GROUPS), 24, 8, window_rows=16, draws=draws_for(weights, rows))
    assert plan.rows == rows
    assert plan.steps == -(-rows // 24)
    assert sum(plan.batch_rows(step) for step in range(plan.steps)) == rows
    for epoch in range(3):
        found = [[] for _ in GROUPS]
        for stream in plan.streams(epoch):
            for window in stream.windows:
                for segment in window.segments:
                    assert segment.epoch == epoch
                    found[segment.row_group] += range(segment.start, segment.stop)
        assert [sorted(of_group) for of_group in found] == [[*range(n)] for n in plan.draws.group_rows(epoch)]
