"""How a model is cut: chains, tied parameters, and cuts against brute force."""

import itertools

import numpy as np
import pytest
from torch import nn

from spark_dl import Mesh
from spark_dl.parallel.mesh.build import cut_of
from spark_dl.parallel.mesh.layers import balance, build_chain, check_cut, cut_chain, find_tied


class Decoder(nn.Module):
    """Token ids [rows, length] to scores [rows, length, 5], with tied embeddings."""

    def __init__(self, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(blocks))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        value = self.embed(tokens)
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


DECODER_LAYERS = ["embed", "layers.*", "head"]


def names(chain):
    return [layer.name for layer in chain]


def test_the_default_is_the_children_of_sequentials_at_any_depth():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 1))
    chain = build_chain(model)
    assert names(chain) == ["0", "1.0", "1.1.0", "2"]
    assert all(model.get_submodule(name) is module for name, module in chain)


def test_a_sequential_with_a_forward_of_its_own_or_a_hook_is_one_layer():
    class Residual(nn.Sequential):
        def forward(self, value):
            return value + super().forward(value)

    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert names(build_chain(nn.Sequential(Residual(nn.Linear(2, 2)), hooked))) == ["0", "1"]
    with pytest.raises(ValueError, match=r"spec.layers: expected the names of the layers .* found Residual"):
        build_chain(Residual(nn.Linear(2, 2)))


def test_patterns_match_parts_of_names_in_the_order_of_the_list():
    assert names(build_chain(Decoder(3), DECODER_LAYERS)) == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert names(build_chain(Decoder(1), ["head", "layers.[0-9]", "emb*"])) == ["head", "layers.0", "embed"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, r"expected the names of the layers .* found Decoder with the modules embed, layers, head"),
        (["embed", "blocks.*", "head"], r"no module of Decoder matches 'blocks.*'; it has embed, layers, head"),
        (["embed", "layers.*"], r"a layer is left out: .* has the parameters or buffers head.weight"),
        (["embed", "layers.*", "layers.0", "head"], r"the layer 'layers.0' is listed 2 times"),
        (["embed", "layers", "layers.0", "head"], r"the layer 'layers.0' is listed twice, as it is a part of"),
        ("layers.*", r"expected a list of names or patterns, found the string"),
        ([], r"expected at least one layer"),
    ],
)
def test_a_chain_that_is_not_the_model_is_an_error(layers, message):
    with pytest.raises(ValueError, match=f"^spec.layers: {message}"):
        build_chain(Decoder(), layers)


def test_a_buffer_that_no_layer_has_is_left_out():
    model = nn.Module()
    model.register_buffer("scale", nn.Parameter().detach())
    model.linear = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"a layer is left out: no layer of linear has the parameters or buffers scale"
    ):
        build_chain(model, ["linear"])


def test_parameters_that_layers_share_are_found():
    chain = build_chain(Decoder(), DECODER_LAYERS)
    [tied] = find_tied(chain)
    assert tied == (("embed.weight", "head.weight"), (0, 3))
    assert find_tied(build_chain(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []


def slowest_of_all_cuts(times, num_stages):
    bounds = itertools.combinations(range(1, len(times)), num_stages - 1)
    return min(max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cut, len(times)))) for cut in bounds)


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_the_slowest_stage_is_that_of_the_best_of_all_cuts(num_layers):
    rng = np.random.default_rng(num_layers)
    for num_stages in range(1, num_layers + 1):
        for scale in (1, 100):
            times = rng.integers(0, 10, num_layers) ** (1 if scale == 1 else 3)
            cut = balance(times, num_stages)
            assert len(cut) == num_stages
            assert check_cut(cut, num_layers, num_stages) == cut
            chain = list(times)
            stages = cut_chain(chain, cut)
            assert [time for stage in stages for time in stage] == chain
            assert max(map(sum, stages)) == slowest_of_all_cuts(chain, num_stages)


def test_of_equal_cuts_the_first_stages_get_more_layers():
    assert balance([1.0] * 5, 2) == [3, 2]
    assert balance([1.0, 1.0, 1.0, 3.0], 2) == [3, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: balance([1.0, 2.0], 3),
            r"parallel.pipeline: expected at least one layer for each of 3 stages, found 2",
        ),
        (lambda: check_cut([1, 2], 3, 3), r"parallel.stages: expected 3 numbers"),
        (lambda: check_cut([3, 0], 3, 2), r"parallel.stages: expected whole numbers >= 1"),
        (lambda: check_cut([1.0, 2.0], 3, 2), r"parallel.stages: expected whole numbers >= 1"),
        (lambda: check_cut([1, 1], 3, 2), r"parallel.stages: expected numbers with the sum 3, .* with the sum 2"),
    ],
)
def test_a_cut_that_does_not_fit_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_stage_ends_behind_the_rows_of_what_was_cut_by_columns():
    """Tensor ranks have a slice between the two, which no boundary passes on."""
    chain = build_chain(nn.Sequential(*(nn.Linear(2, 2) for _ in range(6))))
    plan = {"1": "colwise", "2": "rowwise", "4": "colwise_gather_output"}
    assert cut_of(chain, Mesh(pipeline=2, stages=(3, 3)), plan, [1.0] * 6) == [3, 3]
    assert cut_of(chain, Mesh(pipeline=2, stages=(5, 1)), plan, [1.0] * 6) == [5, 1]
    assert cut_of(chain, Mesh(pipeline=2), plan, [2.0, 8.0, 8.0, 1.0, 0.0, 0.0]) == [1, 5]
    with pytest.raises(ValueError, match=r"parallel.stages: a stage ends between the layers '1' and '2', which tensor"):
        cut_of(chain, Mesh(pipeline=2, stages=(2, 4)), plan, [1.0] * 6)
