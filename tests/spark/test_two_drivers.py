"""Two drivers on one run_dir: the newer attempt wins unharmed, and the older one is told so."""

import functools
import os
import threading
import time

import numpy as np
import pytest

import spark_dl
from spark_dl.rundir import checkpoint, generations
from tests.builders.models import MLP, blobs, small_config

pytestmark = pytest.mark.modes("local")
WAIT_S = 60


@pytest.fixture(scope="module")
def points(spark):
    rows = [(x.tolist(), int(y)) for x, y in zip(*blobs(300).values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(2).cache()


def in_threads(*drivers):
    """What each driver returned or raised."""
    found = [None] * len(drivers)

    def run(i):
        try:
            found[i] = drivers[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(drivers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    return found


def check_one_won(found, run_dir, points):
    (error,) = [f for f in found if isinstance(f, Exception)]
    (result,) = [f for f in found if not isinstance(f, Exception)]
    assert isinstance(error, RuntimeError), error
    assert "attempt 1" in str(error)
    assert "attempt 2 has started since" in str(error)
    assert {saved.generation for saved in checkpoint.list_checkpoints(run_dir)} == {2}
    assert spark_dl.read_shards(f"{run_dir}/shards/train").rows == points.count()
    assert spark_dl.evaluate(points, MLP, run_dir)["rows"] == points.count()
    assert np.isfinite(result.train_loss)


def test_F06_of_two_that_begin_at_once_one_wins(spark, points, tmp_path, monkeypatch):
    run_dir, config = str(tmp_path / "run"), small_config(1)
    read, both, seen = generations.read_generation, threading.Barrier(2), set()

    def read_together(run_dir):
        """Neither takes a number before both have read the newest one."""
        newest = read(run_dir)
        if threading.current_thread().name not in seen and len(seen) < 2:
            seen.add(threading.current_thread().name)
            both.wait(WAIT_S)
        return newest

    monkeypatch.setattr(generations, "read_generation", read_together)
    train = functools.partial(spark_dl.train, points, MLP, config, run_dir=run_dir, progress=False)
    check_one_won(in_threads(train, train), run_dir, points)


def _when_there(batches, path):
    end = time.monotonic() + WAIT_S
    while not os.path.exists(path) and time.monotonic() < end:
        time.sleep(0.05)
    yield from batches


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("let_go", ["before the newer one writes", "after it has trained"])
def test_F06_an_older_one_that_still_writes_shards_harms_nothing(spark, points, tmp_path, let_go):
    run_dir, config = str(tmp_path / "run"), small_config(1)
    started, sign = threading.Event(), tmp_path / "go on"
    slow = points.where("label = 0").mapInArrow(functools.partial(_when_there, path=str(sign)), points.schema)

    def older():
        started.set()
        return spark_dl.train(slow, MLP, config, run_dir=run_dir, progress=False)

    def newer():
        started.wait(WAIT_S)
        end = time.monotonic() + WAIT_S
        while not generations.read_generation(run_dir) and time.monotonic() < end:
            time.sleep(0.02)
        if let_go == "before the newer one writes":
            sign.touch()
        try:
            return spark_dl.train(points, MLP, config, run_dir=run_dir, progress=False)
        finally:
            sign.touch()

    check_one_won(in_threads(older, newer), run_dir, points)
