"""Predictions of a dataset by its URL, and a trained model as a user-defined function for Spark SQL.

Tasks read the row groups of the dataset, and only keys and predictions go through Spark.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spark_dl.config import Config, Loader
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.resume_check import for_ranks
from spark_dl.data.plan import Segment
from spark_dl.data.read.rows import Rows
from spark_dl.inputs import as_written, shards_of
from spark_dl.launch import preflight
from spark_dl.launch.code import payload
from spark_dl.scoring import keys
from spark_dl.scoring.saved_model import features_only
from spark_dl.scoring.scorer import Scorer
from spark_dl.scoring.tables import (
    OpenScorer,
    Outputs,
    added_fields,
    as_struct,
    batch_scorer,
    open_scorer,
    pack,
    trained_sources,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_VECTOR = ("type", "size", "indices", "values")
"""The fields of a vector of Spark ML, as Arrow has it."""

_TASK_BYTES = 128 << 20
"""Decoded bytes of the row groups of a task, as its output is one batch."""
_TASKS_PER_SLOT = 2


def build_udf(scorer: Scorer, of_first_rows: Callable[[], Outputs] | None = None) -> Any:
    """Returns the function. Called on the driver. Raises ValueError for features that are fields of structs.

    Args:
        of_first_rows: as for `tables.trial`.
    """
    if nested := [name for name in scorer.config.data.features if "." in name]:
        raise ValueError(
            f"predict_udf: the feature {nested[0]!r} is a field of a struct; use predict, or train on a column"
        )
    return function_of(scorer, added_fields(scorer, of_first_rows))


def function_of(scorer: Scorer, types: dict[str, DataType]) -> Any:
    """Returns the function of the features, in their order. Called on the driver. # types: of its columns"""
    import pyspark
    from pyspark.sql import functions

    features = scorer.config.data.features
    packed, result = pack(scorer), _result_type(types)
    is_single = result.typeName() != "struct"

    def score(opened: OpenScorer, predictions: pa.Array | tuple[pa.Array, ...]) -> pa.Array:
        arguments = (
            predictions if isinstance(predictions, tuple) else (predictions,)
        )  # Spark passes a single argument as it is
        if len(arguments) != len(features):
            raise ValueError(f"predict_udf: expected the arguments {list(features)}, found {len(arguments)} arguments")
        batch = pa.RecordBatch.from_arrays(list(arguments), names=list(features))
        sources = trained_sources(_spark_schema(batch.schema), scorer)
        added = batch_scorer(opened, sources)(batch)
        return next(iter(added.values())) if is_single else pa.StructArray.from_arrays([*added.values()], [*added])

    # The functions get their hints as objects, from which Spark tells their kind.
    if tuple(int(n) for n in pyspark.__version__.split(".")[:2]) >= (4, 1):

        def of_arrow(batches: Any) -> Any:
            opened = open_scorer(packed)
            for arguments in batches:
                yield score(opened, arguments)

        of_arrow.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
        return functions.arrow_udf(of_arrow, result)

    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    def of_pandas(batches: Any) -> Any:
        opened = open_scorer(packed)
        for arguments in batches:
            series = arguments if isinstance(arguments, tuple) else (arguments,)
            predictions = score(opened, tuple(_from_pandas(argument) for argument in series))
            yield predictions.to_pandas() if is_single else pd.DataFrame.from_records(predictions.to_pylist())

    hints = Iterator[pd.Series] if is_single else Iterator[pd.DataFrame]
    of_pandas.__annotations__ = {"batches": Iterator[tuple[pd.Series, ...]], "return": hints}
    return functions.pandas_udf(of_pandas, result)


def _result_type(added: dict[str, DataType]) -> Any:
    """Returns the type of the only new column, or a struct of all."""
    types = list(added.values())
    return types[0] if len(types) == 1 else as_struct(added)


def _spark_schema(arrow: pa.Schema) -> StructType:
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    schema = StructType()
    for field in arrow:
        is_vector = pa.types.is_struct(field.type) and tuple(f.name for f in field.type) == _VECTOR
        schema = schema.add(field.name, VectorUDT() if is_vector else from_arrow_type(field.type))
    return schema


def _from_pandas(values: Any) -> pa.Array:
    if len(values) and hasattr(values.iloc[0], "toArray"):  # vectors of Spark ML
        return pa.array([np.asarray(v.toArray()) for v in values], pa.list_(pa.float64()))
    return pa.Array.from_pandas(values)


@dataclass(frozen=True)
class _Task:
    """What a task reads, besides the scorer."""

    shards: ShardSet
    config: Config
    keys: tuple[keys.Key, ...]


def of_profile(profile: Any) -> dict[str, Any]:
    """Returns the argument of `mapInArrow` for a resource profile; none without one, as Spark 3.5 does not take it."""
    return {} if profile is None else {"profile": profile}


