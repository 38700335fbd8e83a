"""The profile of a model: bytes are exact, seconds are those of layers that sleep, and units stay together."""

import time

import pytest
import torch
from torch import nn

from spark_dl import ModelSpec
from spark_dl.parallel.mesh.auto.profile import fit_line, measure_profile, state_bytes
from spark_dl.parallel.mesh.layers import build_chain
from spark_dl.parallel.mesh.planner.records import BLOCK, Seconds
from spark_dl.parallel.mesh.tensor.plan import resolve_tensor_plan
from tests.builders.settings import make_config

ROWS = 16


def sleeps(inputs, outputs):
    """A linear layer that takes 4 ms, and 1 ms per row."""
    layer = nn.Linear(inputs, outputs)
    layer.register_forward_pre_hook(lambda module, args: time.sleep(0.004 + 0.001 * len(args[0])))
    return layer


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), sleeps(8, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))


def profile(plan):
    spec, model = ModelSpec(build=build), build()
    config = make_config(features=("features",), label="label")
    batch = {"features": torch.randn(ROWS, 4), "label": torch.arange(ROWS) % 3, "weight": torch.ones(ROWS)}
    words = resolve_tensor_plan(model, plan, 2) if plan else {}
    return measure_profile(spec, model, build_chain(model), words, batch, config)


def test_bytes_and_seconds_of_each_layer():
    first, relu, sleeps, norm, head = profile({})
    assert [layer.name for layer in (first, relu, sleeps, norm, head)] == ["0", "1", "2", "3", "4"]
    assert [layer.parameter_bytes for layer in (first, relu, sleeps, norm, head)] == [160, 0, 144, 32, 48]
    assert [layer.output_bytes for layer in (first, relu, sleeps, norm, head)] == [32, 32, 16, 16, 12]
    # A linear layer keeps its input, a ReLU its output.
    assert (first.kept_bytes, relu.kept_bytes, sleeps.kept_bytes, head.kept_bytes) == (16, 32, 32, 16)
    assert sleeps.forward.of(ROWS) >= 0.020 > first.forward.of(ROWS)  # a sleep lasts at least as long as it says
    assert all(layer.tensor == () for layer in (first, relu, sleeps, norm, head))


def test_layers_that_one_stage_must_have_are_one_layer_that_tensor_ranks_always_cut():
    unit, norm, head = profile({"0": "colwise", "2": "rowwise", "4": "colwise_gather_output"})
    assert (unit.name, unit.tensor, unit.can_be_whole, unit.all_reduces) == ("0 to 2", (BLOCK,), False, 1)
    assert (unit.parameter_bytes, unit.whole_bytes) == (160 + 144, 16)  # the bias of the layer that is cut by rows
    assert (unit.output_bytes, unit.kept_bytes) == (16, 16 + 32 + 32)
    assert (norm.tensor, norm.can_be_whole) == ((), True)
    assert (head.tensor, head.whole_bytes) == ((BLOCK,), 0)


def test_a_line_through_two_sizes():
    assert fit_line([4, 16], [0.008, 0.020]) == Seconds(pytest.approx(0.004), pytest.approx(0.001))
    assert fit_line([4, 16], [0.002, 0.032]) == Seconds(0.0, pytest.approx(0.002))  # never below 0
    assert fit_line([4, 16], [0.030, 0.020]) == Seconds(pytest.approx(0.020), 0.0)
    assert fit_line([2], [0.006]) == Seconds(0.0, pytest.approx(0.003))


@pytest.mark.parametrize(("optimizer", "args", "expected"), [
    ("SGD", {}, 0), ("SGD", {"momentum": 0.9}, 4), ("AdamW", {}, 8), ("Adam", {"amsgrad": True}, 12),
    ("RMSprop", {}, 4),
])  # fmt: skip
def test_bytes_of_the_optimizer(optimizer, args, expected):
    assert state_bytes(ModelSpec(build=build), make_config(optimizer=optimizer, optimizer_args=args)) == expected
