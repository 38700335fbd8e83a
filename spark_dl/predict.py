"""Predictions of a trained model: of a DataFrame, of a dataset by its URL, and as a function for Spark SQL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_dl.config import Config
from spark_dl.data.dataset.records import ShardSet
from spark_dl.inputs import as_source
from spark_dl.launch.session import find_session
from spark_dl.scoring import saved_model, udf
from spark_dl.scoring.dataset import predict_dataset
from spark_dl.scoring.saved_model import Format
from spark_dl.scoring.scorer import Scorer, find_scorer, scorer_of
from spark_dl.scoring.tables import added_fields, batch_scorer, open_scorer, pack, trained_sources
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType


def predict(
    data: DataFrame | str | os.PathLike[str] | ShardSet,
    model: ModelSpec | str | os.PathLike[str] | Any,
    checkpoint_url: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    *,
    keys: Sequence[str] = (),
    spark: SparkSession | None = None,
) -> DataFrame:
    """Adds the columns of `spec.predict` to a DataFrame, or computes them for a dataset. Lazy. Called on the driver.

    data: a DataFrame, whose rows keep their partition and order, and which can be a streaming DataFrame; or a dataset
        or its URL. Tasks then read the dataset as ranks do, in its order, and the result has only the columns `keys`
        and the predictions, as features need not pass through Spark.
    model: a `ModelSpec`, with a checkpoint or a run folder as `checkpoint_url`; or the URL of a model of `save_model`;
        or a model of `spark_dl.ml`.

    config: settings instead of those of the training run. With `checkpoint.signing_key_file`, the checkpoint must be
        signed with that key.

    Each Python worker loads the model once, and uses the GPU that Spark assigned to the task, if any. One value per row
    becomes a scalar column; more values become (nested) arrays.

    Nulls, NaN and Inf in features are filled or allowed as in `config`. All others fail the job, even if training
    dropped their rows: drop them in the DataFrame. `data.filters` is not applied.
    Raises ValueError for a missing feature, a checkpoint of another model, or a column name that exists already.
    """
    scorer, source = find_scorer(model, checkpoint_url, config), as_source(data)
    if isinstance(source, (str, ShardSet)):
        return predict_dataset(find_session(None, spark), source, scorer, added_fields(scorer), keys)
    if keys:
        raise ValueError(f"keys: found {list(keys)} with a DataFrame, which keeps all its columns; remove keys")
    return add_predictions(source, scorer, added_fields(scorer))


def predict_udf(
    model: ModelSpec | str | os.PathLike[str] | Any,
    checkpoint_url: str | os.PathLike[str] | None = None,
    config: Config | None = None,
) -> Any:
    """Returns a user-defined function of the features, in their order, for DataFrames and Spark SQL.

    The arguments are those of `predict`. The function returns the only column of `spec.predict`, or a struct of all its
    columns. Register it for SQL: `spark.udf.register("score", spark_dl.predict_udf(model))`. Called on the driver.
    """
    return udf.build_udf(find_scorer(model, checkpoint_url, config))


def save_model(
    url: str | os.PathLike[str],
    spec: ModelSpec,
    checkpoint_url: str | os.PathLike[str],
    *,
    format: Format = "weights",  # noqa: A002 - the word that Spark and torch use
    signing_key_file: str | None = None,
) -> None:
    """Saves the model of a checkpoint, or of the last one of a run, to a folder that is empty or does not exist.

    Called on the driver. The folder has the description of the model as JSON, with the settings of its features, and
    nothing that is pickled. `predict`, `predict_udf` and `load_model` take its URL.

    format: `"weights"`, the weights as safetensors and the functions of `spec` by their importable names; or
        `"export"`, a program of `torch.export`, which does not need the code of the model.

    signing_key_file: file with the key that must have signed the checkpoint.

    Raises ValueError for a folder that is in use, for a checkpoint with another signature, for functions without an
    importable name (`"weights"`), and for models that `torch.export` does not take (`"export"`).
    """
    scorer = scorer_of(spec, checkpoint_url, key_file=signing_key_file)
    saved_model.write_saved_model(url, scorer.load(), spec, scorer.config, scorer.columns, format=format)


def add_predictions(df: DataFrame, scorer: Scorer, added: dict[str, DataType]) -> DataFrame:
    """Adds the outputs of a scorer to a DataFrame. Lazy. # added: the Spark types of the new columns"""
    if taken := [name for name in added if name in df.columns]:
        raise ValueError(
            f"the DataFrame already has a column {taken[0]!r}, which spec.predict returns; rename one of them"
        )
    from pyspark.sql.types import StructType

    out = StructType(list(df.schema.fields))
    for name, data_type in added.items():
        out = out.add(name, data_type)
    packed, names, sources = pack(scorer), list(added), trained_sources(df.schema, scorer)

    def run_predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        score = batch_scorer(open_scorer(packed), sources)
        for batch in batches:
            if batch.num_rows:
                # One batch for each: Spark reports an error for a task that it ends early, as it has enough rows.
                found = score(batch)
                arrays = [*batch.columns, *(found[name] for name in names)]
                yield pa.RecordBatch.from_arrays(arrays, names=[*batch.schema.names, *names])

    return df.mapInArrow(run_predict, out)
