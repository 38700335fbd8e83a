"""Writes a DataFrame as a dataset: Spark tasks write shards, and the manifest commits them.

A shard is a Parquet file of at most a fixed number of rows. All its row groups but the last have the same row count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.data.columns import schema
from spark_dl.data.columns.policies import add_changes, rules_of
from spark_dl.data.columns.schema import Column, vocabularies_of
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.folder import abandon, delete_replaced, prepare_folder
from spark_dl.data.dataset.manifest import commit
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.dataset.shard_table import ShardTable
from spark_dl.data.write import spark_types
from spark_dl.data.write.join import join_small
from spark_dl.data.write.once import read_once
from spark_dl.data.write.partition import agreed_columns, with_sizes, write_part
from spark_dl.data.write.tasks import run_tasks, with_host
from spark_dl.data.write.vocabulary import counts_words, expression, with_mean_sizes, with_vocabularies
from spark_dl.spark_job import refuse_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("spark_dl")


def write_shards(
    df: DataFrame,
    url: str | os.PathLike[str],
    data: Data | None = None,
    *,
    shards: Shards | None = None,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    reference_columns: Sequence[Column] = (),
    before_commit: Callable[[], None] | None = None,
) -> ShardSet:
    """Writes a DataFrame as a dataset, with the tasks of its own partitions. Called on the driver.

    `columns` are the columns to write, by default the features and the label; `shards` sets the layout of the files.
    The rows are computed once. Building a vocabulary reads its columns once more; ragged columns and images read a
    sample of rows for their size. If partitions leave neighbouring shards that are less than half full, a second job
    joins them. The order of the rows is kept.

    `reference_columns` are the columns of another dataset, for example the training dataset of a model: their
    vocabularies are used, and the written columns must agree with them. `before_commit` is called after all shards are
    written and before the manifest; if it raises, the folder is left as it was.

    With `overwrite` an existing dataset stays complete until the new one is, so the DataFrame may read from it. Until
    then spark_dl reads the old rows, Petastorm's `make_reader` refuses the folder, and plain Parquet readers (Spark,
    pyarrow) see the rows of both. After an error the old dataset is unchanged.

    Raises ValueError for a missing column, a type that cannot become a tensor, an empty DataFrame, nulls, NaN and Inf
    (unless `data.nulls` and `data.nonfinite` allow, drop or fill them), cells of unequal shape, and without
    `overwrite` for a folder that already holds a dataset. Raises RuntimeError if a task cannot write. Nothing of a
    failed write is left at `url`.
    """
    refuse_stream(df, "write_shards")
    data, layout = data or Data(), shards or Shards()
    url = storage.absolute(url)
    names = tuple(columns or data.columns)
    spark_types.source_columns(df.schema, names, data.encode, data.fill, weight=data.weight)  # before any change
    old = prepare_folder(url, overwrite)
    token = uuid.uuid4().hex[:8]  # distinguishes these files from those of a killed writer whose tasks still run
    try:
        with selected_sources(df, names, data, layout, reference_columns) as (selected, sources):
            parts = run_tasks(
                selected, _partition_writer(url, sources, data, layout, token), f"spark_dl: writing the rows of {url}"
            )
        written = agreed_columns(sources, parts)
        changes = add_changes(p.changes for p in parts)
        schema.check_reference_columns(written, reference_columns)
        files = join_small(df.sparkSession, url, written, [s for p in parts for s in p.shards], layout, token)
        rules = rules_of(data, vocabularies_of(reference_columns))
        if before_commit is not None:
            before_commit()
        shard_set = commit(ShardSet(url, with_sizes(written, parts), ShardTable.of(files), changes, rules))
    except BaseException:
        abandon(url, token)
        raise
    delete_replaced(url, old, shard_set, token)
    if changes.dropped_rows or changes.filled:
        _log.warning("%s: %d rows dropped for nulls, NaN, Inf or bad images in %s; rows filled: %s",
                     url, changes.dropped_rows, dict(changes.dropped), dict(changes.filled))  # fmt: skip
    return shard_set


@contextlib.contextmanager
def selected_sources(
    df: DataFrame, names: Sequence[str], data: Data, layout: Shards, reference_columns: Sequence[Column]
) -> Iterator[tuple[DataFrame, tuple[SourceColumn, ...]]]:
    """Yields the columns to write, renamed to c0, c1 ..., and their source columns.

    Runs Spark jobs for vocabularies and mean sizes. The words of a vocabulary are those of the rows that are written,
    also if these are not the same in each job. Raises ValueError for a missing column, and for types or settings that
    cannot become a tensor.
    """
    sources = spark_types.source_columns(df.schema, names, data.encode, data.fill, weight=data.weight)
    known = vocabularies_of(reference_columns)
    selected = df.select(*(expression(c).alias(f"c{i}") for i, c in enumerate(sources)))  # names may have dots
    counts = any(counts_words(c, known) for c in sources)
    with read_once(selected, "a vocabulary") if counts else contextlib.nullcontext(selected) as kept:
        sources = with_vocabularies(kept, sources, data.encode, known)
        if not layout.has_layout:  # otherwise the size of cells is not needed
            sources = with_mean_sizes(kept, sources)
        yield kept, sources


def _partition_writer(url: str, sources: tuple[SourceColumn, ...], data: Data, layout: Shards, token: str) -> Any:
    """The Spark task that writes one partition of the DataFrame."""

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, name = context.partitionId(), f"part-{token}-{context.partitionId():05d}-{context.taskAttemptId()}"
        part = with_host(url, lambda: write_part(batches, url, name, sources, data, partition, layout=layout))
        yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    return write_partition
