"""What a stage passes on is known without computing it; what a stage cannot do is an error."""

import pytest
import torch
from torch import nn

from spark_dl import ModelSpec
from spark_dl.parallel.mesh.layers import build_chain, cut_chain
from spark_dl.parallel.mesh.pipeline import check_pipeline
from spark_dl.parallel.mesh.stage import Stage, UnknownShape, find_boundaries, to_meta
from tests.builders.models import build_dropout_mlp
from tests.builders.settings import make_config
from tests.unit.parallel.mesh.test_trial import BATCH, assert_unchanged, state_of

CONFIG = make_config(features=("features",), label="label")
SPEC = ModelSpec(build=build_dropout_mlp)


class Pair(nn.Module):
    """Passes on a mask beside its values."""

    def forward(self, value):
        return value, value > 0


class Masked(nn.Module):
    def forward(self, pair):
        value, mask = pair
        return value * mask


def boundaries(model, cut, config=CONFIG, spec=SPEC):
    stages = cut_chain(build_chain(model), cut)
    return find_boundaries(spec, model, config, stages, BATCH)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_shapes_are_found_without_computing_them(precision, dtype):
    model = build_dropout_mlp()
    before = state_of(model)
    found = boundaries(model, [1, 3, 1], make_config(features=("features",), label="label", precision=precision))
    assert_unchanged(model, before)
    assert [(b.layer, b.is_tuple) for b in found] == [("0", False), ("3", False)]
    for boundary in found:
        [tensor] = boundary.tensors
        assert (tensor.shape, tensor.device.type, tensor.requires_grad) == ((6, 16), "meta", True)
    assert found[0].tensors[0].dtype == dtype


def test_layers_of_other_stages_can_be_on_the_meta_device():
    model = build_dropout_mlp()
    expected = boundaries(model, [1, 3, 1])
    to_meta(model[1], kept=[])
    to_meta(model[4], kept=[])
    assert [(b.layer, b.tensors[0].shape) for b in boundaries(model, [1, 3, 1])] == [
        (b.layer, b.tensors[0].shape) for b in expected
    ]
    assert {p.device.type for p in model[0].parameters()} == {"cpu"}


def test_several_tensors_of_which_some_have_no_gradient():
    model = nn.Sequential(nn.Linear(4, 4), Pair(), Masked(), nn.Linear(4, 3))
    [boundary] = boundaries(model, [2, 2])
    assert boundary.is_tuple
    assert [(t.dtype, t.requires_grad) for t in boundary.tensors] == [(torch.float32, True), (torch.bool, False)]
    value = boundary.wrap(boundary.unwrap((torch.ones(6, 4), torch.ones(6, 4, dtype=torch.bool))))
    assert isinstance(value, tuple)


class Named(nn.Module):
    def forward(self, value):
        return {"value": value}


class TrueRows(nn.Module):
    def forward(self, value):
        return value[value[:, 0] > 0]


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (Named, ValueError, r"spec.layers: expected a tensor or a tuple of tensors from the layer '1', .* found dict"),
        (TrueRows, UnknownShape, r"the layer '1': "),
    ],
)
def test_what_cannot_be_sent_and_what_is_not_known(layer, error, message):
    with pytest.raises(error, match=message):
        boundaries(nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 3)), [2, 1])


def test_a_shape_that_changes_is_an_error():
    [boundary] = boundaries(build_dropout_mlp(), [1, 4])
    with pytest.raises(
        RuntimeError, match=r"layer '0' .* returned \(5, 16\) float32, and \(6, 16\) float32 for the first"
    ):
        boundary.unwrap(torch.ones(5, 16))


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda model, batch: batch["features"], "none"),
        (lambda m, b: m(b["features"]) + m(b["features"]), "a second one"),
    ],
)
def test_a_forward_that_does_not_call_the_model_once_is_an_error(forward, found):
    model = build_dropout_mlp()
    spec = ModelSpec(build=build_dropout_mlp, forward=forward)
    last = Stage(spec, model, CONFIG, build_chain(model)[3:], is_first=False, is_last=True)
    with pytest.raises(ValueError, match=f"spec.forward: expected one call of the model in a pipeline, found {found}"):
        last.output(BATCH, torch.ones(6, 16))
    assert "forward" not in vars(model)


def spec_with(**functions):
    return ModelSpec(build=build_dropout_mlp, **functions)


@pytest.mark.parametrize("name", ["batch_loss", "evaluation"])
def test_functions_that_need_the_whole_model_are_an_error(name):
    check_pipeline(SPEC, 4)
    spec = ModelSpec(build=build_dropout_mlp, **{name: lambda *_: 0})
    with pytest.raises(ValueError, match=f"spec.{name}: not supported with parallel.pipeline=4"):
        check_pipeline(spec, 4)
