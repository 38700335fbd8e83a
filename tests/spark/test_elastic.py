"""Runs with a range of ranks on real clusters: fewer slots than ranks, and workers that join while it runs."""

import contextlib
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pyspark
import pytest
import torch

import spark_dl
from spark_dl import driver
from spark_dl.launch import preflight, supervise
from spark_dl.rundir import checkpoint
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, build_mlp, small_config
from tests.spark.conftest import REPOSITORY

START_S = 90


def weights(result):
    return checkpoint.load(checkpoint.find(result.checkpoint), "model.pt")["0"]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_fewer_slots_than_ranks_train_the_same_weights_with_fewer_ranks(spark, tmp_path):
    data, joined = write_dataset(str(tmp_path / "data"), blobs(245), group_rows=40, shard_rows=120), []
    results = []
    for num_ranks, fewest in ((4, None), (6, 2)):  # the session has 4 slots
        config = small_config(num_ranks, launch={"min_ranks": fewest})
        events = []
        run_dir = str(tmp_path / f"run-{num_ranks}")
        results.append(spark_dl.train(data, MLP, config, run_dir=run_dir, on_event=events.append, spark=spark))
        joined.append({event["rank"] for event in events if event["kind"] == "joined"})
    assert joined == [{0, 1, 2, 3}] * 2
    assert all(torch.equal(a, b) for a, b in zip(*(weights(r).values() for r in results), strict=True))
    too_many = small_config(6, launch={"min_ranks": 6, "start_timeout_s": 1})
    with pytest.raises(RuntimeError, match=r"6 ranks need 6 task slots .* the cluster has 4"):
        spark_dl.train(data, MLP, too_many, run_dir=str(tmp_path / "none"), spark=spark)


class _DieOnce:
    """`ModelSpec.build` that kills rank 1 of the first attempt."""

    def __init__(self, marker):
        self.marker = pathlib.Path(marker)

    def __call__(self):
        if os.environ.get("RANK") == "1" and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return build_mlp()


@pytest.mark.long
@pytest.mark.modes("local")
def test_an_evaluation_goes_on_with_fewer_ranks_when_slots_are_lost_with_a_rank(spark, tmp_path, monkeypatch):
    data = write_dataset(str(tmp_path / "data"), blobs(245), group_rows=40, shard_rows=120)
    trained = spark_dl.train(
        data, MLP, small_config(2, train={"epochs": 1}), run_dir=str(tmp_path / "run"), spark=spark
    )
    expected = spark_dl.evaluate(data, MLP, trained.checkpoint, spark=spark)
    marker, slots, started = tmp_path / "died", preflight.num_slots, []
    monkeypatch.setattr(preflight, "num_slots", lambda *args: 2 if marker.exists() else slots(*args))
    monkeypatch.setattr(driver, "fit_ranks", functools.partial(supervise.fit_ranks, wait_s=0.5))
    run_barrier = driver.run_barrier
    monkeypatch.setattr(driver, "run_barrier", lambda *args, launch, **options: (
        started.append(launch.num_ranks), run_barrier(*args, launch=launch, **options))[1])  # fmt: skip
    config = small_config(4, launch={"min_ranks": 2, "restart_wait_s": 0.1, "max_restarts": 1})
    dies = spark_dl.ModelSpec(build=_DieOnce(marker))
    assert spark_dl.evaluate(data, dies, trained.checkpoint, config, spark=spark) == expected
    assert started == [4, 2]


JOB = """
import json, sys
import spark_dl
from pyspark.sql import SparkSession
from tests.builders.models import MLP, small_config
from tests.spark.test_elastic import Slow

if __name__ == "__main__":
    master, data, run_dir, launch = sys.argv[1:]
    spark = (SparkSession.builder.master(master).config("spark.executor.memory", "512m").config("spark.cores.max", 2)
             .config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false")
             .config("spark.python.daemon.module", "spark_dl.launch.daemon").getOrCreate())
    config = small_config(2, train={"epochs": 4}, launch=json.loads(launch))
    spec = spark_dl.ModelSpec(build=MLP.build, set_position=Slow(0.5))
    def on_event(event):
        if event["kind"] in ("joined", "checkpoint", "epoch"):
            print(json.dumps(event), flush=True)
    result = spark_dl.train(data, spec, config, run_dir=run_dir, on_event=on_event, progress=False)
    print(json.dumps({"kind": "result", "steps": result.steps, "restarts": result.restarts}), flush=True)
"""


