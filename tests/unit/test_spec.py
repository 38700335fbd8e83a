"""A model and its loss, as the user gives them."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from spark_dl import Config, Data, ModelSpec, Sequences, Train, import_object
from spark_dl.parallel.loss import row_losses, weighted_loss_sum
from spark_dl.spec import build_loss, check_spec

OUTPUT, TARGET = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]]), torch.tensor([0, 0, 1])
PER_ROW = nn.functional.cross_entropy(OUTPUT, TARGET, reduction="none")


def build():
    return nn.Linear(2, 2)


def squared(output, label):
    return (output - label) ** 2


@pytest.mark.parametrize("loss", [
    "CrossEntropyLoss",
    nn.CrossEntropyLoss,
    nn.CrossEntropyLoss(reduction="none"),
    lambda output, label: nn.functional.cross_entropy(output, label, reduction="none"),
], ids=["name", "class", "instance", "function"])  # fmt: skip
def test_a_loss_by_name_class_instance_or_function_gives_one_value_per_row(loss):
    torch.testing.assert_close(build_loss(loss)(OUTPUT, TARGET), PER_ROW)


@pytest.mark.parametrize("name", ["MSELoss", "L1Loss", "BCEWithLogitsLoss", "HuberLoss", "NLLLoss", "KLDivLoss"])
def test_losses_of_torch_are_built_without_reduction(name):
    assert build_loss(name).reduction == "none"


def test_an_instance_of_a_module_without_reduction_is_taken_as_it_is():
    class Own(nn.Module):
        def forward(self, output, label):
            return squared(output, label)

    own = Own()
    assert build_loss(own) is own


def test_a_mean_is_built_without_reduction_and_the_instance_stays_as_it_is():
    given = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    built = build_loss(given)
    assert (given.reduction, built.reduction) == ("mean", "none")
    torch.testing.assert_close(built.weight, given.weight)


def test_batchmean_sums_the_values_of_a_row():
    log, target = torch.randn(3, 4).log_softmax(1), torch.randn(3, 4).softmax(1)
    built = build_loss(nn.KLDivLoss(reduction="batchmean"))
    torch.testing.assert_close(built(log, target).mean(), nn.KLDivLoss(reduction="batchmean")(log, target))


class Contrastive(nn.CrossEntropyLoss):
    """A loss of the user's own, whose reduction means what its author says."""


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.MSELoss(reduction="sum"), r"MSELoss with reduction='sum', whose gradient grows.*flatten\(1\)\.sum\(1\)"),
        (nn.CTCLoss(), "CTCLoss with reduction='mean' divides each row by its length"),
        (Contrastive(), "Contrastive with reduction='mean' reduces the rows to one value"),
    ],
)
def test_a_loss_whose_reduction_is_another_one_is_an_error_with_the_consequence(loss, message):
    with pytest.raises(ValueError, match=rf"^spec\.loss: .*{message}"):
        build_loss(loss)


def test_names_of_layers_are_a_list():
    with pytest.raises(ValueError, match=r"^spec.experts: expected a list of names or patterns, found 'moe'"):
        ModelSpec(build=build, experts="moe")


@pytest.mark.parametrize("name", ["CrossEntropy", "ReLU", "functional", "", "mse_loss", "Module"])
def test_an_unknown_loss_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(
        ValueError, match=rf"^spec\.loss: no loss '{name}' in torch.nn; (expected one of|did you mean) .*Loss"
    ):
        build_loss(name)


class NeedsMargin(nn.Module):
    def __init__(self, margin):
        super().__init__()


def test_a_class_of_a_loss_that_needs_arguments_is_an_error():
    with pytest.raises(ValueError, match=r"^spec.loss: cannot build NeedsMargin: .*'margin'; pass it built"):
        build_loss(NeedsMargin)


@pytest.mark.parametrize(("predicted", "message"), [
    (OUTPUT, "expected a dict of column names to tensors, .* found"), ({"y": [1.0]}, "expected a dict of column names"),
    ({1: OUTPUT}, "expected names of columns, found the key 1"),
])  # fmt: skip
def test_what_predict_returns_is_checked(predicted, message):
    spec = ModelSpec(build=build, predict=lambda output: predicted)
    with pytest.raises(ValueError, match=f"^spec.predict: {message}"):
        spec.predictions(OUTPUT)


@pytest.mark.parametrize("loss", [None, 3, torch.ones(2)])
def test_a_loss_that_cannot_be_called_is_an_error(loss):
    with pytest.raises(ValueError, match=r"^spec\.loss: expected a function"):
        build_loss(loss)


