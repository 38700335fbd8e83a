import itertools
import random

import pytest

from spark_dl.parallel.cost.cost import Network, all_gather_s, all_reduce_s, reduce_scatter_s
from spark_dl.parallel.mesh.planner.records import REPLICATED, LayerProfile, Seconds
from spark_dl.parallel.mesh.planner.stages import TensorChain, fastest, smallest
from tests.builders import chains

NETWORK = Network(1e-5, 1e9)


def layer(*kinds, compute_s=1.0, parameter_bytes=100, output_bytes=1e6, kept_bytes=10.0):
    return LayerProfile(
        "", Seconds(0, compute_s), Seconds(0, 2 * compute_s), parameter_bytes, output_bytes, kept_bytes, kinds
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_to_cut_the_layers_is_better(seed):
    rng = random.Random(seed)
    for _ in range(10):  # 200 chains in all
        layers, tensor, rows = chains.layers(rng, rng.randint(1, 5)), rng.choice((2, 4, 8)), rng.randint(1, 64)
        network = Network(rng.choice((0, 1e-4)), rng.choice((1e7, 1e9)))
        start, chain = rng.randrange(len(layers)), TensorChain(layers, rows=rows, tensor=tensor, network=network)
        for weigh in (fastest, smallest(4, 3)):
            found = chain.best_from(start, weigh)
            assert len(found) == len(layers) - start
            for end, segment in enumerate(found, start + 1):
                ways = itertools.product(*((REPLICATED, *each.tensor) for each in layers[start:end]))
                all_costs = [chain.cost(start, kinds) for kinds in ways]
                assert weigh(segment)[0] == pytest.approx(min(weigh(each)[0] for each in all_costs))
                assert chain.cost(start, segment.kinds)[1:] == pytest.approx(segment[1:])


def test_two_linear_layers_and_an_activation_between_them_need_one_all_reduce_in_each_pass():
    """Shoeybi et al. 2019, arXiv:1909.08053, figure 3."""
    layers = [layer(), layer("colwise", "rowwise"), layer("split", parameter_bytes=0), layer("colwise", "rowwise")]
    found = TensorChain(layers, rows=8, tensor=2, network=NETWORK).best_from(1)[-1]
    assert found.kinds == ("colwise", "split", "rowwise")
    assert found.forward_s == pytest.approx(3 * 8 / 2 + all_reduce_s(2, 8e6, NETWORK))
    assert found.backward_s == pytest.approx(3 * 8 + all_reduce_s(2, 8e6, NETWORK))
    assert found.weight_bytes == 100
    assert found.kept_bytes == 8 * (10 + 5 + 5)  # colwise has its whole input


def test_a_block_has_four_all_reduces_and_two_thirds_of_its_activations_are_cut():
    found = TensorChain([layer("block")], rows=4, tensor=2, network=NETWORK).cost(0, ["block"])
    assert found.seconds == pytest.approx(3 * 4 / 2 + 4 * all_reduce_s(2, 4e6, NETWORK))
    assert found.kept_bytes == pytest.approx(40 * (10 + 24 / 2) / 34)


def test_sequence_parallelism_takes_as_many_bytes_as_two_all_reduces():
    """A reduce-scatter and an all-gather in place of each all-reduce: Korthikanti et al. 2022, arXiv:2205.05198."""
    kinds = ["sequence", "colwise", "rowwise", "sequence"]
    found = TensorChain([layer(kind) for kind in kinds], rows=1, tensor=4, network=NETWORK).cost(0, kinds)
    half = all_gather_s(4, 1e6, NETWORK)
    assert half + reduce_scatter_s(4, 1e6, NETWORK) == pytest.approx(all_reduce_s(4, 1e6, NETWORK))
    assert found.forward_s == pytest.approx(4 / 4 + 3 * half)  # gather, scatter, and the whole rows at the end
    assert found.backward_s == pytest.approx(8 / 4 + 2 * half)
    assert found.shared_bytes == 200


def test_if_the_network_is_slow_layers_are_replicated_until_memory_forbids_it():
    layers = [layer("colwise", compute_s=1e-6), layer("rowwise", compute_s=1e-6)]
    slow = Network(1.0, 1e3)
    assert TensorChain(layers, rows=1, tensor=2, network=slow).best_from(0)[-1].kinds == ("replicated", "replicated")
    found = TensorChain(layers, rows=1, tensor=2, network=slow).best_from(0, smallest(4, 1))[-1]
    assert found.kinds == ("colwise", "rowwise")


def test_one_tensor_rank_has_nothing_to_exchange():
    found = TensorChain([layer("colwise"), layer("block")], rows=2, tensor=1, network=NETWORK).best_from(0)[-1]
    assert found.kinds == ("replicated", "replicated")
    assert found.seconds == pytest.approx(12)