class Slow:
    """`ModelSpec.set_position` of a model that takes its time in each step."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, model, position):
        time.sleep(self.seconds)


def start(command, log):
    return subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, cwd=REPOSITORY, env={
        **os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(REPOSITORY), "PYSPARK_PYTHON": sys.executable,
    })  # fmt: skip


def found_in(log, pattern, process):
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if found := re.search(pattern, log.read_text()):
            return found
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    raise AssertionError(f"no {pattern!r} within {START_S} s: {log.read_text()[-3000:]}")


@contextlib.contextmanager
def standalone(folder):
    """A master without a worker: its URL, `run(name, command)` that starts a process, and the command of a worker.

    All processes end with the block.
    """
    java = str(pathlib.Path(pyspark.__file__).parent / "bin" / "spark-class")
    deploy, local = "org.apache.spark.deploy", ["--host", "127.0.0.1", "--webui-port", "0"]
    running = []

    def run(name, command):
        running.append(start(command, folder / f"{name}.log"))
        return running[-1]

    try:
        master = run("master", [java, f"{deploy}.master.Master", *local, "--port", "0"])
        url = found_in(folder / "master.log", r"Starting Spark master at (spark://\S+)", master)[1]
        yield url, run, [java, f"{deploy}.worker.Worker", *local, "--cores", "1", "--memory", "1g", url]
    finally:
        for process in running:
            process.kill()
            process.wait(10)


def start_job(folder, run, url, **launch):
    write_dataset(str(folder / "data"), blobs(245), group_rows=40, shard_rows=120)
    (folder / "job.py").write_text(JOB)
    places = [str(folder / "data"), str(folder / "run")]
    return run("job", [sys.executable, str(folder / "job.py"), url, *places, json.dumps(launch)])


def events_of(job, log):
    assert job.wait(240) == 0, log.read_text()[-3000:]
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"')]


@pytest.mark.long
def test_more_ranks_start_at_a_checkpoint_when_a_worker_joins_the_cluster(tmp_path):
    log = tmp_path / "job.log"
    with standalone(tmp_path) as (url, run, worker):
        run("one", [*worker, "--work-dir", str(tmp_path / "work-one")])
        job = start_job(tmp_path, run, url, min_ranks=1)
        found_in(log, '"kind": "joined"', job)
        run("two", [*worker, "--work-dir", str(tmp_path / "work-two")])
        events = events_of(job, log)
    assert next(event["rank"] for event in events if event["kind"] == "joined") == 0
    assert sorted(event["rank"] for event in events if event["kind"] == "joined") == [0, 0, 1]
    assert [event["epoch"] for event in events if event["kind"] == "epoch"] == [0, 1, 2, 3]
    assert events[-1] == {"kind": "result", "steps": 24, "restarts": 0}


@pytest.mark.long
def test_the_first_executor_may_come_late_and_the_others_after_it(tmp_path):
    log = tmp_path / "job.log"
    with standalone(tmp_path) as (url, run, worker):
        job = start_job(tmp_path, run, url, start_timeout_s=START_S)
        found_in(log, "no executor has registered yet; waiting for 2 task slots", job)
        time.sleep(12)  # longer than the wait for another executor, which is 10 s
        run("one", [*worker, "--work-dir", str(tmp_path / "work-one")])
        found_in(tmp_path / "master.log", "Launching executor", job)
        run("two", [*worker, "--work-dir", str(tmp_path / "work-two")])
        events = events_of(job, log)
    assert sorted(event["rank"] for event in events if event["kind"] == "joined") == [0, 1]
    assert events[-1] == {"kind": "result", "steps": 24, "restarts": 0}
