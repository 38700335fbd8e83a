"""The rows that are named for a step are those that the loader gives in it."""

import dataclasses
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from spark_dl.data.dataset.records import LocalPlacement
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.build import build_loader
from spark_dl.data.load.mixture import Mixture
from spark_dl.data.load.row_names import name_rows
from spark_dl.data.read.sequences import with_runs
from tests.builders.batches import steps
from tests.builders.datasets import write_dataset
from tests.builders.row_places import places_of, rows_named
from tests.builders.settings import make_config


def config(**fields):
    base = {"features": ("x",), "label": "id", "num_streams": 4, "shuffle_window_rows": 40, "global_batch_size": 12}
    return make_config(**{**base, **fields})


def dataset(url, rows=100, first=0):
    ids = first + np.arange(rows)
    return write_dataset(str(url), {"x": np.zeros((rows, 2), np.float32), "id": ids, "part": ids % 3}, 7, 21)


def assert_named(loader, place_of, epoch=1):
    """place_of: (file, row group, row) of each id."""
    for step, _, batch in steps(loader, epoch=epoch):
        ids = batch["id"][batch["weight"] > 0].tolist()
        found = rows_named(name_rows(loader, epoch, step))
        assert sorted(found) == sorted({place_of[i] for i in ids})


@pytest.mark.parametrize(("split", "settings"), [
    ("all", {}), ("all", {"shuffle": False}), ("train", {"validation_fraction": 0.25}),
    ("validation", {"validation_fraction": 0.25}), ("train", {"validation_fraction": 0.25, "validation_fold": 1}),
], ids=str)  # fmt: skip
def test_rows_are_named_by_file_row_group_and_row(tmp_path, split, settings):
    shards = dataset(tmp_path / "d")
    for rank in range(3):
        loader = build_loader(shards, config(**settings), rank=rank, world_size=3, split=split)
        assert_named(loader, places_of(shards, "id"))
    assert f" in {shards.url} (numbered from 0)" in name_rows(loader, 0, 0)


def test_rows_are_numbered_among_those_that_pass_the_filters(tmp_path):
    settings = config(filters=[("part", "!=", 1)])
    shards = filter_rows(dataset(tmp_path / "d"), settings)
    loader = build_loader(shards, settings, rank=1, world_size=2)
    assert_named(loader, places_of(shards, "id", passes=lambda ids: [i for i in ids if i % 3 != 1]))
    assert "(numbered from 0 among the rows that pass data.filters" in name_rows(loader, 0, 0)


def test_sequences_are_named_by_their_first_rows(tmp_path):
    settings = config(label=None, features=("x", "id"), sequence_length=3, sequence_stride=2)
    shards = with_runs(dataset(tmp_path / "d"), settings.sequences, settings.data.columns)
    place_of, loader = places_of(shards, "id"), build_loader(shards, settings, rank=0, world_size=2)
    for step, _, batch in steps(loader, epoch=1):
        first = batch["id"][batch["weight"] > 0][:, 0].tolist()
        text = name_rows(loader, 1, step)
        assert text.startswith("the sequences from row" if first else "none but padding")
        assert sorted(rows_named(text)) == sorted(place_of[i] for i in first)


def test_rows_of_a_mixture_are_named_by_dataset_also_where_a_dataset_begins_again(tmp_path):
    datasets = {"a": dataset(tmp_path / "a"), "b": dataset(tmp_path / "b", 9, first=1000)}
    settings = config(proportions={"a": 2, "b": 1})
    loader = build_loader(Mixture(datasets), settings, rank=1, world_size=2)
    place_of = places_of(datasets["a"], "id") | places_of(datasets["b"], "id")
    assert_named(loader, place_of)
    assert re.match(r"of the dataset 'a': rows? .*; of the dataset 'b': rows? ", name_rows(loader, 0, 1))


def test_a_rank_with_local_storage_names_its_own_files(tmp_path):
    shards = dataset(tmp_path / "d", 60)  # three files
    for part, streams in ((0, 2), (1, 2)):
        filler = {"x": np.zeros(2, np.float32), "id": np.int64(0)}
        own = dataclasses.replace(shards, placement=LocalPlacement(part, (2, 1), filler))
        loader = build_loader(own, config(num_streams=2 * streams), rank=part, world_size=2)
        assert_named(loader, places_of(shards, "id"))
        assert "a folder of this run on the rank's host" in name_rows(loader, 0, 0)


def test_long_lists_are_shortened(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), {"x": np.zeros((400, 2), np.float32), "id": np.arange(400)}, 200, 400)
    loader = build_loader(shards, config(global_batch_size=400, shuffle=False), rank=0, world_size=1)
    text = name_rows(loader, 0, 0)
    assert re.search(r"^rows 0, 1, [\d, ]+, 47 and 152 others of row group 0 of \S+, rows 0, ", text)
    small = dataset(tmp_path / "small", 300)  # of 43 row groups
    text = name_rows(build_loader(small, config(global_batch_size=300), rank=0, world_size=1), 0, 0)
    assert re.search(r"rows 0, 1, 2, 3, 4, 5 and 6 of row group 0 of \S+, .*, 188 rows of 27 other row groups", text)


def test_a_step_that_cannot_be_named_is_no_error(tmp_path):
    loader = build_loader(dataset(tmp_path / "d"), config(), rank=0, world_size=1)
    assert name_rows(loader, 0, 999) == "none but padding"
    loader._rows = None
    assert name_rows(loader, 0, 0).startswith("not known (AttributeError: ")


def test_the_files_have_the_rows(tmp_path):
    """`places_of` against the files, so that the tests above compare with what a user finds."""
    shards = dataset(tmp_path / "d", 30)
    for i, (name, group, row) in places_of(shards, "id").items():
        assert pq.ParquetFile(f"{shards.url}/{name}").read_row_group(group)["id"][row].as_py() == i
