"""Predictions of a dataset by its URL, as a function for Spark SQL, and of saved models."""

import contextlib
import dataclasses
import datetime
import io
import resource
import shutil
import time
import wave

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pyspark.errors import StreamingQueryException
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, FloatType
from torch import nn

import spark_dl
from spark_dl import Config, Data, Loader, ModelSpec, Train
from spark_dl.data.columns.schema import Column
from spark_dl.ml import TorchEstimator
from spark_dl.scoring.saved_model import load_model, write_saved_model
from tests.builders.models import blobs, build_mlp, small_config

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


@pytest.mark.modes("local")
def test_keys_of_files_of_other_writers_have_the_types_that_spark_reads(spark, saved, tmp_path):
    table = pa.table({
        "features": pa.array([[1.0, 2.0, 3.0, 4.0]] * 3, pa.list_(pa.float32())), "id": [1, 2, 3],
        "took": pa.array([1, 2, 3], pa.duration("us")), "fine": pa.array([1, 2, 3], pa.duration("ns")),
        "small": pa.array([1, 2, 3], pa.uint8()), "large": pa.array([1, 2, 3], pa.uint64()),
        "word": pa.array(["a", "b", "a"]).dictionary_encode(), "day": pa.array([1, 2, 3], pa.date32()),
    })  # fmt: skip
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    keys = table.column_names[1:]
    found = spark_dl.predict(str(tmp_path / "data"), saved["one"], keys=keys, spark=spark)
    there = spark.read.parquet(str(tmp_path / "data"))
    assert [found.schema[key].dataType for key in keys] == [there.schema[key].dataType for key in keys]
    assert sorted(found.select(keys).collect()) == sorted(there.select(keys).collect())


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
def test_keys_of_shards_have_the_types_and_values_of_the_table(spark, saved, tmp_path):
    """In a zone with daylight saving time: a local time that became an instant found the rows of other hours."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    made = {
        "at": "timestamp_micros(i * 3600000001L)", "wall": "CAST(timestamp_micros(i * 3600000001L) AS TIMESTAMP_NTZ)",
        "fine": "timestamp_millis(i)", "day": "date_sub(DATE'1970-01-01', i)", "noon": "date_add(DATE'2026-03-29', i)",
        "took": "make_dt_interval(0, i, 0, 0.000001)", "price": "CAST(i - 3.25 AS DECIMAL(9, 2))",
        "exact": "CAST(i AS DECIMAL(20, 2)) - CAST(90000000000000000.25 AS DECIMAL(20, 2))",
        "whole": "CAST(-i AS DECIMAL(18, 0))", "flag": "i % 2 = 0", "small": "CAST(i AS TINYINT)",
    }  # fmt: skip
    try:
        df = spark.range(48).selectExpr("array(CAST(id AS FLOAT), 0f, 0f, 0f) AS features", "CAST(id AS INT) AS i")
        df = df.selectExpr("*", *(f"{sql} AS {name}" for name, sql in made.items())).cache()
        encode = {"exact": {"as": "decimal"}, "fine": {"as": "timestamp", "unit": "ns"},
                  "noon": {"as": "timestamp", "unit": "s"}}  # fmt: skip
        data = Data(features=tuple(df.columns), label=None, encode=encode)
        shards = spark_dl.write_shards(df, str(tmp_path / "shards"), data)
        found = spark_dl.predict(shards, saved["two"], keys=["i", *made])
        assert [found.schema[name].dataType for name in made] == [df.schema[name].dataType for name in made]
        assert found.join(df, ["i", *made]).count() == 48
        df.write.parquet(str(tmp_path / "files"))
        in_place = str(tmp_path / "files")
        found = spark_dl.predict(in_place, saved["two"], keys=["i", *made])
        assert [found.schema[name].dataType for name in made] == [df.schema[name].dataType for name in made]
        assert found.join(df, ["i", *made]).count() == 48
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.modes("local")
@pytest.mark.parametrize(("column", "settings", "match"), [
    ("current_timestamp()", {"as": "timestamp", "unit": "s"}, "stored in the unit s, which cuts off fractions"),
    ("make_dt_interval(1)", {"as": "duration", "unit": "ms"}, "stored in the unit ms, which cuts off fractions"),
    ("CAST(1 AS DECIMAL(16, 2))", {}, "stored as float, from which its values cannot be restored"),
])  # fmt: skip
def test_keys_that_have_lost_digits_are_refused(spark, saved, tmp_path, column, settings, match):
    df = spark.range(2).selectExpr("array(CAST(id AS FLOAT), 0f, 0f, 0f) AS features", f"{column} AS k")
    data = Data(features=("features", "k"), label=None, encode={"k": settings} if settings else {})
    shards = spark_dl.write_shards(df, str(tmp_path / "shards"), data)
    with pytest.raises(ValueError, match=f"keys: column 'k' is {match}"):
        spark_dl.predict(shards, saved["two"], keys=["k"])


@pytest.mark.modes("local")
def test_a_dataset_is_scored_whatever_batches_and_rules_the_training_had(spark, tmp_path):
    """Streams that do not fit the usual batch; one policy that drops and one that fills; a fill of shards."""
    rows = [(i, float("nan") if i % 3 else float(i)) for i in range(12)]
    df = spark.createDataFrame(rows, "id bigint, x double")
    df.write.parquet(str(tmp_path / "data"))
    data = Data(features=("id", "x"), label=None, nulls="drop", nonfinite="fill", fill={"x": -1.5, "id": 7})
    shards = spark_dl.write_shards(df, str(tmp_path / "shards"), data)
    spec = ModelSpec(build=nn.Identity, forward=lambda model, batch: batch["x"])
    config = Config(
        data=dataclasses.replace(data, features=("x",), fill={"x": -1.5}), loader=Loader(num_streams=24),
        train=Train(global_batch_size=48),
    )  # fmt: skip
    for source in (shards, str(tmp_path / "data")):
        found = spark_dl.predict(source, spec, config=config, keys=["id"], spark=spark).collect()
        assert {row["id"]: row["prediction"] for row in found} == {i: -1.5 if i % 3 else float(i) for i in range(12)}


def decode_sound(batch):
    """What a user does with files: those of one byte, which a trial would have, are none."""
    words = [bytes(row[mask].tolist()) for row, mask in zip(batch["file"], batch["file_mask"], strict=True)]
    found = [wave.Wave_read(io.BytesIO(word)).readframes(4) for word in words]
    return {**batch, "sound": torch.tensor([[*frames] for frames in found], dtype=torch.float32)}


def sound(i):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 1, 8000, 4, "NONE", ""))
        file.writeframes(bytes([i, i + 1, i + 2, i + 3]))
    return buffer.getvalue()


def of_year(model, batch):
    return model(batch["year"] - 1990)[:, 0]


def of_spread(model, batch):
    mean = model(batch["spread"][:, None])[:, 0]
    return torch.distributions.Normal(mean.detach(), batch["spread"]).cdf(mean) + 0 * mean


def of_length(model, batch):
    """Padded windows with a column of lengths, by which the last value is found."""
    last = batch["window"][torch.arange(len(batch["length"])), batch["length"].long() - 1]
    assert (batch["length"] > 0).all()
    return model(last[:, None])[:, 0]


def of_sound(model, batch):
    return model(batch["sound"])[:, 0]


def build_line(values=1):
    return nn.Linear(values, 1)


PICKY = {
    "year": (ModelSpec(build=lambda: nn.Embedding(30, 1), forward=of_year, loss="MSELoss"), ("year",)),
    "spread": (ModelSpec(build=build_line, forward=of_spread, loss="MSELoss"), ("spread",)),
    "length": (ModelSpec(build=build_line, forward=of_length, loss="MSELoss"), ("window", "length")),
    "sound": (
        ModelSpec(build=lambda: build_line(4), transform=decode_sound, forward=of_sound, loss="MSELoss"), ("file",)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def picky_rows(spark):
    rows = [(2000 + i, 0.5 + i, [0.1 * i, 0.2, 0.3], 1 + i % 3, sound(i), float(i % 2)) for i in range(12)]
    schema = "year int, spread float, window array<float>, length int, file binary, label float"
    return spark.createDataFrame(rows, schema).cache()


@pytest.mark.modes("local")
@pytest.mark.parametrize("kind", PICKY)
def test_models_that_do_not_take_zeros_are_scored(spark, picky_rows, tmp_path, kind):
    spec, features = PICKY[kind]
    train = {"epochs": 1, "global_batch_size": 24}
    config = small_config(1, data={"features": features, "label": "label"}, train=train)
    result = spark_dl.train(picky_rows, spec, config, run_dir=str(tmp_path / "run"))
    with_key = picky_rows.withColumn("id", F.col("year"))
    found = {row["id"]: row["prediction"] for row in spark_dl.predict(with_key, spec, result.checkpoint).collect()}
    assert len(found) == 12
    assert all(isinstance(value, float) for value in found.values())
    with_key.write.parquet(str(tmp_path / "data"))
    function = spark_dl.predict_udf(spec, result.checkpoint, data=with_key)
    declared = spark_dl.predict_udf(spec, result.checkpoint, output_schema="prediction float")
    fitted = TorchEstimator(spec, config, runDir=str(tmp_path / "fit")).fit(with_key)
    assert fitted.transform(with_key).count() == 12
    for other in (
        spark_dl.predict(str(tmp_path / "data"), spec, result.checkpoint, keys=["id"], spark=spark),
        with_key.select("id", function(*features).alias("prediction")),
        with_key.select("id", declared(*features).alias("prediction")),
    ):
        assert {row["id"]: row["prediction"] for row in other.collect()} == pytest.approx(found)


@pytest.mark.modes("local")
@pytest.mark.parametrize(("predict", "match"), [
    (lambda output: output, "expected a dict of column names to tensors"),
    (lambda output: {"mean": output.mean()}, r"expected one entry per row in the column 'mean', shape \(2, ...\)"),
    (lambda output: {"first": output["logits"]}, "it raises IndexError|it raises TypeError"),
    (lambda output: {"all": output.reshape(-1)}, r"expected one entry per row in the column 'all'"),
])  # fmt: skip
def test_a_predict_that_returns_the_wrong_thing_is_refused_before_training(spark, tmp_path, predict, match):
    spec = ModelSpec(build=build_mlp, predict=predict)
    df = spark.createDataFrame(
        [([1.0, 2.0, 3.0, 4.0], i % 3) for i in range(48)], "features array<float>, label bigint"
    )
    config = small_config(1)
    with pytest.raises(ValueError, match=f"spec.predict: .*({match})"):
        spark_dl.train(df, spec, config, run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(ValueError, match=f"spec.predict: .*({match})"):
        TorchEstimator(spec, config, runDir=str(tmp_path / "fit")).fit(df)


@pytest.mark.modes("local")
def test_columns_can_be_declared_and_streams_need_it_where_zeros_are_no_rows(spark, picky_rows, tmp_path):
    spec, features = PICKY["year"]
    train = {"epochs": 1, "global_batch_size": 24}
    config = small_config(1, data={"features": features, "label": "label"}, train=train)
    saved = spark_dl.train(picky_rows, spec, config, run_dir=str(tmp_path / "run")).checkpoint
    found = spark_dl.predict(picky_rows, spec, saved, output_schema="prediction double")
    assert found.schema["prediction"].dataType.typeName() == "double"
    assert found.count() == 12
    with pytest.raises(ValueError, match=r"takes? rows of zeros, and there are no rows to try it on, .*output_schema="):
        spark_dl.predict(picky_rows.where("year < 0"), spec, saved)
    picky_rows.write.parquet(str(tmp_path / "data"))
    stream = spark.readStream.schema(picky_rows.schema).parquet(str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"tried on two rows of zeros, and failed .*declare them, output_schema="):
        spark_dl.predict(stream, spec, saved)
    query = spark_dl.predict(stream, spec, saved, output_schema="prediction float").writeStream.format("memory")
    query = query.queryName("declared").trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert spark.table("declared").count() == 12
    for wrong in ("prediction", "", 3):
        with pytest.raises(ValueError, match="output_schema: expected the new columns, such as"):
            spark_dl.predict(picky_rows, spec, saved, output_schema=wrong)
    for wrong, match in (("other float", "expected the columns"), ("prediction array<int>", "does not fit what was")):
        with pytest.raises(Exception, match=f"output_schema: .*{match}"):
            spark_dl.predict(picky_rows, spec, saved, output_schema=wrong).collect()


BAD = [None, [1.0, None, 0.0, 0.0], [float("nan")] * 4, [0.0, float("inf"), 0.0, 0.0], [1.0, 2.0], []]


@pytest.mark.slow
@pytest.mark.modes("local", "connect")
@pytest.mark.long_in("connect")
@pytest.mark.parametrize("model", ["one", "two"])
def test_rows_that_are_no_features_get_null_predictions_and_the_others_theirs(spark, points, saved, model):
    """On bad rows of every kind, alone, in a run, and as a whole partition; of scalars and of arrays."""
    good = [row["features"] for row in points.orderBy("id").limit(9).collect()]
    features = [BAD[0], *good[:3], *BAD, *good[3:5], BAD[4], good[5], BAD[2], *good[6:]]
    rows = [(i, row, i // 7) for i, row in enumerate(features)] + [(100 + i, row, 9) for i, row in enumerate(BAD)]
    df = spark.createDataFrame(rows, "id int, features array<float>, place int").repartition(5, "place")
    scored = spark_dl.predict(df, saved[model], on_bad_rows="null")
    found = {row["id"]: row for row in scored.collect()}
    expected = spark_dl.predict(df.where(df.id.isin([i for i, r in enumerate(features) if r in good])), saved[model])
    whole = {row["id"]: row for row in expected.collect()}
    assert len(found) == len(rows)
    assert len(whole) == 9
    added = [name for name in scored.columns if name not in df.columns]
    for i, row in found.items():
        values = [row[name] for name in added]
        wanted = [whole[i][name] for name in added] if i in whole else [None] * len(added)
        for value, other in zip(values, wanted, strict=True):
            assert value == (other if other is None else pytest.approx(other, abs=1e-6)), i  # of other batches
    assert scored.where(F.col(added[0]).isNull()).count() == len(rows) - 9
    assert scored.schema == expected.schema


@pytest.mark.slow
@pytest.mark.modes("local")
def test_bad_rows_end_the_job_unless_they_shall_be_null(spark, points, saved, tmp_path):
    df = spark.createDataFrame([(1, [1.0, None, 0.0, 0.0])], "id int, features array<float>")
    with pytest.raises(Exception, match="column 'features': found null"):
        spark_dl.predict(df, saved["one"]).collect()
    with pytest.raises(ValueError, match=r"^on_bad_rows: expected one of \('raise', 'null'\), found 'skip'"):
        spark_dl.predict(df, saved["one"], on_bad_rows="skip")
    points.select("features", "id").write.parquet(str(tmp_path / "points"))
    with pytest.raises(ValueError, match="^on_bad_rows: found 'null' with a dataset that is read by its URL"):
        spark_dl.predict(str(tmp_path / "points"), saved["one"], on_bad_rows="null")


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


@pytest.mark.long_in("local-cluster")
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


# Models that are replaced while a session runs


def build_constant():
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    return model


def save_constant(url, value, kind):
    """Saves a model that predicts a constant, over the one that is there."""
    model = build_constant().eval()
    nn.init.constant_(model.bias, value)
    shutil.rmtree(url, ignore_errors=True)
    spec, columns = ModelSpec(build=build_constant), (Column("features", "float32", (4,), "list"),)
    write_saved_model(url, model, spec, Config(data=Data(features=("features",), label=None)), columns, format=kind)


WAYS = {
    "predict": lambda points, shards, url: spark_dl.predict(points, url).select("prediction"),
    "predict_udf": lambda points, shards, url: points.select(spark_dl.predict_udf(url)("features").alias("prediction")),
    "a dataset": lambda points, shards, url: spark_dl.predict(shards, url).select("prediction"),
}


@pytest.mark.modes("local")
@pytest.mark.parametrize("kind", ["weights", "export"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_model_that_was_replaced_is_the_new_one_or_an_error(spark, points, tmp_path, way, kind):
    url, shards = str(tmp_path / "m"), str(tmp_path / "data")
    spark_dl.write_shards(points.select("features"), shards, Data(features=("features",), label=None))
    for value in (1.0, 100.0, 7.0):
        save_constant(url, value, kind)
        found = way(points, shards, url)
        assert {row[0][0] for row in found.collect()} == {value}  # by workers that have loaded the model before
    save_constant(url, 8.0, kind)
    late = way(points, shards, url)
    save_constant(url, 50.0, kind)
    with pytest.raises(Exception, match="was replaced after it was read; call predict"):
        late.collect()
    assert {row[0][0] for row in way(points, shards, url).collect()} == {50.0}


@pytest.mark.modes("local")
@pytest.mark.parametrize("way", ["predict", "predict_udf"])
def test_a_running_stream_keeps_its_model_or_ends(spark, points, tmp_path, way):
    """A batch after the replacement has the weights of before, or is an error; never those that came later."""
    url, incoming = str(tmp_path / "m"), str(tmp_path / "incoming")
    save_constant(url, 1.0, "weights")
    some = points.select("features").limit(8).coalesce(1)
    some.write.parquet(incoming)
    stream = spark.readStream.schema(some.schema).parquet(incoming)
    scored = WAYS[way](stream, None, url).selectExpr("prediction[0] AS value")
    writer = scored.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "query"))
    query = writer.start(str(tmp_path / "scored"))
    try:
        query.processAllAvailable()
        save_constant(url, 100.0, "weights")
        some.write.mode("append").parquet(incoming)
        with contextlib.suppress(StreamingQueryException):
            query.processAllAvailable()
        assert query.exception() is None or "was replaced after it was read; call predict" in str(query.exception())
    finally:
        query.stop()
    found = [row["value"] for row in spark.read.parquet(str(tmp_path / "scored")).collect()]
    assert found in ([1.0] * 8, [1.0] * 16)
    # A query that is started again finds the new model.
    again = WAYS[way](stream, None, url).selectExpr("prediction[0] AS value").writeStream.format("memory")
    again = again.queryName(f"again_{way}").trigger(availableNow=True).start()
    assert again.awaitTermination(60)
    assert {row["value"] for row in spark.table(f"again_{way}").collect()} == {100.0}


# Columns that predictions only pass on


ODD = [
    ("dots", "id AS `a.b`"), ("backticks", "id AS `a``b`"), ("equal names", "id AS a, id + 1 AS a"),
    ("names that differ in case", "id AS same, id + 1 AS Same"), ("an interval", "make_ym_interval(1, 2) AS took"),
    ("a struct with dots", "struct(id AS `x.y`) AS s"), ("a map", "map('k', id) AS m"),
]  # fmt: skip


@pytest.mark.modes("local", "connect")
@pytest.mark.parametrize("columns", [sql for _, sql in ODD], ids=[name for name, _ in ODD])
@pytest.mark.parametrize("which", ["one", "two"])
def test_columns_that_are_only_passed_on_may_be_of_any_kind(spark, points, saved, columns, which):
    rows = points.selectExpr("id AS at", "features", *SPLIT(columns))
    found = spark_dl.predict(rows, saved[which])
    added = ["prediction"] if which == "one" else ["best", "scores"]
    assert found.columns == [*rows.columns, *added]
    assert [f.dataType for f in found.schema.fields[: len(rows.columns)]] == [f.dataType for f in rows.schema.fields]
    numbered = found.toDF(*(f"c{i}" for i in range(len(found.columns))))
    given = rows.toDF(*(f"c{i}" for i in range(len(rows.columns))))
    as_text = [
        F.col(c).cast("string").alias(c) if "make_ym" in columns and c == "c2" else F.col(c) for c in given.columns
    ]
    ours = {row["c0"]: row for row in numbered.select(*as_text, *numbered.columns[len(as_text) :]).collect()}
    theirs = {row["c0"]: row for row in given.select(*as_text).collect()}
    scores = expected(saved, [theirs[i]["c1"] for i in sorted(theirs)])
    for i, score in zip(sorted(theirs), scores, strict=True):
        assert list(ours[i])[: len(rows.columns)] == list(theirs[i])
        assert list(ours[i])[-1] == pytest.approx(score.tolist(), abs=1e-5)


def SPLIT(columns):
    parts, depth = [""], 0
    for sign in columns:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


@pytest.mark.modes("local")
def test_a_name_that_spark_takes_for_another_is_taken(spark, points, saved):
    with pytest.raises(ValueError, match=r"already has a column 'Prediction', and spec.predict returns 'prediction'"):
        spark_dl.predict(points.withColumn("Prediction", F.lit(1)), saved["one"])
    twice = points.select("features", "features")
    with pytest.raises(ValueError, match=r"data.features: the DataFrame has 2 columns 'features'; rename or drop some"):
        spark_dl.predict(twice, saved["one"])


@pytest.mark.modes("local")
def test_errors_about_wide_tables_are_short(spark, saved):
    wide = spark.range(3).select(*(F.lit(1.0).alias(f"a_rather_long_name_of_a_column_{i}") for i in range(5000)))
    for call in (
        lambda: spark_dl.predict(wide, saved["one"]),
        lambda: spark_dl.write_shards(wide, "never", Data(features=("zzz",), label=None)),
    ):
        with pytest.raises(ValueError, match="no column") as caught:
            call()
        assert len(str(caught.value)) < 2000


# One value for each token


class Tagger(torch.nn.Module):
    """The token, doubled, for each token; and the number of tokens of the row."""

    def forward(self, tokens, tokens_mask):
        return {"doubled": tokens * 2, "pairs": torch.stack([tokens, -tokens], 2), "count": tokens_mask.sum(1)}


def tag(model, batch):
    return model(batch["tokens"], batch["tokens_mask"])


RAGGED = Config(data=Data(features=("tokens",), label=None, encode={"tokens": {"ragged": True}}))
TAGGER = ModelSpec(build=Tagger, forward=tag)


def tokens_of(spark, rows):
    return spark.range(rows).selectExpr("id", "slice(sequence(id, id + 8), 1, CAST(id % 7 AS INT)) AS tokens")


@pytest.mark.modes("local")
@pytest.mark.parametrize("rows_at_once", [None, 1, 7])
def test_a_value_for_each_token_has_no_padding(spark, tmp_path, rows_at_once):
    config = dataclasses.replace(RAGGED, loader=Loader(rows_at_once=rows_at_once))
    df = tokens_of(spark, 3000).repartition(2)
    path = str(tmp_path / "tokens")
    df.write.parquet(path)
    for found in (
        spark_dl.predict(df, TAGGER, config=config),
        spark_dl.predict(path, TAGGER, config=config, keys=["id"], spark=spark),
        df.select("id", spark_dl.predict_udf(TAGGER, config=config, data=df)("tokens").alias("p")).select("id", "p.*"),
    ):
        for row in found.collect():
            tokens = list(range(row["id"], row["id"] + row["id"] % 7))
            assert row["doubled"] == [2 * token for token in tokens]
            assert row["pairs"] == [[token, -token] for token in tokens]
            assert row["count"] == len(tokens)


def with_one_more(model, batch):
    return torch.nn.functional.pad(batch["tokens"], (1, 0))


@pytest.mark.modes("local")
def test_values_that_are_not_one_for_each_token_are_an_error_before_any_task(spark):
    spec = ModelSpec(build=Tagger, forward=with_one_more)
    expected = r"'prediction' has 2 values for a row with 1 value of the feature 'tokens', and 4"
    with pytest.raises(ValueError, match=expected):
        spark_dl.predict(tokens_of(spark, 3), spec, config=RAGGED)


# Models that were not trained here


@pytest.mark.modes("local")
def test_a_model_that_was_not_trained_here_is_scored_saved_and_used_in_sql(spark, points, tmp_path):
    spec = ModelSpec(build=build_mlp)
    config = Config(data=Data(features=("features",), label="label"), train=Train(seed=5))
    torch.manual_seed(5)
    model = build_mlp().eval()
    features = {row["id"]: row["features"] for row in points.collect()}
    with torch.no_grad():
        scores = dict(zip(features, model(torch.tensor(list(features.values()))).tolist(), strict=True))
    spark_dl.save_model(str(tmp_path / "model"), spec, config=config, data=points)
    by_udf = spark_dl.predict_udf(spec, config=config, data=points)
    for found in (
        spark_dl.predict(points, spec, config=config),
        spark_dl.predict(points, str(tmp_path / "model")),
        points.select("id", by_udf("features").alias("prediction")),
    ):
        for row in found.collect():
            assert row["prediction"] == pytest.approx(scores[row["id"]], abs=1e-5)
    with pytest.raises(ValueError, match=r"expected a checkpoint or a run_dir, found None; or, for the weights"):
        spark_dl.predict(points, spec)


@pytest.mark.modes("local")
def test_partitions_are_keys_of_the_types_that_spark_infers(spark, points, saved, tmp_path):
    rows = points.limit(6).selectExpr(
        "features", "id", "CAST(id % 2 AS INT) AS month", "id + 5000000000 AS large", "id / 4 AS rate",
        "CAST(date_add('2026-01-01', CAST(id AS INT)) AS DATE) AS day", "concat('0x', id) AS word",
        "CASE WHEN id % 2 = 0 THEN 7 END AS maybe",
    )  # fmt: skip
    keys = ["month", "large", "rate", "day", "word", "maybe"]
    path = str(tmp_path / "data")
    rows.write.partitionBy(*keys).parquet(path)
    found, expected_rows = (
        spark_dl.predict(path, saved["one"], keys=[*keys, "id"], spark=spark),
        spark.read.parquet(path),
    )
    assert [found.schema[key].dataType for key in keys] == [expected_rows.schema[key].dataType for key in keys]
    assert found.join(expected_rows, ["id", *keys[:-1]]).count() == 6
    assert found.filter("maybe IS NULL").count() == expected_rows.filter("maybe IS NULL").count()


@pytest.mark.modes("local")
def test_a_file_whose_row_groups_are_all_empty_has_no_predictions(spark, saved, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "data").mkdir()
    table = pa.table({"features": pa.array([[1.0] * 4] * 3, pa.list_(pa.float32())), "id": [1, 2, 3]})
    with pq.ParquetWriter(tmp_path / "data" / "a.parquet", table.schema) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table)
        writer.write_table(table.slice(0, 0))
    found = spark_dl.predict(str(tmp_path / "data"), saved["one"], keys=["id"], spark=spark)
    assert sorted(row["id"] for row in found.collect()) == [1, 2, 3]


def memory_of(outputs):
    """The most memory that this process has had so far, in MiB, in each row."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"mean": outputs[:, 0], "most_mib": torch.full((len(outputs),), most)}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_pixels_of_small_files_are_decoded_in_pieces_of_bounded_memory(spark, tmp_path):
    """4,000 files of 1 KB and 768 KB of pixels each came in one batch of Spark: 3 GB, and its copies."""
    flat = io.BytesIO()
    Image.new("RGB", (512, 512), (7, 7, 7)).save(flat, "PNG")
    df = spark.range(4000).select(F.lit(bytearray(flat.getvalue())).alias("photo")).coalesce(1)
    config = small_config(1, data={"features": ("photo",), "label": None, "encode": {"photo": {"as": "image"}}})
    spec = ModelSpec(
        build=nn.Identity, loss="MSELoss", predict=memory_of,
        forward=lambda model, batch: model(batch["photo"][:, 0, 0].float()),
    )  # fmt: skip
    found = spark_dl.predict(df, spec, config=config).agg(F.min("mean"), F.max("mean"), F.max("most_mib"))
    low, high, most_mib = found.first()
    assert (low, high) == (7.0, 7.0)
    assert most_mib < 1500
