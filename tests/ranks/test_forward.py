"""Functions of a `ModelSpec` get the model itself, and may call parts of it: every rank still learns from all rows."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import ModelSpec, worker
from spark_dl.launch.rank.environment import restored_process
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from tests.builders import reference
from tests.builders.models import small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import make_run


class Parts(nn.Module):
    """A model that is only used by its parts, as many pretrained ones are."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, features):
        return self.head(self.body(features)) * self.scale


def by_parts(model, batch):
    assert type(model) is Parts
    return model.head(model.body(batch["features"])) * model.scale


def loss_by_parts(model, batch):
    return F.cross_entropy(by_parts(model, batch), batch["label"])


BY_PARTS = ModelSpec(build=Parts, forward=by_parts)
LOSS_BY_PARTS = ModelSpec(build=Parts, batch_loss=loss_by_parts)
STRATEGIES = {
    "ddp": {},
    "sync_batchnorm": {"sync_batchnorm": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "horovod": {"strategy": "horovod"},
    "mesh": {"strategy": "mesh"},
    "zero1": {"strategy": "mesh", "zero_stage": 1},
    "zero2": {"strategy": "mesh", "zero_stage": 2},
    "zero3": {"strategy": "mesh", "zero_stage": 3},
}


def train_rank(run):
    with restored_process():
        return worker.main(run).result


@pytest.mark.parametrize("spec", [BY_PARTS, LOSS_BY_PARTS], ids=["forward", "batch_loss"])
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("ddp", 3),
        ("zero3", 2),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in STRATEGIES if name not in ("ddp", "zero3")),
    ],
)
def test_parts_of_a_model_train_as_in_one_process(tmp_path, name, num_ranks, spec):
    if name == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    config = small_config(
        num_ranks, parallel=parallel(**STRATEGIES[name]), train={"accumulation_steps": 2, "validation_fraction": 0.0}
    )
    train = lambda run: run_ranks(train_rank, num_ranks, run)[0]  # noqa: E731
    reference.assert_same_training(train, tmp_path, config, 245, spec=spec)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_forward_function_with_other_settings(tmp_path, compiled):
    """Validation and resume use the same functions."""
    config = small_config(2, train={"validation_fraction": 0.2, "compile": compiled, "epochs": 1})
    result = run_validated(tmp_path, config, BY_PARTS, "parts")
    plain = run_validated(tmp_path, small_config(1, train={"validation_fraction": 0.2, "epochs": 1}), WHOLE, "whole")
    np.testing.assert_allclose(result["metrics"]["loss"], plain["metrics"]["loss"], rtol=1e-5)
    weights, expected = (load_weights(checkpoint.find(r["checkpoint"])) for r in (result, plain))
    for key in expected:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-5, atol=1e-6)


WHOLE = ModelSpec(build=Parts)


def run_validated(tmp_path, config, spec, name):
    run = make_run(tmp_path, config, spec=spec, name=name)
    return run_ranks(train_rank, config.launch.num_ranks, run, timeout_s=120)[0]
