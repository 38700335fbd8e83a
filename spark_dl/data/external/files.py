"""The files of external datasets: which files of a folder are data, what footers say, and which rows pass filters.

The plan needs the number of rows of each row group that pass `data.filters`, and `drop` of `data.nulls` and
`data.nonfinite`, before the first row is read. They are counted on the driver. Hive partitions and Parquet's
statistics decide most row groups. Statistics do not say whether numbers are finite. For the other row groups, only
the columns of undecided conditions are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.data.dataset.manifest import MANIFEST, is_own_shard
from spark_dl.data.dataset.records import Shard, ShardSet, columns_that_drop, leaves_out_rows
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet.buffers import ByteBudget
from spark_dl.data.parquet.calendar import RebasedFile, may_change
from spark_dl.data.parquet.filters import (
    NULL_PARTITION,
    AnyOf,
    Bounds,
    Condition,
    Filtered,
    columns_of,
    holds_within,
    of_partition,
    simplify,
    typed_conditions,
    without_nonfinite,
    without_nulls,
)
from spark_dl.data.parquet.page_index import IndexedFile

MOST_ROWS = (1 << 31) - 1
"""The most rows of a row group. A damaged or hostile footer can claim any number, and memory would be taken for it."""

_NOT_WHOLE = {
    "_temporary": "a Spark job is writing there or was killed; wait until it ends, or write the dataset again",
    ".spark-staging-": "a Spark job is writing there or was killed; wait until it ends, or write the dataset again",
    "_spark_metadata": "a streaming query wrote it, and its log lists the valid files; read it with Spark",
    "_delta_log": "it is a Delta table, whose log lists the valid files; read it with Spark",
    ".hoodie": "it is a Hudi table, whose timeline lists the valid files; read it with Spark",
}
"""Hidden folders, by the start of their names, which mean that not all files beside them are valid data."""
_ICEBERG = "it is an Iceberg table, whose metadata lists the valid files of each snapshot; read it with Spark"
_ICEBERG_METADATA = re.compile(r"(.*/)?metadata/[^/]*\.metadata\.json(\.gz)?")

_OWNERS = (
    (
        {"commits", "offsets", "metadata"},
        "the checkpoint of a streaming query, which needs it to go on; set the query's checkpointLocation to a folder "
        "outside of the data, and move it there",
    ),
    (
        {"checkpoints", "config.yaml"},
        "a run folder of spark_dl; choose a run_dir outside of the data, and move it there",
    ),
)
"""Folders that are not data, by the names that they contain, and what to do with each. To delete their files would
break the query or the run that needs them."""

_log = logging.getLogger("spark_dl")
_READERS = 16


@dataclass(frozen=True)
class File:
    """A Parquet file and its footer."""

    name: str
    bytes: int
    row_groups: tuple[int, ...]
    schema: pa.Schema
    sizes: Mapping[str, tuple[tuple[int, int], ...]]
    """(Values, stored bytes) in each row group, by the path of the leaf column; only leaves of varying cell size."""
    nulls: Mapping[str, tuple[int, ...]]
    """Nulls in each row group, by column, if the footer has them; not for lists and vectors."""


def list_files(url: str, *, require_success: bool = True) -> tuple[bool, list[tuple[str, int]]]:
    """Lists the data files of a dataset: whether the URL is a folder, and (path, bytes) of its files, sorted by path.

    Hidden files are skipped. Raises ValueError if there are no data files, if the folder is incomplete or belongs to a
    table format, and with `require_success` if Spark wrote the files and left no `_SUCCESS`.
    """
    filesystem, path = storage.resolve(url)
    info = storage.info(url)
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"no dataset at {url}: found nothing (a path without a scheme is a local path)")
    if info.type == fs.FileType.File:
        return False, [(posixpath.basename(path), info.size)]
    entries = filesystem.get_file_info(fs.FileSelector(path, recursive=True))
    names = [entry.path[len(path.rstrip("/")) + 1 :] for entry in entries]
    _check_whole(url, names)
    above: set[str] = set()
    parents = parents_of(url)
    for folder in parents:
        with contextlib.suppress(OSError):  # the user may be allowed to read one partition only
            listed = storage.list_names(folder)
            _check_no_job(folder, listed)
            above.update(listed)
    _check_no_iceberg_parent(url, storage.dirname([url, *parents][-1]))
    if require_success and "_SUCCESS" not in above:
        _check_success(url, names)
    files = []
    for relative, entry in zip(names, entries, strict=True):
        if entry.type == fs.FileType.Directory or any(_is_hidden(part) for part in relative.split("/")):
            continue
        if entry.type != fs.FileType.File:
            raise ValueError(f"{storage.join(url, relative)} is neither a file nor a folder; remove it")
        files.append((relative, entry.size))
    if storage.is_local(url):
        _check_links(path, [relative for relative, _ in files])
    if not files:
        raise ValueError(f"no dataset at {url}: found a folder without a manifest and without data files")
    return True, sorted(files)


def parents_of(url: str) -> list[str]:
    """Returns the parents of a hive partition like `year=2024/month=5`, up to the dataset's folder; else none."""
    parents = []
    while "=" in storage.name(url):
        url = storage.dirname(url)
        parents.append(url)
    return parents


