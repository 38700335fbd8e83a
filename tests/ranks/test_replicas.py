"""`train.check_replicas_every`: a rank whose weights drift from those of the others ends the run, with its name."""

import dataclasses
import os
import re

import pytest
import torch
from torch import nn

from spark_dl import Checkpoint, ModelSpec
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from tests.builders.models import build_dropout_mlp, same_bits, small_config
from tests.builders.settings import parallel as make_parallel
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import cut_at, make_run
from tests.ranks.test_nonfinite_policy import run_of as run_with_bad_row
from tests.ranks.test_not_finite import error_of_rank

DRIFT_STEP, EVERY, STEPS = 5, 3, 12
ADAM = {"optimizer": "Adam", "optimizer_args": {}, "lr": 0.01}
DATA_PARALLEL = {
    "ddp": {},
    "ddp naive": {"all_reduce": "naive"},
    "ddp halving_doubling": {"all_reduce": "halving_doubling"},
    "ddp tree": {"all_reduce": "tree"},
    "ddp topk": {"compression": "topk"},
    "ddp threshold": {"compression": "threshold"},
    "ddp powersgd": {"compression": "powersgd"},
    "ddp fp16": {"compression": "fp16"},
    "horovod": {"strategy": "horovod"},
    "local_sgd": {"strategy": "local_sgd", "sync_every_steps": 3},
    "post-local sgd": {"strategy": "local_sgd", "sync_every_steps": 3, "sync_start_step": 3},
    "mesh": {"strategy": "mesh"},
    "zero1": {"strategy": "mesh", "zero_stage": 1},
    "zero2": {"strategy": "mesh", "zero_stage": 2},
}
CUT = {  # of four ranks
    "zero3 replicas": {"zero_stage": 3, "replicas": 2},
    "zero1 replicas": {"zero_stage": 1, "replicas": 2},
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": 2},
    "tensor zero3": {"tensor": 2, "zero_stage": 3},
    "tensor 4": {"tensor": 4},
}
QUICK = ("ddp", "tensor")
KEPT = [name for name in DATA_PARALLEL if name.startswith(("ddp", "horovod", "mesh"))]
"""With the others, ranks exchange their weights, so that a change does not stay that of one rank."""


def drift(model, position):
    """Called before each step: changes an element of a weight, on the rank that the environment names."""
    if position.global_step == DRIFT_STEP - 1 and os.environ["RANK"] == os.environ.get("DRIFTS"):
        with torch.no_grad():
            bias = dict(model.named_parameters()).get("2.bias")
            local = getattr(bias, "_local_tensor", bias)
            if local is not None and local.numel():
                local.view(-1)[0] += 2**-12  # the next number could be rounded to the same one in later steps


def build():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def config_of(parallel, num_ranks, every=EVERY, **train):
    if parallel.get("strategy") == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    train = {**ADAM, "epochs": 9, "log_every": 100, "check_replicas_every": every, **train}
    saves = Checkpoint(every_steps=STEPS, keep=9)
    return cut_at(small_config(num_ranks, train, parallel=make_parallel(**parallel), checkpoint=saves), STEPS)


def errors_with_drift(run, rank):
    return [error for error, _ in run_ranks(error_with_drift, run.config.launch.num_ranks, run, rank)]


def error_with_drift(run, rank):
    os.environ["DRIFTS"] = str(rank)
    try:
        return error_of_rank(run)
    finally:
        del os.environ["DRIFTS"]


def run_of(tmp_path, config, *, name="run", build=build):
    return make_run(tmp_path, config, spec=ModelSpec(build=build, set_position=drift), name=name)


def cases(names, mark=pytest.mark.slow):
    return [name if name in QUICK else pytest.param(name, marks=mark) for name in names]


@pytest.mark.parametrize("name", cases(KEPT))
def test_F23_a_rank_whose_weight_changes_is_named_with_step_and_parameter(tmp_path, name):
    run = run_of(tmp_path, config_of(DATA_PARALLEL[name], 3))
    for rank, error in enumerate(errors_with_drift(run, rank=1)):
        assert error.startswith("ReplicaDriftError: " if rank == 1 else "RuntimeError: rank 1 on ")
        assert re.search(
            r"replicas of the model differ after step 6: rank 1 on \S+ has other bits of '2.bias' than ranks 0, 2\. "
            r"\d+ tensor\(s\) differ, which were the same in step 3\.", error
        ), error  # fmt: skip
    assert checkpoint.latest(run.run_dir) is None


