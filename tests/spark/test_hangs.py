"""A rank that hangs: the error names it, its step, and what each rank did. A healthy twin ends as always."""

import dataclasses
import datetime
import os
import pathlib
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

import spark_dl
from spark_dl import ModelSpec, RankError
from spark_dl.launch.rank.desync import COMPARED
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, small_config
from tests.spark.test_restarts import FaultOnce

TIMEOUT_S = 8


def stop():
    time.sleep(1.5)  # a heartbeat tells the step
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_user_code():
    time.sleep(60)


def train(tmp_path, fault=None):
    shards = write_dataset(str(tmp_path / "data"), blobs(96), group_rows=40, shard_rows=120)
    (tmp_path / "faults").mkdir()
    spec = MLP
    if fault:
        spec = ModelSpec(build=MLP.build, set_position=FaultOnce(str(tmp_path / "faults"), fault, rank=1, step=3))
    config = small_config(2, launch={"collective_timeout_s": TIMEOUT_S, "start_timeout_s": 60})
    start = time.monotonic()
    try:
        return spark_dl.train(shards.url, spec, config, run_dir=str(tmp_path / "run"), progress=False)
    finally:
        if fault:  # from it: the start of cold processes on a busy machine is no part of the contract
            assert time.time() - (tmp_path / "faults" / "0").stat().st_mtime < TIMEOUT_S + 15
        else:
            assert time.monotonic() - start < TIMEOUT_S + 5 + 20  # and the start of the ranks


def assert_what_ranks_did(error, what, did, stack):
    """The error is about rank 1, for which rank 0 waits in a collective operation."""
    waits = r"collective number (\d+), \w+ \[\[.*\]"
    message = (
        rf"(?s)^rank 1 on .* {what}.*; the others wait in {waits}, and its last is number (\d+).* in step 3 \(train"
    )
    found = re.search(message, error.reason)
    assert found, error.reason
    number, last = map(int, found.groups())
    assert last == number - 1
    assert (error.rank, error.step) == (1, 3)
    table, of_rank_0, of_rank_1 = re.split(r"^rank \d on ", error.stacks, flags=re.MULTILINE)
    head, row_0, row_1 = table.strip().splitlines()
    assert head.split("  ")[:2] == ["rank", "host"]
    assert re.match(rf"0 +127\.0\.0\.1 +3 +waiting in {waits} +{number}( +\d\.\d s ago)?$", row_0), table
    assert re.match(rf"1 +127\.0\.0\.1 +3 +{did} +{last} +\d+\.\d s ago$", row_1), table
    assert "in step 3 (training):" in of_rank_0.splitlines()[0]
    assert "forward_backward" in of_rank_0
    assert stack in of_rank_1


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F04_a_rank_that_is_stopped_is_named_with_its_step_and_what_all_ranks_did(spark, tmp_path):
    with pytest.raises(RankError) as error:
        train(tmp_path, stop)
    what = r"sent no heartbeat for \d+ s"
    assert_what_ranks_did(error.value, what, "no answer", "no stacks: the process does not answer")


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_rank_that_hangs_in_code_is_named_with_its_step_and_what_all_ranks_did(spark, tmp_path):
    with pytest.raises(RankError) as error:
        train(tmp_path, sleep_in_user_code)
    assert_what_ranks_did(error.value, "never entered a collective operation", "computing", "in sleep_in_user_code")


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_healthy_twin_says_nothing(spark, tmp_path):
    assert train(tmp_path).steps == 4


def call_different_collectives(name):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    tensor = torch.ones(3, 4)
    for _ in range(COMPARED):
        dist.barrier()
    dist.all_reduce(tensor)
    if dist.get_rank() == 1 and name == "broadcast":
        dist.broadcast(tensor, 1)  # which waits for nobody; the next operation does
        dist.barrier()
    if dist.get_rank() == 1 and name == "all_gather":
        dist.all_gather([torch.empty(3, 4) for _ in range(2)], tensor)
    dist.all_reduce(tensor)
    return float(tensor[0, 0])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_F19_ranks_in_different_collectives_that_were_not_compared_are_named_with_what_each_called(spark):
    settings = spark_dl.Launch(num_ranks=2, collective_timeout_s=TIMEOUT_S)
    for name in ("broadcast", "all_gather"):
        with pytest.raises(RankError, match=(
            r"the ranks called different collective operations as number \d+: rank 0 \w+ \[.*; rank 1 \w+ \["
        )) as error:  # fmt: skip
            spark_dl.launch(call_different_collectives, name, settings=settings)
        assert not error.value.is_retryable
    assert spark_dl.launch(call_different_collectives, "", settings=settings) == [4.0, 4.0]


@dataclasses.dataclass(frozen=True)
class Stall:
    """A storage that does not answer any more: the files of the second half of a dataset become pipes without a writer.

    Files that are open stay as they are.
    """

    folder: str

    def __call__(self):
        shards = sorted(pathlib.Path(self.folder).glob("part-*"))
        for path in shards[len(shards) // 2 :]:
            path.unlink()
            os.mkfifo(path)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_F17_a_storage_that_does_not_answer_is_named_with_its_path(spark, tmp_path):
    shards = write_dataset(str(tmp_path / "data"), blobs(9600), group_rows=16, shard_rows=32)
    config = small_config(
        2, train={"epochs": 1}, data={"shuffle": False, "prefetch_batches": 1, "shuffle_window_rows": 48},
        launch={"collective_timeout_s": TIMEOUT_S, "start_timeout_s": 60},
    )  # fmt: skip
    twin = spark_dl.train(shards.url, MLP, config, run_dir=str(tmp_path / "twin"), progress=False)
    assert twin.rows == 9600
    (tmp_path / "faults").mkdir()
    fault = FaultOnce(str(tmp_path / "faults"), Stall(str(tmp_path / "data")), rank=1, step=3)
    spec, start = ModelSpec(build=MLP.build, set_position=fault), time.monotonic()
    with pytest.raises(RankError) as error:
        spark_dl.train(shards.url, spec, config, run_dir=str(tmp_path / "run"), progress=False)
    assert time.monotonic() - start < TIMEOUT_S + 20
    path = rf"row group \d of {tmp_path}/data/part-\S+ for \d+ s, more than launch.collective_timeout_s={TIMEOUT_S} s"
    assert re.search(
        rf"^rank 1 on .* \(reading rows\): RuntimeError: the storage gives no rows: .*{path}", str(error.value)
    )
    assert "collective operation" not in error.value.reason
