"""The loss of a batch: by rows, and as a mean of the true rows."""

import pytest
import torch
from torch import nn

from spark_dl import Config, Data, ModelSpec, Train
from spark_dl.launch.failures.errors import is_retryable
from spark_dl.nn import MoE
from spark_dl.parallel.loss import count_of, element_weights, noting_counts, true_rows, weighted_loss_sum
from spark_dl.parallel.trainable import add_gradients
from spark_dl.training.finite import NotFiniteTrainingError

CONFIG = Config(data=Data(features=("x",)))


def mean_loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["label"]).square().mean()


def batch_of(weight, **columns):
    rows = len(weight)
    x = torch.arange(2.0 * rows).reshape(rows, 2)
    return {"x": x, "label": torch.ones(rows), "weight": torch.tensor(weight), **columns}


def gradient_of(spec, model, batch, config=CONFIG):
    model.zero_grad()
    output, total = weighted_loss_sum(spec, model, batch, config)
    total.backward()
    return output, total, model.weight.grad


@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
def test_a_mean_over_the_true_rows_has_the_sum_and_the_gradient_of_a_loss_by_rows(weight):
    model = nn.Linear(2, 1)
    by_rows = ModelSpec(build=nn.Identity, loss=lambda output, label: (output[:, 0] - label).square())
    by_batch = ModelSpec(build=nn.Identity, batch_loss=mean_loss)
    _, expected, expected_gradient = gradient_of(by_rows, model, batch_of(weight))
    output, total, gradient = gradient_of(by_batch, model, batch_of(weight))
    assert output is None
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_mean_is_computed_in_the_precision_of_the_settings():
    dtypes = []
    spec = ModelSpec(build=nn.Identity, batch_loss=lambda model, batch: dtypes.append(model(batch["x"]).dtype) or LOSS)
    _, total = weighted_loss_sum(spec, nn.Linear(2, 1), batch_of([1.0]), Config(train=Train(precision="bf16-mixed")))
    assert dtypes == [torch.bfloat16]
    assert total.dtype == torch.float32


@pytest.mark.parametrize("by_batch", [False, True])
def test_rows_of_weight_0_are_no_load_of_experts(by_batch):
    functions = {"batch_loss": mean_loss} if by_batch else {"loss": lambda output, label: output[:, 0] - label}
    model = MoE(2, 3, top_k=1)
    weighted_loss_sum(ModelSpec(build=nn.Identity, **functions), model, batch_of([0.0, 1.0, 2.0, 0.0]), CONFIG)
    assert model.take_counts()[:-1].sum() == 2


LOSS = torch.tensor(1.0, dtype=torch.bfloat16)


@pytest.mark.parametrize(("loss", "found"), [(torch.ones(2), r"shape \(2,\)"), (1.5, "float"), (None, "NoneType")])
def test_B27_a_mean_must_be_one_value(loss, found):
    spec = ModelSpec(build=nn.Identity, batch_loss=lambda model, batch: loss)
    with pytest.raises(ValueError, match=rf"spec\.batch_loss: expected the mean loss.*found {found}"):
        weighted_loss_sum(spec, nn.Identity(), batch_of([1.0, 1.0]), CONFIG)


def weighted(output, label):
    return (output - label[:, None]).square(), torch.tensor([[1.0, 2.0]]).expand_as(output)


def test_losses_with_weights_are_summed_and_say_what_their_mean_is_over():
    spec, batch = ModelSpec(build=nn.Identity, loss=weighted), batch_of([1.0, 0.5, 0.0])
    with noting_counts() as noted:
        output, total = weighted_loss_sum(spec, nn.Identity(), batch, CONFIG)
    losses = (output - 1).square() * torch.tensor([1.0, 2.0]) * torch.tensor([[1.0], [0.5], [0.0]])
    torch.testing.assert_close(total, losses.sum())
    assert noted.total().item() == 6
    with noting_counts(by_weight=True) as noted:
        weighted_loss_sum(spec, nn.Identity(), batch, CONFIG)
    assert noted.total().item() == 4.5


