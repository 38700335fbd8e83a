"""`train.on_nonfinite`: all ranks leave out the same update, and nothing else of the run changes."""

import dataclasses
import math
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spark_dl import Checkpoint, ModelSpec
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from spark_dl.training import finite
from tests.builders.models import blobs, build_never_finite, same_bits, small_config
from tests.builders.reference import reference
from tests.builders.row_places import rows_named
from tests.builders.settings import parallel as make_parallel
from tests.faults import BuildGated, Gate, assert_last_good, place_of_row, row_of
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import flat_tensors, make_run, rank_states, train_rank
from tests.ranks.test_experts import build_biased
from tests.ranks.test_not_finite import errors_of
from tests.unit.rundir.test_signing import flip_in_weights

STEPS, ROWS, EVERY = 6, 288, 2
BAD_STEP = 4
EXACT = {"optimizer_args": {"momentum": 0.9, "nesterov": True}, "clip_grad_norm": 0.3, "accumulation_steps": 2}
MESHES = {
    "zero1": {"zero_stage": 1}, "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}, "pipeline": {"pipeline": 2},
}  # fmt: skip
STRATEGIES = {
    "ddp": {},
    "ddp static_graph": {"static_graph": True},
    "ddp ring": {"all_reduce": "ring"},
    "horovod": {"strategy": "horovod"},
    "single": {"strategy": "single"},
    "mesh": {"strategy": "mesh"},
    **{name: {"strategy": "mesh", **mesh} for name, mesh in MESHES.items()},
}
INEXACT = {
    "ddp bf16": {"compression": "bf16"},
    "local_sgd": {"strategy": "local_sgd", "sync_every_steps": 5},
    "post-local sgd": {"strategy": "local_sgd", "sync_every_steps": 2, "sync_start_step": 2},
}

QUICK = ("ddp", "zero3", "local_sgd")


def config_of(parallel, num_ranks=2, **train):
    if parallel.get("strategy") == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    train = {"epochs": 1, "log_every": 100, **EXACT, **train}
    saves = Checkpoint(every_steps=EVERY, keep=9)
    num_ranks = 1 if parallel.get("strategy") == "single" else num_ranks
    return small_config(num_ranks, train, parallel=make_parallel(**parallel), checkpoint=saves)


def run_of(tmp_path, config, *, steps=(BAD_STEP,), **build):
    """A run with bad rows on the last of its data ranks, in some steps."""
    run = make_run(tmp_path, config, rows=ROWS)
    rows = tuple(row_of(run, config.data_size - 1, step - 1, config.data_size) for step in steps)
    return dataclasses.replace(run, spec=ModelSpec(build=BuildGated(rows, **build)))


def with_policy(run, policy, name):
    config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, on_nonfinite=policy))
    return dataclasses.replace(run, config=config, run_dir=f"{run.run_dir}-{name}")


def train(run):
    """The result, which all ranks have, and the last checkpoint."""
    results = run_ranks(train_rank, run.config.launch.num_ranks, run)
    for result in results:
        assert {**result, "rows_per_s": 0, "seconds": 0} == {**results[0], "rows_per_s": 0, "seconds": 0}
    return results[0], checkpoint.latest(run.run_dir)


def lines_of(run, kind):
    return [line for line in read_metrics(run.run_dir) if line["kind"] == kind]


def assert_counted(result, *, rollbacks=0):
    rows = ROWS // STEPS
    assert (result["steps"], result["skipped_steps"], result["skipped_rows"]) == (STEPS, 1, rows)
    assert (result["rows"], result["rollbacks"]) == (ROWS - rows, rollbacks)


