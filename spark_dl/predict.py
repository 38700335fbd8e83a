"""Predictions of a trained model: of a DataFrame, of a dataset by its URL, and as a function for Spark SQL."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa

from spark_dl.config import Config
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.write.vocabulary import expression
from spark_dl.inputs import as_source
from spark_dl.launch import preflight
from spark_dl.launch.session import find_session
from spark_dl.scoring import dataset, saved_model
from spark_dl.scoring.dataset import predict_dataset
from spark_dl.scoring.saved_model import Format
from spark_dl.scoring.scorer import OnBadRows, Scorer, find_scorer, scorer_of, scorer_of_build
from spark_dl.scoring.tables import (
    added_fields,
    as_struct,
    batch_scorer,
    first_outputs,
    open_scorer,
    pack,
    trained_sources,
    with_declared,
)
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType


def predict(
    data: DataFrame | str | os.PathLike[str] | ShardSet,
    model: ModelSpec | str | os.PathLike[str] | Any,
    checkpoint_url: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    *,
    keys: Sequence[str] = (),
    output_schema: StructType | str | None = None,
    on_bad_rows: OnBadRows = "raise",
    gpus: float | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """Adds the columns of `spec.predict` to a DataFrame, or computes them for a dataset. Lazy. Called on the driver.

    Each Python worker loads the model once, and uses the GPU that Spark assigned to the task, if any. One value per row
    becomes a scalar column; more values become (nested) arrays.

    Nulls, NaN and Inf in features are filled or allowed as in `config`. All others fail the job, even if training
    dropped their rows: drop them in the DataFrame. `data.filters` is not applied.

    Args:
        data: a DataFrame, whose rows keep their partition and order, and which can be a streaming DataFrame; or a
            dataset or its URL. Tasks then read the dataset as ranks do, in its order, and the result has only the
            columns `keys` and the predictions, as features need not pass through Spark. Keys have their types and
            values in the table.
        model: a `ModelSpec`, with a checkpoint or a run folder as `checkpoint_url`; or the URL of a model of
            `save_model`; or a model of `spark_dl.ml`. A `ModelSpec` without a checkpoint is scored with the weights
            that `spec.build` returns, such as those of a pretrained model, and needs `config`.
        config: settings instead of those of the training run, such as `loader.rows_at_once`. With
            `checkpoint.signing_key_file`, the checkpoint must be signed with that key.
        output_schema: the columns that the model adds, such as `"prediction float, scores array<float>"`. By default,
            the model computes two rows of zeros on the driver to know them, and, if it does not take zeros, the first
            rows of `data`, which runs a job. A streaming DataFrame has no first rows.
        on_bad_rows: what a row does that cannot be features, because of a null, NaN, Inf, a wrong length or an image
            that cannot be decoded. With `"raise"` it ends the job. With `"null"` its predictions are null, and each
            task says the first one in its log; count them with `predictions.where("prediction IS NULL").count()`. Only
            for a DataFrame.
        gpus: GPUs of each task that computes the model, which can be a fraction that tasks share. The stage gets a
            resource profile of its own (Spark 4; standalone, YARN or Kubernetes), with the cores of an executor in the
            same proportion, and its tasks decode the next rows on these cores while the GPU computes. None: the
            resources of all tasks of the session. A local master assigns no GPUs.

    Raises:
        ValueError: For a missing feature, a checkpoint of another model, a column name that exists already, or GPUs
            that the session cannot give.

    Example:
        >>> spark_dl.predict(df, spec, "runs/1").select("prediction").show()
        >>> spark_dl.predict(df, spec, "runs/1", on_bad_rows="null").where("prediction IS NULL").count()
    """
    source = as_source(data)
    if on_bad_rows not in get_args(OnBadRows):
        raise ValueError(f"on_bad_rows: expected one of {get_args(OnBadRows)}, found {on_bad_rows!r}")
    if on_bad_rows == "null" and isinstance(source, (str, ShardSet)):
        raise ValueError(
            "on_bad_rows: found 'null' with a dataset that is read by its URL, expected 'raise'; read it as a "
            "DataFrame, spark.read.parquet(url)"
        )
    is_dataset = isinstance(source, (str, ShardSet))
    session = find_session(None, spark) if is_dataset else source.sparkSession
    profile = None if gpus is None else preflight.build_scoring_profile(session, gpus)
    scorer = with_declared(find_scorer(model, checkpoint_url, config, data=source), output_schema)
    if isinstance(source, (str, ShardSet)):
        return predict_dataset(session, source, scorer, keys, profile)
    if keys:
        raise ValueError(f"keys: found {list(keys)} with a DataFrame, which keeps all its columns; remove keys")
    added = added_fields(scorer, first_outputs(source, scorer))
    if on_bad_rows == "null":
        scorer = replace(with_declared(scorer, as_struct(added)), on_bad_rows="null")
    return add_predictions(source, scorer, added, profile)


def predict_udf(
    model: ModelSpec | str | os.PathLike[str] | Any,
    checkpoint_url: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    *,
    data: DataFrame | str | os.PathLike[str] | ShardSet | None = None,
    output_schema: StructType | str | None = None,
) -> Any:
    """Returns a user-defined function of the features, in their order, for DataFrames and Spark SQL.

    The arguments are those of `predict`; `data`, rows with the features, is needed without a checkpoint. The function
    returns the only column of `spec.predict`, or a struct of all its columns. Register it for SQL:
    `spark.udf.register("score", spark_dl.predict_udf(model))`. Called on the driver.

    Example:
        >>> score = spark_dl.predict_udf(spec, "runs/1")
        >>> df.select(score("features")).show()
    """
    scorer = with_declared(find_scorer(model, checkpoint_url, config, data=data), output_schema)
    return dataset.build_udf(scorer, first_outputs(as_source(data), scorer) if hasattr(data, "sparkSession") else None)


def save_model(
    url: str | os.PathLike[str],
    spec: ModelSpec,
    checkpoint_url: str | os.PathLike[str] | None = None,
    *,
    config: Config | None = None,
    data: DataFrame | str | os.PathLike[str] | ShardSet | None = None,
    format: Format = "weights",  # noqa: A002 - the word that Spark and torch use
    overwrite: bool = False,
    signing_key_file: str | None = None,
) -> None:
    """Saves the model of a checkpoint, or of the last one of a run, to a folder that is empty or does not exist.

    Called on the driver. The folder has the description of the model as JSON, with the settings of its features, and
    nothing that is pickled. `predict`, `predict_udf` and `load_model` take its URL.

    Args:
        format: `"weights"`, the weights as safetensors and the functions of `spec` by their importable names; or
            `"export"`, a program of `torch.export`, which does not need the code of the model.
        overwrite: whether a saved model that is in the folder is replaced. Readers find the whole model of before or
            the whole new one. A prediction of before whose tasks would have to load the new one is an error.
        config, data: the settings of a model that was not trained here, and rows with its features. Without a
            checkpoint, the weights are those that `spec.build` returns.
        signing_key_file: file with the key that must have signed the checkpoint.

    Raises:
        ValueError: For a folder that is in use, for a checkpoint with another signature, for functions without an
            importable name (`"weights"`), and for models that `torch.export` does not take (`"export"`).

    Example:
        >>> spark_dl.save_model("models/1", spec, "runs/1", format="export", overwrite=True)
    """
    if checkpoint_url is None:
        scorer = scorer_of_build(spec, config, data)
    elif config is not None or data is not None:
        raise ValueError("config, data: expected only without a checkpoint, which has its own settings and columns")
    else:
        scorer = scorer_of(spec, checkpoint_url, key_file=signing_key_file)
    saved_model.write_saved_model(
        url, scorer.load(), spec, scorer.config, scorer.columns, format=format, overwrite=overwrite
    )


def add_predictions(df: DataFrame, scorer: Scorer, added: dict[str, DataType], profile: Any = None) -> DataFrame:
    """Adds the outputs of a scorer to a DataFrame. Lazy.

    Args:
        added: the Spark types of the new columns.
        profile: Spark's resource profile of the tasks that compute the model.
    """
    names, schema = df.columns, df.schema
    _check_free(df, list(added))
    sources = trained_sources(schema, scorer)
    # By position: other columns can have equal names, dots, and types that Arrow does not have.
    numbered = df.toDF(*(f"c{i}" for i in range(len(names))))
    sources = tuple(replace(s, path=(f"c{_place_of(s.path[0], names)}", *s.path[1:])) for s in sources)
    others = [field.name for field in schema.fields if not _has_arrow(field)]
    if others and profile is not None:
        raise ValueError(f"gpus: not supported with the column {others[0]!r}, whose type Arrow does not have; drop it")
    if others:
        predicted = _by_udf(numbered, scorer, sources, added)
    else:
        predicted = _by_arrow(numbered, scorer, sources, added, profile)
    return predicted.toDF(*names, *added)


def _check_free(df: DataFrame, added: Sequence[str]) -> None:
    """Raises ValueError for a new column whose name is taken, as Spark compares names."""
    is_exact = str(df.sparkSession.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
    taken = {name if is_exact else name.lower(): name for name in df.columns}
    for name in added:
        if (other := taken.get(name if is_exact else name.lower())) is not None:
            raise ValueError(
                f"the DataFrame already has a column {other!r}, and spec.predict returns {name!r}; rename one of them"
            )


def _place_of(name: str, names: Sequence[str]) -> int:
    if names.count(name) > 1:
        raise ValueError(f"data.features: the DataFrame has {names.count(name)} columns {name!r}; rename or drop some")
    return names.index(name)


def _has_arrow(field: StructField) -> bool:
    """Whether Arrow has the type of a column."""
    from pyspark.sql.pandas.types import to_arrow_type

    if field.dataType.typeName() == "timestamp":  # for which some versions of PySpark ask for a time zone
        return True
    try:
        to_arrow_type(field.dataType)
    except Exception:  # PySpark's, for intervals of years and months
        return False
    return True


def _by_arrow(
    numbered: DataFrame, scorer: Scorer, sources: Sequence[SourceColumn], added: Mapping[str, DataType], profile: Any
) -> DataFrame:
    from pyspark.sql.types import StructType

    names = [f"added{i}" for i in range(len(added))]
    out = StructType(list(numbered.schema.fields))
    for name, data_type in zip(names, added.values(), strict=True):
        out = out.add(name, data_type)
    packed, columns = pack(scorer), list(added)

    def run_predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        score = batch_scorer(open_scorer(packed), sources)
        for batch in batches:
            if batch.num_rows:
                # One batch for each: Spark reports an error for a task that it ends early, as it has enough rows.
                scored = score(batch)
                arrays = [*batch.columns, *(scored[name] for name in columns)]
                yield pa.RecordBatch.from_arrays(arrays, names=[*batch.schema.names, *names])

    return numbered.mapInArrow(run_predict, out, **dataset.of_profile(profile))


def _by_udf(
    numbered: DataFrame, scorer: Scorer, sources: Sequence[SourceColumn], added: dict[str, DataType]
) -> DataFrame:
    """Adds the outputs by a function of the features alone, so that no other column passes through Python."""
    from pyspark.sql import functions as F

    features = map(expression, sources)
    scored = numbered.select("*", dataset.function_of(scorer, added)(*features).alias("added"))
    if len(added) == 1:
        return scored
    return scored.select(*numbered.columns, *(F.col("added").getField(name) for name in added))