def _is_hidden(name: str) -> bool:
    """Returns whether Spark skips a file or folder of this name. `_day=5` is a partition."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _check_whole(url: str, names: Sequence[str]) -> None:
    """Raises ValueError if the files of these names are not exactly one dataset."""
    listed = set(names)
    folders = [posixpath.dirname(name) for name in names if posixpath.basename(name) == MANIFEST]
    if datasets := sorted(f for f in folders if f and not any(_is_hidden(part) for part in f.split("/"))):
        raise ValueError(
            f"{url} is not one dataset: it contains the datasets {datasets[:9]}, each with its manifest; name one of "
            "them, or mix several with loader.proportions"
        )
    _check_no_job(url, names)
    for name in names:
        folder, file = posixpath.split(name)
        if is_own_shard(file) and posixpath.join(folder, MANIFEST) not in listed:
            raise ValueError(
                f"{storage.join(url, name)} is a shard of a spark_dl dataset without its manifest {MANIFEST}: its "
                "writer was killed or is still running, and rows may be missing or duplicated; wait until it ends, or "
                "write the dataset again"
            )


def _check_no_job(url: str, names: Sequence[str]) -> None:
    """Raises ValueError for a folder in which a job is writing, or whose table format decides which files are valid."""
    for name in names:
        if _ICEBERG_METADATA.fullmatch(name):
            raise ValueError(f"{url} cannot be read as plain Parquet files: found {name} in it; {_ICEBERG}")
        parts = name.split("/")
        depth, hidden = next(((i, part) for i, part in enumerate(parts, 1) if _is_hidden(part)), (0, ""))
        for start, why in _NOT_WHOLE.items():
            if hidden.startswith(start):
                parent = "/".join(parts[:depth])
                raise ValueError(f"{url} cannot be read as plain Parquet files: found {parent} in it; {why}")


def _check_no_iceberg_parent(url: str, parent: str) -> None:
    """Raises ValueError for the data folder of an Iceberg table: `metadata/` lies beside it."""
    listed: list[str] = []
    with contextlib.suppress(OSError):  # the user may not be allowed to list it
        listed = [f"metadata/{name}" for name in storage.list_names(storage.join(parent, "metadata"))]
    if found := next(filter(_ICEBERG_METADATA.fullmatch, listed), None):
        raise ValueError(
            f"{url} cannot be read as plain Parquet files: found {found} in its parent folder {parent}; {_ICEBERG}"
        )


def _check_success(url: str, names: Sequence[str]) -> None:
    """Raises ValueError for files with names that Spark gives, without the `_SUCCESS` of a finished job."""
    done = {posixpath.dirname(name) for name in names if posixpath.basename(name) == "_SUCCESS"}
    for name in sorted(name for name in names if not any(_is_hidden(part) for part in name.split("/"))):
        folders = {"", *itertools.accumulate(posixpath.dirname(name).split("/"), posixpath.join)}
        if re.match(r"(.*/)?part-\d{5}-", name) and not done & folders:
            raise ValueError(
                f"{url} may be incomplete: found {name}, which Spark wrote, and no _SUCCESS, which Spark writes last; "
                "the job was killed, is still running, or is configured to write none: write the dataset again, or, if "
                "it is complete, add an empty file _SUCCESS or set data.require_success to false"
            )


def _check_links(path: str, names: Sequence[str]) -> None:
    """Raises ValueError for broken links in a local folder, and for links that would duplicate the rows of a file.

    # names: names of the data files
    """
    for folder, _, files in os.walk(path):
        for file in files:
            link = os.path.join(folder, file)
            if not os.path.exists(link) and not any(map(_is_hidden, os.path.relpath(link, path).split(os.sep))):
                raise ValueError(f"{link} is a link to {os.readlink(link)}, which does not exist; remove or repair it")
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(os.path.realpath(os.path.join(path, name)), name)) != name:
            raise ValueError(f"{name} and {other} in {path} are the same file, because of a link; remove the link")


def read_footer(url: str, is_folder: bool, names: Sequence[str], name: str, size: int) -> File:
    """Reads the footer of a data file. Raises ValueError if it cannot be read. # names: the columns that are read"""
    path = storage.join(url, name) if is_folder else url
    try:
        with storage.open_input(path) as source:
            footer = parquet_file.open_file(source)
            rows = tuple(footer.metadata.row_group(i).num_rows for i in range(footer.metadata.num_row_groups))
            if not all(0 <= group <= MOST_ROWS for group in rows) or sum(rows) != footer.metadata.num_rows:
                raise pa.ArrowInvalid(
                    f"its footer has row groups of {list(rows[:20])} rows and {footer.metadata.num_rows} rows in all; "
                    f"expected their sum, and 0 to {MOST_ROWS} in each"
                )
            return File(name, size, rows, footer.schema_arrow, _sizes(footer, names), _nulls(footer, names))
    except PermissionError as error:
        raise ValueError(f"{path} cannot be read: {error}; check its owner and mode") from error
    except (pa.ArrowException, OSError) as error:
        advice = _owner_of(url, name) or "remove files that are not data, or write the dataset again"
        raise ValueError(f"{path} ({size} bytes) is not a readable Parquet file: {error}; {advice}") from error