def test_a_loss_that_is_not_finite_where_its_weight_is_0_counts_nothing():
    x = torch.tensor([[0.0, 1.0]], requires_grad=True)
    spec = ModelSpec(build=nn.Identity, loss=lambda output, label: (1 / output, (output > 0).float()))
    _, total = weighted_loss_sum(spec, nn.Identity(), {**batch_of([1.0]), "x": x}, CONFIG)
    assert total.item() == 1


@pytest.mark.parametrize(("weight", "count"), [([1.0, 1.0, 1.0], 6.0), ([1.0, 0.0, 1.0], 4.0), ([0.0, 0.0], 0.0)])
def test_a_sum_with_its_count_is_of_the_true_rows(weight, count):
    spec = ModelSpec(
        build=nn.Identity, batch_loss=lambda model, batch: (model(batch["x"]).sum(), 2 * len(batch["label"]))
    )
    batch = batch_of(weight)
    with noting_counts() as noted:
        _, total = weighted_loss_sum(spec, nn.Identity(), batch, CONFIG)
    assert total.item() == (batch["x"] * (batch["weight"] > 0)[:, None]).sum()
    assert noted.total().item() == count


def test_a_row_that_is_there_twice_for_a_batchnorm_counts_once():
    spec = ModelSpec(build=nn.Identity, batch_loss=lambda model, batch: (batch["x"].sum(), len(batch["x"])))
    batch = batch_of([0.0, 1.0])
    with noting_counts() as noted:
        _, total = weighted_loss_sum(spec, nn.BatchNorm1d(2), batch, CONFIG)
    assert total.item() == batch["x"][1].sum()
    assert noted.total().item() == 1


@pytest.mark.parametrize(("loss", "message"), [
    (lambda output, label: (output, label), r"of one shape, \(2, \.\.\.\), found \[\(2, 2\) float32, \(2,\)"),
    (lambda output, label: (output, output, output), "two tensors of one shape"),
    (lambda output, label: (output.sum(), output.sum()), "two tensors of one shape"),
    (lambda output, label: (output, nn.Parameter(output)), r"expected weights without a gradient.*weights\.detach"),
])  # fmt: skip
def test_B27_losses_with_weights_that_do_not_fit_are_an_error(loss, message):
    with pytest.raises(ValueError, match=f"spec.loss: .*{message}"):
        weighted_loss_sum(ModelSpec(build=nn.Identity, loss=loss), nn.Identity(), batch_of([1.0, 1.0]), CONFIG)


@pytest.mark.parametrize(("returned", "message"), [
    ((torch.ones(2), 1), r"expected \(sum of losses, what their mean is over\), each with one value, found"),
    ((1.0, 1), ".*each with one value"),
    ((torch.ones(()), torch.ones((), requires_grad=True)), "expected the count without a gradient"),
])  # fmt: skip
def test_B27_a_sum_with_a_count_that_does_not_fit_is_an_error(returned, message):
    spec = ModelSpec(build=nn.Identity, batch_loss=lambda model, batch: returned)
    with pytest.raises(ValueError, match=f"spec.batch_loss: {message}"):
        weighted_loss_sum(spec, nn.Identity(), batch_of([1.0, 1.0]), CONFIG)


def test_B27_what_a_mean_is_over_is_said_once():
    spec = ModelSpec(build=nn.Identity, loss=weighted, count=lambda batch: 1)
    with pytest.raises(ValueError, match=r"spec\.loss: it returns weights, so spec\.count has no effect"):
        weighted_loss_sum(spec, nn.Identity(), batch_of([1.0, 1.0]), CONFIG)


