"""Synchronized BatchNorm on CPUs: the model trains as a single process would on the true rows of each global batch."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import DDP, Config, Launch, LocalSGD, ModelSpec
from spark_dl.launch.rank import rendezvous
from spark_dl.parallel.modules import CpuSyncBatchNorm, synchronize_batchnorm
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import make_run, train
from tests.ranks.test_local_sgd import validation_loss
from tests.ranks.test_parity import assert_same_training

LAUNCH = Launch(device="cpu", collective_timeout_s=20, start_timeout_s=20)


def build_normalized_mlp():
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8, bias=False),
        nn.BatchNorm1d(8, affine=False, momentum=None), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


NORMALIZED = ModelSpec(build=build_normalized_mlp)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(480, id="whole batches", marks=pytest.mark.slow),
        pytest.param(509, id="short last batch"),
        pytest.param(245, id="five true rows"),
    ],
)
def test_same_as_one_process(tmp_path, num_ranks, rows):
    """Weights, running means and variances; the rows that fill the last batch do not count."""
    config = small_config(num_ranks, parallel=DDP(sync_batchnorm=True))
    assert_same_training(tmp_path, config, rows, spec=NORMALIZED)


def test_B29_micro_batches_without_a_true_row_do_no_harm(tmp_path):
    """Three rows on two ranks, in five micro-batches: most of them have none, on no rank."""
    config = small_config(2, train={"accumulation_steps": 5}, parallel=DDP(sync_batchnorm=True))
    train(make_run(tmp_path, config, spec=NORMALIZED, rows=51))


SHAPES = {"rows": (12, 5), "series": (12, 5, 7), "images": (12, 5, 3, 4)}


def own_part(array, rank, ranks):
    return np.array_split(array, ranks)[rank]


def normalize(kind, dtype, true_rows):
    """Output, gradients and running statistics of this rank's part."""
    with rendezvous.join(LAUNCH) as world:
        rng = np.random.default_rng(0)
        x, target = (rng.normal(2, 3, size=SHAPES[kind]) for _ in range(2))
        weight = np.arange(len(x)) < true_rows
        part = [torch.from_numpy(own_part(a, world.rank, world.world_size).copy()) for a in (x, target, weight)]
        norm = CpuSyncBatchNorm.like(batchnorm(kind))
        norm.row_weight = part[2].float()
        own = part[0].to(getattr(torch, dtype)).requires_grad_()
        out = norm(own)
        loss = ((out.double() - part[1]).square().flatten(1).sum(1) * part[2]).sum()
        loss.backward()
        found = {"out": out, "grad": own.grad, "weight": norm.weight.grad, "bias": norm.bias.grad,
                 "mean": norm.running_mean, "variance": norm.running_var}  # fmt: skip
        return {name: value.detach().double().numpy() for name, value in found.items()}


def batchnorm(kind):
    norm = {"rows": nn.BatchNorm1d, "series": nn.BatchNorm1d, "images": nn.BatchNorm2d}[kind](5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 5))
        norm.bias.copy_(torch.linspace(-1, 1, 5))
    return norm


@pytest.mark.parametrize("true_rows", [12, 9, 3], ids=["all rows", "some rows", "rows of one rank"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", SHAPES)
def test_forward_and_backward_are_those_of_batchnorm_over_the_true_rows(kind, num_ranks, true_rows):
    found = run_ranks(normalize, num_ranks, kind, "float32", true_rows)
    rng = np.random.default_rng(0)
    x, target = (torch.from_numpy(rng.normal(2, 3, size=SHAPES[kind])[:true_rows]) for _ in range(2))
    norm = batchnorm(kind).double()
    x.requires_grad_()
    out = norm(x)
    (out - target).square().sum().backward()
    for name, expected in (("out", out), ("grad", x.grad)):
        got = np.concatenate([part[name] for part in found])
        np.testing.assert_allclose(got[:true_rows], expected.detach().numpy(), rtol=2e-4, atol=2e-4)
        assert name == "out" or not got[true_rows:].any()
    for name, expected in (("weight", norm.weight.grad), ("bias", norm.bias.grad)):
        np.testing.assert_allclose(sum(part[name] for part in found), expected.numpy(), rtol=1e-4, atol=1e-4)
    for part in found:
        np.testing.assert_allclose(part["mean"], norm.running_mean.numpy(), rtol=1e-5)
        np.testing.assert_allclose(part["variance"], norm.running_var.numpy(), rtol=1e-5)


def test_bfloat16_is_normalized_with_statistics_of_float32():
    exact = run_ranks(normalize, 2, "images", "float32", 12)
    for part, expected in zip(run_ranks(normalize, 2, "images", "bfloat16", 12), exact, strict=True):
        np.testing.assert_allclose(part["out"], expected["out"], atol=0.05)
        np.testing.assert_allclose(part["mean"], expected["mean"], atol=1e-2)


def test_the_weights_and_names_of_a_model_stay_as_they_were():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 5, 3), batchnorm("images")), nn.Flatten())
    parameters, state = list(model.parameters()), model.state_dict()
    _, changed = synchronize_batchnorm(ModelSpec(build=nn.Identity), model, Config(), torch.device("cpu"))
    assert [id(p) for p in changed.parameters()] == [id(p) for p in parameters]
    assert changed.state_dict().keys() == state.keys()
    assert isinstance(changed[0][1], CpuSyncBatchNorm)
    changed.eval()
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(changed(x), F.batch_norm(changed[0][0](x), torch.zeros(5), torch.ones(5),
                                                        model[0][1].weight, model[0][1].bias).flatten(1))  # fmt: skip


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(DDP(), id="ddp"),
        pytest.param(LocalSGD(sync_start_step=100), id="before local SGD starts"),
        pytest.param(LocalSGD(sync_start_step=5), id="as local SGD starts"),
        pytest.param(LocalSGD(sync_start_step=3), id="local SGD"),
    ],
)
def test_without_synchronization_ranks_validate_the_statistics_of_the_checkpoint(tmp_path, parallel):
    """Those of rank 0 where gradients are averaged, the mean where weights are: the ranks' own differ after a step."""
    config = small_config(3, train={"epochs": 1}, data={"validation_fraction": 0.2}, parallel=parallel)
    run = make_run(tmp_path, config, spec=NORMALIZED)
    saved = train(run)
    assert saved.step == 5
    (*_, last) = [line for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]
    loss = validation_loss(dataclasses.replace(run, checkpoint=saved.url))
    assert last["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
