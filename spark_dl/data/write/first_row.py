"""The columns of a DataFrame whose rows are not written: their types, and shapes from its first row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from spark_dl.config import Data
from spark_dl.data.columns import schema
from spark_dl.data.columns.policies import clean_batch
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.write import spark_types
from spark_dl.data.write.vocabulary import NO_ROWS, expression
from spark_dl.spark_job import collect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
    found = json.loads(rows[0]["shapes"])
    return tuple(schema.stored_column(c, tuple(shape)) for c, shape in zip(sources, found, strict=True))


def _shapes_of(sources: tuple[SourceColumn, ...], batch: pa.RecordBatch, data: Data) -> list[list[int | None]]:
    cells, _ = clean_batch(sources, batch.columns, data, may_drop=False)
    return [
        list(schema.cell_shape(schema.codec_of(c), of_column, c.encoding))
        for c, of_column in zip(sources, cells, strict=True)
    ]