def assert_reference(run, saved):
    """The weights are those of one process that leaves out the step, in a plain loop."""
    groups = tuple(n for s in run.train.shards for n in s.row_groups)
    losses, weights = reference(blobs(ROWS), run.config, groups, BuildGated(), left_out={BAD_STEP})
    trained = load_weights(saved)
    for name, expected in weights.items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-6)
    (epoch,) = lines_of(run, "epoch")
    assert epoch["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*STRATEGIES, *INEXACT)],
)
def test_F22_skip_and_rollback_leave_out_one_update_and_nothing_else(tmp_path, name):
    """They do so in different ways: before the update, and from a checkpoint, without computing the step."""
    run = run_of(tmp_path, config_of({**STRATEGIES, **INEXACT}[name]))
    skips, goes_back = (with_policy(run, policy, policy) for policy in ("skip", "rollback"))
    (result, saved), (again, saved_again) = train(skips), train(goes_back)
    assert_counted(result)
    assert_counted(again, rollbacks=1)
    assert same_bits(load_weights(saved), load_weights(saved_again))
    if name in STRATEGIES:
        assert_reference(skips, saved)
    (line,), (back,) = lines_of(skips, "skip"), lines_of(goes_back, "rollback")
    rank = run.config.launch.num_ranks - 1 if name not in ("zero3", "pipeline") else 0  # which sum, or pass on, at once
    for found in (line, back):
        assert (found["bad_rank"], found["bad_step"]) == (rank, BAD_STEP)
        assert re.fullmatch(r"the gradient of '\d\.\w+'", found["what"])
        if rank:  # the one whose batch has the row
            assert place_of_row(run, run.spec.build.rows[0]) in rows_named(found["bad_rows"])
    assert (line["step"], line["rows"], line["in_a_row"]) == (BAD_STEP, ROWS // STEPS, 1)
    assert back["step"] == back["bad_step"] - EVERY
    for policy in (skips, goes_back):
        steps = [line["step"] for line in lines_of(policy, "step")]
        assert steps == sorted({*steps})
        if STRATEGIES.get(name, {}).get("strategy") != "mesh":
            assert_last_good(policy, STEPS)


@pytest.mark.parametrize(
    "compression", ["powersgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("threshold", "topk"))]
)
def test_F22_rollback_restores_what_was_not_sent_yet(tmp_path, compression):
    config = config_of({"compression": compression, "compression_start_step": 1}, on_nonfinite="rollback")
    run = run_of(tmp_path, dataclasses.replace(config, checkpoint=Checkpoint(every_steps=1, keep=9)))
    result, _ = train(run)
    assert_counted(result, rollbacks=1)
    before, left_out, after = checkpoint.list_checkpoints(run.run_dir)[BAD_STEP - 2 : BAD_STEP + 1]
    states = [flat_tensors(dict(enumerate(rank_states(saved)))) for saved in (before, left_out, after)]
    assert any("residuals" in name for name in states[0])
    assert all(same(value, states[1][name]) for name, value in states[0].items())
    assert not all(same(value, states[2][name]) for name, value in states[0].items())
    assert_last_good(run, STEPS)


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    "parallel",
    [{}, *(pytest.param(p, marks=pytest.mark.slow) for p in ({"sync_batchnorm": True}, {"strategy": "local_sgd"}))],
    ids=str,
)
def test_F22_a_left_out_step_does_not_change_the_statistics_of_batchnorm(tmp_path, parallel):
    run = run_of(tmp_path, config_of(parallel), where="output", norm=True)
    (result, saved), (_, again) = (train(with_policy(run, policy, policy)) for policy in ("skip", "rollback"))
    assert_counted(result)
    assert same_bits(load_weights(saved), load_weights(again))
    assert any("running_mean" in name for name in load_weights(saved))
    assert lines_of(with_policy(run, "skip", "skip"), "skip")[0]["what"] == "the loss"


@dataclasses.dataclass(frozen=True)
class ChangeCheckpoint:
    """`ModelSpec.set_position`: rank 0 changes the last checkpoint, with its checksums, before the bad step."""

    run_dir: str
    change: object

    def __call__(self, model, position):
        if position.global_step + 1 == BAD_STEP and dist.get_rank() == 0:
            end = time.monotonic() + 20
            while (saved := checkpoint.latest(self.run_dir)) is None and time.monotonic() < end:
                time.sleep(0.01)
            self.change(saved.url)


def leave(url):
    """The healthy twin of a change."""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waits", "asynchronous"])
@pytest.mark.parametrize("change", [leave, flip_in_weights])
def test_S04_a_rollback_does_not_load_a_checkpoint_that_was_changed_since_it_was_saved(tmp_path, change, asynchronous):
    config = config_of({}, on_nonfinite="rollback")
    saving = dataclasses.replace(config.checkpoint, asynchronous=asynchronous)
    run = run_of(tmp_path, dataclasses.replace(config, checkpoint=saving))
    spec = dataclasses.replace(run.spec, set_position=ChangeCheckpoint(run.run_dir, change))
    run = dataclasses.replace(run, spec=spec)
    if change is leave:
        assert_counted(train(run)[0], rollbacks=1)
        return
    for error in errors_of(run):
        assert re.search(r"MANIFEST\.json has changed since this run checked or saved it \(found the SHA-256 ", error)
    assert not lines_of(run, "rollback")


@pytest.mark.parametrize("start", [0, 2])
def test_F22_local_sgd_averages_when_it_would_have_and_leaves_the_rows_out_of_the_shares(tmp_path, start):
    """With plain SGD and an average after every step, the weights are those of one process."""
    plain = {"optimizer_args": {}, "clip_grad_norm": None, "on_nonfinite": "skip"}
    every_step = {"strategy": "local_sgd", "sync_every_steps": 1, "sync_start_step": start}
    run = run_of(tmp_path, config_of(every_step, **plain))
    result, saved = train(run)
    assert_counted(result)
    assert_reference(run, saved)
    # Weights are compared after step 6, where they are the same only if that is when they are averaged.
    config = config_of({**every_step, "sync_every_steps": 2}, check_replicas_every=2, **plain)
    result, _ = train(run_of(tmp_path, dataclasses.replace(config, checkpoint=Checkpoint())))
    assert_counted(result)


@dataclasses.dataclass(frozen=True)
class BuildExperts:
    rows: tuple

    def __call__(self):
        return nn.Sequential(Gate(self.rows, math.nan, "gradient"), *build_biased())


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{}, {"strategy": "mesh", "experts": 2}], ids=str)
def test_F22_a_left_out_step_does_not_count_for_the_balance_of_experts(tmp_path, parallel):
    run = run_of(tmp_path, config_of(parallel))
    run = dataclasses.replace(run, spec=ModelSpec(build=BuildExperts(run.spec.build.rows)))
    (result, saved), (_, again) = (train(with_policy(run, policy, policy)) for policy in ("skip", "rollback"))
    assert_counted(result)
    assert same_bits(load_weights(saved), load_weights(again))


