"""A run goes on in the middle of an epoch with the rows that it was trained on, and with no others."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.dataset.records import LocalPlacement, Shard, ShardSet
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.load.resume_check import check_same_rows, dataset_digest
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config


def saved_at(step, data):
    """What a checkpoint says of the rows, after a way through JSON."""
    return json.loads(json.dumps({**dataset_digest(data), "step_of_epoch": step}))


def placement(sizes, digest="a"):
    shards = tuple(Shard(f"{i}", (n,), 8 * n, digest) for i, n in enumerate(sizes))
    columns = (Column("x", "int64"),)
    return ShardSet("/nowhere", columns, shards, placement=LocalPlacement(0, (1,) * len(sizes), {"x": np.array(1)}))


def test_rows_on_the_ranks_must_be_the_same_in_the_same_places():
    saved = saved_at(3, placement((5, 5)))
    check_same_rows(saved, placement((5, 5)), validation_fraction=0.0)
    for other in (placement((6, 4)), placement((5, 5), "b"), placement((10,))):
        with pytest.raises(ValueError, match=r"made with \[5, 5\] rows on the ranks, now they have .*shards.storage"):
            check_same_rows(saved, other, validation_fraction=0.0)
        check_same_rows({**saved, "step_of_epoch": 0}, other, validation_fraction=0.0)
        with pytest.raises(ValueError, match="cannot resume"):
            check_same_rows({**saved, "step_of_epoch": 0}, other, validation_fraction=0.1)


def plain(folder, *files, group=8):
    folder.mkdir(exist_ok=True)
    for name, first, rows in files:
        pq.write_table(pa.table({"x": np.arange(first, first + rows)}), folder / name, row_group_size=group)
    return open_parquet(str(folder), ["x"])


def test_plain_parquet_must_have_the_same_files_row_groups_and_sizes(tmp_path):
    before = plain(tmp_path / "a", ("1.parquet", 0, 32), ("2.parquet", 32, 32))
    saved = saved_at(3, before)
    check_same_rows(saved, before, validation_fraction=0.0)
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    check_same_rows(saved, open_parquet(str(tmp_path / "moved"), ["x"]), validation_fraction=0.0)
    for name, files, group in (
        ("added", [("1.parquet", 0, 32), ("2.parquet", 32, 32), ("3.parquet", 64, 8)], 8),
        ("renamed", [("2.parquet", 0, 32), ("3.parquet", 32, 32)], 8),
        ("groups", [("1.parquet", 0, 32), ("2.parquet", 32, 32)], 16),
    ):
        with pytest.raises(
            ValueError, match=r"the dataset has changed .*found \d+ rows in . files.*64 rows in 2 files"
        ):
            check_same_rows(saved, plain(tmp_path / name, *files, group=group), validation_fraction=0.0)


def test_filters_must_pass_the_same_rows_of_each_row_group(tmp_path):
    dataset = plain(tmp_path / "a", ("1.parquet", 0, 32))
    low, high = (filter_rows(dataset, make_config(filters=[("x", op, 16)])) for op in ("<", ">="))
    assert low.rows == high.rows
    check_same_rows(saved_at(3, low), low, validation_fraction=0.0)
    for other in (high, dataset):
        with pytest.raises(ValueError, match=r"cannot resume: the dataset has changed .*data.filters"):
            check_same_rows(saved_at(3, low), other, validation_fraction=0.0)


def test_a_dataset_of_ours_that_was_written_again_is_another_unless_it_holds_the_same(tmp_path):
    url = str(tmp_path / "data")
    before = write_dataset(url, {"x": np.arange(64)})
    saved = saved_at(3, before)
    names = set(os.listdir(url))
    shutil.rmtree(url)
    write_dataset(url, {"x": np.arange(64)})
    assert set(os.listdir(url)) != names
    check_same_rows(saved, read_shards(url), validation_fraction=0.0)
    shutil.rmtree(url)
    write_dataset(url, {"x": np.arange(64)[::-1].copy()})
    with pytest.raises(ValueError, match="the dataset has changed"):
        check_same_rows(saved, read_shards(url), validation_fraction=0.0)


def test_a_mixture_is_compared_by_dataset(tmp_path):
    a, b = plain(tmp_path / "a", ("1.parquet", 0, 32)), plain(tmp_path / "b", ("1.parquet", 0, 16))
    saved = saved_at(3, Mixture({"a": a, "b": b}))
    check_same_rows(saved, Mixture({"a": a, "b": b}), validation_fraction=0.0)
    with pytest.raises(ValueError, match=r"the dataset 'b' has changed .*found 32 rows .*expected 16 rows"):
        check_same_rows(saved, Mixture({"a": a, "b": a}), validation_fraction=0.0)


def test_what_a_checkpoint_keeps_does_not_grow_with_the_files():
    shards = ShardSet("/nowhere", (), tuple(Shard(f"{i}", (8,) * 100, 8) for i in range(1000)))
    assert len(json.dumps(dataset_digest(shards))) < 200


def test_a_checkpoint_that_does_not_say_its_rows_is_said(tmp_path, caplog):
    check_same_rows(None, plain(tmp_path / "a", ("1.parquet", 0, 32)), validation_fraction=0.0)
    assert "has no digest of its rows" in caplog.text