def _owner_of(url: str, name: str) -> str:
    """Returns which folder that is not data has a file, and what to do; empty if none is known."""
    folder = posixpath.dirname(name)
    while folder:
        with contextlib.suppress(OSError):
            listed = set(storage.list_names(storage.join(url, folder)))
            for has, what in _OWNERS:
                if has <= listed:
                    return f"{storage.join(url, folder)} is {what}"
        folder = posixpath.dirname(folder)
    return ""


def _sizes(footer: pq.ParquetFile, names: Sequence[str]) -> Mapping[str, tuple[tuple[int, int], ...]]:
    """Returns (values, stored bytes) of the list, string and binary leaves of `columns`, by path and row group."""
    metadata, leaves = footer.metadata, [footer.schema.column(i) for i in range(len(footer.schema))]
    varying = [
        (i, leaf.path)
        for i, leaf in enumerate(leaves)
        if (leaf.max_repetition_level or leaf.physical_type.endswith("BYTE_ARRAY"))
        and any(parquet_file.leaf_in_column(name, leaf.path) for name in names)
    ]
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)] if varying else []
    chunks = {path: [group.column(i) for group in groups] for i, path in varying}
    return {path: tuple((c.num_values, c.total_uncompressed_size) for c in found) for path, found in chunks.items()}


