"""What one rank does not reach, or what goes under the ranks' hands, is an error on all of them, and never a wait."""

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from spark_dl import Config, ModelSpec
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.parquet.file import HAS_CHECKSUMS
from spark_dl.data.plan import streams_of_rank
from spark_dl.rundir import checkpoint, run_folder, saving
from spark_dl.rundir.metrics import read_metrics
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, build_mlp, small_config
from tests.ranks.launcher import kill_ranks, run_ranks
from tests.ranks.test_training import make_run, train_rank

CLONE_NEWNS = 0x20000
CAN_MOUNT = os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
as_root = pytest.mark.skipif(not CAN_MOUNT, reason="only root can give a rank mounts of its own or another user")


@pytest.fixture(autouse=True)
def spoiled_ranks():
    """The processes of the ranks end with the test: they may have other mounts, another user, or a failed group."""
    yield
    kill_ranks()


@pytest.fixture
def folder():
    """Open to all users, unlike pytest's."""
    path = tempfile.mkdtemp(prefix="spark_dl-test-")
    os.chmod(path, 0o755)
    yield Path(path)
    shutil.rmtree(path)


_errors = []
"""Kept until the process is killed: with an error goes its process group, and the end of one in PyTorch can wait for a
thread of its own that waits for the interpreter."""


def error_of(call):
    try:
        call()
    except RuntimeError as error:
        _errors.append(error)
        return str(error)
    return ""


def train_without(run, hidden, only_rank):
    """Trains, while a folder is another one on a rank's host: an empty disk is mounted over it."""
    if os.environ["RANK"] == only_rank:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWNS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", hidden], check=True)
    return error_of(partial(train_rank, run))


def train_as_nobody(run, only_rank):
    if os.environ["RANK"] == only_rank:
        os.setegid(65534)
        os.seteuid(65534)
    return error_of(partial(train_rank, run))


@pytest.mark.sampled(2)
@as_root
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("hidden", "message"), [
    ("data", r"rank {rank} on host \S+: the dataset .*/data is not readable: .*No such file.*; all executors need"),
    ("shared", r"rank 1 on host \S+: the run_dir .*/shared/run is another folder than on the host of rank 0"),
])  # fmt: skip
def test_B15_a_folder_that_not_all_hosts_have(tmp_path, rank, hidden, message):
    (tmp_path / "shared").mkdir()
    run = make_run(tmp_path, small_config(2), spec=MLP, name="shared/run")
    errors = run_ranks(train_without, 2, run, str(tmp_path / hidden), rank)
    assert errors[0] == errors[1]
    with pytest.raises(RuntimeError, match=message.format(rank=rank)):
        raise RuntimeError(errors[0])
    if rank == "1":
        assert checkpoint.latest(run.run_dir) is None
        assert os.listdir(tmp_path / "shared") in ([], ["run"])


@as_root
@pytest.mark.parametrize(("what", "mode", "message"), [
    ("data", 0o000, "the dataset .*/data is not readable: .*Permission denied"),
    ("run", 0o755, "the run_dir .*/run is not writable: .*Permission denied"),
])  # fmt: skip
def test_B15_a_folder_that_one_rank_may_not_use(folder, what, mode, message):
    (folder / "run").mkdir()
    run = make_run(folder, small_config(2), spec=MLP)
    for path in (folder / "run", folder / "data", *(folder / "data").iterdir()):
        os.chmod(path, 0o777)
    os.chmod(folder / what, mode)
    errors = run_ranks(train_as_nobody, 2, run, "1")
    assert errors[0] == errors[1]
    with pytest.raises(RuntimeError, match=rf"rank 1 on host \S+: {message}"):
        raise RuntimeError(errors[0])
    assert os.listdir(folder / "run") == []


def test_all_ranks_lack_the_same(tmp_path):
    run = make_run(tmp_path, small_config(2), spec=MLP)
    shutil.rmtree(tmp_path / "data")
    errors = run_ranks(partial(error_of, partial(train_rank, run)), 2)
    assert errors[0] == errors[1]
    assert "rank 0 on host" in errors[0]
    assert "(and on 1 more ranks, on" in errors[0]


def test_nothing_is_left_in_the_run_dir(tmp_path):
    run = make_run(tmp_path, small_config(2, train={"epochs": 1}), spec=MLP)
    run_ranks(train_rank, 2, run)
    assert [n for n in os.listdir(run.run_dir) if n.startswith("probe")] == []


