"""Ranks, executors and drivers that are killed at random steps: the same bits, every row once, and in bounded time."""

import contextlib
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest

import spark_dl
from benchmarks.faults import job
from benchmarks.faults.job import Job, read_events
from benchmarks.faults.killer import Killer, kill_executor
from benchmarks.faults.ledger import DATA, Ledger, build_spec, read_ledger, settings, write_rows
from benchmarks.faults.state import checksums, state_of
from spark_dl import Checkpoint, Config, Launch
from spark_dl.rundir import checkpoint
from tests.hosts.conftest import wait_until
from tests.spark.conftest import REPOSITORY
from tests.spark.test_jobs import environment

STEPS, EPOCHS, RANKS = 20, 2, 2
NOTICED_S, AGAIN_S = 2, 10
SLEEP_S = 0.03


def make_config(restarts=0, **launch):
    train, loader = settings(EPOCHS)
    return Config(
        data=DATA, train=train, loader=loader, checkpoint=Checkpoint(every_steps=3, every_epochs=100),
        launch=Launch(
            num_ranks=RANKS, device="cpu", max_restarts=restarts, restart_wait_s=0, collective_timeout_s=20, **launch
        ),
    )  # fmt: skip


def end_of(run_dir):
    """Checksums of the state that a run ended with, and its ledger."""
    state = state_of(checkpoint.latest(str(run_dir)))
    return checksums(state), read_ledger(state["weights"], EPOCHS)


@pytest.fixture
def train(spark, tmp_path):
    """Trains in a folder of its own, with kills; returns the result, and what it ended with."""
    rows = write_rows(tmp_path / "data", STEPS)

    def run(name, killer=None):
        config = make_config(len(killer.left) if killer else 0)
        result = spark_dl.train(
            str(tmp_path / "data"), build_spec(rows, SLEEP_S), config, run_dir=tmp_path / name, progress=False,
            on_event=killer or (), spark=spark,
        )  # fmt: skip
        return result, end_of(tmp_path / name)

    return run


def random_kills(number, seed):
    rng = random.Random(seed)
    return {step: rng.randrange(RANKS) for step in sorted(rng.sample(range(1, STEPS * EPOCHS - 1), number))}


@pytest.mark.modes("local")
@pytest.mark.parametrize("number", [
    pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
])  # fmt: skip
def test_F01_ranks_are_killed_at_random_steps(train, number):
    whole, expected = train("whole")
    killer = Killer(random_kills(number, seed=number))
    result, found = train("killed", killer)
    assert (result.restarts, len(killer.done), killer.left) == (number, number, [])
    assert (result.steps, result.rows, result.history) == (whole.steps, whole.rows, whole.history)
    assert found == expected
    assert found[1] == Ledger(lost=0, repeated=0)
    assert max(kill.noticed_s for kill in killer.done) < NOTICED_S, killer.done
    assert max(kill.again_s for kill in killer.done) < AGAIN_S, killer.done


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.modes("local-cluster")
def test_F01_executors_are_killed_at_random_steps(train):
    whole, expected = train("whole")
    killer = Killer(random_kills(3, seed=0), kill_executor)
    result, found = train("killed", killer)
    assert (result.restarts, len(killer.done), killer.left) == (3, 3, [])
    assert (result.steps, result.rows, result.history) == (whole.steps, whole.rows, whole.history)
    assert found == expected
    assert found[1] == Ledger(lost=0, repeated=0)
    assert max(kill.noticed_s for kill in killer.done) < NOTICED_S, killer.done


@contextlib.contextmanager
def a_driver(tmp_path, training):
    """A driver that trains, with its session, in a process of its own."""
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "ab") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", job.__name__, f"local[{RANKS}]"], cwd=REPOSITORY, env=environment(),
            stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            process.stdin.write(job.to_line(training).encode())
            process.stdin.flush()
            yield process
        finally:
            process.kill()
            process.communicate()


def train_to_the_end(tmp_path, training):
    with a_driver(tmp_path, training) as process:
        process.communicate(timeout=150)
        end = (process.returncode, (tmp_path / "out").read_text().splitlines()[-1])
        assert end == (0, f'{{"steps": {STEPS * EPOCHS}, "restarts": 0}}'), (tmp_path / "err").read_text()[-3000:]


@pytest.mark.long
@pytest.mark.timeout(500)
def test_F01_drivers_are_killed_at_random_steps(tmp_path):
    """Each with its JVM. The next driver resumes the run."""
    settings = {"dataset": str(tmp_path / "data"), "rows": write_rows(tmp_path / "data", STEPS), "num_ranks": RANKS}
    whole, killed = (Job(run_dir=str(tmp_path / name), resume=True, **settings) for name in ("whole", "killed"))
    train_to_the_end(tmp_path, whole)
    for step in sorted(random.Random(0).sample(range(1, STEPS * EPOCHS - 1), 3)):
        with a_driver(tmp_path, killed) as process:
            wait_until(lambda: last_step(killed) >= step, (tmp_path / "err").read_text, timeout_s=150)  # noqa: B023
            family = psutil.Process(process.pid).children(recursive=True)
            jvms = [child.pid for child in family if child.name() == "java"]
            assert jvms
            for pid in (*jvms, process.pid):
                os.kill(pid, signal.SIGKILL)
            assert psutil.wait_procs(family, timeout=10)[1] == [], "processes of the killed driver are still there"
        assert last_step(killed) < STEPS * EPOCHS
    train_to_the_end(tmp_path, killed)
    assert end_of(killed.run_dir) == end_of(whole.run_dir)
    assert end_of(killed.run_dir)[1] == Ledger(lost=0, repeated=0)


def last_step(training):
    return max((event["step"] for event in read_events(training.events) if event["kind"] == "step"), default=0)