@pytest.mark.parametrize(("field", "value"), [
    ("build", None), ("build", "module:fn"), ("forward", 3), ("predict", "softmax"),
])  # fmt: skip
def test_what_is_not_a_function_is_an_error_that_names_the_field(field, value):
    with pytest.raises(ValueError, match=rf"^spec\.{field}: expected a function"):
        ModelSpec(**{"build": build, field: value})


def test_a_model_instead_of_its_function_is_an_error():
    with pytest.raises(ValueError, match=r"^spec\.build: .*found the model itself"):
        ModelSpec(build=nn.Linear(1, 1))


def batch_of(rows=3, **columns):
    return {"label": TARGET[:rows], "weight": torch.ones(rows), **columns}


def test_row_losses_are_one_value_per_row():
    torch.testing.assert_close(row_losses(ModelSpec(build=build), OUTPUT, batch_of(), "label")[0], PER_ROW)


@pytest.mark.parametrize("shape", [(3, 1), (3, 4), (3, 2, 5)])
def test_further_axes_are_averaged(shape):
    losses = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    spec = ModelSpec(build=build, loss=lambda output, label: losses)
    torch.testing.assert_close(row_losses(spec, OUTPUT, batch_of(), "label")[0], losses.reshape(3, -1).mean(1))


def test_without_a_label_the_loss_reads_the_whole_batch():
    spec = ModelSpec(build=build, loss=lambda output, batch: batch["a"] * batch["b"])
    batch = batch_of(a=torch.tensor([1.0, 2.0, 3.0]), b=torch.tensor([2.0, 2.0, 2.0]))
    assert row_losses(spec, OUTPUT, batch, None)[0].tolist() == [2, 4, 6]


@pytest.mark.parametrize(("losses", "found"), [
    (torch.tensor(1.0), r"shape \(\)"), (torch.ones(1), r"shape \(1,\)"), (torch.ones(4), r"shape \(4,\)"),
    (torch.ones(2, 3), r"shape \(2, 3\)"), (1.5, "float"), (None, "NoneType"),
])  # fmt: skip
def test_B27_a_loss_of_another_shape_is_an_error_that_says_what_was_found(losses, found):
    spec = ModelSpec(build=build, loss=lambda output, label: losses)
    with pytest.raises(ValueError, match=rf"^spec\.loss: .*shape \(3,\), found {found}"):
        row_losses(spec, OUTPUT, batch_of(), "label")


@pytest.mark.parametrize(("loss", "output", "label", "cause"), [
    ("MSELoss", (3, 5), (3,), "The size of tensor a (5) must match the size of tensor b (3) at non-singleton .* 1"),
    ("BCEWithLogitsLoss", (3, 1), (3,), "Target size (torch.Size([3])) must be the same as input size .*"),
    ("CrossEntropyLoss", (3, 5), (3, 1), "0D or 1D target tensor expected, multi-target not supported"),
    ("CrossEntropyLoss", (3, 5, 2), (3,), "Expected target size [3, 2], got [3]"),
    ("CrossEntropyLoss", (3,), (3,), "Expected floating point type for target with class probabilities, got Long"),
])  # fmt: skip
def test_B27_an_output_that_does_not_fit_the_label_is_shown_with_both_shapes(loss, output, label, cause):
    dtype = torch.int64 if loss == "CrossEntropyLoss" else torch.float32
    batch = {"label": torch.zeros(label, dtype=dtype), "weight": torch.ones(3)}
    kind = str(dtype).removeprefix("torch.")
    expected = (
        f"spec.loss: {cause}. The model's output is {output} float32, and the column 'label' is {label} {kind}; change "
        "the last layer of the model, spec.loss, or the column (data.cast, spec.transform)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected).replace(re.escape('.*'), '.*')}$"):
        row_losses(ModelSpec(build=build, loss=loss), torch.zeros(output), batch, "label")


@pytest.mark.parametrize("loss", ["MSELoss", "L1Loss", "HuberLoss", lambda output, label: (output - label).square()])
@pytest.mark.parametrize(("output", "label"), [((3, 1), (3,)), ((3,), (3, 1))])
def test_B27_an_output_is_not_compared_with_the_labels_of_other_rows(loss, output, label):
    """Torch only warns, broadcasts both to [3, 3], and the training would go on with a wrong loss."""
    batch = {"label": torch.zeros(label), "weight": torch.ones(3)}
    shapes = f"the model's output has the shape {output}, and the column 'label' the shape {label}"
    with pytest.raises(ValueError, match=f"^spec.loss: {re.escape(shapes)}, so that .* expected the same shape"):
        row_losses(ModelSpec(build=build, loss=loss), torch.zeros(output), batch, "label")
    same = {"label": torch.zeros(output), "weight": torch.ones(3)}
    assert row_losses(ModelSpec(build=build, loss=loss), torch.ones(output), same, "label")[0].shape == (3,)


