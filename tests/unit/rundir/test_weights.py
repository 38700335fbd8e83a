"""Weights that a model takes: by names without those of torch.compile, and one tensor for names that are tied."""

import pytest
import torch
from torch import nn

from spark_dl.rundir.checkpoint import load_into


class Tied(nn.Module):
    def __init__(self, is_tied=True):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight


def test_R10_untied_weights_are_not_loaded_into_a_tied_model():
    untied = Tied(is_tied=False).state_dict()
    message = "head.weight is the same tensor as embedding.weight in the model, and another one in the checkpoint"
    with pytest.raises(ValueError, match=message):
        load_into(Tied(), untied, "the weights of x")
    load_into(Tied(), Tied().state_dict(), "the weights of x")
    model = Tied(is_tied=False)
    load_into(model, Tied().state_dict(), "the weights of x")
    assert torch.equal(model.head.weight, model.embedding.weight)


def test_R10_parameters_that_share_memory_are_tied_too():
    model = Tied(is_tied=False)
    model.head.weight.data = model.embedding.weight.data
    with pytest.raises(ValueError, match="is the same tensor as"):
        load_into(model, Tied(is_tied=False).state_dict(), "the weights of x")


@pytest.mark.parametrize("part", ["whole", "inner"])
def test_R23_names_of_a_compiled_model_fit_one_that_is_not_and_the_other_way_round(part):
    def build(is_compiled):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        if not is_compiled:
            return model
        if part == "whole":
            return torch.compile(model)
        model[0] = torch.compile(model[0])
        return model

    for first, second in ((True, False), (False, True), (True, True)):
        source, target = build(first), build(second)
        load_into(target, source.state_dict(), "the weights of x")
        x = torch.randn(2, 3)
        eager = [getattr(m, "_orig_mod", m)[0].weight if part == "whole" else m[0].weight for m in (source, target)]
        assert torch.equal(*eager), x


def test_R23_weights_of_the_older_weight_norm_are_taken():
    old = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)))
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    load_into(new, old.state_dict(), "the weights of x", same_dtypes=True)
    assert torch.allclose(new[0].weight, old[0].weight)


@pytest.mark.parametrize(("other", "same_dtypes", "message"), [
    (nn.Linear(3, 5), False, r"weight: \[5, 3\] float32 in the checkpoint, \[4, 3\] float32 in the model"),
    (nn.Linear(3, 4, bias=False), False, "not in the checkpoint: bias"),
    (nn.Sequential(nn.Linear(3, 4)), False, "not in the checkpoint: weight, bias; not in the model: 0.weight, 0.bias"),
    (nn.Linear(3, 4).double(), True, r"weight: \[4, 3\] float64 in the checkpoint, \[4, 3\] float32 in the model"),
])  # fmt: skip
def test_what_differs_is_named(other, same_dtypes, message):
    with pytest.raises(ValueError, match=rf"^the weights of x do not fit the model of spec.build \(.*{message}"):
        load_into(nn.Linear(3, 4), other.state_dict(), "the weights of x", same_dtypes=same_dtypes)


class WithState(nn.Linear):
    """Has a state that is no tensor, `extra`."""

    def __init__(self, extra):
        super().__init__(1, 1)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("same_dtypes", [True, False])
def test_a_state_of_another_kind_is_named_and_one_of_the_same_kind_is_loaded(same_dtypes):
    model = WithState({"a": 1})
    load_into(model, WithState({"b": 2}).state_dict(), "the weights of x", same_dtypes=same_dtypes)
    assert model.extra == {"b": 2}
    if same_dtypes:
        with pytest.raises(ValueError, match=r"_extra_state: \[2\] float32 in the checkpoint, dict in the model"):
            load_into(model, WithState(torch.ones(2)).state_dict(), "the weights of x", same_dtypes=True)
    assert model.extra == {"b": 2}


def test_weights_of_another_dtype_are_cast_unless_they_must_be_the_same():
    model = nn.Linear(3, 4).bfloat16()
    load_into(model, nn.Linear(3, 4).state_dict(), "the weights of x")
    assert model.weight.dtype == torch.bfloat16
