"""What a Python worker keeps between tasks: any task gets the rows of its step, whatever the worker did before."""

import dataclasses
import random
import threading

import pytest
import torch

from spark_dl import ModelSpec
from spark_dl.baselines.driver_loop import rank_task
from spark_dl.baselines.driver_loop.rank_task import CallData, Step, _Kept
from spark_dl.data.load.build import build_train_loader
from spark_dl.launch.code import payload
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, build_mlp
from tests.builders.settings import make_config

NUM_RANKS = 6


@pytest.fixture
def run(tmp_path):
    shards = write_dataset(str(tmp_path / "data"), blobs(1000), group_rows=50)
    config = make_config(
        global_batch_size=12, accumulation_steps=2, num_streams=6, shuffle_window_rows=300, num_ranks=NUM_RANKS
    )
    return Run(spec=ModelSpec(build=build_mlp), config=config, train=shards, run_dir=str(tmp_path / "run"))


@pytest.fixture
def kept(run):
    kept = _Kept(CallData("attempt", payload.pack_call(None, (run,), {}), []))
    yield kept
    kept.close()
    assert not any(t.name.startswith("spark_dl") for t in threading.enumerate())


def step_at(epoch, step):
    return Step(epoch=epoch, step=step, global_step=0, rows=1, scale=1.0, weights=[])


def batches_of(run, rank, epoch):
    loader = build_train_loader(run.train, run.spec, run.config, rank=rank, world_size=NUM_RANKS)
    return [batches.micro_batches for batches in loader.epoch(epoch)]


def same(a, b):
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


def test_every_place_in_any_order(run, kept):
    """On, in gaps small and large, back, at the ends of epochs, of more ranks than loaders are kept for."""
    expected = {(rank, epoch): batches_of(run, rank, epoch) for rank in range(NUM_RANKS) for epoch in range(2)}
    num_steps = len(expected[0, 0])
    assert num_steps == 84 > rank_task._MAX_STEPS_PASSED_BY
    rng = random.Random(0)
    places = [(rank, epoch, step) for rank in (0, 1) for epoch in (0, 1) for step in (0, 1, 2, 5, 80, 83, 83, 4)]
    places += [(rng.randrange(NUM_RANKS), rng.randrange(2), rng.randrange(num_steps)) for _ in range(60)]
    for rank, epoch, step in places:
        assert same(kept.batches(rank, step_at(epoch, step)), expected[rank, epoch][step]), (rank, epoch, step)
        assert len(kept._loaders) <= rank_task._MAX_LOADERS


def test_steps_that_follow_each_other_come_from_one_reading(run, kept):
    threads = set()
    for step in range(20):
        kept.batches(0, step_at(0, 3 * step))
        threads |= {t for t in threading.enumerate() if t.name == "spark_dl loader"}
    assert len(threads) == 1


def test_the_last_step_of_an_epoch_leaves_no_thread(run, kept):
    kept.batches(0, step_at(0, 82))
    kept.batches(0, step_at(0, 83))
    assert not any(t.name.startswith("spark_dl") for t in threading.enumerate())


@pytest.fixture
def attempt_of(run):
    """An attempt whose steps may take so many seconds; what is kept of it goes after the test."""

    def build(collective_timeout_s):
        launch = dataclasses.replace(run.config.launch, collective_timeout_s=collective_timeout_s)
        of_time = dataclasses.replace(run, config=dataclasses.replace(run.config, launch=launch))
        return CallData(f"attempt of {collective_timeout_s} s", payload.pack_call(None, (of_time,), {}), [])

    yield build
    for timer in rank_task._TIMERS:
        timer.cancel()
        timer.join()
    rank_task._close_idle()


def test_what_is_kept_stays_for_as_long_as_a_step_may_take(attempt_of):
    attempt = attempt_of(400.0)
    with rank_task._kept(attempt) as kept:
        pass
    assert [timer.interval for timer in rank_task._TIMERS] == [400.0]
    with rank_task._kept(attempt) as kept_for_the_next_task:
        assert kept_for_the_next_task is kept
        assert rank_task._TIMERS == []  # no time runs while a task does


def test_what_no_task_uses_for_longer_goes(attempt_of):
    with rank_task._kept(attempt_of(0.2)) as kept:
        kept.batches(0, step_at(0, 0))
        assert any(t.name == "spark_dl loader" for t in threading.enumerate())
    (timer,) = rank_task._TIMERS
    timer.join(timeout=20)
    assert rank_task._KEPT == {}
    assert not any(t.name.startswith("spark_dl") for t in threading.enumerate())


def test_other_versions_than_the_driver_s_are_refused(run):
    attempt = CallData("attempt", payload.pack_call(None, (run,), {}), [], (("torch", "1.0"), ("spark_dl", "0.0")))
    with pytest.raises(RuntimeError, match=r"the driver has {'torch': '1.0', 'spark_dl': '0.0'}, this executor {"):
        _Kept(attempt)
