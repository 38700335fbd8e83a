"""`checkpoint.asynchronous`: the same checkpoints, written while training goes on; errors that are raised."""

import time

import pytest

from spark_dl import LocalSGD, Mesh, storage
from spark_dl.rundir import checkpoint, checkpoint_files
from spark_dl.rundir.metrics import read_metrics
from tests.builders.models import small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import assert_same_to_the_bit, make_run, resume, train, train_rank

SLOW_S = 0.5
TRAIN = {"epochs": 2, "optimizer": "Adam", "lr": 0.01}


def config(num_ranks, *, parallel=None, **settings):
    fields = {**TRAIN, "log_every": 1, "every_steps": 2, "keep": 100, "asynchronous": True, **settings}
    return small_config(num_ranks, train=fields, **({"parallel": parallel} if parallel else {}))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_checkpoints_are_those_that_training_waits_for(tmp_path, num_ranks):
    waits = make_run(tmp_path, config(num_ranks, asynchronous=False), name="waits")
    goes_on = make_run(tmp_path, config(num_ranks), name="goes-on")
    train(waits), train(goes_on)
    found = [checkpoint.list_checkpoints(run.run_dir) for run in (waits, goes_on)]
    assert [saved.step for saved in found[0]] == [saved.step for saved in found[1]]
    assert len(found[0]) > 3
    for saved, again in zip(*found, strict=True):
        assert_same_to_the_bit(saved, again)
    lines = [line for line in read_metrics(goes_on.run_dir) if line["kind"] == "checkpoint"]
    assert [line["step"] for line in lines] == [saved.step for saved in found[1]]
    assert [line["url"] for line in lines] == [saved.url for saved in found[1]]
    assert all(line["background_s"] > 0 for line in lines)
    again = resume(goes_on, found[1][1])
    assert_same_to_the_bit(again, found[0][-1])


def train_with_slow_disk(run):
    write = checkpoint_files.write

    def slow(*args):
        time.sleep(SLOW_S)
        return write(*args)

    checkpoint_files.write = slow
    try:
        return train_rank(run)
    finally:
        checkpoint_files.write = write


@pytest.mark.slow
def test_steps_are_taken_while_a_checkpoint_is_written(tmp_path):
    run = make_run(tmp_path, config(2))
    run_ranks(train_with_slow_disk, 2, run)
    lines = read_metrics(run.run_dir)
    first = next(line for line in lines if line["kind"] == "checkpoint")
    assert first["seconds"] < SLOW_S < first["background_s"]
    before = lines[: lines.index(first)]
    assert max(line["step"] for line in before if line["kind"] == "step") > first["step"]


@pytest.mark.parametrize("victim", ["rank-00001.pt", "MANIFEST.json"])
def test_an_error_in_the_background_is_raised_and_the_checkpoint_before_is_whole(tmp_path, victim):
    run = make_run(tmp_path, config(2))
    blocked = storage.join(checkpoint.folder(run.run_dir), "step-00000004.gen-0000", victim)
    storage.write_bytes(f"{blocked}/in-the-way", b"x")
    with pytest.raises(RankFailed, match=rf"checkpoint at step 4 not saved: .*{victim}"):
        train(run)
    assert checkpoint.last_valid(run.run_dir).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [Mesh(zero_stage=1), LocalSGD(sync_every_steps=2)], ids=["zero", "local_sgd"])
def test_other_strategies_save_in_the_background(tmp_path, parallel):
    waits = make_run(tmp_path, config(2, parallel=parallel, asynchronous=False), name="waits")
    goes_on = make_run(tmp_path, config(2, parallel=parallel), name="goes-on")
    one, other = train(waits), train(goes_on)
    if isinstance(parallel, LocalSGD):
        assert_same_to_the_bit(one, other)
    else:  # the tensors of each rank
        names = [name for name in one.manifest["files"] if name != "training.pt"]
        assert len(names) == 6
        assert all(one.manifest["files"][name] == other.manifest["files"][name] for name in names)