@pytest.mark.parametrize("factor", [math.nan, 1e9], ids=["own gradient", "sum"])
@pytest.mark.parametrize("name", ["ddp", pytest.param("horovod", marks=pytest.mark.slow)])
def test_F22_a_gradient_that_overflows_in_the_exchange_is_left_out(tmp_path, name, factor):
    run = run_of(tmp_path, config_of({**STRATEGIES[name], "compression": "fp16"}), factor=factor)
    run = with_policy(run, "skip", "skip")
    result, _ = train(run)
    assert_counted(result)
    (line,) = lines_of(run, "skip")
    assert line["what"].startswith("the gradient" if math.isnan(factor) else "the sum of the ranks' gradients")


def test_F22_with_fp16_a_loss_that_is_nan_is_left_out_and_the_scale_is_lowered(tmp_path):
    run = with_policy(run_of(tmp_path, config_of({}, precision="fp16-mixed"), where="output"), "skip", "skip")
    result, saved = train(run)
    assert_counted(result)
    assert checkpoint.load(saved, "training.pt")["extra"]["scaler"]["scale"] == 2**15


def test_F22_bf16_autocast(tmp_path):
    run = run_of(tmp_path, config_of({}, precision="bf16-mixed"))
    (result, saved), (_, again) = (train(with_policy(run, policy, policy)) for policy in ("skip", "rollback"))
    assert_counted(result)
    assert same_bits(load_weights(saved), load_weights(again))


def test_F22_too_many_steps_in_a_row_are_the_error(tmp_path):
    config = config_of({}, on_nonfinite="skip", max_nonfinite=2)
    run = dataclasses.replace(make_run(tmp_path, config, rows=ROWS), spec=ModelSpec(build=build_never_finite))
    for error in errors_of(run):
        assert re.search(r"the gradient of 'weight' is not finite .* on rank 0 in step 3 ", error), error
        assert "These are 3 steps in a row (train.max_nonfinite=2). " in error
    assert_last_good(run, 2)
    assert [line["in_a_row"] for line in lines_of(run, "skip")] == [1, 2]


@pytest.mark.parametrize(("step", "message"), [
    (1, r"There is no checkpoint to go back to \(train.on_nonfinite, checkpoint.every_steps\)\. Try a"),
    (3, r"gone back to this checkpoint 1 times \(train.max_nonfinite=1\)"),
])  # fmt: skip
def test_F22_a_rollback_that_does_not_help_is_the_error(tmp_path, step, message):
    errors = errors_of(
        run := run_of(tmp_path, config_of({}, on_nonfinite="rollback", max_nonfinite=1), steps=(step, 4))
    )
    assert all(re.search(message, error) for error in errors), errors
    assert_last_good(run, 0 if step == 1 else 2)


def test_F22_weights_that_overflow_are_undone_by_a_rollback_and_end_a_run_that_skips(tmp_path):
    leap = {"scheduler": "StepLR", "scheduler_args": {"step_size": BAD_STEP - 1, "gamma": 1e6}}
    config = config_of({}, clip_grad_norm=None, scheduler_interval="step", **leap)
    run = run_of(tmp_path, config, factor=1e38)
    result, _ = train(with_policy(run, "rollback", "rollback"))
    assert_counted(result, rollbacks=1)
    for error in errors_of(with_policy(run, "skip", "skip")):
        assert re.search(r"the weight '\d.\w+' is not finite", error)


def count_reductions(run):
    calls, reduce = 0, finite.sum_over_ranks

    def counted(tensor):
        nonlocal calls
        calls += 1
        reduce(tensor)

    finite.sum_over_ranks = counted
    try:
        return train_rank(run)["skipped_steps"], calls
    finally:
        finite.sum_over_ranks = reduce


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("policy", "reductions"), [("raise", 0), ("rollback", 0), ("skip", STEPS)])
def test_F22_a_healthy_run_has_the_same_bits_and_only_skip_reduces_in_each_step(tmp_path, policy, reductions):
    run = run_of(tmp_path, config_of({}), steps=())
    _, expected = train(run)
    run = with_policy(run, policy, policy)
    assert run_ranks(count_reductions, 2, run) == [(0, reductions)] * 2
    assert same_bits(load_weights(checkpoint.latest(run.run_dir)), load_weights(expected))
    assert not lines_of(run, "skip")
