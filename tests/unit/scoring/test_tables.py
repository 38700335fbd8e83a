"""Scoring of Arrow batches whose rows are decoded ahead, as on a GPU. That by Spark is in spark/test_predict.py."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.sql.types import ArrayType, FloatType, StructField, StructType

from spark_dl import Config, Data, ModelSpec
from spark_dl.data.columns.schema import Column
from spark_dl.scoring import tables
from spark_dl.scoring.scorer import Scorer
from tests.builders.models import build_mlp

CONFIG = Config(data=Data(features=("features",)))
SCHEMA = StructType([StructField("features", ArrayType(FloatType()))])
ROWS = 103


def scored(monkeypatch, decoders, batches, device="cpu", **options):
    """The predictions of a task whose device has threads that decode."""
    monkeypatch.setattr(tables.OpenScorer, "decoders", property(lambda self: decoders))
    monkeypatch.setattr(tables, "_DECODED_BYTES", 200)  # 12 rows
    columns = (Column("features", "float32", (4,), "list"),)
    scorer = Scorer(spec=ModelSpec(build=build_mlp), config=CONFIG, columns=columns, url="", sha256="", **options)
    context = SimpleNamespace(partitionId=lambda: 7)
    opened = tables.OpenScorer(scorer, scorer.load().to(device), torch.device(device), context)
    score = tables.batch_scorer(opened, tables.trained_sources(SCHEMA, scorer))
    return [score(batch) for batch in batches]


def batches(bad=()):
    values = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32).tolist()
    cells = [None if row in bad else value for row, value in enumerate(values)]
    table = pa.table({"features": pa.array(cells, pa.list_(pa.float32()))})
    return table.to_batches(max_chunksize=60)


@pytest.mark.parametrize("decoders", [1, 2, 5, 50])
def test_rows_that_are_decoded_ahead_are_scored_in_their_order(monkeypatch, decoders):
    plain, ahead = (scored(monkeypatch, n, batches()) for n in (0, decoders))
    assert [len(part["prediction"]) for part in plain] == [60, 43]
    for one, other in zip(plain, ahead, strict=True):
        expected, found = (np.stack(part["prediction"].to_numpy(zero_copy_only=False)) for part in (one, other))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("decoders", [0, 3])
def test_a_bad_row_is_named_by_its_place_in_the_partition(monkeypatch, decoders):
    with pytest.raises(ValueError, match="first in partition 7, row 71"):
        scored(monkeypatch, decoders, batches(bad=(71, 90)))
    declared = {
        "on_bad_rows": "null",
        "output_schema": StructType([StructField("prediction", ArrayType(FloatType()))]).json(),
    }
    parts = scored(monkeypatch, decoders, batches(bad=(71, 90)), **declared)
    found = pa.chunked_array([part["prediction"] for part in parts]).to_pylist()
    assert [row for row, value in enumerate(found) if value is None] == [71, 90]
