"""spark_dl.launch in every mode: results of all ranks, and one error for each way to fail."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import importlib
import logging
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from py4j.protocol import Py4JNetworkError
from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

import spark_dl
from spark_dl import Launch, RankError, spark_job
from spark_dl.launch import barrier, preflight, session
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.task import Attempt, RankResult
from spark_dl.launch.watch import Listener
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, same_bits, small_config


def _sum_of_ranks(scale, offset=0):
    dist.init_process_group("gloo")
    total = torch.tensor([scale * dist.get_rank() + offset])
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "total": total, "pid": os.getpid(), "local": int(os.environ["LOCAL_RANK"])}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.modes("local")), 4])
def test_results_of_all_ranks_in_rank_order(spark, num_ranks):
    results = spark_dl.launch(_sum_of_ranks, 2.0, num_ranks=num_ranks, offset=1.0)
    assert [r["rank"] for r in results] == list(range(num_ranks))
    assert {float(r["total"]) for r in results} == {sum(2.0 * rank + 1 for rank in range(num_ranks))}
    assert len({r["pid"] for r in results}) == num_ranks
    assert sorted(r["local"] for r in results) == list(range(num_ranks))  # all on this one host


@pytest.mark.modes("local", "connect")
def test_B35_a_thread_without_a_session_of_its_own_uses_the_default_one(spark):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        results = pool.submit(spark_dl.launch, _sum_of_ranks, 1.0, num_ranks=1).result(60)
    assert [r["rank"] for r in results] == [0]


@pytest.mark.modes("local", "connect")
def test_a_session_that_is_passed_is_used_also_where_a_thread_has_none(spark, monkeypatch):
    monkeypatch.setattr(session, "_with_own_python", lambda found: found)
    monkeypatch.setattr("pyspark.sql.SparkSession.active", lambda: pytest.fail("looked for another session"))
    assert spark_dl.launch(_rank, num_ranks=2, spark=spark) == [0, 1]
    with pytest.raises(ValueError, match="spark: expected a SparkSession, found str"):
        spark_dl.launch(_rank, num_ranks=2, spark="local[2]")


@pytest.mark.slow
@pytest.mark.modes("local")
def test_launch_and_train_work_after_an_interrupted_action_whose_thread_has_no_session_any_more(spark, tmp_path):
    """As in a notebook, whose cells are interrupted by a KeyboardInterrupt in the main thread."""

    def wait(batches):
        for batch in batches:
            (tmp_path / "started").touch()
            time.sleep(600)
            yield batch

    def interrupt():
        end = time.monotonic() + 60
        while not (tmp_path / "started").exists() and time.monotonic() < end:
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    df = spark.range(4)
    try:
        with pytest.raises(KeyboardInterrupt):
            df.mapInArrow(wait, df.schema).count()
    finally:
        signal.signal(signal.SIGINT, handler)
        thread.join()
        _cancel_all_jobs(spark)
    assert SparkSession.getActiveSession() is None
    assert spark_dl.launch(_rank, num_ranks=2) == [0, 1]
    url = str(tmp_path / "data")
    write_dataset(url, blobs(48))
    result = spark_dl.train(url, MLP, small_config(2, train={"epochs": 1}), run_dir=str(tmp_path / "run"))
    assert spark_dl.evaluate(url, MLP, result.checkpoint)["rows"] == 48


def _cancel_all_jobs(spark):
    """Ends the jobs after a KeyboardInterrupt, for which py4j makes the JVM close all its connections, in its own time.

    This can meet a connection that was made since (`GatewayClient.send_command` sends the port of the server, which all
    connections have in common).
    """
    end = time.monotonic() + 30
    while True:
        try:
            return spark.sparkContext.cancelAllJobs()
        except Py4JNetworkError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _rank():
    return int(os.environ["RANK"])


def _write(text):
    print(text, os.environ["RANK"])
    print("a warning", file=sys.stderr)
    os.system("echo of a child")


def test_the_output_of_the_ranks_comes_to_the_driver_with_their_rank(spark, mode, capfd):
    spark_dl.launch(_write, "hello from", num_ranks=2)
    out, err = capfd.readouterr()
    expected = {f"[rank {rank}] {line}" for rank in (0, 1) for line in (f"hello from {rank}", "of a child")}
    assert expected <= set(out.splitlines())
    assert {"[rank 0] a warning", "[rank 1] a warning"} <= set(err.splitlines())
    if mode.startswith("local[") and mode != "local-cluster":
        assert not {"hello from 0", "a warning"} & {*out.splitlines(), *err.splitlines()}  # not a second time


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F02_the_error_of_a_rank_that_prints_a_great_deal_is_not_dropped(spark, capfd):
    def work():
        for number in range(20_000):
            print("line", number)
        raise ValueError("the culprit")

    with pytest.raises(RankError, match=r"^rank 0 on \S+ \(pid \d+\) failed: ValueError: the culprit"):
        spark_dl.launch(work, num_ranks=1)
    assert "line 19999" in capfd.readouterr().out


@pytest.mark.modes("local", "connect")
@pytest.mark.parametrize(("output", "ranks"), [("rank0", {0}), ("none", set())])
def test_output_of_rank_0_or_of_no_rank(spark, capfd, output, ranks):
    spark_dl.launch(_write, "hello from", num_ranks=2, settings=Launch(output=output))
    out, _ = capfd.readouterr()
    assert {line for line in out.splitlines() if "hello" in line} == {f"[rank {r}] hello from {r}" for r in ranks}


@pytest.mark.modes("local", "connect")
def test_files_of_the_ranks_have_their_output(spark, tmp_path, capfd):
    spark_dl.launch(_write, "hello from", num_ranks=2, settings=Launch(log_dir=str(tmp_path / "logs")))
    files = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert files.keys() == {"rank-0.log", "rank-1.log"}
    assert "stdout: hello from 1\n" in files["rank-1.log"]
    assert "stderr: a warning\n" in files["rank-1.log"]
    assert capfd.readouterr().out.count("hello from") == 2  # over Connect it comes from the files


@pytest.mark.modes("connect")
def test_over_connect_output_comes_while_the_ranks_run(spark, tmp_path, capfd):
    def write_and_wait(go_on):
        print("at work", flush=True)
        end = time.monotonic() + 60
        while not os.path.exists(go_on):
            assert time.monotonic() < end
            time.sleep(0.05)

    settings = Launch(log_dir=str(tmp_path / "logs"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            spark_dl.launch, write_and_wait, str(tmp_path / "go"), num_ranks=1, settings=settings, spark=spark
        )
        out, end = "", time.monotonic() + 60
        while "[rank 0] at work" not in out:
            assert time.monotonic() < end
            assert not job.done()
            time.sleep(0.1)
            out += capfd.readouterr().out
        (tmp_path / "go").touch()
        job.result(60)


def _import_late():
    import torch

    threads = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    return os.environ.get("LATE"), *threads, str(dist.get_debug_level())


@pytest.mark.long_in("local-cluster")
@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster", "connect")
def test_variables_are_set_before_the_call_and_nothing_of_them_stays(spark, tmp_path, mode, caplog):
    env = {"LATE": "1", "OMP_NUM_THREADS": "3", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    found = spark_dl.launch(_import_late, num_ranks=2, env=env)
    assert found == [("1", 3, "3", "DebugLevel.INFO")] * 2
    for _ in range(2):
        late, _, _, debug = spark_dl.launch(_import_late, num_ranks=2)[0]
        assert (late, debug) == (None, "DebugLevel.OFF")
    assert "env: " not in caplog.text
    spark_dl.launch(_import_late, num_ranks=1, env={"KMP_AFFINITY": "none"})
    assert "env: KMP_AFFINITY: read when Python or torch starts, which is before the call" in caplog.text
    with pytest.raises(ValueError, match=r"env: expected names and values of type str, found 'LATE': 1"):
        spark_dl.launch(_rank, env={"LATE": 1})
    (tmp_path / "print.py").write_text(f"import os; open({str(tmp_path / 'out')!r}, 'w').write(os.environ['LATE'])")
    caplog.clear()
    spark_dl.launch(tmp_path / "print.py", num_ranks=1, env={"LATE": "1", "KMP_AFFINITY": "none"})
    assert (tmp_path / "out").read_text() == "1"
    assert "env: " not in caplog.text  # a program starts with its variables


@pytest.mark.slow
@pytest.mark.modes("local")
def test_variables_of_a_call_reach_no_other_thread_and_start_no_daemon(spark):
    """They were in `sparkContext.environment`: each set of them had a daemon with torch, 240 MiB, for good."""
    before = dict(spark.sparkContext.environment)
    daemons = _daemons()

    def call(number):
        env = {"TOKEN": str(number)} if number % 3 else None
        return number, spark_dl.launch(lambda: os.environ.get("TOKEN"), num_ranks=1, env=env)[0]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = dict(pool.map(call, range(9)))
    assert found == {number: str(number) if number % 3 else None for number in range(9)}
    assert spark.sparkContext.environment == before
    assert len(_daemons() - daemons) <= 1


def _daemons():
    """The processes of Spark's Python daemons."""
    found = set()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            is_daemon = b"spark_dl.launch.daemon" in words or b"pyspark.daemon" in words
            if is_daemon and b"java" in (pathlib.Path("/proc") / parent / "cmdline").read_bytes():
                found.add(folder.name)
    return found


