"""NaN and Inf stop every strategy before they are saved or returned, and the error names where they began."""

import dataclasses
import functools
import math
import os
import re

import pytest
import torch
from torch import nn

from spark_dl import Checkpoint, ModelSpec, loop, worker
from spark_dl.config import strategies
from spark_dl.launch.rank import rendezvous
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.training import finite
from tests.builders.models import build_mlp, build_never_finite, small_config
from tests.builders.row_places import rows_named
from tests.builders.settings import parallel as make_parallel
from tests.faults import assert_last_good, place_of_row, with_bad_row
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import assert_same_to_the_bit, make_run

BAD_RANK = 1
STEPS = 6
EVERY = 2
STRATEGIES = {
    "ddp": {},
    "ddp static_graph": {"static_graph": True},
    **{f"ddp {name}": {"all_reduce": name} for name in ("ring", "halving_doubling", "naive")},
    **{f"ddp {name}": {"compression": name} for name in ("fp16", "bf16", "powersgd", "threshold", "topk")},
    "horovod": {"strategy": "horovod"},
    "horovod fp16": {"strategy": "horovod", "compression": "fp16"},
    "local_sgd": {"strategy": "local_sgd", "sync_every_steps": 3},
    "post-local sgd": {"strategy": "local_sgd", "sync_every_steps": 3, "sync_start_step": 3},
}
ALONE = {"single": {"strategy": "single"}, "dp_single_process": {"strategy": "dp_single_process"}}
SERVERS = {
    mode: {"strategy": "parameter_server", "server_mode": mode, **({"server_k": 1} if "k_" in mode else {})}
    for mode in ("sync", "k_sync", "k_batch_sync", "async", "k_async", "k_batch_async")
}


def config_of(parallel, num_ranks, train=None):
    if parallel.get("strategy") == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    train = {"epochs": 1, "log_every": 100, "optimizer_args": {"momentum": 0.9}, **(train or {})}
    return small_config(
        num_ranks, train, parallel=make_parallel(**parallel), checkpoint=Checkpoint(every_steps=EVERY, keep=9)
    )


def run_with_bad_row(tmp_path, config, **where):
    return with_bad_row(make_run(tmp_path, config, rows=STEPS * 48), **where)


def error_of_rank(run):
    """The error of this rank, or None and the result."""
    try:
        return None, worker.main(run).result
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def errors_of(run):
    results = run_ranks(error_of_rank, run.config.launch.num_ranks, run)
    assert all(error for error, _ in results), results
    return [error for error, _ in results]


def assert_named(errors, run, *, rank, step, what, last):
    good = assert_last_good(run, last)
    for error in errors:
        assert re.search(rf"{what} is not finite \(NaN or Inf\) on rank {rank} in step {step} ", error), error
        assert f"(step {step} of epoch 0)" in error
        assert (f"the last good checkpoint is {good}. " if good else "no checkpoint has been saved") in error
        assert "train.lr" in error


def assert_rows_named(errors, run):
    """The row that made the gradient bad is among those that every rank names, with few others."""
    for error in errors:
        found = rows_named(error)
        assert place_of_row(run, run.spec.build.row) in found
        assert len(found) == len({*found}) == 48 // run.config.data_size


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "step", "last"),
    [
        *(pytest.param(name, STEPS, 4, id=f"{name}-last step") for name in STRATEGIES),
        *(pytest.param(name, 3, 2, id=f"{name}-middle") for name in ("ddp", "horovod", "local_sgd", "post-local sgd")),
        *(pytest.param(name, 4, 2, id=f"{name}-before a save") for name in ("ddp", "local_sgd")),
    ],
)
def test_F22_nan_in_a_gradient_of_one_rank_stops_all_and_names_that_rank(tmp_path, name, step, last):
    config = config_of(STRATEGIES[name], 2)
    run = run_with_bad_row(tmp_path, config, rank=BAD_RANK, step=step, num_trainers=2)
    errors = errors_of(run)
    assert_named(errors, run, rank=BAD_RANK, step=step, what="the gradient of 'net.0.weight'", last=last)
    assert_rows_named(errors, run)


