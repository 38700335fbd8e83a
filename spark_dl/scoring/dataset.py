"""Predictions of a dataset by its URL: tasks read its row groups, and only keys and predictions go through Spark."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
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
from spark_dl.scoring.tables import OpenScorer, Outputs, added_fields, open_scorer, pack

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TASK_BYTES = 128 << 20
"""Decoded bytes of the row groups of a task, as its output is one batch."""
_TASKS_PER_SLOT = 2


@dataclass(frozen=True)
class _Task:
    """What a task reads, besides the scorer."""

    shards: ShardSet
    config: Config
    keys: tuple[keys.Key, ...]


def predict_dataset(spark: SparkSession, data: str | ShardSet, scorer: Scorer, names: Sequence[str]) -> DataFrame:
    """Returns a DataFrame with the keys and the predictions of all rows of a dataset. Lazy. Called on the driver.

    # names: the columns of the keys

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
        reader=usual.reader,
        proportions=usual.proportions,
        epoch_size=usual.epoch_size,
        num_streams=usual.num_streams,
    )
    config = Config(data=as_written(features, data), loader=loader)
    with contextlib.ExitStack() as until_done:
        shards = shards_of(data, "", config, until_done, scorer.columns, reuse="no")
    added = added_fields(scorer, lambda: _first_outputs(scorer, shards, config))
    found = keys.find_keys(shards, names)
    if taken := [name for name in added if name in names]:
        raise ValueError(f"keys: the predictions have a column {taken[0]!r}, too; rename it in spec.predict")
    schema = StructType()
    for name, data_type in [*((key.name, key.spark_type()) for key in found), *added.items()]:
        schema = schema.add(name, data_type)
    task = _Task(for_ranks(shards, config), config, found)
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
    return spark.range(0, groups, 1, _num_tasks(spark, shards, config)).mapInArrow(run_predict, schema)


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
            cells, found = coming.pop(0).result()
            if number + 2 < len(groups):
                coming.append(ahead.submit(read, groups[number + 2]))
            yield {**found, **opened.arrays(cells)}
        ahead.submit(rows.end_thread).result()
