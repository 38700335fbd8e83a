"""Joins neighbouring shards that are less than half full, in a second Spark job."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Shards
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.shard_table import Shard
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.write.partition import PartitionResult
from spark_dl.data.write.tasks import run_tasks, with_host
from spark_dl.data.write.writer import ShardWriter, rows_per_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def join_small(
    spark: SparkSession, url: str, columns: tuple[Column, ...], shards: Sequence[Shard], layout: Shards, token: str
) -> list[Shard]:
    """Rewrites runs of neighbouring shards that are less than half full as fuller shards, in the same order of rows.

    The last shard of a partition may be large and not full; it is kept. Rewriting it would cost as much as writing it,
    and shards that are not full cost a reader nothing.
    """
    group_rows, shard_rows = rows_per_file(columns, layout)
    runs = [list(run) for _, run in itertools.groupby(shards, lambda s: None if 2 * s.rows < shard_rows else s.name)]
    files: list[tuple[int, int, int]] = []  # (run, first row, row after the last) of each new shard
    for i, run in enumerate(runs):
        rows = sum(s.rows for s in run) if len(run) > 1 else 0
        files += [(i, start, min(rows, start + shard_rows)) for start in range(0, rows, shard_rows)]
    if not files:
        return list(shards)

    def join(number: int, prefix: str) -> PartitionResult:
        writer = ShardWriter(url, prefix, columns, group_rows, shard_rows)
        run, start, stop = files[number]
        first = 0
        for shard in runs[run]:
            lo, hi = max(start - first, 0), min(stop - first, shard.rows)
            if lo < hi:
                for arrays in read_rows(url, shard, columns, lo, hi):
                    writer.append(arrays)
            first += shard.rows
        return PartitionResult(number, shards=tuple(writer.close()))

    def join_file(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            for number in batch.column(0).to_pylist():
                prefix = f"part-{token}-joined-{number:05d}-{context.taskAttemptId()}"
                part = with_host(url, functools.partial(join, number, prefix))
                yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    joined: dict[int, list[Shard]] = {}
    ranges = spark.range(0, len(files), 1, len(files))
    for part in run_tasks(ranges, join_file, f"spark_dl: joining small shards of {url}"):
        joined.setdefault(files[part.partition][0], []).extend(part.shards)
    return [shard for i, run in enumerate(runs) for shard in joined.get(i, run)]


def read_rows(
    url: str, shard: Shard, columns: tuple[Column, ...], start: int, stop: int
) -> Iterator[list[Array | Ragged]]:
    """Yields rows `start` to `stop - 1` of a shard by row group, for `ShardWriter.append` (images as bytes)."""
    columns = tuple(replace(c, codec="binary", shape=(None,)) if c.codec == "image" else c for c in columns)
    with storage.open_input(storage.join(url, shard.name)) as file:
        opened = parquet_file.open_file(file)
        first = 0
        for group, rows in enumerate(shard.row_groups):
            lo, hi = max(start, first), min(stop, first + rows)
            if lo < hi:
                table = opened.read_row_group(group, use_threads=False)
                yield [cell_codec.decode(c, table.column(c.name))[lo - first : hi - first] for c in columns]
            first += rows
