import dataclasses

import pytest

from spark_dl.parallel.cost.cost import Network, all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from spark_dl.parallel.mesh.dims import Dims
from spark_dl.parallel.mesh.planner.records import GPIPE, ONE_F_ONE_B, STATES, Cluster, LayerProfile, Seconds, held
from spark_dl.parallel.mesh.planner.stages import PlanChoice, Segments, StageCosts

NETWORK = Network(1e-3, 1e6)
LAYERS = tuple(
    LayerProfile(f"layer{i}", Seconds(0.5, 1.0), Seconds(0, 2.0), 4000 * (i + 1), output_bytes=1e6, kept_bytes=10)
    for i in range(4)
)
WEIGHTS = 4000 * 10


def stages(dims, *, zero_stage=0, schedule=ONE_F_ONE_B, micro_batches=4, rows=2, layers=LAYERS, memory=float("inf")):
    cluster = Cluster(dims[0] * dims[1] * dims[2], 1, NETWORK, NETWORK, memory)
    choice = PlanChoice(Dims(*dims), zero_stage, schedule, micro_batches, rows)
    return StageCosts(layers, cluster, STATES["adam"], choice, Segments(layers, NETWORK))


def test_a_stage_computes_and_exchanges_with_its_neighbors():
    send = send_s(2e6, NETWORK)
    first, middle, last = (stages((3, 1, 1)).cost(i, *at) for i, at in enumerate([(0, 1), (1, 2), (2, 4)]))
    assert first.segment.forward_s == 0.5 + 2
    assert middle.segment.backward_s == 4
    assert [each.transfer_s for each in (first, middle, last)] == pytest.approx([send, 2 * send, send])
    assert middle.seconds == middle.period_s == pytest.approx(6.5 + 2 * send)
    assert middle.behind_s == pytest.approx(4 + send)
    assert last.behind_s == pytest.approx(8)


def test_gpipe_sends_while_it_computes():
    found = stages((3, 1, 1), schedule=GPIPE).cost(1, 1, 2)
    assert found.seconds == pytest.approx(6.5 + 2 * send_s(2e6, NETWORK))
    assert found.period_s == pytest.approx(6.5)
    large = tuple(dataclasses.replace(each, output_bytes=5e6) for each in LAYERS)
    slow = stages((3, 1, 1), schedule=GPIPE, rows=1, layers=large).cost(1, 1, 2)
    assert slow.period_s == pytest.approx(2 * send_s(5e6, NETWORK))


@pytest.mark.parametrize(("schedule", "kept"), [(ONE_F_ONE_B, [3, 2, 1]), (GPIPE, [4, 4, 4])], ids=["1f1b", "gpipe"])
def test_activations_are_kept_for_the_micro_batches_of_the_schedule(schedule, kept):
    found = [stages((3, 1, 1), schedule=schedule).cost(i, i, i + 1).memory for i in range(3)]
    assert [each.activations for each in found] == [2 * 10 * times for times in kept]
    assert found[1].weights == 8000
    assert found[1].total == 8000 * 4 + found[1].activations


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero_moves_the_bytes_of_its_stage(zero_stage):
    """Rajbhandari et al. 2020, section 7: as many as an all-reduce for stages 1 and 2, and half as many again for 3."""
    found = stages((2, 4, 1), zero_stage=zero_stage).cost(1, 2, 4)
    weights = 4000 * 7
    scatter, gather = reduce_scatter_s(4, weights, NETWORK), all_gather_s(4, weights, NETWORK)
    by_layer = 2 * all_gather_s(4, weights / 2, NETWORK)  # two layers, each with its own messages
    expected = {
        0: (0, 0, all_reduce_s(4, weights, NETWORK)), 1: (0, 0, scatter + gather), 2: (0, scatter, gather),
        3: (by_layer, 2 * by_layer, 0),
    }  # fmt: skip
    assert (found.zero_forward_s, found.zero_backward_s, found.sync_s) == pytest.approx(expected[zero_stage])
    states = held(7000, STATES["adam"], zero_stage, 4).total
    gathered = 4 * 4000 * 2 if zero_stage == 3 else 0  # weights and gradients of the largest layer
    assert found.memory.total == pytest.approx(states + found.memory.activations + gathered)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_without_pipeline_gradients_are_sent_during_the_backward_pass(zero_stage):
    collective = reduce_scatter_s if zero_stage else all_reduce_s

    def exposed(network):
        choice, cluster = PlanChoice(Dims(1, 2, 1), zero_stage, ONE_F_ONE_B, 1, 2), Cluster(2, 1, network, network)
        found = StageCosts(LAYERS, cluster, STATES["adam"], choice, Segments(LAYERS, network)).cost(0, 0, 4)
        gather_s = all_gather_s(2, WEIGHTS, network) if zero_stage else 0
        return (found.zero_backward_s if zero_stage == 2 else 0) + found.sync_s - gather_s

    slow, fast = Network(0, 1e3), Network(0, 1e9)
    # the last layer's gradient is ready after 4 s, and the link is busy from then on
    assert exposed(slow) == pytest.approx(collective(2, WEIGHTS, slow) - 3 * 4)
    assert exposed(fast) == pytest.approx(collective(2, 4000, fast))  # only that of the first layer is left


def test_if_the_fastest_tensor_plan_does_not_fit_the_smallest_is_taken():
    layers = (LayerProfile("a", Seconds(0, 1e-6), Seconds(0, 1e-6), 40_000, 1e6, 0, ("colwise",)),)
    fast, small = (stages((1, 1, 2), layers=layers, memory=memory) for memory in (float("inf"), 100_000))
    assert fast.cost(0, 0, 1).segment.kinds == ("replicated",)
    assert small.cost(0, 0, 1).segment.kinds == ("colwise",)
    assert small.cost(0, 0, 1).memory.total == 80_000
    assert stages((1, 1, 2), layers=layers, memory=79_999).cost(0, 0, 1) is None


def test_the_gradients_of_layers_in_sequence_parallelism_are_summed_over_tensor_ranks():
    layers = (LayerProfile("norm", Seconds(0, 100.0), Seconds(0, 100.0), 4000, 8.0, 0, ("sequence",)),)
    found = stages((1, 1, 2), layers=layers).cost(0, 0, 1)
    assert found.segment.kinds == ("sequence",)
    assert found.sync_s == pytest.approx(all_reduce_s(2, 4000, NETWORK))