@pytest.mark.parametrize("name", cases([*DATA_PARALLEL, *CUT], pytest.mark.long))
def test_F23_a_healthy_run_is_silent_and_has_the_same_bits(tmp_path, name):
    parallel = {"strategy": "mesh", **CUT[name]} if name in CUT else DATA_PARALLEL[name]
    num_ranks = 4 if name in CUT else 2 if name == "horovod" else 3
    trained = []
    for every in (EVERY, 0):
        config = config_of(parallel, num_ranks, every, accumulation_steps=2)
        run = run_of(tmp_path, config, name=f"every-{every}")
        assert errors_with_drift(run, rank=None) == [None] * num_ranks
        trained.append(load_weights(checkpoint.latest(run.run_dir)))
    assert same_bits(*trained)


@pytest.mark.parametrize(("name", "expected"), [
    ("zero3 replicas", "rank 1 on HOST and rank 3 on HOST have different bits of '2.bias', and which"),
    ("pipeline", "rank 2 on HOST and rank 3 on HOST have different bits of '2.bias', and which"),
    ("tensor", "rank 3 on HOST has other bits of '2.bias' than ranks 0, 1, 2"),  # the bias is not cut
])  # fmt: skip
def test_F23_in_a_mesh_the_ranks_with_the_same_part_are_compared(tmp_path, name, expected):
    run = run_of(tmp_path, config_of({"strategy": "mesh", **CUT[name]}, 4, accumulation_steps=2))
    for error in errors_with_drift(run, rank=3):
        assert "differ after step 6: " in error
        assert re.search(re.escape(expected).replace("HOST", r"\S+"), error), error


@pytest.mark.parametrize("every", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_F23_nothing_that_differs_is_saved(tmp_path, every):
    """Also if the comparison is not due: each checkpoint is compared before it is committed."""
    config = config_of({}, 3, every=every)
    run = run_of(tmp_path, dataclasses.replace(config, checkpoint=Checkpoint(every_steps=2)))
    errors = errors_with_drift(run, rank=2)
    for error in errors:
        assert "differ after step 6: rank 2" in error
        assert "which were the same in step 4" in error
        assert f"the last checkpoint is {checkpoint.latest(run.run_dir).url}" in error
    assert checkpoint.latest(run.run_dir).step == 4


class Noisy(torch.optim.SGD):
    """Adds noise to the weights, as Langevin dynamics does: other noise on each rank."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def build_noisy(model):
    return Noisy(model.parameters(), lr=0.1)


def build_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_noise_in_the_optimizer_is_named_before_anything_is_saved(tmp_path):
    spec = ModelSpec(build=build, optimizer=build_noisy)
    run = make_run(tmp_path, cut_at(small_config(2), 4), spec=spec)
    for error in errors_with_drift(run, rank=None):
        assert "the replicas of the model differ after step 4" in error
    assert checkpoint.latest(run.run_dir) is None


def unfreeze(model, position):
    """Trains the first layer from the third step on."""
    model[0].requires_grad_(position.global_step >= 2)


def freeze(model, position):
    model[0].requires_grad_(position.global_step < 2)


@pytest.mark.parametrize(("function", "step", "word"), [(unfreeze, 1, "frozen"), (freeze, 3, "frozen")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_that_is_not_trained_as_it_was_built_is_named(tmp_path, num_ranks, function, step, word):
    spec = ModelSpec(build=build, set_position=function, optimizer=build_sgd)
    run = make_run(tmp_path, cut_at(small_config(num_ranks), 6), spec=spec)
    for error in errors_with_drift(run, rank=None):
        assert f"requires_grad has changed before step {step}: '0.weight' ({word}), '0.bias' ({word})." in error


@pytest.mark.parametrize("parallel", [{}, {"sync_batchnorm": True}], ids=str)
def test_F23_statistics_of_batchnorm_are_no_drift(tmp_path, parallel):
    run = run_of(tmp_path, config_of(parallel, 3, every=1), build=build_dropout_mlp)
    assert errors_with_drift(run, rank=None) == [None] * 3


def test_F23_weights_that_are_nan_are_not_called_drift(tmp_path):
    """A NaN can have other bits on each rank, and its own error says more."""
    config = config_of({}, 2, every=1)
    run = run_with_bad_row(tmp_path, config, steps=(4,))
    assert all("is not finite" in error for error in errors_with_drift(run, rank=None))
