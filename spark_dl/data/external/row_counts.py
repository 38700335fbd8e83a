"""Counts the rows of each row group that pass `data.filters`, and `drop` of `data.nulls` and `data.nonfinite`.

Called on the driver: the plan needs these counts before the first row is read. Hive partitions and Parquet's statistics
decide most row groups. Statistics do not say whether numbers are finite. For the other row groups, only the columns of
undecided conditions are read.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.dataset.shard_table import Shard
from spark_dl.data.external.files import check_in_all, comparable_type, type_at, without_values
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet.byte_budget import ByteBudget
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

_log = logging.getLogger("spark_dl")
_READERS = 16


def leaves_out_rows(shards: ShardSet, config: Config) -> bool:
    """Returns whether some rows of a dataset may be skipped, so that its rows must be counted first."""
    return bool(config.data.filters or any(_columns_that_drop(shards, config)))


def filter_rows(shards: ShardSet, config: Config) -> ShardSet:
    """Returns the dataset with only the rows that pass `config.data`; unchanged if all rows pass.

    Called on the driver, which reads at most `loader.memory_mib` at a time. Raises ValueError for a missing column, a
    value that does not fit its column, files whose types differ, a row group that must be read and is larger than
    `loader.memory_mib`, and if no row passes. Raises RuntimeError for a file that is missing, damaged or changed.
    """
    if not leaves_out_rows(shards, config):
        return shards
    data = config.data
    no_nulls, finite = _columns_that_drop(shards, config)
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


def _columns_that_drop(shards: ShardSet, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the columns in which a null drops its row, also inside an array, and those in which NaN or Inf does.

    For external datasets only: spark_dl drops such rows when it writes shards.
    """
    no_nulls: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    if shards.external and config.data.nulls == "drop":
        no_nulls = config.stored_columns
    if shards.external and config.data.nonfinite == "drop":
        finite = tuple(c.name for c in shards.select(config.stored_columns) if np.dtype(c.dtype).kind in "fc")
    return no_nulls, finite


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
            found = [
                _count_row_group(path, file, indexed, group, left, memory) for group in range(len(shard.row_groups))
            ]
    except (pa.ArrowException, OSError) as error:
        raise RuntimeError(f"cannot read {path} for data.filters: {error}") from error
    return [rows for rows, _ in found], sum(was_read for _, was_read in found)


def _check_file(path: str, file: pq.ParquetFile, shard: Shard, conditions: AnyOf) -> None:
    found = tuple(file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    if found != shard.row_groups:
        raise RuntimeError(f"{path} has row groups of {found} rows, expected {shard.row_groups}")
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