SCRIPT = """
import argparse, os, pathlib, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--fails", type=int)
args = parser.parse_args()
dist.init_process_group("gloo")
if args.fails == dist.get_rank():
    raise KeyError("the culprit")
total = torch.tensor([args.lr])
dist.all_reduce(total)
print("total", total.item(), "of", dist.get_world_size(), os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""


def test_a_script_runs_with_its_arguments_on_all_ranks(spark, tmp_path, capfd):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert spark_dl.launch(tmp_path / "train.py", "--lr", 0.5, num_ranks=2) == [None, None]
    out = capfd.readouterr().out.splitlines()
    assert {"[rank 0] total 1.0 of 2 0", "[rank 1] total 1.0 of 2 1"} <= set(out)


def test_a_script_imports_what_was_sent_with_add_py_file(spark, tmp_path_factory):
    if spark_job.is_connect(spark):
        pytest.skip("a session of Connect has no addPyFile")
    folder = tmp_path_factory.mktemp("sent")  # later executors fetch it, too
    (folder / "sent_to_scripts.py").write_text("value = 5")
    spark.sparkContext.addPyFile(str(folder / "sent_to_scripts.py"))
    (folder / "own").mkdir()
    (folder / "own" / "train.py").write_text("import sent_to_scripts; assert sent_to_scripts.value == 5")
    spark_dl.launch(folder / "own" / "train.py", num_ranks=1)


@pytest.mark.long_in("local-cluster", "connect")
@pytest.mark.slow
def test_the_rank_whose_script_failed_first_is_named_with_its_exit_code_and_last_lines(spark, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    match = r"(?s)rank 1 on .* failed: train\.py ended with exit code 1.*KeyError: 'the culprit'"
    with pytest.raises(RankError, match=match) as caught:
        spark_dl.launch(str(tmp_path / "train.py"), "--lr=0.5", "--fails=1", num_ranks=2)
    assert caught.value.rank == 1


@pytest.mark.modes("local")
def test_the_number_of_ranks_comes_from_the_call_or_the_settings(spark):
    assert spark_dl.launch(_rank, settings=Launch(num_ranks=2)) == [0, 1]
    with pytest.raises(ValueError, match="num_ranks: found 3, and 2 in settings"):
        spark_dl.launch(_rank, num_ranks=3, settings=Launch(num_ranks=2))


@pytest.mark.modes("local")
@pytest.mark.parametrize(("call", "match"), [
    (lambda: spark_dl.launch(None), "expected a function that runs on the ranks, found a NoneType"),
    (lambda: spark_dl.launch(_rank, 1), r"the call of _rank\(\) on the ranks: too many positional arguments"),
    (lambda: spark_dl.launch(_wait_for_rank_0), r"_wait_for_rank_0\(seconds\).*missing a required argument: 'seconds'"),
    (lambda: spark_dl.launch(_rank, settings={"output": "none"}), r"settings: expected a spark_dl\.Launch, found dict"),
    (lambda: spark_dl.launch(_rank, env=["A=1"]), r"env: expected a mapping of names to values, found \['A=1'\]"),
    (lambda: spark_dl.launch(_rank, env={"RANK": "7"}), "env: RANK is set by spark_dl on each rank"),
    (lambda: spark_dl.launch(_rank, settings=Launch(log_dir="/proc/logs")), "launch.log_dir: cannot create the folder"),
    (lambda: spark_dl.run_on_dataframe(_rank, "/data"), "expected a function and a DataFrame of Spark, found a str"),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_any_rank_starts(spark, call, match):
    with pytest.raises(ValueError, match=match):
        call()


def _wait_for_rank_0(seconds):
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_groups_of_the_user_s_own_have_the_time_limit_of_the_settings(spark):
    start = time.monotonic()
    with pytest.raises(RankError, match="(?i)timed out"):
        spark_dl.launch(_wait_for_rank_0, 60, num_ranks=2, settings=Launch(collective_timeout_s=2))
    assert time.monotonic() - start < 40


@pytest.mark.modes("local")
def test_what_is_no_script_is_an_error_before_any_rank_starts(spark):
    with pytest.raises(ValueError, match=r"no file 'missing\.py' on the driver"):
        spark_dl.launch("missing.py", num_ranks=2)
    with pytest.raises(ValueError, match=r"a script takes arguments as strings, found lr=\.\.\."):
        spark_dl.launch("missing.py", lr=0.1)


@pytest.mark.modes("local", "connect")
@pytest.mark.parametrize(("end", "match"), [
    (os._exit, r"rank 1 on .* failed: the function ended with exit code 3 \(os\._exit\)"),
    (sys.exit, r"rank 1 on .* failed: the function ended with exit code 3 \(sys\.exit\)"),
])  # fmt: skip
def test_the_exit_code_of_a_rank_that_ends_its_process_is_named(spark, mode, end, match):
    def work(name):
        if os.environ["RANK"] == "1":
            getattr(os if name == "_exit" else sys, name)(3)  # cloudpickle would send another os._exit
        time.sleep(30)

    if mode == "connect" and end is os._exit:
        match = "was killed"  # the rank cannot tell the driver
    with pytest.raises(RankError, match=match):
        spark_dl.launch(work, end.__name__, num_ranks=2)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_function_that_exits_with_0_has_succeeded(spark):
    assert spark_dl.launch(sys.exit, 0, num_ranks=1) == [None]


def _leave_traces():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(5)


@pytest.mark.modes("local")
def test_global_state_of_torch_does_not_reach_the_next_call_in_the_same_worker(spark):
    def look():
        drawn = torch.rand(1).item()
        return os.getpid(), str(torch.get_default_dtype()), torch.is_grad_enabled(), drawn

    before = spark_dl.launch(look, num_ranks=2)
    spark_dl.launch(_leave_traces, num_ranks=2)
    after = spark_dl.launch(look, num_ranks=2)
    assert sorted(after) == sorted(before)
    assert after[0][1:3] == ("torch.float32", True)


def _groups(count):
    sums = []
    for i in range(count):
        dist.init_process_group("gloo")
        total = torch.tensor([i + dist.get_rank()])
        dist.all_reduce(total)
        sums.append(int(total))
        dist.destroy_process_group()
    return sums


@pytest.mark.modes("local")
def test_several_process_groups_in_one_launch(spark):
    assert spark_dl.launch(_groups, 3, num_ranks=2) == [[1, 3, 5]] * 2


def _step_alone():
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return "stepped"


@pytest.mark.slow
@pytest.mark.long_in("connect")
@pytest.mark.modes("local", "connect")
def test_a_rank_that_would_train_alone_is_an_error_unless_it_is_wanted(spark):
    with pytest.raises(RankError, match="takes an optimizer step without a process group, so it would train alone"):
        spark_dl.launch(_step_alone, num_ranks=2)
    wanted = Launch(independent_ranks=True)
    assert spark_dl.launch(_step_alone, num_ranks=2, settings=wanted) == ["stepped"] * 2
    assert spark_dl.launch(_step_alone, num_ranks=1) == ["stepped"]


def test_python_workers_are_used_again_and_left_clean(spark):
    def state():
        before = dist.is_initialized(), "RANK" in os.environ
        dist.init_process_group("gloo")
        dist.barrier()  # a rank that leaves closes its connections, while others may still make theirs
        return {"before": list(before), "pid": os.getpid()}

    first, second = spark_dl.launch(state, num_ranks=4), spark_dl.launch(state, num_ranks=4)
    assert [r["before"] for r in first + second] == [[False, True]] * 8
    assert {r["pid"] for r in first} == {r["pid"] for r in second}


@pytest.mark.modes("local")
def test_any_callable_and_any_data(spark):
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, values):
            return {"values": values * self.factor, "nested": [(1, None, "ä"), {2: float("inf")}], "flag": True}

    results = spark_dl.launch(Scale(3), np.arange(4, dtype=np.int16), num_ranks=2)
    assert results[0]["values"].dtype == np.int16
    assert results[1]["values"].tolist() == [0, 3, 6, 9]
    assert results[0]["nested"] == [(1, None, "ä"), {2: float("inf")}]
    assert results[0]["flag"] is True


def test_a_rank_that_raises(spark):
    def work():
        if os.environ["RANK"] == "1":
            raise KeyError("the culprit")
        time.sleep(600)  # is not waited for

    with pytest.raises(RankError, match="rank 1 on .* failed: KeyError: 'the culprit'") as error:
        spark_dl.launch(work, num_ranks=2)
    assert error.value.rank == 1
    assert 'raise KeyError("the culprit")' in str(error.value)
    _assert_pid_ends(error.value.pid)


def test_the_root_cause_is_named_not_a_survivor(spark):
    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == 2:
            raise ValueError("the culprit")
        dist.barrier()

    with pytest.raises(RankError, match="ValueError: the culprit") as error:
        spark_dl.launch(work, num_ranks=3)
    assert error.value.rank == 2


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.modes("local"))])
def test_a_rank_that_is_killed(spark, mode, victim):
    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankError, match="was killed: its .*process ended without an error") as error:
        spark_dl.launch(work, num_ranks=2)
    if mode != "connect":  # there the message names the task
        assert error.value.rank == victim
        assert error.value.device == "cpu"
        # A local master tells no id.
        assert re.fullmatch(r"\d" if "cluster" in mode else r"127\.0\.0\.1:\d+", error.value.executor)
        assert (", executor " in error.value.reason) == ("cluster" in mode)
    assert spark_dl.launch(_sum_of_ranks, 1.0, num_ranks=2)[0]["rank"] == 0  # the session is as good as before


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.modes("local")  # over Spark Connect ranks have no connection to the driver
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_F04_a_rank_that_stands_still_is_named_whether_others_wait_for_it_or_not(spark, num_ranks):
    def work():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
        dist.barrier()
        if dist.get_rank() == num_ranks - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    with pytest.raises(RankError, match=rf"rank {num_ranks - 1} on .* sent no heartbeat for \d+ s") as error:
        spark_dl.launch(work, num_ranks=num_ranks, settings=Launch(collective_timeout_s=4))
    assert error.value.rank == num_ranks - 1
    _assert_pid_ends(error.value.pid)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_rank_that_is_stuck_is_named_not_those_that_wait_for_it(spark):
    def work():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 on .* never entered a collective operation") as error:
        spark_dl.launch(work, num_ranks=3)
    assert error.value.rank == 1
    _assert_pid_ends(error.value.pid)


def test_B20_too_few_slots_is_an_error_within_seconds(spark):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"9 ranks need 9 task slots .* the cluster has 4 .* launch.num_ranks"):
        spark_dl.launch(_sum_of_ranks, 1.0, num_ranks=9)
    assert time.monotonic() - start < 60  # launch.start_timeout_s is 120


@pytest.mark.long_in("connect")
@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"device": "cuda", "gpus_per_rank": 0.5}], ids=str)
def test_B23_a_gpu_that_no_rank_can_get_is_an_error_before_any_task(spark, mode, monkeypatch, settings):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected, settings = (RankError if mode == "connect" else ValueError), spark_dl.Launch(num_ranks=2, **settings)
    with pytest.raises(expected, match=r"launch\.(device: found 'cuda', but|gpus_per_rank: expected at most)"):
        spark_dl.launch(_sum_of_ranks, 1.0, settings=settings)


@pytest.mark.modes("local", "local-cluster")
def test_the_slots_that_one_rank_leaves_are_said(spark, caplog):
    caplog.set_level(logging.INFO, "spark_dl")
    spark_dl.launch(os.getpid, num_ranks=2)
    assert "1 rank starts" not in caplog.text
    spark_dl.launch(os.getpid)
    slots = preflight.num_slots(spark)
    assert f"1 rank starts, and the cluster has {slots} slots: launch.num_ranks asks for more" in caplog.text


@pytest.mark.long_in("connect")
@pytest.mark.slow
@pytest.mark.modes("local", "connect")
def test_B21_a_busy_cluster_is_said_and_is_an_error_after_the_start_timeout(spark, mode, monkeypatch, caplog):
    def sleep(batches):
        time.sleep(25)
        yield from batches

    def occupy():
        if mode != "connect":
            spark.sparkContext.setJobGroup("busy", "busy", interruptOnCancel=True)
        try:
            spark.range(0, 4, 1, 4).mapInArrow(sleep, "id long").collect()
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(barrier, "_SAY_AFTER_S", 1.0)
    monkeypatch.setattr(barrier, "_SAY_EVERY_S", 2.0)
    errors = []
    other = threading.Thread(target=occupy)
    other.start()
    time.sleep(3)
    start, why = time.monotonic(), "the cluster is busy with other jobs, or its executors have not started"
    try:
        with pytest.raises(RuntimeError, match=rf"0 of 2 ranks started within launch.start_timeout_s=4 s; {why}$"):
            spark_dl.launch(_sum_of_ranks, 1.0, num_ranks=2, settings=Launch(start_timeout_s=4))
        assert 4 <= time.monotonic() - start < 15
        said = [record.message for record in caplog.records]
        assert said == [f"0 of 2 ranks have started; waiting for task slots: {why}"] * 2
    finally:
        if mode == "connect":
            spark.interruptAll()
        else:
            spark.sparkContext.cancelJobGroup("busy")
        other.join()
    assert [r["rank"] for r in spark_dl.launch(_sum_of_ranks, 1.0, num_ranks=2)] == [0, 1]


def _unreachable(spark, num_ranks, **options):
    listener = Listener("127.0.0.1", num_ranks=num_ranks)
    listener.address = dataclasses.replace(listener.address, port=1)
    return listener


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_driver_whose_port_is_closed_gets_results_and_errors_all_the_same(spark, monkeypatch):
    """Executors reach Spark's own ports, but perhaps not the listener's."""

    def work(fails):
        time.sleep(5)
        if fails and os.environ["RANK"] == "1":
            raise KeyError("the culprit")
        return int(os.environ["RANK"])

    monkeypatch.setattr(barrier, "listen", _unreachable)
    settings = Launch(start_timeout_s=4)
    assert spark_dl.launch(work, False, num_ranks=2, settings=settings) == [0, 1]
    with pytest.raises(RankError, match="rank 1 on .* failed: KeyError: 'the culprit'"):
        spark_dl.launch(work, True, num_ranks=2, settings=settings)


@pytest.mark.modes("local")
def test_B17_what_cannot_be_pickled_is_named(spark):
    class Model:
        def __init__(self):
            self.layers = {"guard": threading.Lock()}

    model = Model()
    with pytest.raises(ValueError, match=r"the variable `model\.layers\['guard'\]` of `fn` is a _thread\.lock"):
        spark_dl.launch(lambda: model, num_ranks=2)


DRIVER_ONLY = {
    "spark": lambda spark: spark,
    "context": lambda spark: spark.sparkContext,
    "df": lambda spark: spark.range(3),
    "rdd": lambda spark: spark.range(3).rdd,
    "column": lambda spark: spark.range(3)["id"] + 1,
    "jvm": lambda spark: spark._jvm,
}


_OF_JVM = (("context", "SparkContext"), ("rdd", r"\w*RDD"), ("column", "Column"), ("jvm", "JVMView"))


@pytest.mark.parametrize(("name", "kind"), [
    *(pytest.param(*case, marks=pytest.mark.modes("local", "connect")) for case in
      (("spark", "SparkSession"), ("df", "DataFrame"))),
    *(pytest.param(*case, marks=pytest.mark.modes("local")) for case in _OF_JVM),
])  # fmt: skip
def test_B17_what_exists_on_the_driver_only_is_named_by_its_variable(spark, name, kind):
    held = DRIVER_ONLY[name](spark)
    found = rf"is a {kind}, which exists on the driver only"
    with pytest.raises(ValueError, match=rf"^fn cannot be sent to the ranks: the variable `held` of `fn` {found}"):
        spark_dl.launch(lambda: held, num_ranks=1)
    with pytest.raises(ValueError, match=rf"^args cannot be sent to the ranks: `args\[1\]` {found}"):
        spark_dl.launch(max, 1, held, num_ranks=1)
    with pytest.raises(ValueError, match=rf"^kwargs cannot be sent to the ranks: `kwargs\['key'\]` {found}"):
        spark_dl.launch(max, key=held, num_ranks=1)
    spec = spark_dl.ModelSpec(build=lambda: held)
    with pytest.raises(
        ValueError, match=rf"^spec cannot be sent to the ranks: the variable `held` of `spec.build` {found}"
    ):
        spark_dl.train(spark.range(3), spec, spark_dl.Config(launch=Launch(num_ranks=1)))


@pytest.mark.modes("local")
def test_a_broadcast_variable_reaches_the_ranks(spark):
    held = spark.sparkContext.broadcast([1, 2, 3])
    assert spark_dl.launch(lambda: sum(held.value), num_ranks=2) == [6, 6]


@pytest.mark.modes("local")
def test_B30_what_cannot_be_returned_is_named(spark):
    with pytest.raises(RankError, match=r"result\['model'\]: cannot return a torch.nn.modules.linear.Linear"):
        spark_dl.launch(lambda: {"model": torch.nn.Linear(1, 1)}, num_ranks=2)


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")  # over Spark Connect ranks cannot tell the driver their process ids
def test_F09_an_interrupt_on_the_driver_ends_the_ranks(spark):
    pids = []

    def interrupt(event):
        if event["kind"] == "joined":
            pids.append(event["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        barrier.run_barrier(
            spark, functools.partial(spark_dl.worker.call, lambda: time.sleep(60), (), {}, Launch(num_ranks=2)),
            launch=Launch(num_ranks=2), on_event=interrupt,
        )  # fmt: skip
    for pid in pids:
        _assert_pid_ends(pid)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B19_an_executor_with_another_torch_than_the_driver_is_an_error_before_the_function_runs(spark, monkeypatch):
    there = re.escape(torch.__version__)
    monkeypatch.setattr(torch, "__version__", "1.0.2")  # on the driver, not in its workers
    message = rf"VersionError: the Python of the executor on \S+ has other versions than the driver: torch {there}"
    with pytest.raises(RankError, match=rf"{message} there and 1\.0\.2 on the driver; install the versions of the"):
        spark_dl.launch(os._exit, 3, num_ranks=2)
    monkeypatch.undo()
    assert spark_dl.launch(_rank, num_ranks=2) == [0, 1]


@pytest.mark.modes("local", "connect")
def test_B36_a_hostile_error_survives_its_way_to_the_driver(spark):
    def work():
        raise ValueError("\x1b[31mred\x1b[0m {x} %s ä\udcff\r" + "y" * 10_000 + "\nINFO all is well")

    with pytest.raises(RankError, match=r"failed: ValueError: red {x} %s ä\\udcff\\r" + "y" * 3000) as caught:
        spark_dl.launch(work, num_ranks=1)
    assert "\x1b" not in str(caught.value)
    assert "\r" not in str(caught.value)
    assert str(caught.value).encode().decode() == str(caught.value)
    assert len(caught.value.reason) < 5000
    assert "y" * 10_000 in caught.value.rank_traceback


@pytest.mark.modes("local")
@pytest.mark.parametrize("calls", [pytest.param("some", marks=pytest.mark.slow), "all"])
def test_B31_a_barrier_that_a_rank_does_not_call_names_that_rank(spark, calls):
    def work():
        dist.init_process_group("gloo")
        if dist.get_rank() == 1 and calls == "some":
            return "left"
        dist.barrier()
        return "waited"

    if calls == "all":
        assert spark_dl.launch(work, num_ranks=3) == ["waited"] * 3
        return
    start, left = time.monotonic(), r"rank 1 on \S+ \(pid \d+\) had returned from the function before, .*barrier\(\)"
    with pytest.raises(RankError, match=left):
        spark_dl.launch(work, num_ranks=3, settings=Launch(collective_timeout_s=8))
    assert time.monotonic() - start < 40


@pytest.mark.modes("local")
@pytest.mark.parametrize(("backend", "message"), [
    ("nccl", r"'nccl', expected one of gloo: this \w+ .*; use gloo on CPUs, or give each rank a GPU"),
    ("cpu:glooo", r"'glooo', expected one of gloo: torch does not know it; use gloo on CPUs"),
])  # fmt: skip
def test_B24_a_backend_that_is_not_there_is_an_error_that_lists_those_that_are(spark, backend, message):
    def work():
        with mock.patch.object(torch.cuda, "device_count", return_value=0):  # also where there are some
            dist.init_process_group(backend)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=rf"failed: ValueError: init_process_group: found the backend {message}"):
        spark_dl.launch(work, num_ranks=2)
    assert time.monotonic() - start < 40  # launch.collective_timeout_s is 300


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B35_a_call_within_a_task_is_an_error_that_says_so(spark):
    message = "found a task of a Spark job, such as a rank; expected the driver, as a task cannot start jobs"
    with pytest.raises(RankError, match=f"ValueError: {message}"):
        spark_dl.launch(lambda: spark_dl.launch(_rank, num_ranks=1), num_ranks=1)
    with pytest.raises(RankError, match=f"ValueError: {message}"):
        spark_dl.launch(lambda: spark_dl.train("data", MLP, small_config(1)), num_ranks=1)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B35_two_runs_at_once_in_one_session_have_the_weights_of_each_alone(spark, tmp_path):
    url = str(tmp_path / "data")
    write_dataset(url, blobs(96))

    def train(name, seed):
        config, run_dir = small_config(2, train={"seed": seed}), str(tmp_path / name)
        result = spark_dl.train(url, MLP, config, run_dir=run_dir, spark=spark, progress=False)
        return result.load_model(MLP).state_dict()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        together = [job.result(60) for job in [pool.submit(train, f"together-{seed}", seed) for seed in (1, 2)]]
    for seed, weights in zip((1, 2), together, strict=True):
        assert same_bits(weights, train(f"alone-{seed}", seed))


def _assert_pid_ends(pid):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} of the run is still there")


def _sign_and_wait(folder):
    dist.init_process_group("gloo")
    pathlib.Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(60)


@pytest.mark.modes("local")
@pytest.mark.parametrize("ends", [True, False])
def test_a_job_that_outlives_its_cancellation_is_told(spark, monkeypatch, caplog, ends):
    monkeypatch.setattr(spark_job, "_CANCEL_WAIT_S", 1.0)
    free = threading.Event()
    job = spark_job.SparkJob(spark, lambda: free.wait(30), description="spark_dl: a test")
    if ends:
        free.set()
    try:
        start = time.monotonic()
        job.cancel()
        assert time.monotonic() - start < 10
    finally:
        free.set()
    told = [record.getMessage() for record in caplog.records if "after it was cancelled" in record.getMessage()]
    assert [message.partition(" within")[0] for message in told] == (
        [] if ends else ["Spark has not ended the job 'spark_dl: a test'"]
    )
    assert job.wait(10)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F09_a_job_that_is_cancelled_says_so_and_is_not_started_again(spark, tmp_path):
    """As by the button in Spark's UI, or by `cancelJobGroup`."""

    def cancel():
        end = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        for job in spark.sparkContext._jsc.sc().statusTracker().getActiveJobIds():
            spark.sparkContext._jsc.sc().cancelJob(job)

    other = threading.Thread(target=cancel)
    other.start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^the Spark job of the ranks was cancelled \(.*; resume the run") as error:
        spark_dl.launch(_sign_and_wait, str(tmp_path), settings=Launch(num_ranks=2, max_restarts=2))
    other.join()
    assert not isinstance(error.value, RankError)
    assert time.monotonic() - start < 60
    for path in tmp_path.iterdir():
        _assert_pid_ends(int(path.read_text()))
    assert spark_dl.launch(_sum_of_ranks, 1.0, num_ranks=2)[0]["rank"] == 0


def _sums_of(base, count):
    dist.init_process_group("gloo")
    for _ in range(count):
        total = torch.tensor([base + dist.get_rank()])
        dist.all_reduce(total)
        time.sleep(0.01)
    return int(total)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F24_two_jobs_at_once_on_a_host_never_join_each_other(spark):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(spark_dl.launch, _sums_of, base, 30, num_ranks=2, spark=spark) for base in (100, 10_000)]
        assert [job.result(60) for job in jobs] == [[201, 201], [20_001, 20_001]]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F24_two_scripts_at_once_on_a_host_never_join_each_other(spark, tmp_path, capfd):
    (tmp_path / "train.py").write_text(SCRIPT)  # with stores of torch, which have no password
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(spark_dl.launch, tmp_path / "train.py", "--lr", lr, num_ranks=2, spark=spark)
            for lr in (0.5, 100)
        ]
        assert [job.result(60) for job in jobs] == [[None, None]] * 2
    out = sorted(line for line in capfd.readouterr().out.splitlines() if " total " in line)
    assert out == [f"[rank {rank}] total {total} of 2 {rank}" for rank in (0, 1) for total in (1.0, 200.0)]


