"""SIGTERM to a rank of a training: all ranks save a checkpoint at the same step, and the rank ends by SIGTERM."""

import dataclasses
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from spark_dl import ModelSpec, storage
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, blobs, small_config
from tests.ranks.launcher import RankFailed, kill_ranks, run_ranks
from tests.ranks.runs import assert_same_to_the_bit, make_run, resume, train, train_rank

STEPS = 6
ENDED = "died with exit code -15"
LONG_S = 40


@pytest.fixture(autouse=True)
def spoiled_ranks():
    """Ranks that outlive another one have a process group that has failed."""
    yield
    kill_ranks()


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def sigterm_and_long_step():
    sigterm()
    time.sleep(LONG_S)


def sigterm_twice():
    sigterm()
    sigterm_and_long_step()


def long_step_while_others_wait():
    time.sleep(LONG_S)


def sigterm_in_a_collective():
    threading.Timer(0.5, sigterm).start()


def terminate_a_child():
    if not (pid := os.fork()):
        time.sleep(LONG_S)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


@dataclasses.dataclass(frozen=True)
class Faults:
    """`ModelSpec.set_position` that calls functions before a step, counted from 1, by rank."""

    step: int
    by_rank: dict

    def __call__(self, model, position):
        if position.global_step + 1 == self.step:
            self.by_rank.get(dist.get_rank(), lambda: None)()


def config(*, log_every=4, grace_s=25.0, max_steps=None, **settings):
    return small_config(
        2, train={"log_every": log_every, "max_steps": max_steps, "every_epochs": 100, **settings},
        launch={"preemption_grace_s": grace_s},
    )  # fmt: skip


def run_of(tmp_path, settings, *, step=0, name="run", **faults):
    """faults: rank_0, rank_1."""
    spec = DROPOUT_MLP
    if faults:
        by_rank = {int(rank[-1]): fault for rank, fault in faults.items()}
        spec = ModelSpec(build=DROPOUT_MLP.build, set_position=Faults(step, by_rank))
    url = str(tmp_path / "validation")
    validation = (
        read_shards(url) if storage.exists(url) else write_dataset(url, blobs(60, 1), group_rows=20, shard_rows=60)
    )
    return make_run(tmp_path, settings, spec=spec, name=name, validation=validation)


def fails(run, function=train_rank):
    """What the ranks ended with, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(RankFailed) as error:
        run_ranks(function, 2, run, wait_s=10)
    return str(error.value), time.monotonic() - start


def go_on(run):
    saved = checkpoint.last_valid(run.run_dir)
    return resume(dataclasses.replace(run, spec=DROPOUT_MLP), saved)


def lines_of(run):
    """The lines of steps and epochs, without times."""
    names = ("kind", "epoch", "step", "loss", "lr", "train_loss", "metrics")
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] in ("step", "epoch")]
    return [{name: line[name] for name in names if name in line} for line in lines]


def checkpoint_steps(run):
    return [line["step"] for line in read_metrics(run.run_dir) if line["kind"] == "checkpoint"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rank", "asynchronous", "step", "saved_in"), [
    pytest.param(0, False, 2, 4, marks=pytest.mark.slow), (1, True, 2, 4),
    pytest.param(1, False, STEPS - 1, STEPS, marks=pytest.mark.slow),
    pytest.param(0, True, 2 * STEPS, 2 * STEPS, marks=pytest.mark.slow),
], ids=["rank 0", "rank 1", "at the end of an epoch", "at the end of the run"])  # fmt: skip
def test_F10_all_ranks_save_at_the_next_log_line_and_no_step_is_done_twice(
    tmp_path, rank, asynchronous, step, saved_in
):
    whole = run_of(tmp_path, config(), name="whole")
    last = train(whole)
    run = run_of(tmp_path, config(asynchronous=asynchronous), step=step, **{f"rank_{rank}": sigterm})
    text, _ = fails(run)
    assert f"rank {rank}:\n{ENDED}" in text
    assert f"OtherRankError: rank {rank} on " in text
    assert f"was ended by SIGTERM; the last checkpoint is {checkpoint.latest(run.run_dir).url}" in text
    assert [saved.step for saved in checkpoint.list_checkpoints(run.run_dir)] == [saved_in] == checkpoint_steps(run)
    assert_same_to_the_bit(go_on(run), last)
    assert lines_of(run) == lines_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("every_steps", "saved_in"), [(4, 4), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_F10_a_step_that_has_just_been_saved_is_not_saved_again(tmp_path, every_steps, saved_in):
    run = run_of(tmp_path, config(every_steps=every_steps), step=2, rank_1=sigterm)
    text, _ = fails(run)
    assert f"rank 1:\n{ENDED}" in text
    assert checkpoint_steps(run) == [saved_in]


def test_F10_ranks_that_all_get_sigterm_all_end_by_it(tmp_path):
    run = run_of(tmp_path, config(), step=2, rank_0=sigterm, rank_1=sigterm)
    text, _ = fails(run)
    assert text.count(ENDED) == 2
    assert checkpoint.last_valid(run.run_dir).step == 4


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("grace_s", "faults"), [
    (1.0, {"rank_1": sigterm_and_long_step}),
    pytest.param(
        1.0, {"rank_0": sigterm_in_a_collective, "rank_1": long_step_while_others_wait}, marks=pytest.mark.slow
    ),
    pytest.param(30.0, {"rank_1": sigterm_twice}, marks=pytest.mark.slow),
    pytest.param(0.0, {"rank_1": sigterm_and_long_step}, marks=pytest.mark.slow),
], ids=["long step", "blocked in a collective", "second signal", "no grace"])  # fmt: skip
def test_F10_the_wait_for_a_checkpoint_is_bounded(tmp_path, grace_s, faults):
    run = run_of(tmp_path, config(grace_s=grace_s), step=2, **faults)
    text, seconds = fails(run)
    assert ENDED in text
    assert seconds < LONG_S / 2
    assert checkpoint.list_checkpoints(run.run_dir) == []


def train_and_get_sigterm(run):
    steps = train_rank(run)["steps"]
    if os.environ["RANK"] == "1":
        sigterm()
    return steps


def test_F10_a_run_that_is_over_ends_as_usual_and_sigterm_ends_the_process_again(tmp_path):
    run = run_of(tmp_path, config(max_steps=5), step=5, rank_1=sigterm)
    assert run_ranks(train_rank, 2, run)[0]["steps"] == 5
    again = run_of(tmp_path, config(max_steps=5), name="again")
    text, _ = fails(again, train_and_get_sigterm)
    assert f"rank 1:\n{ENDED}" in text
    assert checkpoint.last_valid(again.run_dir).step == 5


def test_a_child_that_a_rank_terminates_is_not_the_rank(tmp_path):
    run = run_of(tmp_path, config(), step=2, rank_1=terminate_a_child)
    assert train(run).step == 2 * STEPS
    assert checkpoint_steps(run) == [2 * STEPS]


def train_with_own_handler(run):
    got = []
    before = signal.signal(signal.SIGTERM, lambda *about: got.append(about))
    try:
        return train_rank(run)["steps"], len(got)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_user_s_program_stays(tmp_path):
    run = run_of(tmp_path, config(), step=2, rank_1=sigterm)
    assert run_ranks(train_with_own_handler, 2, run) == [(2 * STEPS, 0), (2 * STEPS, 1)]
