"""Measures rows per second of scoring a CNN on `img` from Parquet: spark_dl, `predict_batch_udf`, and the limits.

All ways run in one session, with the same weights, rows per call of the model, and threads: one for each task. They
take turns, so that all see the same machine load. Each way computes the label and the prediction of every row, and
Spark discards them.

- `transform`: a model of `spark_dl.ml`.
- `predict_batch_udf`: Spark's own function.
- `from_dataset`: `spark_dl.predict` of a dataset of `write_shards`, whose features do not pass through Spark.
- `floor`: a limit: the rows pass through an empty function of `mapInArrow`.
- `bare_forward`: a limit: the model on rows in memory, in threads of one process, without Spark.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from benchmarks.peers.loader import image_rows, write_parquet
from spark_dl.config import Data
from spark_dl.data.write.shards import write_shards
from spark_dl.predict import predict
from spark_dl.scoring.scorer import MOST_ROWS_AT_ONCE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS, _TRAINED_ROWS = 240_000, 64
_TOLERANCE = 1e-5
"""Relative difference of predictions: torch may sum in another order for another number of rows."""


def measure(spark: SparkSession, *, repeats: int, scale: float = 1.0) -> dict[str, Any]:
    """Measures median rows per second of each way, and ratios of medians. Called on the driver.

    Raises RuntimeError if two ways predict different values for a row.
    """
    from spark_dl.ml import TorchRegressor

    arrays = image_rows(max(_TRAINED_ROWS, round(_ROWS * scale)))
    with tempfile.TemporaryDirectory() as folder:
        write_parquet(folder, arrays)
        df = spark.read.parquet(f"{folder}/parquet")
        write_shards(df, f"{folder}/shards", Data(features=("image", "label"), label=None))
        estimator = TorchRegressor(
            build_cnn, featuresCol="image", labelCol="label", globalBatchSize=_TRAINED_ROWS, lr=1e-9, runDir=folder,
            settings={"train.max_steps": 1}, progress=False,
        )  # fmt: skip
        model = estimator.fit(df.limit(_TRAINED_ROWS))
        ways: dict[str, DataFrame] = {
            "transform": model.transform(df),
            "predict_batch_udf": df.withColumn("prediction", _batch_udf(model.load_model())("image")),
            "from_dataset": predict(f"{folder}/shards", model, keys=["label"], spark=spark),
        }
        forward = _BareForward(model.load_model(), arrays["image"], spark.sparkContext.defaultParallelism)
        _check_same({name: _collect(way) for name, way in ways.items()}, arrays["label"], forward())
        floor = df.mapInArrow(_identity, df.schema)
        work: dict[str, Callable[[], object]] = {
            "transform": lambda: _discard(ways["transform"], "label", "prediction"),
            "predict_batch_udf": lambda: _discard(ways["predict_batch_udf"], "label", "prediction"),
            "floor": lambda: _discard(floor, "label"),
            "from_dataset": lambda: _discard(ways["from_dataset"], "label", "prediction"),
            "bare_forward": forward,
        }
        return _take_turns(work, len(arrays["label"]), repeats)


def build_cnn() -> nn.Module:
    """A network of two convolutions and a linear layer: images [rows, 784] -> [rows, 1]."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(784, 1),
    )  # fmt: skip


class _BareForward:
    """The forward pass on rows in memory, in a thread for each task, without Spark. Returns predictions, (rows,)."""

    def __init__(self, model: nn.Module, images: np.ndarray[Any, Any], num_threads: int):
        self._model, self._num_threads = model, num_threads
        self._batches = torch.from_numpy(images).split(MOST_ROWS_AT_ONCE)

    def __call__(self) -> np.ndarray[Any, Any]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # each thread is one task
        try:
            with ThreadPoolExecutor(self._num_threads) as pool:
                return np.concatenate(list(pool.map(self._forward, self._batches)))
        finally:
            torch.set_num_threads(before)

    def _forward(self, images: Tensor) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            found: np.ndarray[Any, Any] = self._model(images).squeeze(1).double().numpy()
        return found


def _batch_udf(model: nn.Module) -> Any:
    """Returns Spark's own function for predictions, used as its documentation shows."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import DoubleType

    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    def make_predict_fn() -> Callable[[Any], Any]:
        model = build_cnn()
        model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        model.eval()

        def predict_batch(images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            with torch.inference_mode():
                found: np.ndarray[Any, Any] = model(torch.from_numpy(images)).squeeze(1).double().numpy()
            return found

        return predict_batch

    return predict_batch_udf(
        make_predict_fn, return_type=DoubleType(), batch_size=MOST_ROWS_AT_ONCE, input_tensor_shapes=[[784]]
    )


def _identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _discard(df: DataFrame, *columns: str) -> None:
    """Computes columns of all rows, and writes them nowhere."""
    df.select(*columns).write.format("noop").mode("overwrite").save()


def _collect(df: DataFrame) -> dict[int, float]:
    return {row["label"]: row["prediction"] for row in df.select("label", "prediction").collect()}


def _check_same(found: dict[str, dict[int, float]], labels: np.ndarray[Any, Any], bare: np.ndarray[Any, Any]) -> None:
    expected = dict(zip(labels.tolist(), bare.tolist(), strict=True))
    for name, predictions in found.items():
        if predictions.keys() != expected.keys():
            raise RuntimeError(f"{name}: found predictions of {len(predictions)} rows, expected {len(expected)}")
        ours, theirs = (np.array([each[label] for label in expected]) for each in (predictions, expected))
        if not np.allclose(ours, theirs, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise RuntimeError(f"{name}: predictions differ from the model's by {np.abs(ours - theirs).max():g}")


def _take_turns(work: dict[str, Callable[[], object]], rows: int, repeats: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in work}
    for i in range(repeats + 1):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if i:  # the first warms up
                rates[name].append(rows / (time.perf_counter() - start))
    found: dict[str, Any] = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in found.items():
        print(f"{name:18} {rate:12,.0f} rows/s {rate / found['predict_batch_udf']:8.2f}x", file=sys.stderr)
    return {
        **found,
        "transform_to_floor": found["transform"] / found["floor"],
        "transform_to_udf": found["transform"] / found["predict_batch_udf"],
        "from_dataset_to_udf": found["from_dataset"] / found["predict_batch_udf"],
        "repeats": repeats,
    }