@dataclasses.dataclass
class _NeedsModule:
    """What a module is to pickle that one of the hosts does not have."""

    at: str

    def __reduce__(self):
        return _import_there, (self.at,)


def _import_there(at):
    from pyspark import BarrierTaskContext

    if BarrierTaskContext.get().partitionId() == 1:
        pathlib.Path(at).write_text(str(time.time()))
        importlib.import_module("a_module_that_only_one_host_lacks")
    return "there"


@pytest.mark.modes("local")
def test_F25_a_module_that_one_host_lacks_is_the_error_and_nobody_waits_for_that_rank(spark, tmp_path):
    assert spark_dl.launch(lambda value: value, "there", num_ranks=2) == ["there"] * 2
    needs = _NeedsModule(str(tmp_path / "at"))
    with pytest.raises(RankError, match=r"on 127.0.0.1 .*failed: .*a_module_that_only_one_host_lacks") as error:
        spark_dl.launch(lambda value: value, needs, settings=Launch(num_ranks=2, start_timeout_s=60))
    assert time.time() - float((tmp_path / "at").read_text()) < 15
    assert "_import_there" in error.value.rank_traceback


class _Late:
    """What sleeps on one rank when it is unpickled, as an import from a file system that does not answer."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return _come_late, (self.seconds,)


def _come_late(seconds):
    if BarrierTaskContext.get().partitionId() == 1:
        time.sleep(seconds)
    return "there"


def _join_late(value, launch, seconds, report):
    _come_late(seconds)
    with rendezvous.join(launch, init_group=False, report=report) as world:
        return RankResult(world.rank, value)


def _never_join(seconds, report):
    task = BarrierTaskContext.get().partitionId()
    _come_late(seconds)
    return RankResult(task, task)


def _launch_late(spark, place, seconds, start_timeout_s):
    """Launches two ranks. One of them comes late: before its Python, its call or the others are there."""
    launch, late = Launch(num_ranks=2, start_timeout_s=start_timeout_s), _Late(seconds)
    attempt = Attempt(number=late if place == "python" else 0)  # a part of the task, which is unpickled by Spark
    args = (late if place == "call" else "there", launch, seconds if place == "meeting" else 0)
    return barrier.run_barrier(spark, functools.partial(_join_late, *args), launch=launch, attempt=attempt)


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize(("place", "named"), [
    pytest.param("python", r"task 1 .* on an unknown host .* told nothing to the driver", marks=pytest.mark.long),
    ("call", r"task 1 .* on 127\.0\.0\.1 \(pid \d+\) did .* has not unpickled the function and its arguments"),
    pytest.param("meeting", r"task 1 .* on 127\.0\.0\.1 .* has not come to the other ranks", marks=pytest.mark.long),
])  # fmt: skip
def test_F25_a_rank_that_stalls_before_the_ranks_meet_is_named_after_the_start_timeout(spark, place, named):
    assert _launch_late(spark, place, seconds=2, start_timeout_s=10) == ["there"] * 2
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s)^{named}.*raise launch.start_timeout_s") as error:
        _launch_late(spark, place, seconds=60, start_timeout_s=3)
    assert time.monotonic() - start < 20
    assert "did not join within launch.start_timeout_s=3 s (1 of 2 ranks)" in str(error.value)
    if place != "python":
        assert "in _come_late" in error.value.stacks
        _assert_pid_ends(error.value.pid)


@pytest.mark.long
@pytest.mark.modes("local")
def test_F25_a_rank_that_stalls_is_an_error_also_where_ranks_cannot_reach_the_driver(spark, monkeypatch):
    monkeypatch.setattr(barrier, "listen", _unreachable)
    assert _launch_late(spark, "call", seconds=1, start_timeout_s=20) == ["there"] * 2
    start = time.monotonic()
    with pytest.raises(RankError, match="not all ranks came to meet the others within launch.start_timeout_s=3 s"):
        _launch_late(spark, "call", seconds=60, start_timeout_s=3)
    assert time.monotonic() - start < 30


@pytest.mark.slow
@pytest.mark.modes("local")
def test_ranks_that_do_not_join_each_other_are_not_waited_for(spark):
    launch = Launch(num_ranks=2, start_timeout_s=1)
    assert barrier.run_barrier(spark, functools.partial(_never_join, 3), launch=launch) == [0, 1]


@pytest.fixture
def points(spark):
    rows = [(x.tolist(), int(y)) for x, y in zip(*blobs(245).values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").coalesce(1).cache()


def _leave_autocast():
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    return os.getpid()


def _pid():
    return os.getpid()


def _parse_arguments():
    return vars(argparse.ArgumentParser().parse_args())


def _fork():
    is_child = os.fork() == 0
    if not is_child:
        time.sleep(0.5)
    return "child" if is_child else "parent"


def _start_method():
    multiprocessing.set_start_method("spawn")
    return multiprocessing.get_start_method()


@pytest.mark.long_in("local-cluster")
@pytest.mark.modes("local", "local-cluster")
def test_a_worker_in_which_a_function_left_something_is_not_used_again(spark, points, tmp_path):
    config = small_config(1, train={"epochs": 1})
    before = spark_dl.train(points, MLP, config, run_dir=tmp_path / "before", progress=False)
    (left,) = spark_dl.launch(_leave_autocast, num_ranks=1)
    (next_one,) = spark_dl.launch(_pid, num_ranks=1)
    assert left != next_one
    for _ in range(2):
        spark_dl.launch(_leave_autocast, num_ranks=1)
        assert spark_dl.launch(_start_method, num_ranks=1) == ["spawn"]
    after = spark_dl.train(points, MLP, config, run_dir=tmp_path / "after", progress=False)
    assert after.train_loss == before.train_loss
    assert spark_dl.evaluate(points, MLP, after.checkpoint, progress=False) == spark_dl.evaluate(
        points, MLP, before.checkpoint, progress=False
    )


@pytest.mark.modes("local")
def test_a_worker_of_functions_that_leave_nothing_is_used_again(spark):
    first, second = ({*spark_dl.launch(_pid, num_ranks=2)} for _ in range(2))
    assert first & second


@pytest.mark.modes("local")
def test_a_function_has_no_arguments_of_the_worker_and_its_fork_returns_nothing(spark):
    assert spark_dl.launch(_parse_arguments, num_ranks=1) == [{}]
    assert spark_dl.launch(_fork, num_ranks=1) == ["parent"]
