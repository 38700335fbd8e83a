"""Rows that are drawn by weight, from a DataFrame: training, validation, evaluation, prediction and resume."""

import dataclasses

import pytest
from pyspark.sql import functions as F

import spark_dl
from tests.builders.models import MLP, small_config


@pytest.mark.modes("local", "connect")
def test_draws_are_of_the_training_only_and_a_run_resumes_with_them(spark, tmp_path):
    rows = spark.range(300).select(
        F.array(*(F.rand(i).cast("float") for i in range(4))).alias("features"), (F.col("id") % 3).alias("label"),
        (1 + F.col("id") % 5).alias("w"),
    )  # fmt: skip
    given = small_config(2, {"validation_fraction": 0.1}, {"sampling_weight": "w"}, epoch_size=144)
    whole = spark_dl.train(rows, MLP, given, run_dir=str(tmp_path / "run"), spark=spark)
    assert whole.rows == 144 * given.train.epochs
    other = rows.drop("w").limit(50)
    assert spark_dl.evaluate(other, MLP, whole.checkpoint, spark=spark)["rows"] == 50
    assert spark_dl.predict(other.drop("label"), MLP, whole.checkpoint).count() == 50
    longer = dataclasses.replace(given, train=dataclasses.replace(given.train, epochs=given.train.epochs + 1))
    more = spark_dl.train(rows, MLP, longer, run_dir=str(tmp_path / "run"), resume=True, spark=spark)
    assert more.rows == 144 * longer.train.epochs
    separate = dataclasses.replace(given, train=dataclasses.replace(given.train, validation_fraction=0.0))
    run = {"validation": other, "run_dir": str(tmp_path / "separate"), "spark": spark}
    assert spark_dl.train(rows, MLP, separate, **run).metrics["loss"] > 0
    with pytest.raises(ValueError, match=r"expected finite weights >= 0 in column 'w', found -\d"):
        spark_dl.train(rows.withColumn("w", -F.col("w") + 1), MLP, given, run_dir=str(tmp_path / "bad"), spark=spark)