def error_by_buckets(run, *, waits):
    """As `error_of_rank`, of a model with many parameters; waits: False as on a GPU, True as on a CPU."""
    few, finite._FEW_PARAMETERS = finite._FEW_PARAMETERS, 0
    loop.StepCheck = functools.partial(finite.StepCheck, waits=waits)
    try:
        return error_of_rank(run)
    finally:
        finite._FEW_PARAMETERS, loop.StepCheck = few, finite.StepCheck


@pytest.mark.sampled(5)
@pytest.mark.parametrize("waits", [True, False], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("name", [*STRATEGIES, "skip"])
def test_a_bucket_of_gradients_is_looked_at_before_it_is_sent(tmp_path, name, waits):
    train = {"on_nonfinite": "skip"} if name == "skip" else {}
    run = run_with_bad_row(
        tmp_path, config_of(STRATEGIES.get(name, {}), 2, train), rank=BAD_RANK, step=4, num_trainers=2
    )
    results = run_ranks(functools.partial(error_by_buckets, waits=waits), 2, run)
    if name == "skip":
        assert [result["skipped_steps"] for _, result in results] == [1, 1]
        return
    for error, _ in results:
        assert "the gradient of 'net.0.weight' is not finite (NaN or Inf) on rank 1 in step 4" in error


@pytest.mark.parametrize("factor", [math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["ddp", "ddp threshold", "ddp topk"])
def test_infinity_in_a_gradient_is_found_as_nan_is(tmp_path, name, factor):
    run = run_with_bad_row(tmp_path, config_of(STRATEGIES[name], 2), rank=0, step=4, num_trainers=2, factor=factor)
    assert_named(errors_of(run), run, rank=0, step=4, what="the gradient of 'net.0.weight'", last=2)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(("step", "last"), [(4, 2), (STEPS, 4)])
def test_a_rank_alone(tmp_path, name, step, last):
    run = run_with_bad_row(tmp_path, config_of(ALONE[name], 1), rank=0, step=step, num_trainers=1)
    errors = errors_of(run)
    assert_named(errors, run, rank=0, step=step, what="the gradient of 'net.0.weight'", last=last)
    assert_rows_named(errors, run)


@pytest.mark.parametrize(("step", "last"), [(3, 2), (4, 2), (STEPS, 4)])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_trainer_of_servers_fails_before_it_sends_nan(tmp_path, num_servers, step, last):
    config = config_of({**SERVERS["sync"], "num_servers": num_servers}, 2 + num_servers)
    run = run_with_bad_row(tmp_path, config, rank=BAD_RANK, step=step, num_trainers=2)
    errors = errors_of(run)
    assert_named(errors, run, rank=BAD_RANK, step=step, what="the gradient of 'net.0.weight'", last=last)
    assert_rows_named(errors, run)


@pytest.mark.parametrize("mode", [mode for mode in SERVERS if mode != "sync"])
def test_no_mode_of_the_servers_saves_or_returns_nan(tmp_path, mode):
    run = run_with_bad_row(tmp_path, config_of(SERVERS[mode], 3), rank=BAD_RANK, step=4, num_trainers=2)
    for error in errors_of(run):
        assert re.search(r"the gradient of 'net.0.weight' is not finite \(NaN or Inf\) on rank [01] in step \d+", error)
    saved = checkpoint.latest(run.run_dir)
    assert_last_good(run, saved.step if saved else 0)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_fails_before_it_sends_weights_that_overflowed(tmp_path, num_servers):
    config = config_of({**SERVERS["sync"], "num_servers": num_servers}, 2 + num_servers, {"lr": 1e4})
    run = run_with_bad_row(tmp_path, config, rank=0, step=1, num_trainers=2, factor=1e38)
    for error in errors_of(run):
        assert re.search(r"(the loss|the weight '\S+') is not finite .* on rank \d in step [123] \(step", error), error
    assert_last_good(run, 0)


# `threshold` sends the threshold, whatever the gradient, and fp16 less than 65504: the test after this one has it.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "max_steps"),
    [
        *((name, 1) for name in (*STRATEGIES, *ALONE) if not {"threshold", "fp16"} & {*name.split()}),
        *((name, None) for name in ("ddp", "local_sgd", "single")),
    ],
)
def test_weights_that_overflow_without_a_bad_gradient_are_not_returned(tmp_path, name, max_steps):
    alone = name in ALONE
    num_ranks = 1 if alone else 2
    config = config_of({**STRATEGIES, **ALONE}[name], num_ranks, {"lr": 1e4, "max_steps": max_steps})
    run = run_with_bad_row(tmp_path, config, rank=0, step=1, num_trainers=num_ranks, factor=1e38)
    errors = errors_of(run)
    assert_named(errors, run, rank=0, step=1, what=r"the weight 'net.\d.(weight|bias)'", last=0)


@pytest.mark.parametrize("strategy", ["ddp", "horovod"])
def test_a_gradient_that_overflows_in_the_exchange_is_found_in_the_weights(tmp_path, strategy):
    config = config_of({"strategy": strategy, "compression": "fp16"}, 2)
    run = run_with_bad_row(tmp_path, config, rank=1, step=STEPS, num_trainers=2, factor=1e9)
    errors = errors_of(run)
    assert_named(errors, run, rank=0, step=STEPS, what=r"the weight 'net.\d.(weight|bias)'", last=4)
    assert "parallel.compression" in errors[0]


def train_unchecked(run):
    with rendezvous.join(run.config.launch) as world:
        return loop.train(run, world, strategies.find(run.config.parallel.strategy).parallelize, check_steps=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["ddp ring", "ddp threshold", "local_sgd", "horovod"])
def test_a_healthy_run_is_silent_and_has_the_bits_of_one_that_is_not_checked(tmp_path, name):
    num_ranks = 2 if "horovod" in name else 3  # of three, Horovod's sums may have another order each time
    config = config_of(STRATEGIES[name], num_ranks, {"epochs": 2, "clip_grad_norm": 1.0})
    run = run_with_bad_row(tmp_path, config, rank=BAD_RANK, step=STEPS, num_trainers=num_ranks, factor=1.0)
    assert [error for error, _ in run_ranks(error_of_rank, num_ranks, run)] == [None] * num_ranks
    assert_last_good(run, 2 * STEPS)
    other = dataclasses.replace(run, run_dir=str(tmp_path / "unchecked"))
    run_ranks(train_unchecked, num_ranks, other)
    assert_same_to_the_bit(checkpoint.latest(run.run_dir), checkpoint.latest(other.run_dir))


def _bad_loss(output, label):
    losses = nn.functional.cross_entropy(output, label, reduction="none")
    return losses * math.nan if os.environ["RANK"] == "1" else losses


def test_a_loss_that_is_nan_names_its_rank(tmp_path):
    run = dataclasses.replace(make_run(tmp_path, config_of({}, 3)), spec=ModelSpec(build=build_mlp, loss=_bad_loss))
    assert_named(errors_of(run), run, rank=1, step=1, what="the loss", last=0)


def test_fp16_leaves_out_a_step_that_overflows_and_goes_on(tmp_path):
    run = run_with_bad_row(
        tmp_path, config_of({}, 2, {"precision": "fp16-mixed"}), rank=1, step=4, num_trainers=2, factor=math.inf
    )
    assert [error for error, _ in run_ranks(error_of_rank, 2, run)] == [None, None]
    assert_last_good(run, STEPS)
    scaler = checkpoint.load(checkpoint.latest(run.run_dir), "training.pt")["extra"]["scaler"]
    assert scaler["scale"] == 2**15  # half of what it began with: one step was left out
    assert scaler["_growth_tracker"] == 2


def test_fp16_does_not_leave_out_steps_for_ever(tmp_path):
    config = config_of({}, 2, {"precision": "fp16-mixed", "epochs": 9})
    run = dataclasses.replace(make_run(tmp_path, config), spec=ModelSpec(build=build_never_finite))
    assert all(error.startswith("NotFiniteTrainingError: train.precision: ") for error in errors_of(run))
    assert_last_good(run, checkpoint.latest(run.run_dir).step)


class NanBuffer(nn.Module):
    """A mask with infinities from the start, which is right, and a statistic that becomes NaN, which is not."""

    def __init__(self, bad_from):
        super().__init__()
        self.net, self.bad_from = build_mlp(), bad_from
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features):
        if self.training:
            self.seen += 1 if self.seen + 1 < self.bad_from else math.nan
        return self.net(features)


