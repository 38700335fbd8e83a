"""Predictions of a dataset by its URL, as a function for Spark SQL, and of saved models."""

import datetime
import time

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, FloatType

import spark_dl
from spark_dl import Config, Data, ModelSpec
from spark_dl.data.columns.schema import Column
from spark_dl.scoring.saved_model import load_model, write_saved_model
from tests.builders.models import blobs, build_mlp

ROWS = 300
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def two_columns(output):
    return {"best": output.argmax(1), "scores": output}


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(ROWS)
    rows = [
        (x.tolist(), i, f"row {i % 7}", START + datetime.timedelta(hours=i), START.date() + datetime.timedelta(days=i))
        for i, x in enumerate(columns["features"])
    ]
    schema = "features array<float>, id bigint, word string, at timestamp, day date"
    return spark.createDataFrame(rows, schema).repartition(3).cache()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """URLs of saved models with random weights, with one output column and with two."""
    torch.manual_seed(0)
    found, model = {}, build_mlp().eval()
    for name, predict in (("one", None), ("two", two_columns)):
        found[name] = str(tmp_path_factory.mktemp("model") / name)
        spec = ModelSpec(build=build_mlp, predict=predict)
        columns = (Column("features", "float32", (4,), "list"),)
        write_saved_model(found[name], model, spec, Config(data=Data(features=("features",), label=None)), columns)
    return found


def expected(saved, features):
    with torch.no_grad():
        return load_model(saved["one"])(torch.tensor(np.array(features, dtype=np.float32)))


def check(rows, saved, points):
    """Checks that rows with `id`, `best` and `scores` are those of all points."""
    features = {row["id"]: row["features"] for row in points.select("id", "features").collect()}
    assert sorted(row["id"] for row in rows) == sorted(features)
    for row, scores in zip(rows, expected(saved, [features[row["id"]] for row in rows]), strict=True):
        assert row["scores"] == pytest.approx(scores.tolist(), abs=1e-5)
        assert row["best"] == int(scores.argmax())


@pytest.mark.long_in("local-cluster")
def test_a_dataset_by_its_url_is_scored_with_keys_alone(spark, points, saved, tmp_path):
    points.write.parquet(str(tmp_path / "data"))
    keys = ["id", "word", "at", "day"]
    found = spark_dl.predict(str(tmp_path / "data"), saved["two"], keys=keys, spark=spark)
    assert found.columns == [*keys, "best", "scores"]
    assert found.schema["scores"].dataType == ArrayType(FloatType())
    assert [found.schema[key] for key in keys] == [points.schema[key] for key in keys]
    check(found.collect(), saved, points)
    assert found.join(points, keys).count() == ROWS
    assert len(found.take(5)) == 5
    assert spark_dl.predict(str(tmp_path / "data"), saved["one"], spark=spark).count() == ROWS


@pytest.mark.slow
@pytest.mark.modes("local")
def test_keys_of_shards_are_restored_and_those_of_partitions_read(spark, points, saved, tmp_path):
    data = Data(features=tuple(points.columns), label=None, encode={"word": {"as": "vocabulary"}})
    shards = spark_dl.write_shards(points, str(tmp_path / "shards"), data=data)
    keys = ["day", "word", "id", "at"]
    found = spark_dl.predict(shards, saved["two"], keys=keys)
    check(found.collect(), saved, points)
    assert found.join(points, keys).count() == ROWS
    points.write.partitionBy("word").parquet(str(tmp_path / "partitioned"))
    by_word = spark_dl.predict(str(tmp_path / "partitioned"), saved["two"], keys=["word", "id"])
    check(by_word.collect(), saved, points)
    assert by_word.join(points, ["word", "id"]).count() == ROWS