@as_root
@pytest.mark.parametrize(("free_bytes", "message"), [
    (0, "the run_dir .*/run is not writable: .*No space left on device"),
    (
        16384,
        r"checkpoint at step 6 not saved: rank [01] cannot write to .*No space left on device: it needs about [\d,]+ "
        r"bytes, and [\d,]+ bytes are free; .*\.pt'",
    ),
])  # fmt: skip
def test_F12_a_full_disk_is_one_error(tmp_path, free_bytes, message):
    """Before training where nothing fits, and at the first checkpoint where that does not."""
    run = make_run(tmp_path, small_config(2), spec=MLP)
    (tmp_path / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", run.run_dir], check=True)
    try:
        (tmp_path / "run" / "ballast").write_bytes(bytes((64 << 10) - free_bytes))
        errors = run_ranks(partial(error_of, partial(train_rank, run)), 2)
        assert errors[0] == errors[1]
        with pytest.raises(RuntimeError, match=message):
            raise RuntimeError(errors[0])
    finally:
        subprocess.run(["umount", run.run_dir], check=True)


@as_root
@pytest.mark.parametrize("inodes", [1, 2, 3])  # the first two are too few for the folder of the checkpoint
def test_F12_a_disk_that_is_full_before_the_first_file_is_the_same_error(tmp_path, inodes):
    state = saving.contents(0, model={"w": torch.zeros(1000)}, training={}, of_rank={})
    about = saving.About(world_size=1, generation=0, step=3, config=Config(), columns=())
    save = partial(saving.save, str(tmp_path), state, about, gather=lambda value: [value])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "none", tmp_path], check=True)
    try:
        match = r"rank 0 cannot write .*No space left on device: it needs about [\d,]+ bytes, and [\d,]+ bytes are"
        with pytest.raises(saving.NotWrittenError, match=match):
            save()
        assert checkpoint.list_checkpoints(str(tmp_path)) == []
        subprocess.run(["mount", "-o", "remount,nr_inodes=100", tmp_path], check=True)
        save()
        assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path))] == [3]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@as_root
