"""Shards: a dataset on storage, written by Spark tasks, committed by its manifest.

A shard is a Parquet file of row groups of an exact row count; all shards have the same number of rows, save the last.
`_manifest.json` (the schema, the rows of every row group, sizes and checksums) is written last: a folder without it is
not a dataset.
"""

from __future__ import annotations

import itertools
import json
import logging
import posixpath
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Data, suggestion
from spark_dl.data import parquet, petastorm, schema
from spark_dl.data.schema import Array, BadCellsError, Column, SourceColumn
from spark_dl.data.writer import Shard, ShardWriter, layout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("spark_dl")

MANIFEST = "_manifest.json"
"""Named with an underscore, so that Spark, Petastorm and pyarrow read the folder as plain Parquet and pass it by."""
FORMAT = "spark_dl.shards"
VERSION = 1


@dataclass(frozen=True)
class Spread:
    """How a dataset lies on the disks of the ranks, as one of them sees it: it can read its own part only."""

    part: int
    """This rank's part: the number of its barrier task."""
    part_shards: tuple[int, ...]
    """Shards of each part, in the order of the dataset."""
    filler: Mapping[str, Array]
    """One row by column, each (*cell,), for places of batches that count with weight 0 on a rank without rows."""


@dataclass(frozen=True)
class ShardSet:
    """A committed dataset: what its manifest says."""

    url: str
    columns: tuple[Column, ...]
    shards: tuple[Shard, ...]
    spread: Spread | None = None
    """None where all shards lie at `url`."""

    @cached_property
    def rows(self) -> int:
        return sum(s.rows for s in self.shards)

    @cached_property
    def row_groups(self) -> tuple[tuple[int, int, int], ...]:
        """(shard, row group of the shard, rows) of every row group, in the order of the dataset."""
        return tuple((s, g, rows) for s, shard in enumerate(self.shards) for g, rows in enumerate(shard.row_groups))

    @property
    def part_groups(self) -> tuple[int, ...]:
        """Row groups of each part; none where the dataset lies in one place."""
        if self.spread is None:
            return ()
        groups = iter([len(s.row_groups) for s in self.shards])
        return tuple(sum(itertools.islice(groups, n)) for n in self.spread.part_shards)

    def select(self, names: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these names. Raises ValueError for one that is missing, naming the nearest."""
        by_name = {c.name: c for c in self.columns}
        for name in names:
            if name not in by_name:
                near = suggestion(name, list(by_name))
                raise ValueError(f"no column {name!r} in the dataset {self.url}{near} (data.features, data.label)")
        return tuple(by_name[name] for name in names)


def write_shards(
    df: DataFrame, url: str, data: Data | None = None, *, columns: Sequence[str] | None = None, overwrite: bool = False
) -> ShardSet:
    """Writes a DataFrame as a dataset. Called on the driver; the tasks of the DataFrame's own partitions write.

    `columns` are the columns to keep, by default the features and the label. The rows are read once. Where a partition
    does not fill its last shard, a second, small job joins what is left over.

    Raises ValueError for a missing column, a type that cannot become a tensor, an empty DataFrame, nulls, NaN, cells of
    unequal shape, or a folder that holds a dataset already (unless `overwrite`); nothing is left at `url` then.
    """
    data = data or Data()
    url = storage.absolute(url)
    source = schema.source_columns(df.schema, columns or data.columns)
    _prepare_folder(url, overwrite)
    selected = df.select(*(f"`{c.name}`" for c in source))
    token = uuid.uuid4().hex[:8]  # a task of an earlier, killed writer never writes a file of this one
    try:
        parts = _run(selected, _partition_writer(url, source, data, token))
        written = agreed_columns(parts)
        shards = _join_remainders(df.sparkSession, url, written, [s for p in parts for s in p.shards], data, token)
        shard_set = _commit(ShardSet(url, written, tuple(shards)))
    except BaseException:
        _delete_files(url, keep=())
        raise
    _delete_files(url, keep=(MANIFEST, petastorm.COMMON_METADATA, *(s.name for s in shards)))
    return shard_set


def write_arrays(columns: Mapping[str, Array], url: str, data: Data | None = None) -> ShardSet:
    """Writes arrays in memory as a dataset, without Spark. # each (rows, *cell); one axis makes a scalar column

    Raises ValueError for a folder that is in use.
    """
    url = storage.absolute(url)
    written = tuple(
        Column(name, str(a.dtype), a.shape[1:], "ndarray" if a.ndim > 1 else "scalar") for name, a in columns.items()
    )
    _prepare_folder(url, overwrite=False)
    writer = ShardWriter(url, f"part-{uuid.uuid4().hex[:8]}", written, *layout(written, data or Data()))
    writer.append(list(columns.values()))
    return _commit(ShardSet(url, written, tuple(writer.close())))


def read_shards(url: str) -> ShardSet:
    """Opens a dataset by its manifest. Called on the driver.

    Raises ValueError if there is none, or if it is not one that this version can read.
    """
    url = storage.absolute(url)
    path = storage.join(url, MANIFEST)
    try:
        manifest = json.loads(storage.read_bytes(path))
    except FileNotFoundError:
        what = "a folder without a manifest" if storage.exists(url) else "nothing"
        raise ValueError(
            f"no dataset at {url}: found {what}; write it with spark_dl.write_shards(df, url) or jobs/prepare.py"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read the dataset {url}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a manifest: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not a manifest of {FORMAT}")
    if manifest["version"] > VERSION:
        raise ValueError(f"{path} has version {manifest['version']}; this spark_dl reads up to {VERSION}")
    columns = tuple(Column.from_plain(c) for c in manifest["columns"])
    shards = tuple(_shard(s) for s in manifest["shards"])
    for shard in shards:
        if shard.name != posixpath.basename(shard.name) or shard.name in ("", ".", "..") or "\0" in shard.name:
            raise ValueError(f"{path} names a file outside its folder: {shard.name!r}")
    return ShardSet(url, columns, shards)


@dataclass(frozen=True)
class Part:
    """What one task wrote, or why it could not."""

    partition: int
    columns: tuple[Column, ...] = ()
    shards: tuple[Shard, ...] = ()
    error: str = ""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Part:
        """A part from the dict that `dataclasses.asdict` made of it, after a way through JSON."""
        columns = tuple(Column.from_plain(c) for c in plain["columns"])
        return cls(plain["partition"], columns, tuple(_shard(s) for s in plain["shards"]), plain["error"])


def _commit(shard_set: ShardSet) -> ShardSet:
    """Writes Petastorm's metadata, then the manifest: from now on the folder is a dataset."""
    from spark_dl import __version__

    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "spark_dl": __version__,
        "rows": shard_set.rows,
        "columns": [asdict(c) for c in shard_set.columns],
        "shards": [{"rows": s.rows, **asdict(s)} for s in shard_set.shards],
    }
    arrow = pa.schema([pa.field(c.name, schema.arrow_type(c), nullable=False) for c in shard_set.columns])
    row_groups = {s.name: len(s.row_groups) for s in shard_set.shards}
    try:
        unischema = petastorm.unischema_of(shard_set.columns)
        petastorm.write_common_metadata(shard_set.url, arrow, unischema=unischema, row_groups_per_file=row_groups)
    except ValueError as error:  # such as a name with a space, which is no hindrance here
        _log.warning("Petastorm's make_reader cannot open %s: %s", shard_set.url, error)
    storage.write_bytes(storage.join(shard_set.url, MANIFEST), json.dumps(manifest, indent=1).encode())
    return shard_set


