"""`loader.reader: petastorm` trains and evaluates on the rows that Petastorm deals, and logs which it leaves out."""

import os
import pickle
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import worker
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.load.build import build_loader
from spark_dl.data.petastorm.unischema import UnsafeMetadataError
from spark_dl.data.petastorm_plan import PetastormPlan
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, small_config
from tests.builders.petastorm import Reduced
from tests.petastorm.exchange import cells
from tests.ranks.launcher import run_ranks

ROWS = 490
"""10 row groups: two ranks are dealt 250 and 240."""


@pytest.fixture(scope="module")
def columns():
    return blobs(ROWS)


@pytest.fixture(scope="module")
def datasets(columns, tmp_path_factory):
    """Our shards, which make_reader decodes, and plain Parquet with lists, for make_batch_reader."""
    root = tmp_path_factory.mktemp("datasets")
    write_dataset(str(root / "shards"), columns, group_rows=50, shard_rows=100)
    (root / "plain").mkdir()
    table = pa.table({"features": list(columns["features"]), "label": columns["label"]})
    pq.write_table(table, root / "plain" / "a.parquet", row_group_size=50)
    return {"shards": str(root / "shards"), "plain": str(root / "plain")}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def answer(request, datasets, run_petastorm, tmp_path_factory):
    asked = {"run_dir": str(tmp_path_factory.mktemp("runs")), "datasets": datasets, "num_ranks": request.param}
    return run_petastorm("train_ranks", asked, timeout_s=115)


def rows_of(batches):
    """(features, label) of the true rows, sorted."""
    found = []
    for batch in batches:
        is_true = cells(batch["weight"]) > 0
        features, label = cells(batch["features"])[is_true], cells(batch["label"])[is_true]
        found += [(*map(float, f), int(y)) for f, y in zip(features, label, strict=True)]
    return sorted(found)


def all_rows(columns):
    return sorted((*map(float, f), int(y)) for f, y in zip(columns["features"], columns["label"], strict=True))


def evaluate_rank(run):
    return worker.main(run, task="evaluate").result


@pytest.mark.parametrize("name", ["shards", "plain"])
@pytest.mark.slow
def test_training_and_evaluation(answer, datasets, name):
    ranks = answer[name]["ranks"]
    steps = 11 if len(ranks) == 1 else 10
    used = ROWS if len(ranks) == 1 else 480
    for rank in ranks:
        assert rank["trained"]["steps"] == 2 * steps
        assert rank["trained"]["rows"] == 2 * used
        assert rank["evaluated"]["rows"] == ROWS
        assert rank["evaluated"]["loss"] == pytest.approx(rank["trained"]["metrics"]["loss"])
        assert rank["evaluated"]["loss"] < 0.7
    shards = read_shards(datasets[name]) if name == "shards" else open_parquet(datasets[name], ["features", "label"])
    run = Run(spec=MLP, config=small_config(1), train=shards, run_dir="", checkpoint=ranks[0]["trained"]["checkpoint"])
    (ours,) = run_ranks(evaluate_rank, 1, run)  # with this package's loader, and today's libraries
    assert ours["loss"] == pytest.approx(ranks[0]["evaluated"]["loss"], rel=1e-5)
    said = [w for w in ranks[0]["warnings"] if "leaves out" in w]
    assert len(said) == len(ranks) - 1
    if said:
        assert "[250, 240] of 490 rows" in said[0]
        assert "leaves out 10 rows" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "plain"])
def test_without_shuffling_every_row_is_read_once(answer, columns, name):
    ranks = answer[name]["in order"]
    assert sorted(row for batches in ranks for row in rows_of(batches)) == all_rows(columns)
    assert {len(batches) for batches in ranks} == {11}
    for step in zip(*ranks, strict=True):
        assert step[0]["rows"] == sum(cells(b["weight"]).sum() for b in step)
        assert all(b["rows"] == step[0]["rows"] for b in step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shards", "plain"])
def test_training_reads_no_row_twice_and_leaves_out_as_many_as_it_says(answer, columns, name):
    ranks = answer[name]["shuffled"]
    found = [row for batches in ranks for row in rows_of(batches)]
    assert len(set(found)) == len(found) == (ROWS if len(ranks) == 1 else 480)
    assert set(found) <= set(all_rows(columns))
    first = cells(ranks[0][0]["label"]).tolist()
    assert first != cells(answer[name]["in order"][0][0]["label"]).tolist()


@pytest.mark.slow
def test_more_ranks_than_row_groups_are_an_error(answer):
    for name in ("shards", "plain"):
        assert "found 10 row groups for 12 ranks" in answer[name]["too many ranks"]


def test_S01_metadata_that_petastorm_would_unpickle_are_checked_first(tmp_path):
    shards = write_dataset(str(tmp_path / "x"), blobs(10))
    hostile = pickle.dumps(Reduced(os.system, f"touch {tmp_path}/canary"))
    schema = pa.schema([("label", pa.int64())], metadata={b"dataset-toolkit.unischema.v1": hostile})
    pq.write_metadata(schema, tmp_path / "x" / "_common_metadata")
    with pytest.raises(UnsafeMetadataError, match="system"):
        build_loader(shards, small_config(1, data={"reader": "petastorm"}), rank=0, world_size=1)
    assert not (tmp_path / "canary").exists()


def test_the_plan_of_dealt_rows():
    training = PetastormPlan((100, 70, 31), 32, every_row=False)
    assert [training.rank_batch(r) for r in range(3)] == [10, 11, 11]
    assert training.steps == 3
    assert training.rows == 30 + 33 + 31
    assert training.left_out == 107
    assert [training.batch_rows(s) for s in range(3)] == [32, 32, 30]
    everything = PetastormPlan((100, 70, 31), 32, every_row=True)
    assert everything.steps == 10
    assert everything.rows == 201 == sum(everything.batch_rows(s) for s in range(10))
    assert everything.left_out == 0


def test_without_petastorm_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "petastorm", None)
    shards = write_dataset(str(tmp_path / "x"), blobs(10))
    with pytest.raises(ValueError, match=r"pip install .*petastorm==0.13.1") as caught:
        build_loader(shards, small_config(1, data={"reader": "petastorm"}), rank=0, world_size=1)
    assert "\n" not in str(caught.value)
