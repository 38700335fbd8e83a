"""Activations that are computed again: the weights of a run that keeps them, and less memory."""

import dataclasses

import pytest
import torch
from torch import nn

from spark_dl import ModelSpec, Single
from spark_dl.nn import MoE
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import same_bits, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import RankFailed
from tests.ranks.runs import cut_at, make_run, resume, train


class Block(nn.Module):
    def __init__(self, *, norm=nn.LayerNorm):
        super().__init__()
        self.net, self.norm, self.drop = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), norm(8), None

    def forward(self, x):
        return x + self.net(self.norm(x))


class WithDropout(Block):
    def __init__(self, *, norm=nn.BatchNorm1d):
        super().__init__(norm=norm)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.net(self.norm(x)))


def build(block=Block):
    return nn.Sequential(nn.Linear(4, 8), *(block() for _ in range(3)), nn.Linear(8, 3))


class Dropping(WithDropout):
    def __init__(self):
        super().__init__(norm=nn.LayerNorm)
        self.net.insert(2, nn.Dropout(0.3))  # of slices, in a layer that is cut


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.embed, self.out = nn.Linear(1, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features):  # [rows, 4]
        return self.out(self.encoder(self.embed(features[..., None])).mean(1))


def build_experts():
    return nn.Sequential(nn.Linear(4, 8), *(MoE(8, 4, hidden=8, balance="loss") for _ in range(2)), nn.Linear(8, 3))


def weights_of(tmp_path, name, spec, num_ranks, layers, **settings):
    config = small_config(
        num_ranks, {"lr": 0.1, "activation_checkpointing": layers, **settings.pop("train", {})}, **settings
    )
    return load_weights(train(make_run(tmp_path, config, spec=spec, name=name)))


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed"])
@pytest.mark.parametrize(("block", "layers"), [(Block, "full"), (WithDropout, "full"), (WithDropout, ("1", "[23]"))])
def test_the_weights_are_the_same_to_the_bit(tmp_path, block, layers, precision):
    spec = ModelSpec(build=lambda: build(block), loss="CrossEntropyLoss")
    more = {"accumulation_steps": 2, "precision": precision}
    found, kept = (weights_of(tmp_path, str(i), spec, 2, each, train=more) for i, each in enumerate((layers, ())))
    assert same_bits(found, kept)


MESHES = {
    "zero1": (2, {"zero_stage": 1}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "zero1 of pipelines": (4, {"pipeline": 2, "schedule": "1f1b", "zero_stage": 1}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_has_the_weights_of_one_process(tmp_path, name):
    num_ranks, settings = MESHES[name]
    spec, more = ModelSpec(build=build, loss="CrossEntropyLoss"), {"accumulation_steps": 2}
    found = weights_of(tmp_path, "mesh", spec, num_ranks, "full", train=more, parallel=parallel("mesh", **settings))
    alone = weights_of(tmp_path, "alone", spec, 1, (), train=more, parallel=Single())
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)
    spec = ModelSpec(build=lambda: build(Dropping), loss="CrossEntropyLoss")
    found, kept = (
        weights_of(tmp_path, f"dropping {i}", spec, num_ranks, each, train=more, parallel=parallel("mesh", **settings))
        for i, each in enumerate(("full", ()))
    )
    assert same_bits(found, kept)


@pytest.mark.parametrize("settings", [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"zero_stage": 3}], ids=str)
def test_the_layers_of_a_transformer_are_trained_alike(tmp_path, settings):
    spec = ModelSpec(build=Transformer, loss="CrossEntropyLoss")
    found, kept = (
        weights_of(tmp_path, str(i), spec, 2, each, parallel=parallel("mesh", **settings))
        for i, each in enumerate((("encoder.layers.*",), ()))
    )
    assert same_bits(found, kept)


def test_experts_are_trained_alike(tmp_path):
    spec = ModelSpec(build=build_experts, loss="CrossEntropyLoss")
    found, kept = (weights_of(tmp_path, str(i), spec, 2, each) for i, each in enumerate((("1", "2"), ())))
    assert same_bits(found, kept)


def test_a_resumed_run_may_begin_and_end_it(tmp_path):
    spec, config = ModelSpec(build=lambda: build(WithDropout)), small_config(2, {"activation_checkpointing": "full"})
    without = dataclasses.replace(config, train=dataclasses.replace(config.train, activation_checkpointing=()))
    expected = load_weights(train(make_run(tmp_path, without, spec=spec, name="whole")))
    run = make_run(tmp_path, cut_at(config, 5), spec=spec)
    found = load_weights(resume(run, train(run), without))
    assert same_bits(found, expected)
    assert checkpoint.latest(run.run_dir).step == 12


def test_a_pattern_of_no_module_is_named(tmp_path):
    spec = ModelSpec(build=build)
    with pytest.raises(RankFailed, match=r"activation_checkpointing: no module of the model is 'layers\.\*'; its mod"):
        weights_of(tmp_path, "run", spec, 1, ("layers.*",))
