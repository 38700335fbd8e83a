"""Ranks that are killed are started again: the training goes on from its last checkpoint, to the same bits."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import spark_dl
from benchmarks.faults import state as bench_state
from spark_dl import Checkpoint, Launch, ModelSpec, RankError
from spark_dl.rundir import checkpoint, environment
from spark_dl.rundir.metrics import read_metrics
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, blobs, build_mlp, small_config
from tests.builders.settings import parallel
from tests.spark.conftest import REPOSITORY
from tests.spark.test_jobs import environment as job_environment

STEPS = 6
CONFIG = {"epochs": 2, "log_every": 1}


@dataclasses.dataclass(frozen=True)
class FaultOnce:
    """`ModelSpec.set_position` of a model whose rank has a fault before a step, counted from 1, the first `times`."""

    folder: str
    fault: object
    rank: int
    step: int
    times: int = 1

    def __call__(self, model, position):
        if position.global_step + 1 != self.step or int(os.environ["RANK"]) != self.rank:
            return
        done = len(os.listdir(self.folder))
        if done < self.times:
            pathlib.Path(self.folder, f"{done}").touch()
            self.fault()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def preempt():
    os.kill(os.getpid(), signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class EndExecutor:
    number: int

    def __call__(self):
        daemon = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(daemon.rpartition(")")[2].split()[1]), self.number)
        time.sleep(60)


def fail_in_code():
    raise ValueError("the culprit")


def fail_in_system():
    raise OSError("no route to host")


def state_of(result):
    """Checksums of the last checkpoint, by part: weights, optimizer, generators and so on."""
    return bench_state.checksums(bench_state.state_of(checkpoint.find(result.checkpoint)))


@pytest.fixture
def train(spark, tmp_path):
    """Trains in a folder of its own, with a fault. Returns the result and the events."""
    shards = write_dataset(str(tmp_path / "data"), blobs(STEPS * 48), group_rows=40, shard_rows=120)

    def run(name, *, build=DROPOUT_MLP.build, every_steps=0, settings=None, launch=None, strategy=None, **fault):
        spec = ModelSpec(build=build)
        if fault:
            (tmp_path / f"{name}-faults").mkdir()
            once = FaultOnce(str(tmp_path / f"{name}-faults"), **fault)
            spec = ModelSpec(build=build, set_position=once)
        config = small_config(
            2, {**CONFIG, **(settings or {})}, launch={"max_restarts": "auto", "restart_wait_s": 0.1, **(launch or {})},
            parallel=parallel(**(strategy or {})), checkpoint=Checkpoint(every_steps=every_steps, every_epochs=100),
        )  # fmt: skip
        events = []
        result = spark_dl.train(
            shards.url, spec, config, run_dir=str(tmp_path / name), progress=False, on_event=events.append
        )
        return result, events

    return run


@pytest.mark.long_in("local-cluster")
@pytest.mark.sampled(2)
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize(("rank", "step", "every_steps"), [
    (1, 5, 2), pytest.param(0, 1, 0, marks=pytest.mark.slow), pytest.param(0, 2 * STEPS, 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_F01_training_goes_on_by_itself_after_a_rank_was_killed(train, rank, step, every_steps):
    whole, _ = train("whole", every_steps=every_steps)
    start = time.monotonic()
    result, events = train("killed", every_steps=every_steps, fault=kill, rank=rank, step=step)
    assert (result.restarts, result.steps, result.rows) == (1, whole.steps, whole.rows)
    assert state_of(result) == state_of(whole)
    assert result.history == whole.history
    assert time.monotonic() - start < 60
    (restart,) = [event for event in events if event["kind"] == "restart"]
    assert (restart["restarts"], restart["rank"]) == (1, rank)
    assert re.search(r"^rank \d on \S+ \(pid \d+(, executor \d)?\) was killed", restart["error"])
    places = {(event["device"], bool(event["executor"])) for event in events if event["kind"] == "joined"}
    assert places == {("cpu", True)}
    lines = [line for line in read_metrics(result.run_dir) if line["kind"] == "restart"]
    assert lines == [{name: value for name, value in restart.items() if name != "error"}]
    assert (lines[0]["attempt"], lines[0]["reason"]) == (1, " ".join(restart["error"].split()))
    steps = [event["step"] for event in events if event["kind"] == "step"]
    begins = max(0, (step - 1) // every_steps * every_steps if every_steps else 0)
    assert steps[-2 * STEPS + begins :] == list(range(begins + 1, 2 * STEPS + 1))
    attempts, _ = environment.read(result.run_dir)
    assert [attempt.driver["outcome"] for attempt in attempts] == ["failed", "finished"]


@pytest.mark.modes("local")
@pytest.mark.parametrize(("strategy", "settings"), [
    pytest.param({"strategy": "mesh", "tensor": 2}, {}, marks=pytest.mark.slow),
    pytest.param({"strategy": "mesh", "pipeline": 2}, {"accumulation_steps": 2}, marks=pytest.mark.long),
    pytest.param({"strategy": "local_sgd", "sync_every_steps": 3}, {}, marks=pytest.mark.long),
    pytest.param({"strategy": "horovod"}, {}, marks=pytest.mark.long),
], ids=str)  # fmt: skip
def test_F01_training_goes_on_with_other_strategies_after_a_rank_was_killed(train, strategy, settings):
    if strategy["strategy"] == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    about = {"build": build_mlp, "every_steps": 2, "strategy": strategy, "settings": settings}
    whole, _ = train("whole", **about)
    result, events = train("killed", **about, fault=kill, rank=1, step=5)
    assert (result.restarts, result.steps, result.rows) == (1, whole.steps, whole.rows)
    assert [event["rank"] for event in events if event["kind"] == "restart"] == [1]
    assert state_of(result) == state_of(whole)
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps[-8:] == list(range(5, 2 * STEPS + 1))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F10_training_goes_on_from_the_checkpoint_of_a_preempted_rank(train, caplog):
    whole, _ = train("whole", settings={"log_every": 4})
    result, events = train(
        "preempted", settings={"log_every": 4}, launch={"max_restarts": 1}, fault=preempt, rank=1, step=2
    )
    assert result.restarts == 1
    assert re.search(r"rank 1 on \S+ .* was ended by SIGTERM .*; starting .* \(preempted\)", caplog.text)
    assert state_of(result) == state_of(whole)
    assert result.history == whole.history
    saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert saved == [4, 2 * STEPS]
    assert steps == [4, STEPS, 8, 2 * STEPS]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F10_the_error_of_a_preempted_rank_ends_with_the_checkpoint(train, tmp_path):
    with pytest.raises(RankError, match="was ended by SIGTERM") as caught:
        train("run", settings={"log_every": 2}, launch={"max_restarts": 0}, fault=preempt, rank=1, step=3)
    saved = checkpoint.latest(str(tmp_path / "run"))
    assert str(caught.value).endswith(
        f"\n\nThe last checkpoint is {saved.url} (step 4). resume=True / --resume with the run_dir {tmp_path / 'run'} "
        "goes on from it."
    )
    assert "most recent call first" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.slow
@pytest.mark.modes("local")
def test_the_error_of_a_run_without_checkpoints_says_that_there_is_none(train):
    with pytest.raises(RankError, match="the culprit") as caught:
        train("run", fault=fail_in_code, rank=1, step=2)
    assert str(caught.value).endswith("\n\nNo checkpoint has been saved yet, so the next call begins from the start.")


@pytest.mark.slow
@pytest.mark.modes("local-cluster")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_F07_training_goes_on_after_an_executor_was_ended(train, number):
    """By SIGTERM, as a cluster manager ends it, its ranks get no signal of their own: it is a lost executor."""
    whole, _ = train("whole", every_steps=2)
    start = time.monotonic()
    result, events = train("killed", every_steps=2, fault=EndExecutor(number), rank=1, step=5)
    assert time.monotonic() - start < 60
    assert result.restarts == 1
    assert state_of(result) == state_of(whole)
    (restart,) = [event for event in events if event["kind"] == "restart"]
    (killed,) = {
        event["executor"] for event in events
        if event["kind"] == "joined" and event["rank"] == 1 and event["time"] < restart["time"]
    }  # fmt: skip
    assert restart["restarts"] == 1
    assert re.match(rf"rank \d on \S+ \(pid \d+, executor {killed}\) was killed", restart["error"])


@dataclasses.dataclass(frozen=True)
class InTheWay:
    """`ModelSpec.set_position`: before step 4, rank 1 makes a folder in place of its file of the next checkpoint."""

    run_dir: str

    def __call__(self, model, position):
        if position.global_step + 1 == 4 and dist.get_rank() == 1:
            pathlib.Path(self.run_dir, "checkpoints", "step-00000004.gen-0001", "rank-00001.pt").mkdir(parents=True)


@pytest.mark.modes("local")
def test_F12_a_checkpoint_that_was_not_written_is_in_the_result_the_events_and_the_log(spark, tmp_path, caplog):
    shards = write_dataset(str(tmp_path / "data"), blobs(STEPS * 48), group_rows=40, shard_rows=120)
    spec = ModelSpec(build=DROPOUT_MLP.build, set_position=InTheWay(str(tmp_path / "run")))
    config = small_config(2, {**CONFIG, "epochs": 1}, checkpoint=Checkpoint(every_steps=2, on_error="warn"))
    events = []
    result = spark_dl.train(
        shards.url, spec, config, run_dir=str(tmp_path / "run"), progress=False, on_event=events.append
    )
    assert (result.steps, result.restarts, result.failed_checkpoints) == (STEPS, 0, 1)
    assert [saved.step for saved in checkpoint.list_checkpoints(result.run_dir)] == [2, STEPS]
    (event,) = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert event["step"] == 4
    (text,) = [text for text in caplog.messages if "on_error" in text]
    assert text.startswith(
        "checkpoint.on_error: the checkpoint of step 4 was not written, and training goes on: rank 1 "
    )
    assert event["reason"] in text


@pytest.mark.modes("local")
def test_F02_a_user_s_value_error_is_raised_at_once_with_its_step(train, tmp_path):
    with pytest.raises(RankError, match=r"failed in step 3 \(training\): ValueError: the culprit") as error:
        train("failed", every_steps=2, fault=fail_in_code, rank=1, step=3)
    assert (error.value.rank, error.value.step, error.value.phase) == (1, 3, "training")
    assert time.time() - (tmp_path / "failed-faults" / "0").stat().st_mtime < 15
    assert (error.value.is_retryable, error.value.earlier) == (False, ())


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F03_the_same_error_twice_in_a_step_ends_the_run(train):
    with pytest.raises(RankError, match=r"after 2 attempts; the same error came twice in step 3") as error:
        train("failed", every_steps=2, fault=fail_in_system, rank=1, step=3, times=9)
    assert len(error.value.earlier) == 1
    assert "failed in step 3 (training): OSError: no route to host" in error.value.earlier[0]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_run_without_restarts_left_says_what_every_attempt_ended_with(train):
    with pytest.raises(RankError, match=r"after 2 attempts; launch.max_restarts is 1") as error:
        train("failed", launch={"max_restarts": 1}, fault=kill, rank=1, step=3, times=9)
    assert "was killed" in error.value.earlier[0]


def call(folder, times):
    """What a rank of `launch` does."""
    done = len(os.listdir(folder))
    if os.environ["RANK"] == "0" and done < times:
        pathlib.Path(folder, str(done)).touch()
        kill()
    return done


@pytest.mark.slow
@pytest.mark.long_in("connect")
@pytest.mark.modes("local", "connect")
def test_a_function_is_called_again_if_launch_asks_for_it(spark, tmp_path):
    for times, restarts in ((1, 1), (1, 0)):
        folder = tmp_path / f"{restarts}"
        folder.mkdir()
        settings = Launch(num_ranks=2, max_restarts=restarts, restart_wait_s=0.1)
        if restarts:
            found = spark_dl.launch(call, str(folder), times, settings=settings, spark=spark)
            assert found == [1, 1]
        else:
            with pytest.raises(RankError, match="was killed") as error:
                spark_dl.launch(call, str(folder), times, settings=settings, spark=spark)
            assert error.value.earlier == ()


SESSION_ENDS = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(REPOSITORY)!r})
import spark_dl
spark = spark_dl.build_session("test", master="local[2]")
jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()

def end():
    if sys.argv[3] == "ranks run":
        while not (os.path.exists(sys.argv[2]) and open(sys.argv[2]).read()):
            time.sleep(0.05)
        time.sleep(0.5)
    spark.stop() if sys.argv[1] == "stop" else os.kill(jvm, signal.SIGKILL)

def wait(path):
    import torch.distributed as dist
    open(path, "w").write(str(os.getpid()))
    dist.init_process_group("gloo")
    dist.barrier()
    time.sleep(60)

settings = spark_dl.Launch(num_ranks=1, max_restarts=3, start_timeout_s=30)
spark_dl.launch(lambda: None, num_ranks=1)
if sys.argv[3] == "before":
    end()
else:
    threading.Thread(target=end).start()
start = time.monotonic()
try:
    spark_dl.launch(wait, sys.argv[2], settings=settings, spark=spark)
except spark_dl.RankError as error:
    print("RankError", error)
except (RuntimeError, ValueError) as error:
    print(error, time.monotonic() - start < 30)
if not os.path.exists(sys.argv[2]):
    sys.stdout.flush()
    os._exit(0)
rank, start = int(open(sys.argv[2]).read()), time.monotonic()
while os.path.exists(f"/proc/{{rank}}") and time.monotonic() - start < 10:
    time.sleep(0.1)
print("the rank lives on" if os.path.exists(f"/proc/{{rank}}") else "the rank has ended", flush=True)
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("when", ["ranks run", pytest.param("before", marks=pytest.mark.long)])
@pytest.mark.parametrize(("how", "cause"), [
    pytest.param("stop", "the Spark session was stopped (spark.stop())", marks=pytest.mark.long),
    ("kill", "the JVM of Spark's driver has ended"),
])  # fmt: skip
def test_B35_a_session_that_ends_is_the_cause_and_not_a_killed_rank(tmp_path, how, cause, when):
    (tmp_path / "script.py").write_text(SESSION_ENDS)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", how, tmp_path / "pid", when], env=job_environment(), cwd=tmp_path,
        timeout=100, capture_output=True, text=True,
    )  # fmt: skip
    advice = "build a session, and resume the run"
    if (how, when) == ("stop", "before"):
        cause, advice = "the Spark session of this call has ended (spark.stop())", "read the DataFrame with it"
    last = done.stdout.splitlines()
    assert len(last) == (2 if when == "ranks run" else 1), done.stderr[-4000:]
    assert last[0].startswith(cause), (last, done.stderr[-2000:])
    assert last[0].endswith(f"{advice} True")
    assert last[1:] == ["the rank has ended"] * (when == "ranks run")


def leave_traces_and_fail(folder):
    """A rank whose first attempt fails with all that a process can keep: a variable, a thread, a process group."""
    found = {
        "pid": os.getpid(), "variable": os.environ.get("LEFT_BEHIND"), "has_group": dist.is_initialized(),
        "threads": [thread.name for thread in threading.enumerate() if thread.name == "left behind"],
    }  # fmt: skip
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(folder, f"{os.environ['RANK']}-{attempt}").write_text(json.dumps(found))
    os.environ["LEFT_BEHIND"] = "1"
    threading.Thread(target=time.sleep, args=(600,), name="left behind", daemon=True).start()
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1" and attempt == "0":
        raise OSError("no route to host")
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F26_an_attempt_finds_nothing_of_the_one_before_it(spark, tmp_path):
    settings = Launch(num_ranks=2, max_restarts=1, restart_wait_s=0.1)
    assert spark_dl.launch(leave_traces_and_fail, str(tmp_path), settings=settings, spark=spark) == [2.0, 2.0]
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found.keys() == {"0-0", "1-0", "0-1", "1-1"}
    for about in found.values():
        assert (about["variable"], about["has_group"], about["threads"]) == (None, False, [])
    assert {found["0-0"]["pid"], found["1-0"]["pid"]}.isdisjoint({found["0-1"]["pid"], found["1-1"]["pid"]})
