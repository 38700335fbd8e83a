"""Shards: a dataset on storage, written by Spark tasks, committed by its manifest.

A shard is a Parquet file of row groups of a set row count, save its last one, and of a set number of rows at most.
`_manifest.json` (the schema, the rows of every row group, sizes and checksums) is written last: a folder without it is
not a dataset.
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
from spark_dl.config import Data, suggestion
from spark_dl.data import parquet, petastorm, schema, source
from spark_dl.data.filters import Filtered
from spark_dl.data.policies import Changes, add_changes, clean_batch
from spark_dl.data.ragged import Array, Ragged
from spark_dl.data.schema import Column
from spark_dl.data.source import BadCellsError, SourceColumn
from spark_dl.data.vocabulary import expression, with_mean_sizes, with_vocabularies
from spark_dl.data.writer import Shard, ShardWriter, layout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger("spark_dl")

MANIFEST = "_manifest.json"
"""Named with an underscore, so that Spark, Petastorm and pyarrow read the folder as plain Parquet and pass it by."""
FORMAT = "spark_dl.shards"
VERSION = 2
_CANNOT_WRITE = "cannot write to"


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
    changes: Changes = field(default_factory=Changes)
    """What was dropped and filled when it was written."""
    spread: Spread | None = None
    """None where all shards lie at `url`."""
    run_starts: Array | None = field(default=None, compare=False)
    """For sequences (`data/sequences.py`), once they were looked for: the first row of each run. # (runs,) int64"""
    filtered: Filtered | None = None
    """None where all rows are read."""

    @functools.cached_property
    def rows(self) -> int:
        return sum(self.group_rows)

    @functools.cached_property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each row group that are read."""
        return self.filtered.group_rows if self.filtered else tuple(rows for _, _, rows in self.row_groups)

    @functools.cached_property
    def row_groups(self) -> tuple[tuple[int, int, int], ...]:
        """(shard, row group of the shard, stored rows) of every row group, in the order of the dataset."""
        return tuple((s, g, rows) for s, shard in enumerate(self.shards) for g, rows in enumerate(shard.row_groups))

    @functools.cached_property
    def largest_row_group(self) -> tuple[int, int, int]:
        """(shard, row group of the shard, stored rows) of the largest row group of those that are read."""
        read = (group for group, rows in zip(self.row_groups, self.group_rows, strict=True) if rows)
        return max(read, key=lambda group: group[2])

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
                raise ValueError(
                    f"no column {name!r} in the dataset {self.url}{near} (data.features, data.label, data.sequence_*)"
                )
        return tuple(by_name[name] for name in names)


def write_shards(
    df: DataFrame,
    url: str,
    data: Data | None = None,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    like: Sequence[Column] = (),
) -> ShardSet:
    """Writes a DataFrame as a dataset. Called on the driver; the tasks of the DataFrame's own partitions write.

    `columns` are the columns to keep, by default the features, the label and those of `data.sequence_*`. The rows are
    read once; a vocabulary that is built reads its columns once more, and ragged columns a few rows for their length.
    Where partitions leave neighbouring shards of less than half the size, a second job joins them; the order of the
    rows is kept. `like` are the columns of another dataset, such as the one that a model was trained on, whose
    vocabularies are used and with which these must agree.

    Raises ValueError for a missing column, a type that cannot become a tensor, an empty DataFrame, nulls, NaN (unless
    `data.nulls` and `data.nonfinite` say otherwise), cells of unequal shape, or a folder that holds a dataset already
    (unless `overwrite`); nothing is left at `url` then.
    """
    data = data or Data()
    url = storage.absolute(url)
    names = tuple(columns or data.stored_columns)
    source.source_columns(df.schema, names, data.encode, data.fill)  # before the folder is touched
    _prepare_folder(url, overwrite)
    selected, sources = select_sources(df, names, data, like)
    token = uuid.uuid4().hex[:8]  # a task of an earlier, killed writer never writes a file of this one
    try:
        parts = _run(selected, _partition_writer(url, sources, data, token))
        written = agreed_columns(sources, parts)
        changes = add_changes(p.changes for p in parts)
        schema.check_like(written, like)
        shards = _join_small(df.sparkSession, url, written, [s for p in parts for s in p.shards], data, token)
        shard_set = _commit(ShardSet(url, with_sizes(written, parts), tuple(shards), changes))
    except BaseException:
        _delete_files(url, keep=())
        raise
    _delete_files(url, keep=(MANIFEST, petastorm.COMMON_METADATA, *(s.name for s in shards)))
    if changes.dropped_rows or changes.filled:
        _log.warning("%s: %d rows dropped for nulls, NaN or Inf in %s; rows filled: %s",
                     url, changes.dropped_rows, dict(changes.dropped), dict(changes.filled))  # fmt: skip
    return shard_set


def select_sources(
    df: DataFrame, names: Sequence[str], data: Data, like: Sequence[Column]
) -> tuple[DataFrame, tuple[SourceColumn, ...]]:
    """The asked columns of a DataFrame, named c0, c1 ..., and what is known of them before their rows are written.

    Raises ValueError for a missing column, and for a type or settings that do not make a tensor.
    """
    sources = source.source_columns(df.schema, names, data.encode, data.fill)
    known = {c.name: c.encoding.vocabulary for c in like if c.encoding.vocabulary is not None}
    sources = with_vocabularies(df, sources, data.encode, known)
    if not (data.rows_per_row_group and data.rows_per_shard):
        sources = with_mean_sizes(df, sources)
    return df.select(*(expression(c).alias(f"c{i}") for i, c in enumerate(sources))), sources  # a name may have dots


def write_arrays(columns: Mapping[str, Array | Ragged], url: str, data: Data | None = None) -> ShardSet:
    """Writes arrays in memory as a dataset, without Spark. # each (rows, *cell); one axis makes a scalar column

    Raises ValueError for a folder that is in use.
    """
    url = storage.absolute(url)
    written = []
    for name, array in columns.items():
        values = array.own_values if isinstance(array, Ragged) else array
        codec = "list" if isinstance(array, Ragged) else "ndarray" if values.ndim > 1 else "scalar"
        mean = values.size / max(1, len(array)) if isinstance(array, Ragged) else None
        shape = schema.cell_shape(codec, array)
        written.append(Column(name, str(values.dtype), shape, codec, mean_size=mean))
    _prepare_folder(url, overwrite=False)
    writer = ShardWriter(url, f"part-{uuid.uuid4().hex[:8]}", tuple(written), *layout(written, data or Data()))
    writer.append(list(columns.values()))
    return _commit(ShardSet(url, writer.columns, tuple(writer.close())))


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
    if not isinstance(version := manifest.get("version"), int) or version > VERSION:
        raise ValueError(f"{path} has version {version}; this spark_dl reads up to {VERSION}")
    try:
        columns = tuple(Column.from_plain(c) for c in manifest["columns"])
        shards = tuple(_shard(s) for s in manifest["shards"])
        shard_set = ShardSet(url, columns, shards, Changes(**manifest.get("changes", {})))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a manifest that can be read: {error!r}") from error
    _check_files(shard_set, "write it again, or bring the file back")
    return shard_set


def _check_files(shard_set: ShardSet, change: str) -> None:
    """Raises ValueError unless every shard lies in the folder itself and is as long as the manifest says.

    One listing for all of them. The name of a shard is one that this package gives, so it leads nowhere else; neither
    may a symbolic link. `change` says what to do where one is missing.
    """
    url = shard_set.url
    found = {info.base_name: info.size for info in storage.list_infos(url)}
    for shard in shard_set.shards:
        if not re.fullmatch(r"part-[0-9a-z-]+\.parquet", str(shard.name)):
            raise ValueError(
                f"{storage.join(url, MANIFEST)} names the shard {shard.name!r:.200}, expected part-<name>.parquet in "
                "its own folder; the manifest was not written by spark_dl, do not trust it"
            )
        path = storage.join(url, shard.name)
        if storage.is_local(url) and os.path.dirname(os.path.realpath(path)) != os.path.realpath(url):
            raise ValueError(f"{path} is a link that leads to {os.path.realpath(path)}, outside of its dataset")
        if found.get(shard.name) != shard.bytes:
            what = f"{found[shard.name]} bytes" if shard.name in found else "nothing"
            raise ValueError(
                f"the dataset {url} is not whole: found {what} at {shard.name}, expected {shard.bytes} bytes; {change}"
            )


@dataclass(frozen=True)
class Part:
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
    def from_plain(cls, plain: Mapping[str, Any]) -> Part:
        """A part from the dict that `dataclasses.asdict` made of it, after a way through JSON."""
        shapes = tuple(None if n is None else tuple(n) for n in plain["shapes"])
        shards, changes = tuple(_shard(s) for s in plain["shards"]), Changes(**plain["changes"])
        return cls(plain["partition"], shapes, tuple(plain["sizes"]), shards, changes, plain["error"])


def _commit(shard_set: ShardSet) -> ShardSet:
    """Writes Petastorm's metadata, then the manifest: from now on the folder is a dataset."""
    from spark_dl import __version__

    _check_files(shard_set, "it must lie on storage that the driver and all executors share")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "spark_dl": __version__,
        "rows": shard_set.rows,
        "columns": [asdict(c) for c in shard_set.columns],
        "shards": [{"rows": s.rows, **asdict(s)} for s in shard_set.shards],
        "changes": asdict(shard_set.changes),
    }
    arrow = pa.schema([schema.arrow_field(c) for c in shard_set.columns])
    row_groups = {s.name: len(s.row_groups) for s in shard_set.shards}
    try:
        unischema = petastorm.unischema_of(shard_set.columns)
        petastorm.write_common_metadata(shard_set.url, arrow, unischema=unischema, row_groups_per_file=row_groups)
    except ValueError as error:  # such as a name with a space, which is no hindrance here
        _log.warning("Petastorm's make_reader cannot open %s: %s", shard_set.url, error)
    storage.write_bytes(storage.join(shard_set.url, MANIFEST), json.dumps(manifest, indent=1).encode())
    return shard_set