@dataclasses.dataclass(frozen=True)
class BuildBuffer:
    bad_from: float

    def __call__(self):
        return NanBuffer(self.bad_from)


@pytest.mark.parametrize("parallel", [{}, {"strategy": "local_sgd"}, {"strategy": "single"}], ids=str)
def test_buffers_that_become_nan_are_not_saved_and_a_mask_of_infinities_is(tmp_path, parallel):
    num_ranks = 1 if "single" in parallel.values() else 2
    run = make_run(tmp_path, config_of(parallel, num_ranks))
    run = dataclasses.replace(run, spec=ModelSpec(build=BuildBuffer(4)))
    for error in errors_of(run):
        assert re.search(
            r"^BadStateError: checkpoint at step 4 not saved: model.0.seen is not finite .* on rank 0; the last good",
            error,
        )
    saved = checkpoint.latest(run.run_dir)
    assert saved.step == 2
    healthy = dataclasses.replace(run, spec=ModelSpec(build=BuildBuffer(99)), run_dir=str(tmp_path / "healthy"))
    assert all(error is None for error, _ in run_ranks(error_of_rank, num_ranks, healthy))
    assert checkpoint.latest(healthy.run_dir).step == STEPS


def test_a_run_begins_with_finite_weights(tmp_path):
    run = make_run(tmp_path, config_of({}, 2))
    errors = errors_of(dataclasses.replace(run, spec=ModelSpec(build=build_with_nan)))
    assert all("spec.build: the parameter '0.bias' is not finite" in error for error in errors)