@pytest.mark.parametrize("loss", ["MSELoss", "L1Loss", "HuberLoss", "PoissonNLLLoss",
                                  nn.MSELoss(reduction="none"), lambda a, b: (a - b).abs()])  # fmt: skip
@pytest.mark.parametrize(("output", "label"), [((4, 1), (4, 3)), ((4,), (4, 4)), ((4, 1, 2), (4, 5, 2))])
def test_B27_an_output_is_not_repeated_for_several_labels(loss, output, label):
    """The losses have the label's shape: several horizons, or a window of labels as long as the batch has rows."""
    batch = {"label": torch.zeros(label), "weight": torch.ones(4)}
    shapes = f"the model's output has the shape {output}, and the column 'label' the shape {label}"
    with pytest.raises(ValueError, match=f"^spec.loss: {re.escape(shapes)}, so that torch repeats values"):
        row_losses(ModelSpec(build=build, loss=loss), torch.zeros(output), batch, "label")


def test_a_label_is_repeated_by_a_function_of_the_user_alone():
    batch = {"label": torch.zeros(4, 1), "weight": torch.ones(4)}
    spec = ModelSpec(build=build, loss=lambda output, label: (output - label).abs())
    assert row_losses(spec, torch.ones(4, 3), batch, "label")[0].tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="so that torch repeats values"):
        row_losses(ModelSpec(build=build, loss="L1Loss"), torch.ones(4, 3), batch, "label")


def test_labels_with_offsets_have_a_value_for_each_value_of_a_row():
    batch = {"label": torch.zeros(9), "label_offsets": torch.arange(5), "weight": torch.ones(4)}
    with pytest.raises(ValueError, match=r"found shape \(9,\); the column 'label' has all values .*set loader.ragged"):
        row_losses(ModelSpec(build=build, loss="MSELoss"), torch.zeros(9), batch, "label")


def test_B27_an_error_of_the_loss_about_something_else_stays_as_it_is():
    def fail(output, label):
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="^no such file$"):
        row_losses(ModelSpec(build=build, loss=fail), OUTPUT, batch_of(), "label")


def test_B27_a_scalar_is_no_loss_of_a_batch_of_one_row():
    spec = ModelSpec(build=build, loss=lambda output, label: squared(output, label).sum())
    with pytest.raises(ValueError, match=r"expected one value per row, shape \(1,\), found shape \(\)"):
        row_losses(spec, OUTPUT[:1], batch_of(1), "label")


def test_rows_of_weight_0_add_nothing_to_the_sum():
    spec = ModelSpec(build=build, forward=lambda model, batch: batch["x"], loss=lambda output, label: output[:, 0])
    config = Config(data=Data(features=("x",)))
    batch = batch_of(x=torch.tensor([[1.0], [10.0], [100.0]]), weight=torch.tensor([1.0, 0.0, 1.0]))
    output, total = weighted_loss_sum(spec, nn.Identity(), batch, config)
    assert output is batch["x"]
    assert total.item() == 101
    assert total.dtype == torch.float32


def test_the_model_is_called_with_the_features_in_their_order():
    class Pair(nn.Module):
        def forward(self, first, second):
            return first - second

    batch = {"a": torch.tensor([5.0]), "b": torch.tensor([3.0]), "weight": torch.ones(1)}
    spec = ModelSpec(build=build)
    assert spec.output(Pair(), batch, ("a", "b")).item() == 2
    assert spec.output(Pair(), batch, ("b", "a")).item() == -2


@pytest.mark.parametrize("sequences", [None, Sequences(length=3)], ids=["rows", "windows"])
def test_features_are_assembled_to_one_tensor_in_their_order(sequences):
    config = Config(data=Data(features=("a", "v", "m"), label=None, assemble="float32"), sequences=sequences)
    assert config.data.cast == {"a": "float32", "v": "float32", "m": "float32"}
    lead = (5,) if sequences is None else (5, 3)
    batch = {"a": torch.randn(lead), "v": torch.randn(*lead, 2), "m": torch.randn(*lead, 2, 2), "b": torch.randn(lead)}
    spec = ModelSpec(build=build)
    found = spec.output(nn.Identity(), batch, config.inputs)
    assert found.shape == (*lead, 7)
    assert torch.equal(found[..., 0], batch["a"])
    assert torch.equal(found[..., 1:3], batch["v"])
    assert torch.equal(found[..., 3:].reshape(*lead, 2, 2), batch["m"])
    empty = spec.output(nn.Identity(), {name: cells[:0] for name, cells in batch.items()}, config.inputs)
    assert empty.shape == (0, *lead[1:], 7)
    assert Config(data=Data(**dataclasses.asdict(config.data))).data == config.data


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_precision_is_that_of_the_forward_pass_and_sums_stay_float32(precision, dtype):
    config = Config(data=Data(features=("x",)), train=Train(precision=precision))
    batch = batch_of(x=torch.ones(3, 2))
    output, total = weighted_loss_sum(ModelSpec(build=build), build(), batch, config)
    assert output.dtype == dtype
    assert total.dtype == torch.float32