def _shard(plain: Mapping[str, Any]) -> Shard:
    if bad := [n for n in plain["row_groups"] if type(n) is not int or n < 1]:
        raise ValueError(f"the shard {plain['name']!r} has a row group of {bad[0]!r} rows")
    footer_bytes, footer_crc32 = plain.get("footer_bytes", 0), plain.get("footer_crc32", 0)
    return Shard(plain["name"], tuple(plain["row_groups"]), plain["bytes"], plain["sha256"], footer_bytes, footer_crc32)


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
    """Runs a task over a DataFrame. Raises RuntimeError where a task could not write, as the task said it."""
    try:
        rows = df.mapInArrow(task, "part string").collect()
    except Exception as error:  # Spark Connect and classic Spark have classes of their own
        if said := re.search(rf"^\s*RuntimeError: ({_CANNOT_WRITE}.*)$", str(error), re.MULTILINE):
            raise RuntimeError(said.group(1)) from error
        raise
    return sorted((Part.from_plain(json.loads(row["part"])) for row in rows), key=lambda p: p.partition)


def _reported(url: str, write: Callable[[], Part]) -> Part:
    """What a task writes. An error of its disk or network is raised with the host; Spark then tries elsewhere."""
    try:
        return write()
    except OSError as error:
        raise RuntimeError(
            f"{_CANNOT_WRITE} {url} on host {socket.gethostname()}: {error}; all executors must reach the folder, may "
            "write there, and need free space"
        ) from error


