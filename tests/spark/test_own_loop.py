"""Loops of the user's own on ranks: Lightning, transformers and Accelerate as anyone would call them, with our rows."""

import pytest
import torch

import spark_dl
from spark_dl import Data, Launch, RankError
from tests.builders import libraries
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs

ROWS = libraries.GLOBAL_BATCH * 5 + 5
"""The last global batch has 5 rows, and ranks have padding in it, or nothing else."""
pytestmark = pytest.mark.modes("local")


@pytest.fixture
def url(tmp_path):
    write_dataset(str(tmp_path / "data"), blobs(ROWS), group_rows=20)
    return str(tmp_path / "data")


def check(results, num_ranks, alone=None):
    """All rows were used, in each epoch, and the ranks have the same weights: of one process, where it trained so."""
    assert [r["rank"] for r in results] == list(range(num_ranks))
    assert {r["world_size"] for r in results} == {num_ranks}
    assert sum(r["rows"] for r in results) == ROWS * libraries.EPOCHS
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
    if alone is not None:
        torch.testing.assert_close(results[0]["weights"], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_lightning(spark, url):
    alone = libraries.train_alone(url)
    check(spark_dl.launch(libraries.train_with_lightning, url, num_ranks=2), 2, alone)
    check(spark_dl.launch(libraries.train_with_lightning, url, num_ranks=3), 3, alone)


@pytest.mark.slow
def test_transformers(spark, url, tmp_path):
    (alone,) = spark_dl.launch(libraries.train_with_transformers, url, str(tmp_path), num_ranks=1)
    results = spark_dl.launch(libraries.train_with_transformers, url, str(tmp_path), num_ranks=2)
    check(results, 2, alone["weights"])
    assert {r["steps"] for r in results} == {6 * libraries.EPOCHS}


@pytest.mark.slow
def test_accelerate_also_twice_in_the_same_workers(spark, url):
    alone = libraries.train_alone(url)
    check(spark_dl.launch(libraries.train_with_accelerate, url, num_ranks=2), 2, alone)
    check(spark_dl.launch(libraries.train_with_accelerate, url, num_ranks=3), 3, alone)


@pytest.mark.slow
def test_a_trainer_that_would_train_on_one_rank_alone_is_an_error(spark, url):
    with pytest.raises(
        RankError, match=r"takes an optimizer step without a process group.*Lightning: Trainer\(devices"
    ):
        spark_dl.launch(libraries.train_with_lightning, url, 1, num_ranks=2)


@pytest.mark.slow
def test_a_trainer_that_would_split_the_rows_of_a_rank_once_more_is_an_error(spark, url, tmp_path):
    with pytest.raises(RankError, match="return it from get_train_dataloader"):
        spark_dl.launch(libraries.train_with_transformers, url, str(tmp_path), False, num_ranks=2)


@pytest.mark.long
@pytest.mark.slow
def test_accelerate_that_is_told_of_a_gpu_on_a_cpu_is_an_error(spark, url):
    """Else each rank would train alone, as `DistributedType.NO`, though there is a process group."""
    with pytest.raises(RankError, match="takes an optimizer step with an Accelerate that has found one process"):
        spark_dl.launch(libraries.train_with_accelerate, url, num_ranks=2, env={"ACCELERATE_USE_CPU": "false"})


def read_rows(rows):
    dataset = spark_dl.open_dataset(rows, batch_size=16)
    first = [int(i) for batch in dataset for i in batch["id"][batch["weight"] > 0]]
    second = [int(i) for batch in dataset for i in batch["id"][batch["weight"] > 0]]
    return first, second, len(dataset), dataset.rows


def test_rows_of_a_dataframe_come_as_the_same_kind_of_dataset(spark):
    df = spark.range(100).repartition(3)
    results = spark_dl.run_on_dataframe(
        read_rows, df, num_ranks=2, data=Data(features=("id",), label=None), settings=Launch(output="rank0")
    )
    for epoch in (0, 1):
        assert sorted(row for result in results for row in result[epoch]) == list(range(100))
    assert {result[2:] for result in results} == {(4, 100)}
    assert results[0][0] != results[0][1]


def test_a_dataframe_which_a_rank_does_not_have_is_an_error_that_says_what_to_pass(spark):
    with pytest.raises(ValueError, match="open_dataset: found a DataFrame, which exists on the driver only; expected"):
        spark_dl.open_dataset(spark.range(3), batch_size=2)