# Objects by name


def test_an_object_of_a_module():
    assert import_object("torch.nn:Linear", "model.build") is nn.Linear


def test_an_object_of_a_file_is_loaded_once_and_again_when_the_file_was_edited(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text("VALUE = object()\n")
    before = import_object(f"{path}:VALUE", "model.build")
    assert import_object(f"{path}:VALUE", "model.build") is before
    path.write_text("VALUE = 1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            import_object(f"{path}:VALUE", "model.build")
    path.write_text("VALUE = 'edited'\n")
    assert import_object(f"{path}:VALUE", "model.build") == "edited"


@pytest.mark.parametrize(("path", "message"), [
    ("", "expected 'package.module:name'"),
    ("torch.nn.Linear", "expected 'package.module:name'"),
    ("torch.nn:", "expected 'package.module:name'"),
    (":Linear", "expected 'package.module:name'"),
    ("no_such_package.x:y", "no module 'no_such_package'"),
    ("torch.nn:NoSuchClass", "torch.nn has no 'NoSuchClass'"),
    ("no_such_file.py:build", "no file 'no_such_file.py'"),
])  # fmt: skip
def test_what_cannot_be_found_is_an_error_that_names_the_key(path, message):
    with pytest.raises(ValueError, match=f"^model.forward: .*{message}"):
        import_object(path, "model.forward")


def test_a_name_that_a_file_lacks_is_an_error_that_names_the_key_and_the_file(tmp_path):
    (tmp_path / "empty_model.py").write_text("")
    with pytest.raises(ValueError, match=r"^model\.build: .*empty_model\.py has no 'build'"):
        import_object(f"{tmp_path}/empty_model.py:build", "model.build")


def test_a_loader_has_a_function_to_call_only_if_the_spec_has_one():
    batch = {"x": torch.ones(2), "weight": torch.ones(2)}
    assert ModelSpec(build=build).prepare_in_loader(augment_seed=3) is None
    transformed = ModelSpec(build=build, transform=lambda b: {"x": b["x"] * 2}).prepare_in_loader()
    assert transformed(batch, (0, 1))["x"].tolist() == [2.0, 2.0]
    augmenting = ModelSpec(build=build, augment=lambda b, g: {"x": b["x"] + torch.rand(2, generator=g)})
    assert augmenting.prepare_in_loader() is None  # in an evaluation nothing is augmented
    drawn = [augmenting.prepare_in_loader(3)(batch, (0, step))["x"].tolist() for step in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_metric_that_cannot_be_called_and_a_loss_with_parameters_are_errors():
    with pytest.raises(ValueError, match=r"spec.metrics\['top'\]: expected a function or a class of .*, found 3"):
        ModelSpec(build=build, metrics={"top": 3})
    with pytest.raises(ValueError, match=r"^spec.loss: PReLU has the parameter 'weight', which no optimizer"):
        check_spec(ModelSpec(build=build, loss=nn.PReLU()))
    with pytest.raises(ValueError, match="^spec: expected a spark_dl.ModelSpec, found a Linear"):
        check_spec(nn.Linear(1, 1))


def test_weights_without_values_are_an_error():
    def on_meta():
        with torch.device("meta"):
            return nn.Linear(1, 1)

    with pytest.raises(ValueError, match=r"^spec.build: expected weights with values, found 'weight' on the"):
        ModelSpec(build=on_meta).build_to_train()


def test_an_output_that_has_no_names_needs_a_function_that_gives_them():
    spec = ModelSpec(build=build)
    assert [*spec.predictions([OUTPUT, OUTPUT])] == ["prediction_0", "prediction_1"]
    assert [*spec.predictions({"a": OUTPUT, "b": "text"})] == ["a"]
    for output in (3, [OUTPUT, 3]):
        with pytest.raises(ValueError, match=r"^spec.predict: the model returns .*, expected a tensor, or"):
            spec.predictions(output)