def build_with_nan():
    model = build_mlp()
    nn.init.constant_(model[0].bias, math.nan)
    return model


def test_early_stopping_never_takes_nan_for_the_best(tmp_path):
    """The validation loss of the first epoch is NaN, and from then on it gets better."""
    early = {"early_stop_metric": "loss", "early_stop_patience": 2, "epochs": 6}
    config = small_config(2, train=early, data={"validation_fraction": 0.2})
    run = make_run(tmp_path, config, spec=ModelSpec(build=NanAtFirst))
    results = run_ranks(error_of_rank, 2, run)
    assert [error for error, _ in results] == [None, None]
    losses = [entry["metrics"]["loss"] for entry in results[0][1]["history"]]
    assert math.isnan(losses[0])
    assert sorted(losses[1:], reverse=True) == losses[1:]
    assert (results[0][1]["epochs"], results[0][1]["stopped_early"]) == (6, False)
    assert len([line for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]) == 6


class NanAtFirst(nn.Module):
    """Its output is NaN in the first evaluation."""

    def __init__(self):
        super().__init__()
        self.net, self.evaluations = build_mlp(), 0

    def train(self, mode=True):
        self.evaluations += not mode
        return super().train(mode)

    def forward(self, features):
        return self.net(features) * (math.nan if not self.training and self.evaluations == 1 else 1.0)


def takes_no_nan(output, target):
    """As BCELoss, which raises for what is not between 0 and 1."""
    if not torch.isfinite(output).all():
        raise ValueError("all elements of input should be between 0 and 1")
    return nn.functional.cross_entropy(output, target, reduction="none")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nan_is_named_in_the_step_where_it_arose_and_not_by_the_next_forward_pass(tmp_path, num_ranks):
    config = small_config(num_ranks, {"epochs": 1, "log_every": 100, "lr": 1e38, "optimizer": "SGD"})
    run = make_run(tmp_path, config)
    run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, loss=takes_no_nan))
    errors = errors_of(run)
    named = [error for error in errors if error.startswith("NotFiniteTrainingError: ")]
    assert named, errors
    for error in named:
        assert re.search(r"(the loss|the weight '\S+') is not finite .* on rank \d in step [123] \(step", error), error
        assert "Its rows in that step: " in error
