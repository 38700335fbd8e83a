"""Datasets, loaders and checkpoints on S3, and what happens when the server does not serve."""

import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from spark_dl import Shards, storage
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.arrays import write_arrays
from spark_dl.rundir import checkpoint
from tests.builders.models import small_config
from tests.unit.rundir.test_checkpoint import group as group
from tests.unit.rundir.test_checkpoint import save

ROWS = 1000
BOUND_S = 90


def write(url):
    rng = np.random.default_rng(0)
    columns = {"features": rng.normal(size=(ROWS, 4)).astype(np.float32), "label": np.arange(ROWS)}
    return write_arrays(columns, url, shards=Shards(rows_per_row_group=64, rows_per_shard=256)), columns


def labels(shards, **options):
    loader = ShardLoader(shards, small_config(1), rank=0, world_size=1, **options)
    steps = [b.micro_batches[0] for b in loader.epoch(0)]
    return torch.cat([s["label"][s["weight"] > 0] for s in steps]).tolist()


def test_a_dataset_is_written_opened_and_read(s3, tmp_path):
    url = s3.url("sets/größe #1 100%")
    written, _ = write(url)
    assert read_shards(url) == written
    assert written.url == storage.absolute(url)
    assert sorted(labels(read_shards(url))) == list(range(ROWS))
    on_disk, _ = write(str(tmp_path / "set"))
    assert labels(read_shards(url)) == labels(on_disk)
    with pytest.raises(ValueError, match="already has a dataset|in use|is not empty"):
        write(url)


def test_the_plain_parquet_of_others_is_read(s3):
    _, columns = write(s3.url("plain"))
    found = open_parquet(s3.url("plain"), ["label"])
    assert found.rows == ROWS
    one = found.shards[0].name
    assert open_parquet(s3.url(f"plain/{one}"), ["label"]).rows == 256
    with storage.open_input(s3.url(f"plain/{one}")) as file:
        assert pq.read_table(file)["label"].to_pylist() == columns["label"][:256].tolist()


def test_nothing_there_and_no_such_bucket_are_clear_errors(s3):
    for url in (s3.url("nothing"), s3.url("x", bucket="no-such-bucket")):
        with pytest.raises(ValueError, match="no dataset at s3://.*found nothing"):
            read_shards(url)
    with pytest.raises(ValueError, match=r"cannot write to s3://no-such-bucket.*does not exist"):
        write(s3.url("x", bucket="no-such-bucket"))
    with pytest.raises(ValueError, match="no checkpoint at s3://"):
        checkpoint.find(s3.url("nothing"))


def test_wrong_credentials_are_an_error_that_says_where_they_come_from(own_s3):
    own_s3.check_credentials()
    url = own_s3.url("x")
    start = time.monotonic()
    for use in (storage.exists, storage.list_names, storage.read_bytes, storage.delete, checkpoint.find):
        with pytest.raises(PermissionError, match="no access to s3://bucket/x.*AWS_ACCESS_KEY_ID") as caught:
            use(url)
        assert "MARKER" not in str(caught.value)
    with pytest.raises(ValueError, match="no access to s3://bucket/x"):
        write(url)
    assert time.monotonic() - start < BOUND_S


@pytest.mark.slow
def test_a_server_that_goes_in_an_epoch_is_an_error_and_never_a_skip(own_s3):
    shards, _ = write(own_s3.url("x"))
    epoch = ShardLoader(shards, small_config(1, data={"prefetch_batches": 1}), rank=0, world_size=1).epoch(0)
    next(epoch)
    own_s3.kill()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"cannot read .*s3://bucket/x/part-.*onnect"):
        list(epoch)
    assert time.monotonic() - start < BOUND_S
    with pytest.raises(RuntimeError, match="cannot read the dataset s3://bucket/x"):
        read_shards(own_s3.url("x"))


@pytest.mark.parametrize("damage", ["missing", "truncated", "replaced"])
def test_a_damaged_shard_is_an_error_that_names_it(s3, damage):
    shards, _ = write(s3.url(f"damaged-{damage}"))
    url = storage.join(shards.url, shards.shards[1].name)
    content = storage.read_bytes(url)
    if damage == "missing":
        storage.delete(url)
    else:
        storage.write_bytes(url, content[: len(content) // 2] if damage == "truncated" else b"x" * len(content))
    with pytest.raises(RuntimeError, match=f"cannot read .*{shards.shards[1].name}"):
        labels(shards)


def test_checkpoints_are_committed_listed_loaded_and_deleted(s3, group):
    run_dir = s3.url("runs/one two")
    for step in (1, 2, 3):
        saved = save(run_dir, step=step, model={"0": {"w": torch.full((3,), float(step))}})
    found = checkpoint.list_checkpoints(run_dir)
    assert [c.step for c in found] == [2, 3]
    assert checkpoint.latest(run_dir).url == saved
    assert checkpoint.find(run_dir) == checkpoint.find(saved) == found[-1]
    assert checkpoint.run_dir_of(found[-1]) == storage.absolute(run_dir)
    assert torch.equal(checkpoint.load(found[-1], "model.pt")["0"]["w"], torch.full((3,), 3.0))
    assert not [key for key in s3.keys("runs/") if "step-00000001" in key and key[-1] != "/"]