def test_a_full_disk_can_be_mended_and_a_read_only_one_needs_another_run_dir(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    begin = partial(run_folder.begin_attempt, str(run_dir), Config(), resume=True, overwrite=False)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", run_dir], check=True)
    try:
        (run_dir / "ballast").write_bytes(bytes(64 << 10))
        with pytest.raises(RuntimeError, match=f"cannot write to the run_dir {run_dir}: .*No space left on device"):
            begin()
        (run_dir / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,ro", run_dir], check=True)
        with pytest.raises(ValueError, match=f"cannot write to the run_dir {run_dir}: .*Read-only file system"):
            begin()
        subprocess.run(["mount", "-o", "remount,rw", run_dir], check=True)
        assert begin() == (1, None)
    finally:
        subprocess.run(["umount", run_dir], check=True)


@as_root
def test_F12_a_disk_that_fills_up_leaves_the_checkpoint_before_it_and_nothing_else(tmp_path):
    run = make_run(tmp_path, small_config(2, train={"epochs": 1}), spec=MLP)
    (tmp_path / "run").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", run.run_dir], check=True)
    try:
        run_ranks(train_rank, 2, run)
        saved = checkpoint.latest(run.run_dir)
        free = shutil.disk_usage(run.run_dir).free
        (tmp_path / "run" / "ballast").write_bytes(bytes(free - 36_864))  # for metrics, but not for a checkpoint
        generation = checkpoint.start_generation(run.run_dir)
        more = dataclasses.replace(
            run, config=small_config(2, train={"epochs": 2}), checkpoint=saved.url, generation=generation
        )
        errors = run_ranks(partial(error_of, partial(train_rank, more)), 2)
        assert errors[0] == errors[1]
        with pytest.raises(RuntimeError, match=r"checkpoint at step 12 not saved: .*No space left on device"):
            raise RuntimeError(errors[0])
        assert checkpoint.find(run.run_dir) == saved
        assert os.listdir(tmp_path / "run" / "checkpoints") == [Path(saved.url).name]
        assert not [*Path(run.run_dir).rglob("*.tmp-*")]
        (tmp_path / "run" / "ballast").unlink()
        kill_ranks()  # their process group has failed
        run_ranks(train_rank, 2, dataclasses.replace(more, generation=checkpoint.start_generation(run.run_dir)))
        assert checkpoint.find(run.run_dir).step == 12
    finally:
        subprocess.run(["umount", run.run_dir], check=True)


@dataclasses.dataclass(frozen=True)
class ReadOnlyForAWhile:
    """`ModelSpec.set_position`: rank 0 makes the disk read-only before a step, and writable before another."""

    folder: str
    steps: tuple = (3, 6)

    def __call__(self, model, position):
        if position.global_step + 1 in self.steps and os.environ["RANK"] == "0":
            how = "ro" if position.global_step + 1 == self.steps[0] else "rw"
            subprocess.run(["mount", "-o", f"remount,{how}", self.folder], check=True)


@as_root
def test_F12_training_outlives_a_disk_that_is_read_only_for_a_while(tmp_path):
    settings = {"epochs": 1, "every_steps": 2, "keep": 100, "on_error": "warn"}
    (tmp_path / "run").mkdir()
    spec = ModelSpec(build=build_mlp, set_position=ReadOnlyForAWhile(str(tmp_path / "run")))
    run = make_run(tmp_path, small_config(2, train=settings), spec=spec)
    subprocess.run(["mount", "-t", "tmpfs", "none", run.run_dir], check=True)
    try:
        results = run_ranks(train_rank, 2, run)
        assert [result["failed_checkpoints"] for result in results] == [1, 1]
        assert [saved.step for saved in checkpoint.list_checkpoints(run.run_dir)] == [2, 6]
        lines = read_metrics(run.run_dir)
        assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
        (failed,) = [line for line in lines if line["kind"] == "checkpoint_failed"]
        assert failed["step"] == 4
        assert "Read-only file system" in failed["reason"]
        assert not [*Path(run.run_dir).rglob("*.tmp-*")]
    finally:
        subprocess.run(["umount", run.run_dir], check=True)


def delete(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_bits(path):
    """One in every value's page, in place."""
    content = bytearray(path.read_bytes())
    footer = pq.ParquetFile(path).metadata
    for group in range(footer.num_row_groups):
        for column in range(footer.num_columns):
            chunk = footer.row_group(group).column(column)
            content[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 4
    path.write_bytes(content)


def fewer_row_groups(path):
    table = pq.read_table(path)
    pq.write_table(table.slice(0, table.num_rows // 2), path, row_group_size=8)


DAMAGES = {f.__name__: f for f in (delete, truncate, flip_bits, fewer_row_groups)}


class DamagingLoss:
    """Rank 0 damages a shard in its fourth step, while both ranks read."""

    def __init__(self, path, how):
        self.path, self.how, self.step = path, how, 0

    def __call__(self, output, label):
        self.step += 1
        if self.step == 4 and os.environ["RANK"] == "0" and self.how:
            DAMAGES[self.how](Path(self.path))
        return torch.nn.functional.cross_entropy(output, label, reduction="none")


def shard_of_rank_1(run):
    """The number of a shard that rank 1 alone reads, and not in the first half of the epoch."""
    first, config = ({}, {}), run.config
    for rank, found in enumerate(first):
        plan = build_train_loader(run.train, run.spec, config, rank=rank, world_size=2).plan
        for stream in plan.streams(0, streams_of_rank(config.loader.num_streams, rank, 2)):
            for window in stream.windows:
                for segment in window.segments:
                    shard = segment.row_group // GROUPS
                    found[shard] = min(found.get(shard, window.first), window.first)
    late = [(row, shard) for shard, row in first[1].items() if shard not in first[0] and row >= stream.rows // 2]
    return min(late)[1]


GROUPS = 2
"""Row groups of a shard."""


def train_with_damage(tmp_path, how):
    """What each rank has raised, and the damaged shard."""
    shards = write_dataset(str(tmp_path / "data"), blobs(6_000), group_rows=16, shard_rows=16 * GROUPS)
    run = make_run(tmp_path, small_config(2, train={"epochs": 1}), spec=MLP, train=shards)
    path = f"{tmp_path}/data/{shards.shards[shard_of_rank_1(run)].name}"
    run = dataclasses.replace(run, spec=ModelSpec(build=build_mlp, loss=DamagingLoss(path, how)))
    run_ranks(partial(error_of, int), 2)  # starts their processes, which is not measured
    start = time.monotonic()
    errors = run_ranks(partial(error_of, partial(train_rank, run)), 2)
    return errors, path, time.monotonic() - start, checkpoint.latest(run.run_dir)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", sorted(DAMAGES if HAS_CHECKSUMS else DAMAGES.keys() - {"flip_bits"}))
def test_F15_a_dataset_that_is_damaged_in_the_middle_of_an_epoch_stops_all_ranks(tmp_path, how):
    """Only rank 1 reads the shard. Its error has file and row group, and with it rank 0 ends, and names rank 1."""
    (other, error), path, seconds, saved = train_with_damage(tmp_path, how)
    assert re.match(rf"cannot read row group [01] of {path}", error), error
    assert re.match(rf"rank 1 on \S+ .*cannot read row group [01] of {path}", other), other
    assert seconds < 20, "the time after which a rank is given up (launch.collective_timeout_s)"
    assert saved is None


def test_a_dataset_that_stays_whole_is_read_to_the_end_of_the_epoch_by_all_ranks(tmp_path):
    errors, _, _, saved = train_with_damage(tmp_path, None)
    assert errors == ["", ""]
    assert saved.step == 125
