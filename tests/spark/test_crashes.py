"""Ranks that end without a Python exception: the signal is named, with the stacks of the rank."""

import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import spark_dl
from spark_dl import Launch, RankError
from spark_dl.launch.rank.desync import COMPARED

SETTINGS = Launch(num_ranks=2, collective_timeout_s=20, start_timeout_s=60)


def crash(number, at):
    if os.environ["RANK"] == "1":
        pathlib.Path(at).write_text(str(time.time()))
        os.kill(os.getpid(), number)
    time.sleep(30)


@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGBUS])
@pytest.mark.long_in("local-cluster")
def test_F30_the_signal_that_ends_a_rank_is_named_with_its_stack(spark, tmp_path, number):
    with pytest.raises(RankError, match=rf"rank 1 on .* was ended by {number.name}") as error:
        spark_dl.launch(crash, number, str(tmp_path / "at"), settings=SETTINGS, spark=spark)
    assert time.time() - float((tmp_path / "at").read_text()) < 6  # rank 0 sleeps for longer
    assert error.value.rank == 1
    assert "in crash" in error.value.rank_traceback


def die_with_a_pool(folder, victim):
    rank = int(os.environ["RANK"])
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pathlib.Path(folder, str(rank)).write_text(" ".join(map(str, pool.map(pid_of_worker, range(2)))))
        if rank == victim:
            pathlib.Path(folder, "fault").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30 if victim is not None else 0)
        return pool.map(abs, [-1, -2])


def pid_of_worker(number):
    time.sleep(0.2)
    return os.getpid()


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F01_a_rank_with_forks_that_is_killed_is_noticed_at_once_and_they_end(spark, tmp_path):
    assert spark_dl.launch(die_with_a_pool, str(tmp_path), None, settings=SETTINGS, spark=spark) == [[1, 2]] * 2
    with pytest.raises(RankError, match=r"^rank 1 on .* was killed: its process ended without an error"):
        spark_dl.launch(die_with_a_pool, str(tmp_path), 1, settings=SETTINGS, spark=spark)
    assert time.time() - float((tmp_path / "fault").read_text()) < 5
    pids = {*(tmp_path / "0").read_text().split(), *(tmp_path / "1").read_text().split()}
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def sum_of_other_shapes():
    dist.init_process_group("gloo")
    for _ in range(COMPARED):
        dist.barrier()
    dist.all_reduce(torch.ones(300_000 if os.environ["RANK"] == "0" else 3))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F19_an_abort_by_gloo_is_named_with_the_line_of_the_collective(spark):
    with pytest.raises(RankError) as error:
        spark_dl.launch(sum_of_other_shapes, settings=SETTINGS, spark=spark)
    assert "was ended by SIGABRT" in str(error.value) or "failed: RuntimeError" in str(error.value)
    assert "in sum_of_other_shapes" in error.value.rank_traceback
    if "SIGABRT" in str(error.value):
        assert "that gives a smaller tensor to a collective operation than another rank" in error.value.reason


OPERATIONS = {
    "shape": lambda first: dist.all_reduce(torch.ones(300_000 if first else 3)),
    "dtype": lambda first: dist.all_reduce(torch.ones(4, dtype=torch.float32 if first else torch.float64)),
    "operation": lambda first: dist.all_reduce(torch.ones(4)) if first else dist.broadcast(torch.ones(4), 0),
    "root": lambda first: dist.broadcast(torch.ones(4), 0 if first else 1),
    "one more": lambda first: first and dist.all_reduce(torch.ones(5)),
}


def _differ_as_they_may():
    """In groups of their own, in messages between two ranks, and in tensors that one rank alone has."""
    rank = int(os.environ["RANK"])
    own, both = [dist.new_group([each]) for each in range(2)], dist.new_group([0, 1])
    dist.all_reduce(torch.ones(2 + rank), group=own[rank])
    dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(3), 1)
    dist.broadcast(torch.ones(3), 0, group=both)
    dist.gather(torch.ones(2), None if rank else [torch.ones(2), torch.ones(2)])