def _shard(plain: Mapping[str, Any]) -> Shard:
    return Shard(plain["name"], tuple(plain["row_groups"]), plain["bytes"], plain["sha256"])


def _prepare_folder(url: str, overwrite: bool) -> None:
    manifest = storage.join(url, MANIFEST)
    try:
        if storage.exists(manifest):
            if not overwrite:
                raise ValueError(f"{url} holds a dataset already; pass overwrite=True to replace it")
            storage.delete(manifest)
        elif foreign := [n for n in storage.list_names(url) if not _is_ours(n)]:
            raise ValueError(f"{url} is not empty and not a dataset: it holds {foreign[:5]}; name an empty folder")
        _delete_files(url, keep=())
        storage.make_folder(url)
        storage.write_bytes(storage.join(url, "part-probe"), b"")
        storage.delete(storage.join(url, "part-probe"))
    except OSError as error:
        raise ValueError(f"cannot write to {url}: {error}") from error


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, petastorm.COMMON_METADATA) or name.startswith("part-")


def _delete_files(url: str, keep: Sequence[str]) -> None:
    for name in storage.list_names(url):
        if _is_ours(name) and name not in keep:
            storage.delete(storage.join(url, name))


def _run(df: DataFrame, task: Any) -> list[Part]:
    """Runs a task over a DataFrame."""
    parts = [Part.from_plain(json.loads(row["part"])) for row in df.mapInArrow(task, "part string").collect()]
    return sorted(parts, key=lambda p: p.partition)


