"""Ranks that end without a Python exception: the signal is named, with the stacks of the rank."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import spark_dl
from spark_dl import Launch, RankError

SETTINGS = Launch(num_ranks=2, collective_timeout_s=20, start_timeout_s=60)


def crash(number):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    time.sleep(30)


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGBUS])
def test_F30_the_signal_that_ends_a_rank_is_named_with_its_stack(spark, number):
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"rank 1 on .* was ended by {number.name}") as error:
        spark_dl.launch(crash, number, settings=SETTINGS, spark=spark)
    assert time.monotonic() - start < 20
    assert error.value.rank == 1
    assert "in crash" in error.value.rank_traceback


def sum_of_other_shapes():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(300_000 if os.environ["RANK"] == "0" else 3))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F19_an_abort_by_gloo_is_named_with_the_line_of_the_collective(spark):
    with pytest.raises(RankError) as error:
        spark_dl.launch(sum_of_other_shapes, settings=SETTINGS, spark=spark)
    assert "was ended by SIGABRT" in str(error.value) or "failed: RuntimeError" in str(error.value)
    assert "in sum_of_other_shapes" in error.value.rank_traceback


def large(mebibytes):
    return torch.zeros(mebibytes << 18)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B30_results_that_the_driver_cannot_take_are_refused_on_the_rank(spark):
    with pytest.raises(RankError, match=r"has 600 MiB, and the driver can take \d+ MiB of each rank") as error:
        spark_dl.launch(large, 600, settings=SETTINGS, spark=spark)
    assert not error.value.is_retryable
    limit = int(str(error.value).split("can take ")[1].split(" MiB")[0])
    found = spark_dl.launch(large, limit - 1, settings=SETTINGS, spark=spark)
    assert [each.numel() >> 18 for each in found] == [limit - 1] * 2


def start_and_end(folder, end):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(folder, os.environ["RANK"]).write_text(str(child.pid))
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["RANK"] == "1":
        if end == "raise":
            raise KeyError("the culprit")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize("end", ["raise", "kill"])
def test_F08_children_with_a_session_of_their_own_end_with_the_job(spark, tmp_path, end):
    with pytest.raises(RankError):
        spark_dl.launch(start_and_end, str(tmp_path), end, settings=SETTINGS, spark=spark)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
