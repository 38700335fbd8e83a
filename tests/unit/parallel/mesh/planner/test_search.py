import dataclasses
import functools
import itertools
import random

import pytest

from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.records import GPIPE, ONE_F_ONE_B, STATES, Cluster, LayerProfile, Seconds
from spark_dl.parallel.mesh.planner.search import Problem, choices, least_memory, plan_of, search
from spark_dl.parallel.mesh.planner.stages import Segments, StageCosts, step_s
from tests.builders import chains

GIB = 2**30


def by_brute_force(problem):
    """The shortest step of each mesh: every choice with every cut."""
    segments, found = Segments(problem.layers, problem.cluster.within), {}
    for choice in choices(problem):
        cost = functools.cache(StageCosts(problem.layers, problem.cluster, problem.states, choice, segments).cost)
        for inner in itertools.combinations(range(1, len(problem.layers)), choice.dims.pipeline - 1):
            bounds = itertools.pairwise((0, *inner, len(problem.layers)))
            stages = [cost(i, start, end) for i, (start, end) in enumerate(bounds)]
            if None not in stages:
                seconds = sum(step_s(stages, choice.micro_batches))
                found[choice.dims] = min(seconds, found.get(choice.dims, float("inf")))
    return found


def all_meshes(num_ranks, hosts):
    sizes = itertools.product(range(1, num_ranks + 1), repeat=3)
    return {(p, d, t) for p, d, t in sizes if p * d * t == num_ranks and (num_ranks // hosts) % t == 0}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_no_other_plan_is_better(seed):
    rng = random.Random(seed)
    for _ in range(10):  # 200 chains in all
        problem = chains.problem(rng)
        expected = by_brute_force(problem)
        if not expected:
            with pytest.raises(ValueError, match="no plan fits"):
                search(problem)
            continue
        found = search(problem)
        assert {plan.choice.dims: pytest.approx(plan.step_s) for plan in found} == expected
        assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in found)
        assert all(plan.memory_bytes <= problem.cluster.memory_bytes for plan in found)
        assert all(plan_of(problem, plan.choice, plan.starts) == plan for plan in found)
        possible = all_meshes(problem.cluster.num_ranks, problem.cluster.hosts)
        assert {(d.pipeline, d.data, d.tensor) for d in expected} <= possible


@pytest.mark.parametrize("seed", range(20))
def test_no_other_plan_needs_less_memory(seed):
    problem = chains.problem(random.Random(seed), most_layers=6, most_ranks=4)
    held, segments = [], Segments(problem.layers, problem.cluster.within)
    for choice in choices(problem):
        stages = StageCosts(problem.layers, problem.cluster, problem.states, choice, segments)
        for inner in itertools.combinations(range(1, len(problem.layers)), choice.dims.pipeline - 1):
            bounds = itertools.pairwise((0, *inner, len(problem.layers)))
            held.append(max(stages.least_memory(i, *at).memory.total for i, at in enumerate(bounds)))
    found = least_memory(problem)
    assert found.memory.total == pytest.approx(min(held))


def chain(count, *, parameter_bytes=0, **changes):
    layer = LayerProfile("", Seconds(0, 1e-3), Seconds(0, 2e-3), parameter_bytes)
    return tuple(dataclasses.replace(layer, name=f"layer{i}", **changes) for i in range(count))


def cluster(num_ranks=4, hosts=1, memory_gib=float("inf"), rate=1e9):
    network = Network(1e-5, rate)
    return Cluster(num_ranks, hosts, network, network, memory_gib * GIB)


def test_without_weights_and_activations_data_parallel_is_best_and_exact():
    best = search(Problem(chain(8), cluster(), STATES["adam"], 64))[0]
    assert best.choice.dims == Dims(1, 4, 1)
    assert best.choice.zero_stage == 0
    assert best.choice.micro_batches == 1
    assert best.step_s == pytest.approx(8 * 16 * 3e-3)
    assert best.bubble == pytest.approx(0)


def test_large_weights_and_small_activations_are_for_pipelines():
    layers = chain(8, parameter_bytes=400_000_000, output_bytes=100)
    best = search(Problem(layers, cluster(rate=1e8), STATES["adam"], 64))[0]
    assert best.choice.dims.pipeline == 4
    assert best.starts == (0, 2, 4, 6)


def test_stages_that_are_equal_have_the_bubble_of_the_formula():
    layers, states = chain(8), STATES["sgd"]
    found = search(Problem(layers, cluster(rate=float("inf")), states, 8, schedules=(ONE_F_ONE_B,)))
    by_dims = {plan.choice.dims: plan for plan in found}
    plan = by_dims[Dims(4, 1, 1)]
    micro_batches = plan.choice.micro_batches
    assert plan.bubble == pytest.approx(3 / (micro_batches + 3), rel=0.02)  # latency is 10 µs


def test_a_model_larger_than_a_device_gets_zero_stages_or_pipelines():
    layers = chain(8, parameter_bytes=GIB // 8)  # 1 GiB of weights, 4 GiB with Adam
    for plan in search(Problem(layers, cluster(memory_gib=1.6), STATES["adam"], 64)):
        assert plan.choice.zero_stage == 3 or plan.choice.dims.pipeline > 1
    (only,) = search(Problem(layers, cluster(memory_gib=1.2), STATES["adam"], 64, zero_stages=(0,)))
    assert only.choice.dims == Dims(4, 1, 1)


def test_tensor_ranks_are_on_one_host():
    layers = chain(2, tensor=("block",))
    found = search(Problem(layers, cluster(8, hosts=4), STATES["adam"], 64))
    assert {plan.choice.dims.tensor for plan in found} == {1, 2}


def test_1f1b_has_a_micro_batch_for_each_stage_and_gpipe_need_not():
    problem = Problem(chain(4), cluster(), STATES["adam"], 4)
    for choice in choices(problem):
        assert choice.micro_batches * choice.rows * choice.dims.data == 4
        if choice.schedule == ONE_F_ONE_B and choice.dims.pipeline > 1:
            assert choice.micro_batches >= choice.dims.pipeline
    assert any(c.schedule == GPIPE and c.micro_batches < c.dims.pipeline for c in choices(problem))


@pytest.mark.parametrize(
    ("limit", "kept_bytes", "facts"),
    [
        (0.5, 0, ["memory_gib=0.5", "needs 1 GiB", "1 for weights", "more ranks"]),
        (2, GIB / 4, ["memory_gib=2", "activations, with pipeline=4", "a smaller global_batch_size"]),
    ],
)
def test_if_nothing_fits_the_error_says_how_much_is_needed_and_what_to_change(limit, kept_bytes, facts):
    layers = chain(8, parameter_bytes=GIB // 8, kept_bytes=kept_bytes)
    with pytest.raises(ValueError, match="no plan fits") as error:
        search(Problem(layers, cluster(memory_gib=limit), STATES["adam"], 64))
    assert [fact for fact in facts if fact not in str(error.value)] == []


def test_sizes_that_no_mesh_has_are_an_error():
    with pytest.raises(ValueError, match="data ranks need equally many rows"):
        search(Problem(chain(1), cluster(3), STATES["adam"], 64))
    with pytest.raises(ValueError, match=r"zero_stages: expected some of 0, 1, 2, 3, found \(4,\)"):
        Problem(chain(1), cluster(), STATES["adam"], 64, zero_stages=(4,))
    with pytest.raises(ValueError, match="layers: expected at least one"):
        Problem((), cluster(), STATES["adam"], 64)
    with pytest.raises(ValueError, match="global_batch_size: expected at least 1, found 0"):
        Problem(chain(1), cluster(), STATES["adam"], 0)
    with pytest.raises(ValueError, match="hosts: expected a divisor of the number of ranks, 4"):
        cluster(4, hosts=3)