def test_B27_a_class_that_the_output_does_not_have_is_named_with_its_column():
    batch = batch_of([1.0, 1.0], label=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match=r"column 'label' has values from 0 to 7 in this batch.*shape \(2, 3\)"):
        weighted_loss_sum(ModelSpec(build=nn.Identity), nn.Linear(2, 3), batch, CONFIG)


@pytest.mark.parametrize("counted", [torch.ones(3), "3", None])
def test_a_count_that_is_no_number_is_an_error(counted):
    spec = ModelSpec(build=nn.Identity, batch_loss=mean_loss, count=lambda batch: counted)
    with pytest.raises(
        ValueError, match=r"spec.count: expected one number for the batch, found (shape \(3,\)|str|None)"
    ):
        count_of(spec, batch_of([1.0, 1.0, 1.0]), CONFIG)


def test_a_count_gets_the_true_rows_and_is_0_without_any():
    spec = ModelSpec(build=nn.Identity, batch_loss=mean_loss, count=lambda batch: batch["x"].sum())
    assert count_of(spec, batch_of([1.0, 0.0, 2.0]), CONFIG).item() == 0 + 1 + 4 + 5
    assert count_of(spec, batch_of([1.0, 1.0]), CONFIG).item() == 0 + 1 + 2 + 3
    assert count_of(spec, batch_of([0.0, 0.0]), CONFIG).item() == 0


RAGGED = {"label": torch.tensor([[0, 1, 0], [2, 0, 0]]), "label_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()}


@pytest.mark.parametrize(("loss", "weights"), [
    (nn.CrossEntropyLoss(reduction="none"), [[1, 1, 0], [1, 0, 0]]),
    (nn.CrossEntropyLoss(torch.tensor([2.0, 3, 5]), reduction="none"), [[2, 3, 0], [5, 0, 0]]),
    (nn.CrossEntropyLoss(ignore_index=0, reduction="none"), [[0, 1, 0], [1, 0, 0]]),
    (nn.CrossEntropyLoss(torch.tensor([2.0, 3, 5]), ignore_index=1, reduction="none"), [[2, 0, 0], [5, 0, 0]]),
    (nn.MSELoss(reduction="none"), [[1, 1, 0], [1, 0, 0]]),
])  # fmt: skip
def test_the_mean_of_a_ragged_label_is_over_the_weights_of_its_values(loss, weights):
    spec, config = ModelSpec(build=nn.Identity, loss=loss), Config(data=Data(features=("x",), label="label"))
    batch = batch_of([1.0, 1.0], **RAGGED)
    assert element_weights(spec, batch, "label").tolist() == weights
    assert count_of(spec, batch, config).item() == sum(map(sum, weights))
    assert count_of(spec, {**batch, "weight": torch.tensor([0.0, 1.0])}, config).item() == sum(weights[1])


def test_a_transform_that_changes_a_ragged_label_alone_is_an_error():
    spec = ModelSpec(build=nn.Identity, loss="MSELoss")
    batch = batch_of([1.0, 1.0], **{**RAGGED, "label": RAGGED["label"][:, :2]})
    with pytest.raises(
        ValueError, match=r"spec.transform: the column 'label' has the shape \(2, 2\), and its mask .*3\)"
    ):
        element_weights(spec, batch, "label")


def test_one_loss_for_each_row_of_a_ragged_label_is_an_error():
    spec = ModelSpec(build=nn.Identity, forward=lambda model, batch: batch["label"].float(),
                     loss=lambda output, label: output.sum(1))  # fmt: skip
    config = Config(data=Data(features=("x",), label="label"))
    with pytest.raises(
        ValueError, match=r"'label' is ragged, so .* shape \(2, 3\), found shape \(2,\), in which padding"
    ):
        weighted_loss_sum(spec, nn.Identity(), batch_of([1.0, 1.0], **RAGGED), config)


def test_padding_is_left_out_of_every_column():
    found = true_rows(batch_of([1.0, 0.0, 1.0], word=torch.tensor([5, 6, 7])), nn.Identity())
    assert found["word"].tolist() == [5, 7]
    assert found["x"].tolist() == [[0, 1], [4, 5]]
    assert found["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        pytest.param(nn.BatchNorm1d(2), 2, id="training"),
        pytest.param(nn.BatchNorm1d(2).eval(), 1, id="evaluation"),
        pytest.param(nn.Linear(2, 2), 1, id="no BatchNorm"),
    ],
)
def test_B29_a_batchnorm_in_training_gets_its_only_row_twice(model, rows):
    found = true_rows(batch_of([0.0, 1.0]), nn.Sequential(model))
    assert found["x"].tolist() == [[2, 3]] * rows
    model(found["x"])