def differ_in(what):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4), async_op=True).wait()
    if what:
        OPERATIONS[what](os.environ["RANK"] == "0")
    dist.broadcast(torch.ones(6), 0)
    _differ_as_they_may()
    gathered = [None, None]
    dist.all_gather_object(gathered, "x" * (1 + int(os.environ["RANK"])))
    return gathered


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.long_in("local-cluster")
@pytest.mark.parametrize(
    ("what", "of_rank_0", "of_rank_1"),
    [
        ("shape", "all_reduce [[300000] float32]", "all_reduce [[3] float32]"),
        ("dtype", "all_reduce [[4] float32]", "all_reduce [[4] float64]"),
        ("operation", "all_reduce [[4] float32]", "broadcast [[4] float32] of rank 0 of the group"),
        ("root", "broadcast [[4] float32] of rank 0 of the group", "broadcast [[4] float32] of rank 1 of the group"),
        ("one more", "all_reduce [[5] float32]", "broadcast [[6] float32] of rank 0 of the group"),
    ],
)
def test_F19_operations_that_differ_are_named_and_no_process_is_aborted(spark, what, of_rank_0, of_rank_1):
    assert spark_dl.launch(differ_in, "", settings=SETTINGS, spark=spark) == [["x", "xx"]] * 2
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        spark_dl.launch(differ_in, what, settings=SETTINGS, spark=spark)
    assert time.monotonic() - start < 15, "not the time limit of an operation"
    reason = error.value.reason
    assert "DesyncError: the ranks called different collective operations as number 2: " in reason
    for rank, operation in enumerate((of_rank_0, of_rank_1)):
        assert re.search(rf"rank {rank} {re.escape(operation)} at \S+/test_crashes.py:\d+", reason)
    assert not error.value.is_retryable
    assert "in differ_in" in error.value.rank_traceback


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


@pytest.mark.sampled(2)
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


class SlowRows(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.tensor([float(i), os.getpid()], dtype=torch.float64)


def read_with_a_data_worker(kills):
    total = 0.0
    for i, batch in enumerate(torch.utils.data.DataLoader(SlowRows(), batch_size=2, num_workers=1)):
        if i == 3 and kills and os.environ["RANK"] == "1":
            os.kill(int(batch[0, 1]), signal.SIGKILL)
        total += float(batch[:, 0].sum())
    return total


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F16_a_data_worker_that_was_killed_is_named_with_its_signal(spark):
    assert spark_dl.launch(read_with_a_data_worker, False, settings=SETTINGS, spark=spark) == [59 * 30.0] * 2
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 on .* a data worker, pid (\d+), was ended by SIGKILL") as error:
        spark_dl.launch(read_with_a_data_worker, True, settings=SETTINGS, spark=spark)
    assert time.monotonic() - start < 15
    assert "in read_with_a_data_worker" in error.value.rank_traceback


CGROUPS = pathlib.Path("/sys/fs/cgroup")
VERSION_1 = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
MEMORY = CGROUPS / "memory" if VERSION_1 else CGROUPS
CAN_LIMIT = (VERSION_1 or (CGROUPS / "cgroup.controllers").exists()) and os.access(MEMORY / "cgroup.procs", os.W_OK)


@pytest.fixture
def small_group():
    """A control group of the kernel with 96 MiB."""
    folder = MEMORY / f"spark_dl-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if VERSION_1 else "memory.max")).write_text(str(96 << 20))
        yield str(folder)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            (MEMORY / "cgroup.procs").write_text(pid)
        folder.rmdir()


def use_memory(folder, mebibytes, is_killed):
    if os.environ["RANK"] == "1":
        pathlib.Path(folder, "cgroup.procs").write_text(str(os.getpid()))
        time.sleep(2.5)  # for a heartbeat
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        found = bytearray(mebibytes << 20)
        pathlib.Path(folder).parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
        return len(found) >> 20
    time.sleep(5)


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.skipif(not CAN_LIMIT, reason="only root can make a control group for memory")
def test_F30_out_of_memory_is_the_cause_only_where_the_kernel_says_so(spark, small_group):
    assert spark_dl.launch(use_memory, small_group, 16, False, settings=SETTINGS, spark=spark) == [None, 16]
    with pytest.raises(RankError) as error:
        spark_dl.launch(use_memory, small_group, 300, False, settings=SETTINGS, spark=spark)
    of_kernel = r"^rank 1 on \S+ \(pid \d+\) was killed by the kernel: out of memory, with a peak memory of \d+ MiB"
    assert re.search(rf"{of_kernel} of 96 MiB; raise spark.executor.memoryOverhead", str(error.value))
    with pytest.raises(RankError) as error:
        spark_dl.launch(use_memory, small_group, 16, True, settings=SETTINGS, spark=spark)
    of_nobody = (
        r"was killed: its process ended without an error, with a peak memory of \d+ MiB of 96 MiB\. A SIGKILL can"
    )
    assert re.search(of_nobody, str(error.value))
