"""Layers that compute their activations again: which they are, and what they keep."""

import pytest
import torch
from torch import nn

from spark_dl.parallel.recompute import recompute_activations


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True)
    return nn.ModuleDict(
        {"embed": nn.Linear(4, 16), "encoder": nn.TransformerEncoder(layer, 4), "out": nn.Linear(16, 2)}
    )


def compute(model, x):
    return model["out"](model["encoder"](model["embed"](x)))


def kept_bytes(model, x):
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute(model, x).sum()
    return kept


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["full"], [f"encoder.layers.{i}" for i in range(4)]),
        (["encoder.layers.[01]"], ["encoder.layers.0", "encoder.layers.1"]),
        (["encoder", "encoder.layers.*"], ["encoder"]),
        (["encoder.layers.*.linear1", "embed"], [*(f"encoder.layers.{i}.linear1" for i in range(4)), "embed"]),
    ],
)
def test_the_outermost_modules_of_a_pattern_are_chosen(patterns, names):
    assert recompute_activations(encoder(), patterns) == names


def test_a_layer_keeps_its_inputs_only_and_has_the_same_gradients():
    x, model, other = torch.rand(8, 32, 4), encoder(), encoder()
    other.load_state_dict(model.state_dict())
    recompute_activations(other, ["full"])
    assert other.state_dict().keys() == model.state_dict().keys()
    gradients = []
    for each in (model, other):
        torch.manual_seed(3)
        compute(each, x).square().mean().backward()
        gradients.append([p.grad for p in each.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert kept_bytes(other, x) < kept_bytes(model, x) / 4


def test_without_gradients_nothing_is_computed_again():
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    recompute_activations(model, ["0"])
    with torch.no_grad():
        model(torch.rand(2, 4))
    assert len(calls) == 1
    model.eval()(torch.rand(2, 4)).sum().backward()
    assert len(calls) == 2  # hooks are around what is computed again
