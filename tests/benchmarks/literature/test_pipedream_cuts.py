import itertools
import random

import pytest

from benchmarks.literature.pipedream_cuts import State, chain, plan, stage_s


def by_brute_force(states, workers, rate):
    """The least time of the slowest stage over all cuts and all numbers of replicas."""
    found = []
    for count in range(1, min(workers, len(states)) + 1):
        for inner in itertools.combinations(range(1, len(states)), count - 1):
            bounds = (0, *inner, len(states))
            for replicas in itertools.product(range(1, workers + 1), repeat=count):
                if sum(replicas) == workers:
                    cumulated = [(0.0, 0.0), *((s.compute_s, s.parameter_bytes) for s in states)]
                    times = [
                        stage_s(*(b - a for a, b in zip(cumulated[start], cumulated[end], strict=True)), each, rate)
                        for (start, end), each in zip(itertools.pairwise(bounds), replicas, strict=True)
                    ]
                    found.append(max(times))
    return min(found)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_stages_and_replicas_are_better(seed):
    rng = random.Random(seed)
    for _ in range(3):
        count, workers = rng.randint(1, 7), rng.randint(1, 5)
        layers = [(rng.uniform(0.1, 1), rng.uniform(0, 100), rng.uniform(0, 100)) for _ in range(count)]
        states, rate = chain(*zip(*layers, strict=True)), rng.choice((10.0, 1000.0))
        found = plan(states, workers, rate)
        assert found.period_s == pytest.approx(by_brute_force(states, workers, rate))
        bounds = [stage.start for stage in found.stages] + [count]
        assert bounds == sorted({*bounds})
        assert bounds[0] == 0
        assert [stage.end for stage in found.stages] == bounds[1:]
        assert sum(stage.replicas for stage in found.stages) == workers
        assert sum(stage.compute_s for stage in found.stages) == pytest.approx(found.single_s)


def test_layers_without_weights_are_replicated_and_those_with_are_not():
    """VGG's shape: convolutions with much work, then linear layers with most of the weights."""
    states = chain([15.0, 0.5, 0.5], [1.0, 1e4, 1e4], [1.0] * 3)
    found = plan(states, 16, 1e3)
    assert found.replication == "15-1"
    assert found.stages[-1].start == 1
    assert found.data_parallel_s > 2 * found.period_s
    assert plan(states[:1], 2, 1e9).replication == "2"
    assert plan(chain([1.0] * 4, [1e6] * 4, [1.0] * 4), 4, 1.0).replication == "straight"


def test_transfers_between_stages_can_cost_a_plan_its_lead():
    states = chain([1.0, 1.0], [1e3, 1e3], [1e9, 0.0])
    assert [stage.replicas for stage in plan(states, 2, 1e4).stages] == [1, 1]
    assert [stage.replicas for stage in plan(states, 2, 1e4, transfers=True).stages] == [2]


def test_only_what_is_before_a_state_can_be_cut_off():
    """Two branches that meet: one of 1 s, one of 3 s. Neither is before the other."""
    ends = [(0.0, frozenset()), (1.0, frozenset({0})), (3.0, frozenset({0})), (4.0, frozenset({0, 1, 2}))]
    found = plan([State(seconds, 0.0, 0.0, before) for seconds, before in ends], 3, 1.0)
    assert found.period_s == pytest.approx(4 / 3)  # not cut after both branches: one stage of three replicas
    slow = [State(seconds, 1e9 * (1 + seconds), 0.0, before) for seconds, before in ends]
    assert plan(slow, 3, 1.0).period_s == 3.0
