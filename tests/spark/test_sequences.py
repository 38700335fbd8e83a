"""Sequences from a DataFrame: the order in which it is sorted is kept, and where it was not, nothing is trained."""

import pytest

import spark_dl
from spark_dl import write_shards
from tests.builders.batches import read_all
from tests.builders.models import small_config
from tests.builders.series import GRU, SEQUENCES, waves


@pytest.fixture
def sorted_rows(spark):
    """Nine devices, sorted into partitions that end within devices."""
    columns = waves(9, 61)
    rows = list(zip(*(a.tolist() for a in columns.values()), strict=True))
    df = spark.createDataFrame(rows[::-1], "value float, time bigint, device bigint")
    return df.repartitionByRange(7, "device", "time").sortWithinPartitions("device", "time")


@pytest.mark.long_in("connect")
@pytest.mark.slow
@pytest.mark.modes("local", "connect")
def test_train_and_evaluate_on_a_sorted_dataframe(spark, sorted_rows, tmp_path):
    layout = {"rows_per_row_group": 20, "rows_per_shard": 60}
    train = {"optimizer": "Adam", "lr": 0.02, "epochs": 4}
    config = small_config(2, train=train, data={**SEQUENCES, **layout, "encode": {"device": {}}})
    validation = sorted_rows.filter("device < 2").orderBy("device", "time")
    result = spark_dl.train(
        sorted_rows, GRU, config, validation=validation, run_dir=str(tmp_path / "run"), progress=False
    )
    assert result.rows == 4 * 9 * 28
    assert result.metrics["loss"] < 0.1
    found = spark_dl.evaluate(sorted_rows, GRU, result.run_dir)
    assert found["rows"] == 9 * 28
    with pytest.raises(ValueError, match=r"the model reads sequences \(sequences\.length=6\)"):
        spark_dl.predict(sorted_rows, GRU, result.checkpoint)


@pytest.mark.modes("local")
def test_shards_keep_the_order_of_the_dataframe(spark, sorted_rows, tmp_path):
    config = small_config(1, data={**SEQUENCES, "rows_per_row_group": 16, "rows_per_shard": 64})
    url, columns = str(tmp_path / "ordered"), config.stored_columns
    shards = write_shards(sorted_rows, url, config.data, shards=config.shards, columns=columns)
    assert len(shards.shards) > 7
    found, expected = read_all(shards), waves(9, 61)
    assert {name: a.tolist() for name, a in found.items()} == {name: a.tolist() for name, a in expected.items()}

    by_value = sorted_rows.orderBy("device", "value")
    with pytest.raises(ValueError, match=r"goes from .* within one 'device' .* df\.orderBy\('device', 'time'\)"):
        spark_dl.train(by_value, GRU, config, run_dir=str(tmp_path / "run"), progress=False)