def _nulls(footer: pq.ParquetFile, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    metadata, counts = footer.metadata, {}
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    for i in range(len(footer.schema)):
        leaf = footer.schema.column(i)
        if leaf.path in names and not leaf.max_repetition_level and leaf.max_definition_level:
            statistics = [group.column(i).statistics for group in groups]
            counts[leaf.path] = tuple((s.null_count or 0) if s and s.has_null_count else 0 for s in statistics)
    return counts


def elements_of(name: str, file: File, *, unit: int | None) -> tuple[int, ...]:
    """Returns the elements of a column in each row group: values, including nulls and empty lists, or bytes / `unit`.

    Bytes are counted before Parquet's compression, but after dictionary encoding and the codec's own compression. With
    either, the decoded cells are larger, and the loader counts them when it reads them.
    """
    sizes = next((sizes for path, sizes in file.sizes.items() if parquet_file.leaf_in_column(name, path)), ())
    return tuple(num_values if unit is None else num_bytes // unit for num_values, num_bytes in sizes)


def names_below(fields: Any, prefix: str = "") -> list[str]:
    """Returns the paths of columns and of the fields of structs."""
    names = []
    for field in fields:
        names.append(f"{prefix}{field.name}")
        if pa.types.is_struct(field.type):
            names += names_below(field.type, f"{prefix}{field.name}.")
    return names


def type_at(arrow: pa.Schema, name: str) -> pa.DataType | None:
    """Returns the type of a column, or of a struct's field by its path; None if there is none."""
    if (count := arrow.names.count(name)) > 1:
        raise ValueError(f"found column {name!r} {count} times in one file; write the file again with unique names")
    if count:
        return arrow.field(name).type
    at: Any = arrow
    for part in name.split("."):
        fields = {f.name: f.type for f in at} if at is arrow or pa.types.is_struct(at) else {}
        if part not in fields:
            return None
        at = fields[part]
    return at


def check_in_all(url: str, name: str, has: Mapping[str, bool], *, key: str = "") -> None:
    """Raises ValueError for a column that only some of the files have.

    `has` maps the names of files to whether they have the column; `key` begins the message with the setting that names
    the column.
    """
    there, missing = ([file for file, is_there in has.items() if is_there == wanted] for wanted in (True, False))
    if there and missing:
        raise ValueError(
            f"{key}column {name!r} is in {there[0]} and not in {missing[0]} of {url}; all files of a dataset must have "
            f"the column, or be in folders {name}=..."
        )


def comparable_type(arrow: pa.DataType | None) -> pa.DataType | None:
    """Returns the type that files must have in common.

    Writers give hints of which Arrow type Parquet's type was: nullable or not, with 64-bit offsets, views, dictionaries
    (categories of pandas) or not. Files with other hints have the same values, so the hints do not count.
    """
    types = pa.types
    if arrow is None:
        return None
    if types.is_dictionary(arrow):
        return comparable_type(arrow.value_type)
    if types.is_struct(arrow):
        return pa.struct([pa.field(f.name, comparable_type(f.type)) for f in arrow])
    if types.is_fixed_size_list(arrow):
        return pa.list_(comparable_type(arrow.value_type), arrow.list_size)
    if types.is_list(arrow) or types.is_large_list(arrow):
        return pa.list_(comparable_type(arrow.value_type))
    if types.is_large_string(arrow) or is_view(arrow, "string"):
        return pa.string()
    return pa.binary() if types.is_large_binary(arrow) or is_view(arrow, "binary") else arrow


def is_view(arrow: pa.DataType, of: str) -> bool:
    """Whether a type is `string_view` or `binary_view`, which older versions of pyarrow do not have."""
    return str(arrow) == f"{of}_view"


def without_values(arrow: pa.DataType | None) -> bool:
    """Whether a column has only nulls in a file, whose writer did not know its type."""
    return arrow is not None and pa.types.is_null(arrow)


def filter_rows(shards: ShardSet, config: Config) -> ShardSet:
    """Returns the dataset with only the rows that pass `config.data`; unchanged if all rows pass.

    Called on the driver, which reads at most `loader.memory_mib` at a time. Raises ValueError for a missing column, a
    value that does not fit its column, files whose types differ, a row group that must be read and is larger than
    `loader.memory_mib`, and if no row passes. Raises RuntimeError for a file that is missing, damaged or changed.
    """
    if not leaves_out_rows(shards, config):
        return shards
    data = config.data
    no_nulls, finite = columns_that_drop(shards, config)
    conditions = _conditions_of(shards, data.filters, no_nulls, finite)
    described = _described(data.filters, no_nulls, finite)
    memory = ByteBudget(config.loader.memory_mib << 20)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="spark_dl filters") as readers:
        counted = list(readers.map(lambda shard: _count(shards.url, shard, conditions, memory), shards.shards))
    rows = np.fromiter(itertools.chain.from_iterable(counts for counts, _ in counted), np.int64)
    num_read, stored = sum(num_read for _, num_read in counted), int(shards.shards.group_rows.sum())
    if not rows.any():
        asked = (("data.filters", data.filters), ("data.nulls", no_nulls), ("data.nonfinite", finite))
        keys = ", ".join(key for key, is_set in asked if is_set)
        raise ValueError(f"{keys}: none of the {stored} rows of {shards.url} passes {described}")
    _log.info(
        "%d of %d rows, in %d of %d row groups, pass %s in %s; %d row groups were read to count them",
        rows.sum(), stored, np.count_nonzero(rows), len(rows), described, shards.url, num_read,
    )  # fmt: skip
    return dataclasses.replace(shards, filtered=Filtered(conditions, rows))


def _conditions_of(shards: ShardSet, filters: Sequence[Any], no_nulls: Sequence[str], finite: Sequence[str]) -> AnyOf:
    schema, types = _read_schema(shards), {}
    partitions = [dict(shard.partition) for shard in shards.shards]
    for name in {*(name for alternative in filters for name, _, _ in alternative), *no_nulls, *finite}:
        arrow = type_at(schema, name)
        if all(name in partition for partition in partitions):
            types[name] = _partition_type([partition[name] for partition in partitions])
        elif arrow is not None and not any(name in partition for partition in partitions):
            types[name] = arrow
        else:
            has = {shard.name: name in dict(shard.partition) for shard in shards.shards}
            check_in_all(shards.url, name, has, key="data.filters: ")
            near = suggestion(name, [*schema.names, *partitions[0]])
            raise ValueError(f"data.filters: no column {name!r} in the dataset {shards.url}{near}")
    stored = {
        c.name: c.encoding for c in shards.columns if c.codec == "scalar"
    }  # cells of spark_dl's shards may be encoded
    conditions = typed_conditions(filters, types, stored) if filters else ((),)
    conditions = without_nulls(conditions, {name: types[name] for name in no_nulls})
    return without_nonfinite(conditions, {name: types[name] for name in finite})


def _read_schema(shards: ShardSet) -> pa.Schema:
    path = storage.join(shards.url, shards.shards[0].name)
    try:
        with storage.open_input(path) as source:
            return _open(path, source, shards.shards[0]).schema_arrow
    except OSError as error:
        raise RuntimeError(f"cannot read {path} for data.filters: {error}") from error


def _open(path: str, source: Any, shard: Shard, names: Sequence[str] = ()) -> pq.ParquetFile:
    """Opens a shard. Raises ValueError if its footer is not the recorded one. # source: a pyarrow file"""
    try:
        return parquet_file.open_file(
            source, footer_bytes=shard.footer_bytes, footer_crc32=shard.footer_crc32, dictionary_columns=names
        )
    except (pa.ArrowException, ValueError, OSError) as error:
        raise RuntimeError(f"cannot read the footer of {path} for data.filters: {error}") from error


def _partition_type(values: Sequence[str]) -> pa.DataType:
    """Returns integers if all values are integers; otherwise strings."""
    try:
        pa.array([v for v in values if v != NULL_PARTITION], pa.string()).cast(pa.int64())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int64()


def _count(url: str, shard: Shard, conditions: AnyOf, memory: ByteBudget) -> tuple[list[int], int]:
    """Returns the rows of each row group of a shard that pass, and how many row groups were read to count them."""
    left = of_partition(conditions, shard.partition)
    if left in ((), ((),)):
        return [rows if left else 0 for rows in shard.row_groups], 0
    path = storage.join(url, shard.name)
    try:
        with storage.open_input(path) as source:
            file = _open(path, source, shard, columns_of(left))
            _check_file(path, file, shard, left)
            indexed = IndexedFile(source, file, dictionary_columns=columns_of(left))
            counts = [
                _count_row_group(path, file, indexed, group, left, memory) for group in range(len(shard.row_groups))
            ]
    except (pa.ArrowException, OSError) as error:
        raise RuntimeError(f"cannot read {path} for data.filters: {error}") from error
    return [rows for rows, _ in counts], sum(was_read for _, was_read in counts)


def _check_file(path: str, file: pq.ParquetFile, shard: Shard, conditions: AnyOf) -> None:
    group_rows = tuple(file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    if group_rows != shard.row_groups:
        raise RuntimeError(f"{path} has row groups of {group_rows} rows, expected {shard.row_groups}")
    for condition in itertools.chain.from_iterable(conditions):
        arrow = type_at(file.schema_arrow, condition.column)
        expected, is_same = condition.values.type, comparable_type(arrow) == comparable_type(condition.values.type)
        plain = arrow if arrow is None or not pa.types.is_dictionary(arrow) else arrow.value_type
        if not (is_same or without_values(arrow) or condition.is_of_any_type):
            raise ValueError(
                f"data.filters: column {condition.column!r} has type {plain or 'none'} in {path} and "
                f"{expected} in the first file; read the files with Spark and write them with one schema"
            )


def _count_row_group(
    path: str, file: pq.ParquetFile, indexed: IndexedFile, group: int, conditions: AnyOf, memory: ByteBudget
) -> tuple[int, bool]:
    metadata = file.metadata.row_group(group)
    columns = {metadata.column(i).path_in_schema: i for i in range(metadata.num_columns)}

    def decide(condition: Condition) -> bool | None:
        if (i := columns.get(condition.column)) is not None and not file.schema.column(i).max_repetition_level:
            if isinstance(file, RebasedFile) and may_change(condition.values.type):
                return None  # bounds of the old calendar: the rows decide
            return holds_within(condition, _bounds(metadata.column(i), condition.values.type))
        below = [metadata.column(i) for path, i in columns.items() if path.startswith(f"{condition.column}.")]
        return holds_within(condition, Bounds(has_nulls=not below or any(map(_may_have_nulls, below))))

    left = simplify(conditions, decide)
    if left in ((), ((),)):
        return (metadata.num_rows if left else 0), False
    asked = columns_of(left)
    chunks = [metadata.column(i) for name, i in columns.items() if any(f"{name}.".startswith(f"{a}.") for a in asked)]
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    if size > memory.size:
        raise ValueError(
            f"row group {group} of {path} has {size / 2**20:.0f} MiB in the columns that are read to count its rows; a "
            f"row group is read as a whole, and loader.memory_mib={memory.size >> 20}: raise it, or write the dataset "
            "with smaller row groups (shards.rows_per_row_group)"
        )
    with memory.of(size):
        return int(np.count_nonzero(indexed.read_passing(group, (), left)[1])), True


def _may_have_nulls(chunk: Any) -> bool:
    """Returns whether a column of a row group may have nulls at any depth. Empty lists count as nulls here."""
    statistics = chunk.statistics
    return statistics is None or not statistics.has_null_count or statistics.null_count > 0


def _bounds(chunk: Any, arrow: pa.DataType) -> Bounds:
    """Returns a column's statistics of a row group, from the footer."""
    statistics = chunk.statistics
    if statistics is None:
        return Bounds()
    has_nulls = _may_have_nulls(chunk)
    only_nulls = statistics.has_null_count and statistics.null_count == chunk.num_values
    if not statistics.has_min_max:
        return Bounds(has_nulls=has_nulls, only_nulls=only_nulls)
    try:
        low, high = (pa.scalar(bound, arrow) for bound in (statistics.min, statistics.max))
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError):  # such as nanoseconds, which Python has not:
        return Bounds(has_nulls=has_nulls, only_nulls=only_nulls)  # the rows themselves decide
    return Bounds(low, high, has_nulls, only_nulls)


def _described(filters: Sequence[Any], no_nulls: Sequence[str], finite: Sequence[str]) -> str:
    texts = [" and ".join(f"{name} {op} {value!r}" for name, op, value in alternative) for alternative in filters]
    either = " or ".join(f"({text})" if len(texts) > 1 else text for text in texts)[:500]
    columns = [
        f"{what} in {[*names]!s:.500}" for what, names in (("no null", no_nulls), ("no NaN or Inf", finite)) if names
    ]
    return " and ".join([*([either] if filters else []), *columns])