def agreed_columns(sources: Sequence[SourceColumn], parts: Sequence[Part]) -> tuple[Column, ...]:
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
        raise ValueError(f"the DataFrame has no rows{dropped}; training needs at least one")
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


def with_sizes(columns: Sequence[Column], parts: Sequence[Part]) -> tuple[Column, ...]:
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
) -> Part:
    """Writes a task's rows as shards whose names begin with `name`. Its input is consumed to the end."""
    writer: ShardWriter | None = None
    rows = 0
    changes = Changes()
    try:
        for batch in batches:
            if batch.num_rows == 0:
                continue
            arrays, changed = clean_batch(sources, batch.columns, data)
            changes = add_changes([changes, changed])
            if len(arrays[0]):
                writer = writer or _build_writer(url, name, sources, arrays, data)
                writer.append(arrays)
            rows += batch.num_rows
        if writer is None:
            return Part(partition, changes=changes)
        shards = tuple(writer.close())
        known = [not c.is_ragged or i in writer.filled for i, c in enumerate(writer.columns)]
        shapes = tuple(c.shape if k else None for c, k in zip(writer.columns, known, strict=True))
        return Part(partition, shapes, tuple(writer.sizes), shards, changes)
    except ValueError as error:
        if writer is not None:
            writer.abort()
        for _ in batches:  # the task's Python process is used again only if its input is consumed
            pass
        at = f"; first in partition {partition}, row {rows + error.row}" if isinstance(error, BadCellsError) else ""
        return Part(partition, error=f"{error}{at}")


