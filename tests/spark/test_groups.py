"""One row per group of rows: what `group_rows` makes of a DataFrame, and training, metrics and scores by group."""

import numpy as np
import pytest
import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import functions as F
from torch import nn

import spark_dl
from spark_dl import ModelSpec
from spark_dl.evaluate import load_model
from tests.builders.models import small_config

pytestmark = pytest.mark.modes("local", "connect")


def test_the_values_of_a_group_are_ordered_whatever_the_partitions_are(spark):
    rows = [("a", 2, 5.0), ("b", 1, 1.0), ("a", 1, None), ("a", None, 7.0), (None, 3, 2.0), ("a", 2, 4.0)]
    found = []
    for partitions in (1, 4):
        df = spark.createDataFrame(rows, "query string, rank int, price double").repartition(partitions)
        groups = spark_dl.group_rows(df, "query", order_by="rank").orderBy("query").collect()
        found.append([tuple(row) for row in groups])
    assert found[0] == found[1] == [
        (None, [3], [2.0]), ("a", [None, 1, 2, 2], [7.0, None, 4.0, 5.0]), ("b", [1], [1.0]),
    ]  # fmt: skip


def test_columns_stay_where_they_are_and_names_need_no_quotes(spark):
    df = spark.range(4).selectExpr("id AS `a.b`", "id % 2 AS `q``x`", "array(id, id + 1) AS pair")
    groups = spark_dl.group_rows(df, ["q`x"])
    assert groups.columns == ["a.b", "q`x", "pair"]
    assert [tuple(row) for row in groups.orderBy("`q``x`").collect()] == [
        ([0, 2], 0, [[0, 1], [2, 3]]), ([1, 3], 1, [[1, 2], [3, 4]]),
    ]  # fmt: skip


@pytest.mark.modes("local")
def test_vectors_become_arrays(spark):
    df = spark.createDataFrame([(1, Vectors.dense(3, 4)), (1, Vectors.dense(1, 2))], ["query", "x"])
    assert spark_dl.group_rows(df, "query").first()["x"] == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(("by", "order_by", "message"), [
    ("quer", (), "there is no column 'quer'; did you mean 'query'"), ("query", "time", "there is no column 'time'"),
    ([], (), r"expected columns to group by.*found by=\[\]"), (["query", "m"], (), "and others, found by="),
    ("query", (), "column 'm' has the type map<string,int>, whose values have no order"),
])  # fmt: skip
def test_B27_columns_that_cannot_be_grouped_are_named(spark, by, order_by, message):
    df = spark.sql("SELECT 1 AS query, map('a', 1) AS m")
    with pytest.raises(ValueError, match=f"group_rows: .*{message}"):
        spark_dl.group_rows(df, by, order_by=order_by)


class Ranker(nn.Module):
    """Scores of the items of each query. # x: [queries, longest, 3], returns: [queries, longest]"""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(x)[:, :, 0]


def listwise(scores, batch):
    """ListNet (Cao et al. 2007): the cross entropy of the items of each query. # returns: [queries]"""
    mask = batch["relevance_mask"]
    wanted = batch["relevance"].masked_fill(~mask, -torch.inf).softmax(1)
    return -(wanted * scores.masked_fill(~mask, -1e9).log_softmax(1)).sum(1)


def first_is_best(scores, batch):
    mask = batch["relevance_mask"]
    best = batch["relevance"].masked_fill(~mask, -1)
    found = best.gather(1, scores.masked_fill(~mask, -torch.inf).argmax(1, keepdim=True))[:, 0]
    return (found == best.max(1).values).float()


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_listwise_loss_its_metric_and_its_scores_are_by_group(spark, tmp_path):
    items = spark.range(600).select(
        (F.col("id") * F.col("id") % 101).alias("query"), "id",
        F.array(*(F.rand(seed).cast("float") for seed in (1, 2, 3))).alias("x"),
    ).withColumn("relevance", (4 * F.col("x")[0]).cast("int").cast("float")).cache()  # fmt: skip
    queries = spark_dl.group_rows(items, "query", order_by="id")
    ragged = {name: {"ragged": True} for name in ("x", "relevance")}
    results = []
    for num_ranks in (1, 2):
        config = small_config(
            num_ranks, {"optimizer": "Adam", "lr": 0.05, "global_batch_size": 24, "validation_fraction": 0.2},
            {"features": ("x",), "label": None, "labels": ("relevance",), "encode": ragged},
        )  # fmt: skip
        spec = ModelSpec(build=Ranker, loss=listwise, metrics={"first": first_is_best})
        results.append(spark_dl.train(queries, spec, config, run_dir=str(tmp_path / str(num_ranks))))
    assert results[1].metrics == pytest.approx(results[0].metrics, rel=1e-4)
    scored = spark_dl.predict(queries, spec, results[0].checkpoint)
    flat = scored.select(
        F.explode(F.arrays_zip("id", F.expr("slice(prediction, 1, size(id))").alias("score"))).alias("r")
    )
    rows = flat.select("r.id", "r.score").orderBy("id").collect()
    assert [row["id"] for row in rows] == list(range(600))
    model = load_model(spec, results[0].checkpoint)
    x = torch.tensor([row["x"] for row in items.orderBy("id").collect()])
    np.testing.assert_allclose([row["score"] for row in rows], model(x[None])[0].detach(), rtol=1e-5, atol=1e-6)
    items.unpersist()
