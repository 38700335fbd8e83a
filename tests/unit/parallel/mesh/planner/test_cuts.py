import itertools
import math
import random
from typing import NamedTuple

import pytest

from spark_dl.parallel.mesh.planner.stages import best_cuts, step_s


class Stage(NamedTuple):
    seconds: float
    period_s: float
    behind_s: float
    sync_s: float


def random_costs(rng, num_layers, num_stages):
    """A cost for each stage and each of its possible layers, as if there were no structure at all. A third are full."""
    table = {}
    for stage in range(num_stages):
        for start, end in itertools.combinations(range(num_layers + 1), 2):
            seconds = (end - start) * rng.uniform(0.5, 1.5)
            fits = rng.random() < 0.8
            table[stage, start, end] = (
                Stage(seconds, seconds * rng.uniform(0.7, 1), seconds * rng.uniform(0.1, 0.7), rng.uniform(0, 8))
                if fits
                else None
            )
    return lambda stage, start, end: table[stage, start, end]


def by_brute_force(num_layers, num_stages, micro_batches, cost):
    found = {}
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *inner, num_layers)
        stages = [cost(i, start, end) for i, (start, end) in enumerate(itertools.pairwise(bounds))]
        if None not in stages:
            found[bounds[:-1]] = sum(step_s(stages, micro_batches))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cuts_are_better(seed):
    rng = random.Random(seed)
    for _ in range(10):  # 200 chains in all
        num_layers = rng.randint(1, 10)
        num_stages, micro_batches = rng.randint(1, min(8, num_layers)), rng.randint(1, 12)
        cost = random_costs(rng, num_layers, num_stages)
        expected = by_brute_force(num_layers, num_stages, micro_batches, cost)
        found = best_cuts(num_layers, num_stages, micro_batches, cost)
        if not expected:
            assert found is None
            continue
        assert found.step_s == pytest.approx(min(expected.values()))
        assert expected[found.starts] == pytest.approx(found.step_s)
        assert best_cuts(num_layers, num_stages, micro_batches, cost, limit_s=found.step_s * 0.999) is None
        prefix_s = [0.0] * (num_layers + 1)
        pruned = best_cuts(num_layers, num_stages, micro_batches, cost, prefix_s=prefix_s, limit_s=found.step_s * 1.001)
        assert pruned == found


def test_the_time_of_a_step_is_that_of_alpa_and_the_exchange_that_no_backward_pass_hides():
    stages = [Stage(3, 3, 2, 1), Stage(5, 5, 3, 2.5), Stage(4, 4, 3, 6)]
    assert step_s(stages, 4) == (12 + 3 * 5, 1)  # 6 - (2 + 3) and 2.5 - 2 are hidden
    assert step_s([*stages[:2], Stage(4, 4, 3, 9)], 4) == (27, 4)


def test_more_stages_than_layers_cannot_be():
    assert best_cuts(2, 3, 1, lambda *at: Stage(1, 1, 1, 0)) is None


def test_equal_layers_are_cut_into_equal_stages():
    found = best_cuts(12, 4, 8, lambda stage, start, end: Stage(end - start, end - start, 0, 0))
    assert found.starts == (0, 3, 6, 9)
    assert found.step_s == 12 + 7 * 3


def test_a_layer_that_does_not_fit_anywhere_leaves_no_cuts():
    assert best_cuts(4, 2, 2, lambda s, start, end: None if start <= 2 < end else Stage(1, 1, 1, 0)) is None
    assert math.isfinite(best_cuts(4, 2, 2, lambda s, start, end: Stage(1, 1, 1, 0)).step_s)