@pytest.mark.modes("local")
def test_other_keys_are_refused(spark, points, saved, tmp_path):
    points.write.parquet(str(tmp_path / "data"))
    shards = spark_dl.write_shards(
        points, str(tmp_path / "shards"),
        data=Data(features=("features", "word"), label=None, encode={"word": {"as": "hash", "buckets": 10}}),
    )  # fmt: skip
    for data, keys, match in (
        (str(tmp_path / "data"), ["ID"], "no column 'ID' .*did you mean 'id'"), (shards, ["id"], "no column 'id'"),
        (str(tmp_path / "data"), ["features"], "expected one value per row"), (shards, ["features"], "several values"),
        (shards, ["word"], "stored as hash, from which its values cannot be restored"),
        (str(tmp_path / "data"), "id", "expected a list of columns"), (points, ["id"], "keeps all its columns"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"keys: .*{match}"):
            spark_dl.predict(data, saved["two"], keys=keys)
    with pytest.raises(ValueError, match="the predictions have a column 'best', too"):
        spark_dl.predict(_renamed(points, tmp_path), saved["two"], keys=["best"])
    for model, match in (
        (build_mlp(), "expected a ModelSpec, a model of spark_dl.ml, or the URL of a saved model, found Sequential"),
        (ModelSpec(build=build_mlp), "expected a checkpoint"), (str(tmp_path / "data"), "is not a saved model"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            spark_dl.predict(points, model)


def _renamed(points, tmp_path):
    path = str(tmp_path / "renamed")
    points.withColumnRenamed("id", "best").write.parquet(path)
    return path


@pytest.mark.slow
def test_a_model_is_a_function_of_spark_sql(spark, points, saved):
    points.createOrReplaceTempView("points")
    spark.udf.register("score", spark_dl.predict_udf(saved["two"]))
    rows = spark.sql("SELECT id, result.* FROM (SELECT id, score(features) AS result FROM points)").collect()
    check(rows, saved, points)
    score = spark_dl.predict_udf(saved["one"])
    doubles = points.select("id", F.transform("features", lambda x: x.cast("float")).alias("f"))
    found = doubles.select("id", score("f").alias("scores"), F.lit(0).alias("best"))
    assert found.schema["scores"].dataType == ArrayType(FloatType())
    assert found.where("size(scores) = 3").count() == ROWS


@pytest.mark.slow
@pytest.mark.modes("local")
def test_the_function_of_a_model_takes_vectors_and_refuses_what_it_was_not_trained_on(spark, saved):
    rows = [(i, Vectors.dense(x.tolist())) for i, x in enumerate(blobs(20)["features"])]
    vectors = spark.createDataFrame([*rows, (20, Vectors.sparse(4, [1], [2.0]))], ["id", "v"])
    score = spark_dl.predict_udf(saved["one"])
    found = [row["s"] for row in vectors.select("id", score("v").alias("s")).orderBy("id").collect()]
    features = [*(v.toArray() for _, v in rows), [0, 2.0, 0, 0]]
    np.testing.assert_allclose(found, expected(saved, features), atol=1e-5)
    with pytest.raises(Exception, match=r"expected the arguments \['features'\], found 2 arguments"):
        vectors.select(score("v", "id")).collect()
    with pytest.raises(Exception, match="the model was trained on"):
        vectors.select(score(F.array("id"))).collect()


@pytest.mark.modes("local")
def test_a_limit_ends_predictions_without_an_error(spark, points, saved, capfd):
    assert len(spark_dl.predict(points, saved["two"]).limit(3).collect()) == 3
    time.sleep(1)
    assert "BrokenPipe" not in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_saved_model_of_a_run_predicts_as_its_checkpoint_does(spark, points, tmp_path):
    labelled = points.withColumn("label", F.col("id") % 3)
    spec = ModelSpec(build=build_mlp, predict=two_columns)
    config = spark_dl.Config(train=spark_dl.Train(epochs=1), launch=spark_dl.Launch(num_ranks=1))
    result = spark_dl.train(labelled, spec, config, run_dir=str(tmp_path / "run"))
    by_run = spark_dl.predict(points, spec, result.run_dir).select("id", "best", "scores")
    for kind in ("weights", "export"):
        spark_dl.save_model(tmp_path / kind, spec, result.checkpoint, format=kind)
        found = spark_dl.predict(points, str(tmp_path / kind)).select("id", "best", "scores")
        assert found.exceptAll(by_run).isEmpty() or _close(found, by_run)


def _close(a, b):
    rows = [{row["id"]: row["scores"] for row in df.collect()} for df in (a, b)]
    return all(rows[0][i] == pytest.approx(rows[1][i], abs=1e-5) for i in rows[1])