def predict_dataset(
    spark: SparkSession, data: str | ShardSet, scorer: Scorer, names: Sequence[str], profile: Any = None
) -> DataFrame:
    """Returns a DataFrame with the keys and the predictions of all rows of a dataset. Lazy. Called on the driver.

    Args:
        names: the columns of the keys.
        profile: Spark's resource profile of the tasks.

    Raises ValueError for invalid keys, and as `shards_of` does.
    """
    from pyspark.sql.types import StructType

    features = features_only(scorer.config.data)
    # Every row gets a prediction.
    nulls, nonfinite = ("error" if policy == "drop" else policy for policy in (features.nulls, features.nonfinite))
    features = dataclasses.replace(features, nulls=nulls, nonfinite=nonfinite)  # type: ignore[arg-type]
    # Without what the batches of the training need.
    usual = Loader()
    loader = dataclasses.replace(
        scorer.config.loader,
        proportions=usual.proportions,
        epoch_size=usual.epoch_size,
        num_streams=usual.num_streams,
    )
    config = Config(data=as_written(features, data), loader=loader)
    with contextlib.ExitStack() as until_done:
        shards = shards_of(data, "", config, until_done, scorer.columns, reuse="no")
    added = added_fields(scorer, lambda: _first_outputs(scorer, shards, config))
    key_columns = keys.find_keys(shards, names)
    if taken := [name for name in added if name in names]:
        raise ValueError(f"keys: the predictions have a column {taken[0]!r}, too; rename it in spec.predict")
    schema = StructType()
    for name, data_type in [*((key.name, key.spark_type()) for key in key_columns), *added.items()]:
        schema = schema.add(name, data_type)
    task = _Task(for_ranks(shards, config), config, key_columns)
    packed, scoring, order = payload.pack_call(None, (task,), {}), pack(scorer), schema.names

    def run_predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        opened = None
        for batch in batches:
            if batch.num_rows:
                opened = opened or open_scorer(scoring)
                _, (task,), _ = payload.unpack_call(packed)
                parts = [
                    pa.RecordBatch.from_pydict({name: part[name] for name in order})
                    for part in _score(opened, task, batch.column(0).to_pylist())
                ]
                if parts:  # else all row groups of the task are empty
                    yield pa.Table.from_batches(parts).combine_chunks().to_batches()[0]

    groups = len(shards.group_rows)
    return spark.range(0, groups, 1, _num_tasks(spark, shards, config)).mapInArrow(
        run_predict, schema, **of_profile(profile)
    )


def _first_outputs(scorer: Scorer, shards: ShardSet, config: Config) -> Outputs:
    """Computes the new columns of the first row on the driver."""
    data = config.data
    columns = shards.select(data.features)
    rows = Rows(shards, columns, 0.0, 0, "all", nonfinite=data.nonfinite, fill=data.fill)
    out: list[Any] = [[] if c.is_ragged else np.empty((1, *c.inner), dtype=c.dtype) for c in columns]
    try:
        rows.read_into([Segment(int(np.flatnonzero(shards.group_rows)[0]), 0, 1)], out)
    finally:
        rows.end_thread()
    return scorer.outputs(scorer.load(), [o[0] if isinstance(o, list) else o for o in out], "cpu")


def _num_tasks(spark: Any, shards: ShardSet, config: Config) -> int:
    size = int(shards.decoded_bytes(shards.select(config.data.features)).sum())
    slots = preflight.num_slots(spark) or 1
    return max(1, min(len(shards.group_rows), max(-(-size // _TASK_BYTES), _TASKS_PER_SLOT * slots)))


def _score(opened: OpenScorer, task: _Task, groups: Sequence[int]) -> Iterator[dict[str, pa.Array]]:
    """Yields the columns of each row group. The next row group is read while the model computes."""
    shards, data = task.shards, task.config.data
    columns = shards.select(data.features)
    rows = Rows(shards, columns, 0.0, 0, "all", nonfinite=data.nonfinite, fill=data.fill)
    reader = keys.KeyReader(shards, task.keys)

    def read(group: int) -> tuple[list[Array | Ragged], dict[str, pa.Array]]:
        count = int(shards.group_rows[group])
        out: list[Any] = [[] if c.is_ragged else np.empty((count, *c.inner), dtype=c.dtype) for c in columns]
        rows.read_into([Segment(group, 0, count)], out)
        return [o[0] if isinstance(o, list) else o for o in out], reader.read(group)

    groups = [group for group in groups if shards.group_rows[group]]
    with ThreadPoolExecutor(1, "spark_dl row groups") as ahead:
        coming = [ahead.submit(read, group) for group in groups[:2]]
        for number in range(len(groups)):
            cells, key_values = coming.pop(0).result()
            if number + 2 < len(groups):
                coming.append(ahead.submit(read, groups[number + 2]))
            yield {**key_values, **opened.arrays(cells)}
        ahead.submit(rows.end_thread).result()
