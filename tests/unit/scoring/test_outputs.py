"""Columns of classifiers and regressors, from outputs."""

import pytest
import torch

from spark_dl import ModelSpec
from spark_dl.scoring.outputs import ClassColumns, Squeezed, ValueColumn

ALL = {"rawPrediction": "raw", "probability": "p", "prediction": "y"}


def test_columns_of_logits_per_class():
    logits = torch.randn(50, 4)
    found = ClassColumns(ALL)(logits)
    torch.testing.assert_close(found["p"], logits.double().softmax(1))
    assert torch.equal(found["raw"], logits.double())
    assert torch.equal(found["y"], logits.argmax(1).double())
    assert list(ClassColumns({"prediction": "only"})(logits)) == ["only"]


@pytest.mark.parametrize("shape", [(50,), (50, 1)])
def test_one_logit_per_row_is_that_of_the_second_class(shape):
    logit = torch.randn(shape)
    found = ClassColumns(ALL)(logit)
    torch.testing.assert_close(found["p"][:, 1], logit.reshape(-1).double().sigmoid())
    torch.testing.assert_close(found["p"].sum(1), torch.ones(50, dtype=torch.float64))
    assert torch.equal(found["y"], (logit.reshape(-1) > 0).double())


def test_probabilities_of_large_logits_are_finite():
    found = ClassColumns(ALL)(torch.tensor([1000.0, -1000.0]))
    assert torch.equal(found["p"], torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))


def test_the_prediction_of_a_row_with_nan_is_nan():
    for logits in (torch.tensor([[1.0, 2.0], [torch.nan, 1.0]]), torch.tensor([1.0, torch.nan])):
        found = ClassColumns(ALL)(logits)["y"]
        assert found[0] == 1.0
        assert found[1].isnan()


def test_the_column_of_a_regressor():
    for output in (
        torch.tensor([[1.5], [2.0]]),
        torch.tensor([1.5, 2.0]),
        {"prediction": torch.tensor([[1.5], [2.0]])},
    ):
        assert torch.equal(ValueColumn("y")(output)["y"], torch.tensor([1.5, 2.0], dtype=torch.float64))


@pytest.mark.parametrize(("predict", "output"), [
    (ValueColumn("y"), torch.zeros(3, 2)), (ValueColumn("y"), torch.zeros(3, 1, 1)), (ValueColumn("y"), {}),
    (ClassColumns(ALL), torch.zeros(3, 2, 2)), (ClassColumns(ALL), [torch.zeros(3, 2)] * 2),
    (ClassColumns(ALL), {"a": torch.zeros(3), "b": torch.zeros(3)}),
])  # fmt: skip
def test_outputs_of_other_shapes_are_refused(predict, output):
    with pytest.raises(ValueError, match=r"expected one output.*use TorchEstimator"):
        predict(output)


def test_a_second_axis_of_length_one_is_removed_and_no_other():
    batch = {"features": torch.randn(6, 4)}
    for outputs, shape in ((1, (6,)), (3, (6, 3))):
        spec = ModelSpec(build=lambda n=outputs: torch.nn.Linear(4, n))
        assert Squeezed(spec, ("features",))(spec.build(), batch).shape == shape
