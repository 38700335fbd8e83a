"""Trial passes: a chain that is not the model is found, and times are of the layers; nothing is left behind."""

import time

import pytest
import torch
from torch import nn

from spark_dl import ModelSpec
from spark_dl.parallel.mesh.layers import build_chain
from spark_dl.parallel.mesh.trial import _check_buffers, check_chain, measure_layers
from tests.builders.models import build_dropout_mlp
from tests.builders.settings import make_config
from tests.unit.parallel.mesh.test_layers import DECODER_LAYERS, Decoder

CPU = torch.device("cpu")
CONFIG = make_config(features=("features",), label="label")
BATCH = {"features": torch.randn(6, 4), "label": torch.arange(6) % 3, "weight": torch.ones(6)}
TOKENS = {"features": torch.arange(12).reshape(3, 4) % 5, "weight": torch.ones(3)}


def state_of(model):
    modes = [module.training for module in model.modules()]
    return {name: t.clone() for name, t in model.state_dict().items()}, modes, torch.get_rng_state()


def assert_unchanged(model, before):
    tensors, modes, generator = before
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("build", "layers", "batch"),
    [(build_dropout_mlp, None, BATCH), (Decoder, DECODER_LAYERS, TOKENS)],
    ids=["batchnorm and dropout", "tied"],
)
def test_a_chain_that_is_the_model(build, layers, batch):
    model = build()
    model[1].eval() if build is build_dropout_mlp else None  # a frozen BatchNorm stays so
    before = state_of(model)
    check_chain(ModelSpec(build=build), model, build_chain(model, layers), batch, CONFIG)
    assert_unchanged(model, before)


class Scaled(Decoder):
    """Does more than its layers, in one of the modes."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, tokens):
        return super().forward(tokens) * (2 if self.training == (self.mode == "training") else 1)


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_model_that_does_more_than_its_layers_is_an_error(mode):
    model = Scaled(mode)
    before = state_of(model)
    with pytest.raises(ValueError, match=f"give another output than the model in {mode} mode: the largest difference"):
        check_chain(ModelSpec(build=Decoder), model, build_chain(model, DECODER_LAYERS), TOKENS, CONFIG)
    assert_unchanged(model, before)


def test_a_layer_that_cannot_be_called_is_named():
    model = Decoder()
    chain = build_chain(model, ["layers.*", "embed", "head"])
    with pytest.raises(ValueError, match=r"spec.layers: the layer 'layers.0' cannot be called on the output"):
        check_chain(ModelSpec(build=Decoder), model, chain, TOKENS, CONFIG)


def test_a_forward_of_the_user_runs_before_and_after_the_layers():
    def forward(model, batch):
        return {"scores": model(batch["features"] * 2) + 1}

    model = build_dropout_mlp()
    check_chain(ModelSpec(build=build_dropout_mlp, forward=forward), model, build_chain(model), BATCH, CONFIG)


class Slow(nn.Module):
    """Sleeps in its forward pass, and in its backward pass."""

    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.seconds = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value):
        self.calls += 1
        time.sleep(self.seconds[0])
        out = value * self.weight
        out.register_hook(lambda gradient: time.sleep(self.seconds[1]))
        return out


def test_times_are_those_of_the_layers():
    model = nn.Sequential(Slow(0.05, 0.0), nn.ReLU(inplace=True), Slow(0.0, 0.1), nn.Linear(4, 3))
    before = state_of(model)
    times = measure_layers(
        ModelSpec(build=nn.Identity), model, build_chain(model), BATCH, CONFIG, device=CPU, repeats=1
    )  # fmt: skip
    assert_unchanged(model, before)
    assert len(times) == 4
    assert times[0] > 0.05
    assert times[2] > 0.1
    assert max(times[1], times[3]) < 0.05


def test_buffers_that_several_stages_change_are_an_error_and_those_of_one_stage_are_not():
    norm = nn.BatchNorm1d(4)
    chain = build_chain(nn.Sequential(norm, nn.Linear(4, 4), nn.Sequential(norm)), None)
    _check_buffers(chain, [0, 0, 0])
    with pytest.raises(
        ValueError, match=r"the buffers '0.running_mean' and '2.0.running_mean' are one tensor, .*stages"
    ):
        _check_buffers(chain, [0, 0, 1])
