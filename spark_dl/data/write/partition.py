"""Writes one partition of a DataFrame as shards, and combines the columns of all partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from spark_dl.config import Data, Shards
from spark_dl.data.columns import schema
from spark_dl.data.columns.policies import Changes, add_changes, clean_batch
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.dataset.manifest import shard_from_plain
from spark_dl.data.dataset.records import Shard
from spark_dl.data.write.vocabulary import NO_ROWS
from spark_dl.data.write.writer import ShardWriter, rows_per_file


@dataclass(frozen=True)
class PartitionResult:
    """The shards that one task wrote, or the error that kept it from writing."""

    partition: int
    shapes: tuple[tuple[int | None, ...] | None, ...] = ()
    """Shape of the cells of each column; None (unknown) if all rows of a ragged column are empty."""
    sizes: tuple[int, ...] = ()
    """Number of elements of each column."""
    shards: tuple[Shard, ...] = ()
    changes: Changes = field(default_factory=Changes)
    error: str = ""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> PartitionResult:
        """Restores a result from `dataclasses.asdict` after a JSON round trip."""
        shapes = tuple(None if n is None else tuple(n) for n in plain["shapes"])
        shards, changes = tuple(shard_from_plain(s) for s in plain["shards"]), Changes(**plain["changes"])
        return cls(plain["partition"], shapes, tuple(plain["sizes"]), shards, changes, plain["error"])


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
    """Writes the rows of a task as shards whose names begin with `name`. Consumes its input to the end.

    Errors in the rows are returned in the result, with the row; OSError of the storage is raised.
    """
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
        for _ in batches:  # Spark reuses the Python process only if its input is consumed
            pass
        at = f"; first in partition {partition}, row {rows + error.row}" if isinstance(error, BadCellsError) else ""
        return PartitionResult(partition, error=f"{error}{at}")


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
            raise ValueError(schema.empty_first_cell(column.name, f"partition {partition}"))
        columns.append(schema.stored_column(column, shape))
    return ShardWriter(url, prefix, tuple(columns), *rows_per_file(columns, layout))


def agreed_columns(sources: Sequence[SourceColumn], parts: Sequence[PartitionResult]) -> tuple[Column, ...]:
    """The columns of a dataset from the results of all partitions, in their order.

    Raises ValueError for an error in a partition, for cells of unequal shape between partitions, and if there are no
    rows.
    """
    if errors := [p.error for p in parts if p.error]:
        more = f" (and in {len(errors) - 1} more partitions)" if len(errors) > 1 else ""
        raise ValueError(errors[0] + more)
    filled = [p for p in parts if p.shards]
    if not filled:
        changes = add_changes(p.changes for p in parts)
        dropped = (
            f": {changes.dropped_rows} were dropped for nulls, NaN, Inf or bad images" if changes.dropped_rows else ""
        )
        raise ValueError(f"{NO_ROWS}{dropped}; training needs at least one")
    columns = []
    for i, column in enumerate(sources):
        shapes = [(p.partition, shape) for p in filled if (shape := p.shapes[i]) is not None]
        empty = (None, *[0] * (column.depth - 1))  # a ragged column without any value
        first, shape = shapes[0] if shapes else (0, empty)
        for partition, other in shapes[1:]:
            if other != shape:
                hint = "" if column.ragged else f", or set data.encode.{column.name}: {{ragged: true}}"
                raise ValueError(
                    f"column {column.name!r}: cells have shape {shape} in partition {first} and {other} in partition "
                    f"{partition}; all cells of a column must have one shape{hint if column.kind == 'array' else ''}"
                )
        columns.append(schema.stored_column(column, shape))
    return tuple(columns)


def with_sizes(columns: Sequence[Column], parts: Sequence[PartitionResult]) -> tuple[Column, ...]:
    """The columns with the mean sizes of all cells, which replace the estimate from the first rows."""
    rows = sum(s.rows for p in parts for s in p.shards)
    means = [sum(p.sizes[i] for p in parts if p.sizes) / rows for i in range(len(columns))]
    return tuple(
        replace(c, mean_size=mean) if c.is_ragged or c.codec == "image" else c
        for c, mean in zip(columns, means, strict=True)
    )
