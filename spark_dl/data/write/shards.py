"""Shards: a DataFrame, or arrays, written as a dataset, by Spark tasks and committed by its manifest.

A shard is a Parquet file of row groups of a set row count, save its last one, and of a set number of rows at most.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.config.checks import missing_on_executors
from spark_dl.data.columns import schema, stored_cells
from spark_dl.data.columns.policies import Changes, add_changes, clean_batch, rules_of
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column, words_of
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.dataset.folder import abandon, delete_replaced, prepare_folder
from spark_dl.data.dataset.manifest import CANNOT_WRITE, commit, shard_from_plain
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.dataset.shard_table import Shard, ShardTable
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.write import spark_types
from spark_dl.data.write.vocabulary import NO_ROWS, expression, with_mean_sizes, with_vocabularies
from spark_dl.data.write.writer import ShardWriter, rows_per_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("spark_dl")


def write_shards(
    df: DataFrame,
    url: str | os.PathLike[str],
    data: Data | None = None,
    *,
    shards: Shards | None = None,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    like: Sequence[Column] = (),
    before_commit: Callable[[], None] | None = None,
) -> ShardSet:
    """Writes a DataFrame as a dataset. Called on the driver; the tasks of the DataFrame's own partitions write.

    `columns` are the columns to keep, by default the features and the label; `shards` says how rows are laid
    out in files. The rows are
    read once; a vocabulary that is built reads its columns once more, and ragged columns a few rows for their length.
    Where partitions leave neighbouring shards of less than half the size, a second job joins them; the order of the
    rows is kept. `like` are the columns of another dataset, such as the one that a model was trained on, whose
    vocabularies are used and with which these must agree. `before_commit` is called once all shards are written; what
    it raises leaves the folder as it was.

    With `overwrite` the dataset that is there stays whole until the new one is, so that the DataFrame may read it.
    Until then spark_dl reads the old rows, and Petastorm's `make_reader` refuses the folder; who reads it as plain
    Parquet (Spark, pyarrow) meanwhile gets rows of both. After an error the old dataset is there as it was.

    Raises ValueError for a missing column, a type that cannot become a tensor, an empty DataFrame, nulls, NaN (unless
    `data.nulls` and `data.nonfinite` say otherwise), cells of unequal shape, or a folder that holds a dataset already
    (unless `overwrite`); nothing of it is left at `url` then. RuntimeError where a task cannot write.
    """
    data, layout = data or Data(), shards or Shards()
    url = storage.absolute(url)
    names = tuple(columns or data.columns)
    spark_types.source_columns(df.schema, names, data.encode, data.fill)  # before the folder is touched
    old = prepare_folder(url, overwrite)
    selected, sources = select_sources(df, names, data, layout, like)
    token = uuid.uuid4().hex[:8]  # a task of an earlier, killed writer never writes a file of this one
    try:
        parts = _run(selected, _partition_writer(url, sources, data, layout, token))
        written = agreed_columns(sources, parts)
        changes = add_changes(p.changes for p in parts)
        schema.check_like(written, like)
        files = _join_small(df.sparkSession, url, written, [s for p in parts for s in p.shards], layout, token)
        rules = rules_of(data, words_of(like))
        if before_commit is not None:
            before_commit()
        shard_set = commit(ShardSet(url, with_sizes(written, parts), ShardTable.of(files), changes, rules))
    except BaseException:
        abandon(url, token)
        raise
    delete_replaced(url, old, shard_set, token)
    if changes.dropped_rows or changes.filled:
        _log.warning("%s: %d rows dropped for nulls, NaN or Inf in %s; rows filled: %s",
                     url, changes.dropped_rows, dict(changes.dropped), dict(changes.filled))  # fmt: skip
    return shard_set


def select_sources(
    df: DataFrame, names: Sequence[str], data: Data, layout: Shards, like: Sequence[Column]
) -> tuple[DataFrame, tuple[SourceColumn, ...]]:
    """The asked columns of a DataFrame, named c0, c1 ..., and what is known of them before their rows are written.

    Raises ValueError for a missing column, and for a type or settings that do not make a tensor.
    """
    sources = spark_types.source_columns(df.schema, names, data.encode, data.fill)
    sources = with_vocabularies(df, sources, data.encode, words_of(like))
    if not layout.has_layout:  # else the size of cells need not be known
        sources = with_mean_sizes(df, sources)
    return df.select(*(expression(c).alias(f"c{i}") for i, c in enumerate(sources))), sources  # a name may have dots


@dataclass(frozen=True)
class PartitionResult:
    """What one task wrote, or why it could not."""

    partition: int
    shapes: tuple[tuple[int | None, ...] | None, ...] = ()
    """Of the cells of each column; None where all rows of a ragged column are empty, so that it is not known."""
    sizes: tuple[int, ...] = ()
    """Elements of each column."""
    shards: tuple[Shard, ...] = ()
    changes: Changes = field(default_factory=Changes)
    error: str = ""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PartitionResult:
        """A part from the dict that `dataclasses.asdict` made of it, after a way through JSON."""
        shapes = tuple(None if n is None else tuple(n) for n in plain["shapes"])
        shards, changes = tuple(shard_from_plain(s) for s in plain["shards"]), Changes(**plain["changes"])
        return cls(plain["partition"], shapes, tuple(plain["sizes"]), shards, changes, plain["error"])


def _run(df: DataFrame, task: Any) -> list[PartitionResult]:
    """Runs a task over a DataFrame. Raises RuntimeError where a task could not write, as the task said it."""
    try:
        rows = df.mapInArrow(task, "part string").collect()
    except Exception as error:  # Spark Connect and classic Spark have classes of their own
        if said := re.search(rf"^\s*RuntimeError: ({CANNOT_WRITE}.*)$", str(error), re.MULTILINE):
            raise RuntimeError(said.group(1)) from error
        if missing := missing_on_executors(str(error)):
            raise RuntimeError(missing) from error
        raise
    return sorted((PartitionResult.from_plain(json.loads(row["part"])) for row in rows), key=lambda p: p.partition)


def _reported(url: str, write: Callable[[], PartitionResult]) -> PartitionResult:
    """What a task writes. An error of its disk or network is raised with the host; Spark then tries elsewhere."""
    try:
        return write()
    except OSError as error:
        raise RuntimeError(
            f"{CANNOT_WRITE} {url} on host {socket.gethostname()}: {error}; all executors must reach the folder, may "
            "write there, and need free space"
        ) from error


def agreed_columns(sources: Sequence[SourceColumn], parts: Sequence[PartitionResult]) -> tuple[Column, ...]:
    """The columns of a dataset that tasks wrote part by part, given in the order of their partitions.

    Raises ValueError for an error in one of them, for parts that do not fit together, and where there are no rows.
    """
    if errors := [p.error for p in parts if p.error]:
        more = f" (and in {len(errors) - 1} more partitions)" if len(errors) > 1 else ""
        raise ValueError(errors[0] + more)
    filled = [p for p in parts if p.shards]
    if not filled:
        changes = add_changes(p.changes for p in parts)
        dropped = f": {changes.dropped_rows} were dropped for nulls, NaN or Inf" if changes.dropped_rows else ""
        raise ValueError(f"{NO_ROWS}{dropped}; training needs at least one")
    columns = []
    for i, column in enumerate(sources):
        shapes = [(p.partition, shape) for p in filled if (shape := p.shapes[i]) is not None]
        empty = (None, *[0] * (column.depth - 1))  # of a ragged column without any value
        first, shape = shapes[0] if shapes else (0, empty)
        for partition, other in shapes[1:]:
            if other != shape:
                hint = "" if column.ragged else f", or set data.encode.{column.name}: {{ragged: true}}"
                raise ValueError(
                    f"column {column.name!r}: cells have shape {shape} in partition {first} and {other} in partition "
                    f"{partition}; all cells of a column need one shape{hint if column.kind == 'array' else ''}"
                )
        columns.append(schema.stored_column(column, shape))
    return tuple(columns)


def with_sizes(columns: Sequence[Column], parts: Sequence[PartitionResult]) -> tuple[Column, ...]:
    """With the mean sizes of all cells in place of those of the first rows."""
    rows = sum(s.rows for p in parts for s in p.shards)
    means = [sum(p.sizes[i] for p in parts if p.sizes) / rows for i in range(len(columns))]
    return tuple(
        replace(c, mean_size=mean) if c.is_ragged or c.codec == "image" else c
        for c, mean in zip(columns, means, strict=True)
    )


def write_part(
    batches: Iterator[pa.RecordBatch],
    url: str,
    name: str,
    sources: tuple[SourceColumn, ...],
    data: Data,
    partition: int,
    *,
    layout: Shards,
) -> PartitionResult:
    """Writes a task's rows as shards whose names begin with `name`. Its input is consumed to the end."""
    writer: ShardWriter | None = None
    rows = 0
    changes = Changes()
    try:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            arrays, changed = clean_batch(
                sources, batch.columns, data, shapes=writer.known_shapes() if writer else None
            )
            changes = add_changes([changes, changed])
            if len(arrays[0]):
                writer = writer or _build_writer(url, name, sources, arrays, layout, partition)
                writer.append(arrays)
            rows += batch.num_rows
        if writer is None:
            return PartitionResult(partition, changes=changes)
        shards = tuple(writer.close())
        return PartitionResult(partition, writer.known_shapes(), tuple(writer.sizes), shards, changes)
    except ValueError as error:
        if writer is not None:
            writer.abort()
        for _ in batches:  # the task's Python process is used again only if its input is consumed
            pass
        at = f"; first in partition {partition}, row {rows + error.row}" if isinstance(error, BadCellsError) else ""
        return PartitionResult(partition, error=f"{error}{at}")


