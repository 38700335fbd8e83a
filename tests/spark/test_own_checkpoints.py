"""Checkpoints of a function of the user's own: ranks that are killed go on from the last one, to the same bits."""

import os
import pathlib
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import spark_dl
from spark_dl import Launch, RankError
from spark_dl.rundir import checkpoint, saving
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs

STEPS = 6
QUICK = Launch(num_ranks=2, restart_wait_s=0.1, device="cpu")


def train(folder, fault_at=None, steps=STEPS, stop=False):
    """Trains a model with noise in each step; one rank is killed once, in the step `fault_at`. Returns its steps."""
    checkpoints = spark_dl.open_checkpoints(keep=2)
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done, seen = 0, []
    if (saved := checkpoints.load()) is not None:
        model.load_state_dict(saved.state["model"])
        optimizer.load_state_dict(saved.state["optimizer"])
        assert saved.of_rank is None or saved.of_rank["rank"] == dist.get_rank()
        done = saved.step
    for step in range(done + 1, steps + 1):
        seen.append(step)
        if step == fault_at and dist.get_rank() == 1 and not (fault := pathlib.Path(folder, "fault")).exists():
            fault.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 3)).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(state, step=step, of_rank={"rank": dist.get_rank()})
    dist.destroy_process_group()
    if stop:
        raise ValueError("stop")
    return {"steps": seen, "weight": model.weight.detach().flatten().tolist()}


def launch(spark, folder, *args, settings=QUICK, **options):
    folder.mkdir(exist_ok=True)
    return spark_dl.launch(train, str(folder), *args, settings=settings, run_dir=folder / "run", spark=spark, **options)


def test_ranks_that_are_killed_go_on_from_their_last_checkpoint_to_the_same_bits(spark, tmp_path):
    whole = launch(spark, tmp_path / "whole")
    assert [rank["steps"] for rank in whole] == [list(range(1, STEPS + 1))] * 2
    again = launch(spark, tmp_path / "again", 4)
    assert [rank["steps"] for rank in again] == [[4, 5, 6]] * 2
    assert [rank["weight"] for rank in again] == [rank["weight"] for rank in whole]
    kept = checkpoint.list_checkpoints(str(tmp_path / "again" / "run"))
    assert [(saved.step, saved.generation) for saved in kept] == [(3, 1), (5, 2), (6, 2)]


@pytest.mark.modes("local")
@pytest.mark.slow
def test_a_later_call_resumes_with_another_number_of_ranks_too(spark, tmp_path):
    with pytest.raises(RankError, match="stop") as caught:
        launch(spark, tmp_path, None, 3, True)
    assert "(step 3). resume=True / --resume with the run_dir" in caught.value.advice
    with pytest.raises(ValueError, match="already has checkpoints .* set resume to continue"):
        launch(spark, tmp_path)
    one = Launch(num_ranks=1, restart_wait_s=0.1, device="cpu")
    (rank,) = launch(spark, tmp_path, resume=True, settings=one)
    assert rank["steps"] == [4, 5, 6]
    assert launch(spark, tmp_path, overwrite=True)[0]["steps"] == list(range(1, STEPS + 1))


def first_step(lock=None):
    """Returns the step of the checkpoint that the rank goes on from, and saves one."""
    checkpoints = spark_dl.open_checkpoints()
    saved = checkpoints.load()
    checkpoints.save({"w": 1.0}, step=9)
    return saved.step if saved else None


@pytest.mark.modes("local")
def test_overwrite_deletes_the_checkpoints_when_the_call_can_start_and_nothing_else(spark, tmp_path):
    run_dir, generation = str(tmp_path / "run"), checkpoint.start_generation(str(tmp_path / "run"))
    state = saving.contents(0, model={"w": torch.zeros(1)}, training={}, of_rank={})
    about = saving.About(world_size=1, generation=generation, step=3, config=spark_dl.Config(), columns=())
    saving.save(run_dir, state, about, gather=lambda value: [value])
    for name in ("shards/train", "shards/evaluate-00000000"):
        write_dataset(f"{run_dir}/{name}", blobs(8))
    theirs = sorted(pathlib.Path(run_dir, "shards").rglob("*"))

    def call(*args, num_ranks=1, env=None):
        return spark_dl.launch(
            first_step, *args, num_ranks=num_ranks, env=env, run_dir=run_dir, overwrite=True, spark=spark
        )

    with pytest.raises(ValueError, match="lock"):
        call(threading.Lock())
    with pytest.raises(RuntimeError, match="99 ranks need 99 task slots"):
        call(num_ranks=99)
    with pytest.raises(ValueError, match="env: RANK is set by spark_dl"):
        call(env={"RANK": "3"})
    assert [saved.step for saved in checkpoint.list_checkpoints(run_dir)] == [3]
    assert call() == [None]
    assert [saved.step for saved in checkpoint.list_checkpoints(run_dir)] == [9]
    assert sorted(pathlib.Path(run_dir, "shards").rglob("*")) == theirs


def save_other_things():
    spark_dl.open_checkpoints().save({"model": object()}, step=1)


def save_without_group():
    spark_dl.open_checkpoints().save({}, step=1)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_what_cannot_be_saved_is_an_error_that_says_why(spark, tmp_path):
    run = {"run_dir": str(tmp_path / "run"), "spark": spark, "resume": True}
    with pytest.raises(RankError, match=r"save: state\['model'\]: found a builtins.object"):
        spark_dl.launch(save_other_things, num_ranks=1, **run)
    with pytest.raises(RankError, match=r"call torch.distributed.init_process_group\(\) before the first one is saved"):
        spark_dl.launch(save_without_group, num_ranks=2, settings=Launch(max_restarts=0), **run)
    with pytest.raises(RankError, match="open_checkpoints: found no run folder; pass run_dir to spark_dl.launch"):
        spark_dl.launch(save_without_group, num_ranks=1, spark=spark)
    with pytest.raises(ValueError, match="resume: expected a run_dir with it, found none"):
        spark_dl.launch(save_without_group, num_ranks=1, resume=True, spark=spark)


def save_on_one_rank(folder):
    """Only rank 0 calls a collective operation. Leaves a file per attempt."""
    checkpoints = spark_dl.open_checkpoints()
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 0:
        pathlib.Path(folder, os.environ["TORCHELASTIC_RESTART_COUNT"]).touch()
        checkpoints.save({}, step=1)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B31_a_collective_operation_of_one_rank_alone_is_not_retried(spark, tmp_path, caplog):
    with pytest.raises(RankError, match=r"rank 1 on .* had returned from the function before, without an") as caught:
        spark_dl.launch(save_on_one_rank, str(tmp_path), settings=QUICK, run_dir=tmp_path / "run", spark=spark)
    assert not caught.value.is_retryable
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "run"]
    assert "keep failing" not in caplog.text + str(caught.value)
    assert "take it out" not in str(caught.value)
