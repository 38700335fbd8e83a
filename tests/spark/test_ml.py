"""Spark ML: the estimators in pipelines, with Spark's own feature stages, evaluators and tuning."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DoubleType, FloatType, LongType
from torch import nn

import spark_dl
from spark_dl import ModelSpec, RankError
from spark_dl.data.columns.schema import Column
from spark_dl.ml import (
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from spark_dl.scoring import saved_model
from spark_dl.scoring.saved_model import read_saved_model, write_saved_model
from spark_dl.scoring.scorer import saved_scorer
from tests.builders.models import MLP, blobs, build_mlp, small_config
from tests.builders.settings import make_config

CONFIG = small_config(2, train={"epochs": 4})
NAMES = ("a", "b", "c", "d")
NIGHTLY = spark_dl.Config(data=spark_dl.Data(features=("features",), label=None))
NIGHTLY_COLUMNS = (Column("features", "float32", (4,), "list"),)
REPOSITORY = Path(__file__).parents[2]
CONNECT = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED")


def build_linear():
    return nn.Linear(4, 1)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(1, 1)

    def forward(self, features, extra):
        return {"classes": self.first(features), "amount": self.second(extra.float()[:, None] / 240)[:, 0]}


def two_losses(output, batch):
    classes = nn.functional.cross_entropy(output["classes"], batch["label"].long(), reduction="none")
    return classes + (output["amount"] - batch["target"]) ** 2


@pytest.fixture(scope="module")
def points(spark):
    """Four columns of doubles, a word with the class, and other columns for the tests."""
    columns = blobs(240)
    words = ["red", "green", "blue"]
    rows = [
        (*(float(v) for v in x), words[y], int(y), float(y), i, i % 6 == 0, float(1 + i % 2))
        for i, (x, y) in enumerate(zip(*columns.values(), strict=True))
    ]
    names = [*NAMES, "word", "label", "target", "id", "held", "w"]
    return spark.createDataFrame(rows, names).withColumn("label", F.col("label").cast("int")).repartition(3).cache()


def vectors(df):
    return VectorAssembler(inputCols=list(NAMES), outputCol="features").transform(df)


def classifier(tmp_path, **params):
    return TorchClassifier(build_mlp, CONFIG, runDir=str(tmp_path / "runs"), progress=False, **params)


def pipeline_of(estimator):
    indexer = StringIndexer(inputCol="word", outputCol="index", stringOrderType="alphabetAsc")
    return Pipeline(stages=[indexer, VectorAssembler(inputCols=list(NAMES), outputCol="features"), estimator])


LOAD = """
import json, sys
from pyspark.ml import PipelineModel
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
model = PipelineModel.load(sys.argv[1])
rows = [(*values, "red") for values in json.loads(sys.argv[2])]
df = spark.createDataFrame(rows, "a double, b double, c double, d double, word string")
print(json.dumps([row["probability"].toArray().tolist() for row in model.transform(df).collect()]))
spark.stop()
"""


def probabilities_in_a_new_process(path, features):
    environment = {k: v for k, v in os.environ.items() if k not in CONNECT}
    found = subprocess.run(
        [sys.executable, "-c", LOAD, path, json.dumps(features)],
        capture_output=True, text=True, timeout=90, cwd=REPOSITORY, env=environment,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.long_in("local-cluster", "connect")
@pytest.mark.slow
def test_a_pipeline_fits_transforms_saves_and_loads_in_a_new_process(spark, points, tmp_path):
    model = pipeline_of(classifier(tmp_path, labelCol="index")).fit(points)
    found = model.transform(points)
    assert found.columns == [*points.columns, "index", "features", "rawPrediction", "probability", "prediction"]
    kinds = [VectorUDT(), VectorUDT(), DoubleType()]
    assert [found.schema[name].dataType for name in found.columns[-3:]] == kinds
    stage = model.stages[-1]
    assert stage.transformSchema(vectors(points).schema).fieldNames()[-3:] == found.columns[-3:]
    assert (stage.numClasses, len(stage.result.history)) == (3, 4)
    assert MulticlassClassificationEvaluator(labelCol="index", metricName="accuracy").evaluate(found) > 0.7

    rows = found.orderBy("id").collect()
    features = [[row[name] for name in NAMES] for row in rows]
    with torch.no_grad():
        expected = stage.load_model()(torch.tensor(features)).double().softmax(1)
    np.testing.assert_allclose([row["probability"].toArray() for row in rows], expected, atol=1e-5)
    assert [row["prediction"] for row in rows] == expected.argmax(1).double().tolist()

    path = str(tmp_path / "saved")
    model.write().overwrite().save(path)
    again = PipelineModel.load(path)
    assert again.stages[-1].uid == stage.uid
    assert [row["prediction"] for row in again.transform(points).orderBy("id").collect()] == [
        row["prediction"] for row in rows
    ]
    np.testing.assert_allclose(probabilities_in_a_new_process(path, features[:5]), expected[:5], atol=1e-5)


def stage_of(folder, value):
    """A stage of Spark ML that predicts a constant."""
    model = build_linear().eval()
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, value)
    write_saved_model(folder, model, ModelSpec(build=build_linear), NIGHTLY, NIGHTLY_COLUMNS)
    return TorchModel(saved_scorer(read_saved_model(folder)))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_stage_that_is_replaced_each_night_is_the_new_one_in_the_same_session(spark, tmp_path):
    df = spark.range(8).select(F.array(*[F.col("id").cast("float")] * 4).alias("features"))
    path = str(tmp_path / "stage")
    for night, value in enumerate((1.0, 100.0, 7.0)):
        stage_of(tmp_path / f"m{night}", value).write().overwrite().save(path)
        assert {row["prediction"][0] for row in TorchModel.load(path).transform(df).collect()} == {value}
    assert len(os.listdir(f"{path}/model")) == 2
    stage_of(tmp_path / "m3", 8.0).write().overwrite().save(path)
    late = TorchModel.load(path).transform(df)
    new = saved_model.pack_model(
        stage_of(tmp_path / "m4", 9.0).load_model(), ModelSpec(build=build_linear), NIGHTLY, NIGHTLY_COLUMNS
    )
    new.write(f"{path}/model", overwrite=True)  # the job ends here
    with pytest.raises(Exception, match="was replaced after it was read"):
        late.collect()
    with pytest.raises(ValueError, match="the model is not that of its metadata; another program replaces it now"):
        TorchModel.load(path)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.long_in("local-cluster", "connect")
def test_cross_validation_chooses_the_better_learning_rate(spark, points, tmp_path):
    estimator = classifier(tmp_path, labelCol="index")
    pipeline = pipeline_of(estimator)
    grid = ParamGridBuilder().addGrid(estimator.lr, [1e-6, 0.1]).build()
    evaluator = MulticlassClassificationEvaluator(labelCol="index", metricName="accuracy")
    found = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, seed=1
    ).fit(points)  # fmt: skip
    assert found.avgMetrics[1] > found.avgMetrics[0]
    best = found.bestModel.stages[-1]
    assert best.getOrDefault(best.lr) == 0.1
    path = str(tmp_path / "saved")
    found.write().overwrite().save(path)
    again = CrossValidatorModel.load(path)
    assert (
        again.transform(points).select("prediction").collect() == found.transform(points).select("prediction").collect()
    )


@pytest.mark.long
@pytest.mark.modes("local")
@pytest.mark.slow
def test_a_train_validation_split_with_settings_in_its_grid(spark, points, tmp_path):
    estimator = TorchRegressor(build_linear, CONFIG, labelCol="target", runDir=str(tmp_path / "runs"), progress=False)
    grid = ParamGridBuilder().addGrid(estimator.settings, [{"train.lr": 1e-6}, {"train.optimizer": "Adam"}]).build()
    split = TrainValidationSplit(
        estimator=estimator, estimatorParamMaps=grid, evaluator=RegressionEvaluator(labelCol="target"), seed=1
    )
    found = split.fit(vectors(points))
    assert found.validationMetrics[1] < found.validationMetrics[0]
    assert found.bestModel.transform(vectors(points)).schema["prediction"].dataType == DoubleType()
    found.save(str(tmp_path / "saved"))
    again = TrainValidationSplitModel.load(str(tmp_path / "saved"))
    assert type(again.bestModel) is TorchRegressionModel
    rows = [m.transform(vectors(points)).select("prediction").collect() for m in (found, again)]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.modes("local")
def test_weights_validation_rows_and_lists_of_columns(spark, points, tmp_path):
    spec = ModelSpec(build=TwoOutputs, loss=two_losses)
    named = TorchRegressor(build_linear).setFeaturesCol(["a", "b"]).setLabelCol("target").setWeightCol("w")
    assert (named.feature_columns(), named.getLabelCol(), named.getWeightCol()) == (("a", "b"), "target", "w")
    assert named.setPredictionCol("y").getPredictionCol() == "y"
    df = points.withColumn("features", F.array(*NAMES))
    estimator = TorchEstimator(
        spec, CONFIG, featuresCol=["features", "id"], labelCols=["label", "target"], weightCol="w",
        validationIndicatorCol="held", runDir=str(tmp_path / "runs"), progress=False,
    )  # fmt: skip
    model = estimator.fit(df)
    assert (model.result.rows, set(model.result.metrics)) == (4 * 200, {"loss"})
    config = spark_dl.load_config(str(Path(model.result.run_dir) / "config.yaml"))
    assert (config.data.features, config.data.labels) == (("features", "id"), ("label", "target"))
    assert (config.data.weight, config.data.label, dict(config.data.cast)) == ("w", None, {"features": "float32"})
    assert not list((Path(model.result.run_dir) / "shards").glob("*/*.parquet"))
    found = model.transform(df.select("id", "features"))
    assert found.columns == ["id", "features", "classes", "amount"]
    assert found.schema["classes"].dataType == ArrayType(FloatType())
    model.save(str(tmp_path / "saved"))
    again = TorchModel.load(str(tmp_path / "saved"))
    assert again.transform(df).select("amount").collect() == model.transform(df).select("amount").collect()
    assert again.facts == model.facts
    assert type(spark_dl.load_model(tmp_path / "saved" / "model")) is TwoOutputs
    assert spark_dl.predict(df, str(tmp_path / "saved" / "model")).columns[-2:] == ["classes", "amount"]


@pytest.mark.modes("local")
def test_a_list_of_columns_is_one_vector_of_the_model(spark, points, tmp_path):
    """As with VectorAssembler: the same model, and the same predictions of each way."""
    columns, settings = [*NAMES, "id"], {"data.assemble": "float32", "train.seed": 3}
    assert points.schema["id"].dataType == LongType()
    df = points.withColumn("id", F.col("id") % 7).withColumn("all", F.array(*NAMES, F.col("id").cast("float")))
    of_list, of_vector = (
        TorchRegressor(
            ModelSpec(build=_Wide, loss="MSELoss"), CONFIG, settings=chosen, featuresCol=features, labelCol="target",
            epochs=1, runDir=str(tmp_path / "runs"), progress=False,
        ).fit(df)
        for features, chosen in ((columns, settings), ("all", {"train.seed": 3}))
    )  # fmt: skip
    expected = sorted(of_vector.transform(df).select("id", "prediction").collect())
    assert sorted(of_list.transform(df).select("id", "prediction").collect()) == expected
    for form in ("weights", "export"):
        of_list.set(of_list.saveFormat, form)
        of_list.save(str(tmp_path / form))
        found = spark_dl.predict(df, str(tmp_path / form / "model")).selectExpr("id", "prediction[0] AS prediction")
        assert sorted(found.collect()) == expected
    data = {"features": ("all", "id"), "label": "target", "assemble": "float32", "encode": {"all": {"ragged": True}}}
    ragged = small_config(2, data=data)
    with pytest.raises(ValueError, match="data.assemble: column 'all' has arrays of varying length"):
        spark_dl.train(df, ModelSpec(build=_Wide, loss="MSELoss"), ragged, run_dir=str(tmp_path / "ragged"))


class _Wide(nn.Linear):
    def __init__(self):
        super().__init__(len(NAMES) + 1, 1)


@pytest.mark.modes("local")
def test_with_early_stopping_the_model_is_that_of_the_best_epoch(spark, points, tmp_path):
    """The step is so large that the loss grows from epoch to epoch."""
    df = points.withColumn("features", F.array(*NAMES))
    settings = {"train.early_stop_metric": "loss", "train.early_stop_patience": 2}
    named = {"featuresCol": "features", "labelCol": "target", "validationIndicatorCol": "held", "progress": False}
    estimator = TorchRegressor(build_linear, CONFIG, settings=settings, lr=1.9, runDir=str(tmp_path / "runs"), **named)
    fitted = estimator.fit(df)
    losses = [epoch["metrics"]["loss"] for epoch in fitted.result.history]
    assert losses[-1] > 2 * min(losses)
    error = fitted.transform(df.filter("held")).selectExpr("avg(pow(prediction - target, 2)) AS loss").collect()[0]
    assert error["loss"] == pytest.approx(min(losses), rel=1e-4)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_one_logit_is_a_binary_classifier_and_columns_can_be_left_out(spark, points, tmp_path):
    spec = ModelSpec(build=build_linear, loss="BCEWithLogitsLoss")
    df = vectors(points).withColumn("label", (F.col("label") == 1).cast("double"))
    estimator = TorchClassifier(
        spec, CONFIG, rawPredictionCol="", probabilityCol="p", predictionCol="y", runDir=str(tmp_path / "runs"),
        progress=False,
    )  # fmt: skip
    model = estimator.fit(df)
    found = model.transform(df)
    assert (found.columns[-2:], model.numClasses) == (["p", "y"], 2)
    assert "rawPrediction" not in found.columns
    row = found.first()
    assert row["y"] == float(row["p"][1] > 0.5)
    assert float(row["p"].toArray().sum()) == pytest.approx(1)
    renamed = model.copy({model.predictionCol: "z"})
    assert renamed.transform(df).columns[-1] == "z"
    assert model.copy().setPredictionCol("z").setProbabilityCol("").transform(df).columns[-1] == "z"
    score = spark_dl.predict_udf(model)
    assert df.select(score("features").alias("s")).select("s.*").columns == ["p", "y"]


@pytest.mark.modes("local")
def test_an_estimator_is_saved_by_the_names_of_its_functions(spark, points, tmp_path):
    spec = ModelSpec(build=TwoOutputs, loss=two_losses)
    estimator = TorchEstimator(spec, CONFIG, featuresCol=["features", "id"], labelCols=["label", "target"], epochs=7)
    estimator.save(str(tmp_path / "a"))
    again = TorchEstimator.load(str(tmp_path / "a"))
    assert (again.spec, again.config, again.uid) == (spec, CONFIG, estimator.uid)
    assert again.extractParamMap() == estimator.extractParamMap()
    pipeline_of(classifier(tmp_path, labelCol="index", lr=0.5)).save(str(tmp_path / "b"))
    loaded = Pipeline.load(str(tmp_path / "b")).getStages()[-1]
    assert type(loaded) is TorchClassifier
    assert type(loaded.spec.loss) is nn.CrossEntropyLoss
    assert loaded.getOrDefault(loaded.lr) == 0.5
    with pytest.raises(ValueError, match=r"spec.build: .*no name that another process can import"):
        TorchClassifier(lambda: nn.Linear(4, 3)).save(str(tmp_path / "c"))
    smoothed = ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1))
    with pytest.raises(ValueError, match="CrossEntropyLoss has arguments"):
        TorchClassifier(smoothed).save(str(tmp_path / "d"))


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_model_of_a_notebook_is_saved_as_a_program(spark, points, tmp_path):
    spec = ModelSpec(build=lambda: nn.Sequential(nn.Linear(4, 3)))
    estimator = TorchClassifier(spec, CONFIG, runDir=str(tmp_path / "runs"), saveFormat="export", progress=False)
    model = estimator.fit(vectors(points))
    model.save(str(tmp_path / "saved"))
    again = TorchClassificationModel.load(str(tmp_path / "saved"))
    df = vectors(points).orderBy("id")
    a, b = ([row["probability"].toArray() for row in m.transform(df).collect()] for m in (model, again))
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.long_in("connect")
@pytest.mark.slow
@pytest.mark.modes("local", "connect")
def test_a_stream_is_scored(spark, points, tmp_path):
    model = classifier(tmp_path).fit(vectors(points))
    vectors(points).select("id", "features").write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(vectors(points).select("id", "features").schema).parquet(str(tmp_path / "in"))
    query = (
        model.transform(stream).writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "state"))
        .trigger(availableNow=True).start(str(tmp_path / "out"))
    )  # fmt: skip
    assert query.awaitTermination(90)
    found = spark.read.parquet(str(tmp_path / "out"))
    expected = model.transform(vectors(points)).select("id", "prediction")
    assert found.count() == 240
    assert found.select("id", "prediction").exceptAll(expected).isEmpty()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_dtypes_of_labels_and_features(spark, points, tmp_path):
    df = vectors(points)
    for kind in ("tinyint", "bigint", "double", "decimal(3,0)"):
        model = classifier(tmp_path, epochs=1).fit(df.withColumn("label", F.col("label").cast(kind)))
        assert model.numClasses == 3, kind
    array = points.withColumn("features", F.array(*NAMES))
    model = classifier(tmp_path, epochs=1).fit(array)
    assert model.transform(array).count() == 240
    with pytest.raises(ValueError, match="column 'features' has type string"):
        model.transform(array.withColumn("features", F.col("word")))
    estimator = TorchEstimator(
        ModelSpec(build=build_mlp, predict=_argmax), CONFIG, epochs=1, runDir=str(tmp_path / "runs"), progress=False
    )
    kept = estimator.fit(df.withColumn("label", F.col("label").cast("bigint")))
    assert kept.transform(df).schema["best"].dataType == LongType()


def _argmax(output):
    return {"best": output.argmax(1)}


@pytest.mark.slow
@pytest.mark.modes("local")
def test_what_cannot_be_fitted_or_transformed_is_refused_before_any_rank_starts(spark, points, tmp_path):
    df = vectors(points)
    labels = {"minus": F.col("label") - 100 * (F.col("id") == 7).cast("int"), "half": F.col("target") / 2}
    wrong = df.withColumns({**labels, "never": F.lit(False)})
    for estimator, match in (
        (classifier(tmp_path, labelCol="lable"), "no column 'lable' in the DataFrame.*did you mean 'label'"),
        (classifier(tmp_path, featuresCol="feature"), "no column 'feature'.*did you mean 'features'"),
        (classifier(tmp_path, weightCol="weight"), "no column 'weight'"),
        (classifier(tmp_path, validationIndicatorCol="label"), "expected a boolean column, found 'label' of type int"),
        (classifier(tmp_path, labelCol="word"), "word"),
        (classifier(tmp_path, settings={"train.lrr": 1}), "train.lrr"),
        (classifier(tmp_path, settings={"lr": 1}), "expected keys such as 'train.lr', found 'lr'"),
        (classifier(tmp_path, labelCol="minus"), "labelCol: expected classes 0, 1, 2 ... in 'minus', found -100"),
        (classifier(tmp_path, labelCol="half"), "labelCol: expected classes 0, 1, 2 ... in 'half', found 0.5"),
        (classifier(tmp_path, validationIndicatorCol="never"), "validationIndicatorCol.*'never'"),
        (classifier(tmp_path, settings={"sequences.length": 2}), "^sequences: a fitted model scores the rows"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            estimator.fit(wrong)
    together = classifier(tmp_path, parallelTrials=2)
    grid = ParamGridBuilder().addGrid(together.validationIndicatorCol, ["held", "never"]).build()
    with pytest.raises(ValueError, match="^validationIndicatorCol: expected the same one in all param maps with para"):
        next(together.fitMultiple(wrong.withColumn("held", F.lit(True)), grid))
    together = classifier(tmp_path, labelCol="minus", parallelTrials=2)
    grid = ParamGridBuilder().addGrid(together.lr, [0.1, 0.2]).build()
    with pytest.raises(ValueError, match=r"^labelCol: expected classes 0, 1, 2 \.\.\. in 'minus', found -100$"):
        next(together.fitMultiple(wrong, grid))
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/checkpoints/*"))
    for make, match in (
        (lambda: TorchClassifier(build_mlp()), "spec: expected a ModelSpec, or a function that returns the model"),
        (lambda: TorchClassifier(ModelSpec(build=build_mlp, predict=_argmax)), "use TorchEstimator"),
        (lambda: TorchClassifier(ModelSpec(build=build_linear, loss="BCELoss")), "use BCEWithLogitsLoss"),
        (lambda: TorchRegressor(ModelSpec(build=build_linear)), "found CrossEntropyLoss for a regressor"),
        (lambda: TorchRegressor(ModelSpec(build=build_linear, loss="MSELoss", predict=_argmax)), "use TorchEstimator"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            make()
    with pytest.raises(TypeError, match=r"settings.*expected settings by key, such as .*, found 3"):
        classifier(tmp_path, settings=3)
    model = classifier(tmp_path, epochs=1).fit(df)
    with pytest.raises(ValueError, match="no column 'features'"):
        model.transform(points)
    with pytest.raises(ValueError, match="already has a column 'prediction'"):
        model.transform(df.withColumn("prediction", F.lit(0)))


@pytest.mark.modes("local")
def test_settings_of_the_config_and_by_key_hold_unless_a_param_is_set(spark, points):
    def config_of(estimator):
        return estimator.build_config(estimator.config, vectors(points).schema, None)

    base = small_config(2, data={"label": "index", "weight": "w", "features": ("features",)})
    found = config_of(TorchEstimator(build_mlp, base))
    assert (found.data.label, found.data.weight, found.train.lr) == ("index", "w", base.train.lr)
    assert TorchEstimator(build_mlp, base).getOrDefault("lr") == base.train.lr
    settings = {
        "data.nulls": "drop",
        "data.cast": {"target": "float32"},
        "parallel.strategy": "single",
        "train.lr": 0.5,
    }
    found = config_of(TorchEstimator(build_mlp, labelCol="target", settings=settings, lr=0.25))
    assert (found.data.nulls, found.data.label, found.parallel.strategy, found.train.lr) == (
        "drop",
        "target",
        "single",
        0.25,
    )
    assert found.data.cast == {"features": "float32", "target": "float32"}
    with pytest.raises(ValueError, match="data.nonsense"):
        config_of(TorchEstimator(build_mlp, settings={"data.nonsense": 1}))
    metrics = {"mae": {"class": "MeanAbsoluteError", "label": "target"}}
    several = TorchEstimator(build_mlp, labelCols=["label", "target"], settings={"train.metrics": metrics})
    assert config_of(several).data.labels == ("label", "target")
    listed = TorchEstimator(build_mlp).setFeaturesCol(["a", "b"])
    assert config_of(listed).data.features == ("a", "b")
    assert config_of(listed.setFeaturesCol("features")).data.features == ("features",)
    schema = spark.createDataFrame([], "price decimal(5,2), whole decimal(9,0), cents decimal(5,2), y double").schema
    encode = {"cents": {"as": "decimal"}, "whole": {}}
    data = {"features": ("price", "whole", "cents"), "label": "y", "encode": encode}
    estimator = TorchEstimator(build_mlp, small_config(1, data=data))
    found = estimator.build_config(estimator.config, schema, None).data
    assert found.encode == {"price": {"as": "float"}, "whole": {"as": "float"}, "cents": {"as": "decimal"}}
    assert found.cast == {"price": "float32", "whole": "float32"}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_decimals_are_numbers_in_their_own_unit(spark, tmp_path):
    rows = spark.range(200).selectExpr(
        "array(float(id) / 200) AS features", "CAST(id / 200 AS DECIMAL(10, 2)) AS label"
    )
    estimator = TorchRegressor(OneInput, runDir=str(tmp_path), epochs=20, lr=0.5, progress=False, globalBatchSize=16)
    predicted = estimator.fit(rows).transform(rows.where("label = 0.5")).first()["prediction"]
    assert predicted == pytest.approx(0.5, abs=0.1)


class OneInput(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_params_of_an_estimator_are_those_of_its_model_as_in_spark_ml(spark, points, tmp_path):
    df = vectors(points).withColumn("label", F.col("label").cast("long"))
    for estimator in (
        classifier(tmp_path, epochs=1),
        TorchEstimator(MLP, featuresCol="features", runDir=str(tmp_path)),
    ):
        model = estimator.setEpochs(1).setNumRanks(1).setLr(0.5).fit(df)
        assert model.uid == estimator.uid
        assert model.getOrDefault(estimator.lr) == model.getLr() == 0.5
    assert (estimator.getNumRanks(), estimator.getEpochs(), estimator.getRunDir()) == (1, 1, str(tmp_path))
    assert (estimator.getFeaturesCols(), estimator.getLabelCols(), estimator.getSettings()) == (
        ["features"],
        ["label"],
        {},
    )
    assert estimator.getGlobalBatchSize() == spark_dl.Train().global_batch_size
    assert (estimator.getSaveFormat(), estimator.getParallelTrials()) == ("weights", 1)
    estimator = classifier(tmp_path, epochs=1)
    model = estimator.fit(df)
    for found in (
        model.transform(df, {estimator.predictionCol: "p2"}),
        model.copy({estimator.predictionCol: "p2"}).transform(df),
        Pipeline(stages=[estimator]).fit(df).transform(df, {estimator.predictionCol: "p2"}),
    ):
        assert "p2" in found.columns
        assert "prediction" not in found.columns


@pytest.mark.modes("local")
def test_what_cannot_be_saved_leaves_the_model_that_was_saved_before(spark, points, tmp_path):
    model = classifier(tmp_path, settings={"train.log_every": np.int64(5)}).fit(vectors(points))
    path = str(tmp_path / "saved")
    model.save(path)
    assert TorchClassificationModel.load(path).getSettings() == {"train.log_every": 5}
    for unsaved, folder in ((model.copy(), path), (classifier(tmp_path), str(tmp_path / "estimator"))):
        unsaved.write().overwrite().save(folder)
        bad = unsaved.copy({unsaved.settings: {"train.log_every": {1, 2}}})
        with pytest.raises(ValueError, match=r"^settings: cannot be saved, as Object of type set is not JSON"):
            bad.write().overwrite().save(folder)
        assert type(unsaved).load(folder).uid == unsaved.uid
    local = TorchClassificationModel(
        dataclasses.replace(model.trained, spec=ModelSpec(build=lambda: build_mlp())), None
    )
    with pytest.raises(ValueError, match="spec.build"):
        local.write().overwrite().save(path)
    assert TorchClassificationModel.load(path).uid == model.uid
    assert isinstance(spark_dl.load_model(path), nn.Module)
    with pytest.raises(ValueError, match="has a .*TorchClassificationModel"):
        TorchModel.load(path)


@pytest.mark.modes("local")
def test_columns_and_splits_that_exclude_each_other_are_refused_before_training(spark, points, tmp_path):
    df = vectors(points)
    with pytest.raises(ValueError, match="probabilityCol: the DataFrame already has a column 'word'"):
        classifier(tmp_path, probabilityCol="word").fit(df)
    with pytest.raises(ValueError, match="probabilityCol: found 'prediction' for several columns"):
        classifier(tmp_path, probabilityCol="prediction").fit(df)
    both = {"validationIndicatorCol": "held", "settings": {"train.validation_fraction": 0.1}}
    with pytest.raises(ValueError, match="found it together with train.validation_fraction=0.1"):
        classifier(tmp_path, **both).fit(df)
    with pytest.raises(TypeError, match="saveFormat"):
        classifier(tmp_path, saveFormat="onnx")


@pytest.mark.modes("local")
def test_each_row_is_in_training_or_in_validation_also_if_a_udf_decides(spark, points, tmp_path):
    """A function that is not deterministic, and does not say so."""
    chosen = F.udf(lambda i: random.random() < 0.3, "boolean")("id")
    rows = vectors(points).withColumn("held", chosen)
    estimator = classifier(tmp_path, epochs=1, validationIndicatorCol="held")
    ids = sorted(row["id"] for row in rows.collect())
    with estimator._split(rows, ["id", "features"]) as (train, validation):
        for _ in range(2):
            found = [[row["id"] for row in part.collect()] for part in (train, validation)]
            assert sorted([*found[0], *found[1]]) == ids
            assert all(found)
    model = estimator.fit(rows)
    assert 0 < model.result.rows < len(ids)


@pytest.mark.modes("local")
@pytest.mark.parametrize("name", ["my.features", "my`features"])
def test_columns_of_any_name_are_features_labels_and_weights(spark, points, tmp_path, name):
    label, weight = f"{name} label", f"{name} weight"
    rows = vectors(points).withColumnsRenamed({"features": name, "label": label}).withColumn(weight, F.lit(2.0))
    estimator = classifier(tmp_path, epochs=1, featuresCol=name, labelCol=label, weightCol=weight)
    found = estimator.fit(rows).transform(rows)
    assert found.columns[: len(rows.columns)] == rows.columns
    assert found.count() == rows.count()


@pytest.mark.modes("local")
def test_weights_of_a_decimal_column_are_their_values(spark, points, tmp_path):
    """A number with a point in Spark SQL is a decimal."""
    losses = []
    for kind in ("DOUBLE", "DECIMAL(2,1)", "DECIMAL(12,6)"):
        rows = vectors(points).withColumn("w", F.expr(f"CAST(CASE WHEN label = 1 THEN 3.0 ELSE 1.0 END AS {kind})"))
        losses.append(classifier(tmp_path, epochs=1, weightCol="w").fit(rows).result.train_loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.modes("local")
def test_the_scale_of_weights_changes_nothing_as_in_spark_ml(spark, points, tmp_path):
    rows = vectors(points).withColumn("w", F.expr("CASE WHEN label = 1 THEN 3.0 ELSE 1.0 END"))
    rows = rows.withColumn("heavy", F.col("w") * 10)
    by_weights = {name: classifier(tmp_path, epochs=1, weightCol=name).fit(rows) for name in ("w", "heavy")}
    states = [model.load_model().state_dict() for model in by_weights.values()]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)
    by_rows = classifier(tmp_path, epochs=1, weightCol="heavy", settings={"data.weight_mean": "rows"}).fit(rows)
    assert not all(torch.allclose(by_rows.load_model().state_dict()[n], v, rtol=1e-2) for n, v in states[0].items())


@pytest.mark.modes("local", "connect")
def test_a_stream_is_refused_with_the_way_that_works(spark, tmp_path):
    stream = spark.readStream.format("rate").load().selectExpr("CAST(value AS FLOAT) AS x", "value AS y")
    config = make_config(features=("x",), label="y")
    for call, name in (
        (lambda: spark_dl.train(stream, MLP, config, run_dir=str(tmp_path / "run")), "train"),
        (lambda: spark_dl.train({"a": stream}, MLP, config, run_dir=str(tmp_path / "run")), "train"),
        (lambda: spark_dl.write_shards(stream, str(tmp_path / "shards")), "write_shards"),
        (lambda: spark_dl.run_on_dataframe(print, stream), "run_on_dataframe"),
        (lambda: spark_dl.evaluate(stream, MLP, str(tmp_path / "run")), "evaluate"),
        (lambda: TorchClassifier(build_mlp, featuresCol="x", labelCol="y").fit(stream), "fit"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: found a streaming DataFrame, .*foreachBatch.*{name}\(batch"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.modes("local")
def test_a_fit_that_fails_leaves_no_copy_of_the_rows(spark, tmp_path):
    def fail():
        raise RuntimeError("the model of the user")

    rows = spark.range(64).selectExpr("array(CAST(id AS FLOAT)) AS features", "id % 2 AS label")
    estimator = TorchClassifier(fail, runDir=str(tmp_path))
    with pytest.raises((RankError, ValueError, RuntimeError), match="the model of the user"):
        estimator.fit(rows)
    assert not list(tmp_path.rglob("*.parquet"))