def agreed_columns(parts: Sequence[Part]) -> tuple[Column, ...]:
    """The columns of a dataset that tasks wrote part by part, given in the order of their partitions.

    Raises ValueError for an error in one of them, for parts that do not fit together, and where there are no rows.
    """
    if errors := [p.error for p in parts if p.error]:
        more = f" (and in {len(errors) - 1} more partitions)" if len(errors) > 1 else ""
        raise ValueError(errors[0] + more)
    filled = [p for p in parts if p.shards]
    if not filled:
        raise ValueError("the DataFrame has no rows; training needs at least one")
    first = filled[0]
    for part in filled[1:]:
        for a, b in zip(first.columns, part.columns, strict=True):
            if a != b:
                raise ValueError(
                    f"column {a.name!r}: cells have shape {a.shape} in partition {first.partition} and {b.shape} in "
                    f"partition {part.partition}; all cells of a column need one shape"
                )
    return first.columns


def write_part(
    batches: Iterator[pa.RecordBatch], url: str, name: str, source: tuple[SourceColumn, ...], data: Data, partition: int
) -> Part:
    """Writes a task's rows as shards whose names begin with `name`. Its input is consumed to the end."""
    writer: ShardWriter | None = None
    rows = 0
    try:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            arrays = [_checked(c, batch.column(i), data, partition, rows) for i, c in enumerate(source)]
            rows += batch.num_rows
            if writer is None:
                columns = tuple(
                    Column(c.name, c.dtype, a.shape[1:], "scalar" if c.kind == "scalar" else "ndarray")
                    for c, a in zip(source, arrays, strict=True)
                )
                writer = ShardWriter(url, name, columns, *layout(columns, data))
            writer.append(arrays)
        return Part(partition, writer.columns, tuple(writer.close())) if writer else Part(partition)
    except ValueError as error:
        if writer is not None:
            writer.abort()
        for _ in batches:  # the task's Python process is used again only if its input is consumed
            pass
        return Part(partition, error=str(error))


def _partition_writer(url: str, source: tuple[SourceColumn, ...], data: Data, token: str) -> Any:
    """The task that writes one partition of the DataFrame."""

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, name = context.partitionId(), f"part-{token}-{context.partitionId():05d}-{context.taskAttemptId()}"
        part = write_part(batches, url, name, source, data, partition)
        yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    return write_partition


def _checked(column: SourceColumn, stored: pa.Array, data: Data, partition: int, first_row: int) -> Array:
    try:
        values = schema.cells(column, stored)
        if values.dtype.kind == "f" and not data.allow_nonfinite and not np.isfinite(values).all():
            bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
            expected = "finite values; drop them in the DataFrame or set data.allow_nonfinite=true"
            raise BadCellsError(column.name, int(bad[0]), f"NaN or Inf in {len(bad)} row(s)", expected)
        return values
    except BadCellsError as error:
        raise ValueError(f"{error}; first in partition {partition}, row {first_row + error.row}") from None


def _join_remainders(
    spark: SparkSession, url: str, columns: tuple[Column, ...], shards: Sequence[Shard], data: Data, token: str
) -> list[Shard]:
    """Rewrites the shards that are not full, so that all but the last one are, in the same order of rows."""
    group_rows, shard_rows = layout(columns, data)
    full = [s for s in shards if s.rows == shard_rows]
    rest = [s for s in shards if s.rows != shard_rows]
    if len(rest) <= 1:
        return full + rest
    ends = np.cumsum([s.rows for s in rest])
    starts = ends - [s.rows for s in rest]
    num_files = -(-int(ends[-1]) // shard_rows)

    def join_file(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            for number in batch.column(0).to_pylist():
                prefix = f"part-{token}-joined-{number:05d}-{context.taskAttemptId()}"
                writer = ShardWriter(url, prefix, columns, group_rows, shard_rows)
                for i, shard in enumerate(rest):
                    start = max(0, number * shard_rows - int(starts[i]))
                    stop = min(shard.rows, (number + 1) * shard_rows - int(starts[i]))
                    if start < stop:
                        for arrays in read_rows(url, shard, columns, start, stop):
                            writer.append(arrays)
                part = Part(number, shards=tuple(writer.close()))
                yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    parts = _run(spark.range(0, num_files, 1, num_files), join_file)
    return full + [s for p in parts for s in p.shards]


def read_rows(url: str, shard: Shard, columns: tuple[Column, ...], start: int, stop: int) -> Iterator[list[Array]]:
    """Rows [start; stop - 1] of a shard, row group by row group."""
    with storage.open_input(storage.join(url, shard.name)) as file:
        opened = parquet.open_file(file)
        first = 0
        for group, rows in enumerate(shard.row_groups):
            lo, hi = max(start, first), min(stop, first + rows)
            if lo < hi:
                table = opened.read_row_group(group, use_threads=False)
                yield [schema.decode(c, table.column(c.name))[lo - first : hi - first] for c in columns]
            first += rows
