"""Writes a DataFrame as a dataset: Spark tasks write shards, and the manifest commits them.

A shard is a Parquet file of at most a fixed number of rows. All its row groups but the last have the same row count.
A second Spark job joins neighbouring shards that are less than half full.

Spark computes a DataFrame again in each job. If the plan does not show all that decides its rows, as with a Python
UDF, the rows can differ from job to job. Then a split by a column would lose some rows and use others twice, and a
vocabulary would lack words of the rows that are written. Such rows are kept for all jobs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.config.checks import UnfitPythonError, unfit_python
from spark_dl.data.columns import cell_codec, schema
from spark_dl.data.columns.policies import add_changes, clean_batch, rules_of
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column, vocabularies_of
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.manifest import CANNOT_WRITE, abandon, commit, delete_replaced, prepare_folder
from spark_dl.data.dataset.records import Shard, ShardSet, ShardTable
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.write import spark_types
from spark_dl.data.write.partition import PartitionResult, agreed_columns, with_sizes, write_part
from spark_dl.data.write.vocabulary import NO_ROWS, counts_words, expression, with_mean_sizes, with_vocabularies
from spark_dl.data.write.writer import ShardWriter, rows_per_file
from spark_dl.spark_job import collect, is_connect, refuse_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
_USER_CODE = re.compile(
    r"UDF|UDAF|UDTF|Invoke|Reflect|PythonUD|ScalaAgg|TypedAgg|InPandas|InArrow|MapPartitions|MapElements|MapGroups"
    r"|TypedFilter|SerializeFromObject|ScriptTransformation|WithPython|TransformWithState"
)
"""Operators and expressions that run code which the plan does not show."""
_NOW = re.compile(r"^(Current(?!Row|Database|Catalog|User)|Now$|Local(Date)?Timestamp|CurDate)")

_log = logging.getLogger("spark_dl")


def run_tasks(df: DataFrame, task: Any, description: str) -> list[PartitionResult]:
    """Runs a task over the partitions of a DataFrame. Raises RuntimeError, with its cause, if a task cannot write.

    Args:
        description: of the job, in Spark's UI.
    """
    try:
        rows = collect(df.mapInArrow(task, "part string"), description)
    except Exception as error:  # Spark Connect and classic Spark have different classes
        if match := re.search(rf"^\s*RuntimeError: ({CANNOT_WRITE}.*)$", str(error), re.MULTILINE):
            raise RuntimeError(match.group(1)) from error
        if unfit := unfit_python(str(error)):
            raise UnfitPythonError(unfit) from error
        raise
    return sorted((PartitionResult.from_plain(json.loads(row["part"])) for row in rows), key=lambda p: p.partition)


def with_host(url: str, write: Callable[[], PartitionResult]) -> PartitionResult:
    """Calls `write`. Raises RuntimeError with the host for an OSError; Spark then retries the task."""
    try:
        return write()
    except OSError as error:
        raise RuntimeError(
            f"{CANNOT_WRITE} {url} on host {socket.gethostname()}: {error}; all executors must reach the folder, be "
            "allowed to write there, and have free space"
        ) from error


@contextlib.contextmanager
def read_once(df: DataFrame, what: str) -> Iterator[DataFrame]:
    """Yields a DataFrame with the rows of `df`, which are the same in all jobs of the block. Called on the driver.

    That is `df` itself if its plan decides its rows, or it is cached. Otherwise the rows are computed once, and kept on
    the executors until the block ends (`DataFrame.localCheckpoint`); if an executor is lost, a job that reads them
    fails, so that no row is computed again.

    Args:
        what: what reads the rows several times, for messages. Raises ValueError over a Spark Connect server that cannot
            keep rows (Spark 3.5).
    """
    if _is_decided(df):
        yield df
        return
    try:
        kept = df.localCheckpoint(eager=True)
    except (AttributeError, NotImplementedError) as error:  # PySparkNotImplementedError is one of the latter
        raise ValueError(
            f"{what} reads the DataFrame more than once, and whether its rows are the same each time is not known; "
            "cache it (df.cache()), or write it first and pass its path"
        ) from error
    try:
        yield kept
    finally:
        _release(kept)


def _is_decided(df: DataFrame) -> bool:
    """Whether each job computes the same rows, as far as the plan shows."""
    level = df.storageLevel
    if level.useMemory or level.useDisk:
        return True
    if is_connect(df.sparkSession):
        return False  # the plan stays on the server
    plan: Any = df._jdf.queryExecution().analyzed()  # type: ignore[operator]
    try:
        nodes = json.loads(plan.toJSON())
    except Exception:  # of py4j, for an operator that Spark cannot write as JSON
        return False
    if not plan.deterministic() or any(map(_is_open, _classes(nodes))):
        return False
    leaves = plan.collectLeaves()
    return all(_is_kept(leaves.apply(i)) for i in range(leaves.size()))


def _is_open(name: str) -> bool:
    package, _, short = name.rpartition(".")
    is_now = f"{package}." == _EXPRESSIONS and _NOW.search(short)
    return bool(_USER_CODE.search(short) or is_now)


def _classes(nodes: Any) -> Iterator[str]:
    """Yields the classes of all operators and expressions of a plan, at any depth."""
    if isinstance(nodes, dict):
        if "class" in nodes:
            yield nodes["class"]
        nodes = list(nodes.values())
    if isinstance(nodes, list):
        for node in nodes:
            yield from _classes(node)


def _is_kept(leaf: Any) -> bool:
    """Whether a leaf of a plan has the same rows in each job. An RDD has not: Spark computes it again."""
    name = leaf.getClass().getSimpleName()
    return bool(leaf.rdd().isCheckpointed()) if name == "LogicalRDD" else name != "ExternalRDD"


def _release(kept: DataFrame) -> None:
    """Frees the kept rows, where the driver can. Over Spark Connect the server does it, with its garbage collection."""
    with contextlib.suppress(Exception):  # the session may have ended
        kept._jdf.queryExecution().analyzed().rdd().unpersist(False)  # type: ignore[operator]


def first_row_columns(df: DataFrame, names: Sequence[str], data: Data) -> tuple[Column, ...]:
    """Returns columns as a written dataset would have them. Called on the driver; runs a job for one row.

    Raises ValueError as `write_shards` does, for a DataFrame without rows, and for a stream.
    """
    sources = spark_types.source_columns(df.schema, names, data.encode, data.fill)
    if df.isStreaming:
        raise ValueError("data: found a stream, whose first row is not there yet; pass rows with the same columns")
    selected = df.select(*(expression(c).alias(f"c{i}") for i, c in enumerate(sources))).limit(1)

    def find_shapes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield pa.RecordBatch.from_pydict({"shapes": [json.dumps(_shapes_of(sources, batch, data))]})

    rows = collect(selected.mapInArrow(find_shapes, "shapes string"), "spark_dl: reading the first row")
    if not rows:
        raise ValueError(f"{NO_ROWS}; expected one, to know the shapes of the features")
    shapes = json.loads(rows[0]["shapes"])
    return tuple(schema.stored_column(c, tuple(shape)) for c, shape in zip(sources, shapes, strict=True))


def _shapes_of(sources: tuple[SourceColumn, ...], batch: pa.RecordBatch, data: Data) -> list[list[int | None]]:
    cells, _ = clean_batch(sources, batch.columns, data, may_drop=False)
    return [
        list(schema.cell_shape(schema.codec_of(c), of_column, c.encoding))
        for c, of_column in zip(sources, cells, strict=True)
    ]


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

    Example:
        >>> shards = spark_dl.write_shards(df, "points", config.data, overwrite=True)
        >>> shards.rows, shards.url
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