def test_a_column_that_has_no_rows_is_named():
    with pytest.raises(ValueError, match=r"one entry per row in the column 'offsets'.*found shape \(3,\)"):
        true_rows(batch_of([1.0, 0.0], offsets=torch.arange(3)), nn.Identity())


def test_a_loss_beside_a_mean_has_no_effect_and_is_an_error():
    with pytest.raises(ValueError, match=r"spec\.loss: has no effect with spec\.batch_loss"):
        ModelSpec(build=nn.Identity, loss="MSELoss", batch_loss=mean_loss)


class Raises(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


def gradients(model, x, **columns):
    batch = {"x": x, "label": torch.zeros(len(x), dtype=torch.int64), "weight": torch.ones(len(x)), **columns}
    config = Config(data=Data(features=("x", *columns)))
    spec = ModelSpec(build=nn.Identity)
    return add_gradients(spec, model, [batch], config, device=torch.device("cpu"), scale=lambda losses: losses)


@pytest.mark.parametrize(("model", "x", "text"), [
    (nn.Linear(4, 3), torch.ones(6, 3), "mat1 and mat2 shapes cannot be multiplied"),
    (nn.Linear(3, 3), torch.ones(6, 3, dtype=torch.int64), "must have the same dtype"),
    (nn.Conv2d(3, 3, 2), torch.ones(6, 8, 8, 3), "to have 3 channels"),
    (nn.BatchNorm1d(3), torch.ones(6, 3, 3, 3), "expected 2D or 3D input"),
    (nn.Embedding(5, 3), torch.full((6,), 5), "index out of range"),
    (nn.Embedding(5, 3), torch.ones(6), "scalar types"),
], ids=str)  # fmt: skip
def test_B27_a_batch_that_the_model_does_not_take_is_shown_with_its_columns(model, x, text):
    with pytest.raises(ValueError, match=rf"the model cannot be computed for a batch: .*{text}") as error:
        gradients(model, x)
    about = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    assert f"The batch has the columns 'x' {about}, 'label' (6,) int64, " in str(error.value)
    assert str(error.value.__cause__).rstrip(".") in str(error.value)
    assert "weight" not in str(error.value).partition("The batch has")[2]
    assert not is_retryable(error.value)


def test_B27_a_model_that_takes_fewer_features_is_shown_the_columns():
    with pytest.raises(ValueError, match=r"takes 2 positional arguments but 3 were given.* 'y' \(6, 2\) float32"):
        gradients(nn.Linear(3, 3), torch.ones(6, 3), y=torch.ones(6, 2))


def test_a_batch_that_fits_is_computed():
    assert gradients(nn.Linear(3, 3), torch.ones(6, 3)).isfinite()


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB, the size of the tensor"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory of this size"),
    torch.distributed.DistBackendError("NCCL error: the tensor size"), RuntimeError("no route to host"),
    RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer, size 4"),
    RuntimeError("CUDA error: an illegal memory access was encountered in a shape"),
    NotFiniteTrainingError("the loss of shape (3,)"), OSError("file size"),
], ids=str)  # fmt: skip
def test_errors_of_memory_devices_and_connections_stay_as_they_are(error):
    with pytest.raises(type(error)) as found:
        gradients(Raises(error), torch.ones(6, 3))
    assert found.value is error