def _partition_writer(url: str, sources: tuple[SourceColumn, ...], data: Data, token: str) -> Any:
    """The task that writes one partition of the DataFrame."""

    def write_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition, name = context.partitionId(), f"part-{token}-{context.partitionId():05d}-{context.taskAttemptId()}"
        part = _reported(url, lambda: write_part(batches, url, name, sources, data, partition))
        yield pa.RecordBatch.from_pydict({"part": [json.dumps(asdict(part))]})

    return write_partition


def _build_writer(
    url: str, prefix: str, sources: Sequence[SourceColumn], arrays: Sequence[Array | Ragged], data: Data
) -> ShardWriter:
    columns = []
    for column, cells in zip(sources, arrays, strict=True):
        codec = schema.codec_of(column)
        columns.append(schema.stored_column(column, schema.cell_shape(codec, cells)))
    return ShardWriter(url, prefix, tuple(columns), *layout(columns, data))


def _join_small(
    spark: SparkSession, url: str, columns: tuple[Column, ...], shards: Sequence[Shard], data: Data, token: str
) -> list[Shard]:
    """Rewrites neighbouring shards that are less than half full as fuller ones. The order of the rows stays.

    What a partition leaves over is a shard, too. Where it is large, it stays as it is: rewriting it would cost as much
    as writing it did, and a shard that is less than full costs a reader nothing.
    """
    group_rows, shard_rows = layout(columns, data)
    runs = [list(run) for _, run in itertools.groupby(shards, lambda s: None if 2 * s.rows < shard_rows else s.name)]
    files: list[tuple[int, int, int]] = []  # (run, first row, row after the last) of each new shard
    for i, run in enumerate(runs):
        rows = sum(s.rows for s in run) if len(run) > 1 else 0
        files += [(i, start, min(rows, start + shard_rows)) for start in range(0, rows, shard_rows)]
    if not files:
        return list(shards)

    def join(number: int, prefix: str) -> Part:
        writer = ShardWriter(url, prefix, columns, group_rows, shard_rows)
        run, start, stop = files[number]
        first = 0
        for shard in runs[run]:
            lo, hi = max(start - first, 0), min(stop - first, shard.rows)
            if lo < hi:
                for arrays in read_rows(url, shard, columns, lo, hi):
                    writer.append(arrays)
            first += shard.rows
        return Part(number, shards=tuple(writer.close()))

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
        if part.error:
            raise RuntimeError(part.error)
        joined.setdefault(files[part.partition][0], []).extend(part.shards)
    return [shard for i, run in enumerate(runs) for shard in joined.get(i, run)]


def read_rows(
    url: str, shard: Shard, columns: tuple[Column, ...], start: int, stop: int
) -> Iterator[list[Array | Ragged]]:
    """Rows [start; stop - 1] of a shard, row group by row group, as the writer takes them: of images their bytes."""
    columns = tuple(replace(c, codec="binary", shape=(None,)) if c.codec == "image" else c for c in columns)
    with storage.open_input(storage.join(url, shard.name)) as file:
        opened = parquet.open_file(file)
        first = 0
        for group, rows in enumerate(shard.row_groups):
            lo, hi = max(start, first), min(stop, first + rows)
            if lo < hi:
                table = opened.read_row_group(group, use_threads=False)
                yield [schema.decode(c, table.column(c.name))[lo - first : hi - first] for c in columns]
            first += rows