def _partition_writer(url: str, sources: tuple[SourceColumn, ...], data: Data, layout: Shards, token: str) -> Any:
    """The task that writes one partition of the DataFrame."""

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, name = context.partitionId(), f"part-{token}-{context.partitionId():05d}-{context.taskAttemptId()}"
        part = _reported(url, lambda: write_part(batches, url, name, sources, data, partition, layout=layout))
        yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    return write_partition


def _build_writer(
    url: str,
    prefix: str,
    sources: Sequence[SourceColumn],
    arrays: Sequence[Array | Ragged],
    layout: Shards,
    partition: int,
) -> ShardWriter:
    columns = []
    for column, cells in zip(sources, arrays, strict=True):
        shape = schema.cell_shape(schema.codec_of(column), cells, column.encoding)
        if 0 in shape and not column.ragged:
            raise ValueError(schema.empty_first(column.name, f"partition {partition}"))
        columns.append(schema.stored_column(column, shape))
    return ShardWriter(url, prefix, tuple(columns), *rows_per_file(columns, layout))


def _join_small(
    spark: SparkSession, url: str, columns: tuple[Column, ...], shards: Sequence[Shard], layout: Shards, token: str
) -> list[Shard]:
    """Rewrites neighbouring shards that are less than half full as fuller ones. The order of the rows stays.

    What a partition leaves over is a shard, too. Where it is large, it stays as it is: rewriting it would cost as much
    as writing it did, and a shard that is less than full costs a reader nothing.
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
                part = _reported(url, functools.partial(join, number, prefix))
                yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    joined: dict[int, list[Shard]] = {}
    for part in _run(spark.range(0, len(files), 1, len(files)), join_file):
        joined.setdefault(files[part.partition][0], []).extend(part.shards)
    return [shard for i, run in enumerate(runs) for shard in joined.get(i, run)]


def read_rows(
    url: str, shard: Shard, columns: tuple[Column, ...], start: int, stop: int
) -> Iterator[list[Array | Ragged]]:
    """Rows [start; stop - 1] of a shard, row group by row group, as the writer takes them: of images their bytes."""
    columns = tuple(replace(c, codec="binary", shape=(None,)) if c.codec == "image" else c for c in columns)
    with storage.open_input(storage.join(url, shard.name)) as file:
        opened = parquet_file.open_file(file)
        first = 0
        for group, rows in enumerate(shard.row_groups):
            lo, hi = max(start, first), min(stop, first + rows)
            if lo < hi:
                table = opened.read_row_group(group, use_threads=False)
                yield [stored_cells.decode(c, table.column(c.name))[lo - first : hi - first] for c in columns]
            first += rows
