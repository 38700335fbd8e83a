"""Predictions of Arrow batches: from the columns of a DataFrame to features, and from tensors to columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from spark_dl.config import Data
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.policies import clean_batch
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.write import spark_types
from spark_dl.launch import gpus
from spark_dl.launch.code import payload
from spark_dl.scoring.scorer import Scorer, loaded_model

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


_DECODED_BYTES = 64 << 20
"""Bytes of the features of the rows that are decoded at once."""


def pack(scorer: Scorer) -> bytes:
    """Pickles a scorer for tasks. Called on the driver. Raises ValueError for functions that cannot be pickled."""
    return payload.pack_call(None, (), {"scorer": scorer})


def trained_sources(fields: StructType, scorer: Scorer) -> tuple[SourceColumn, ...]:
    """Returns the features of a DataFrame with the vocabularies of the training dataset. Called on the driver.

    Raises ValueError for a missing column, and for a type or an encoding other than in training.
    """
    columns, data = scorer.columns, scorer.config.data
    names = [c.name for c in columns]
    encode = {name: settings for name, settings in data.encode.items() if name in names}
    fill = {name: value for name, value in data.fill.items() if name in names}
    sources = spark_types.source_columns(fields, names, encode, fill)
    for found, column in zip(sources, columns, strict=True):
        expected = replace(column.encoding, vocabulary=found.encoding.vocabulary)
        if "orientation" not in encode.get(column.name, {}):  # of a model from before there was this setting
            expected = replace(expected, orientation=found.encoding.orientation)
        if found.encoding != expected:
            raise ValueError(
                f"column {column.name!r}: found the encoding {found.encoding}, the model was trained on {expected}"
            )
    return tuple(replace(s, encoding=c.encoding) for s, c in zip(sources, columns, strict=True))


@dataclass(frozen=True)
class OpenScorer:
    """A scorer in a task, with its model on the device of the task."""

    scorer: Scorer
    model: nn.Module
    device: torch.device
    context: Any
    """Spark's TaskContext."""

    def arrays(self, cells: Sequence[Array | Ragged]) -> dict[str, pa.Array]:
        """Computes the new columns of some rows, by name. # cells: of each feature, (rows, *cell)"""
        return {name: to_arrow(v) for name, v in self.scorer.outputs(self.model, cells, self.device).items()}


def open_scorer(packed: bytes) -> OpenScorer:
    """Opens a scorer of `pack`. Called in a task. The model stays loaded for later tasks of the Python worker."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    _, _, sent = payload.unpack_call(packed)
    device = gpus.first(gpus.gpus_of_task("auto", context.resources()))
    return OpenScorer(**sent, model=loaded_model(sent["scorer"], packed, device), device=device, context=context)


def batch_scorer(
    opened: OpenScorer, sources: Sequence[SourceColumn]
) -> Callable[[pa.RecordBatch], dict[str, pa.Array]]:
    """Returns a function that computes the new columns of a batch of rows, by name. Called in a task.

    The rows are decoded in pieces of bounded size: Spark's batch of 10,000 small files can be gigabytes of pixels.
    """
    scorer, context = opened.scorer, opened.context
    at_once = max(1, _DECODED_BYTES // max(1, sum(column.value_bytes for column in scorer.columns)))
    rows = 0

    def score(batch: pa.RecordBatch) -> dict[str, pa.Array]:
        pieces = [score_piece(batch.slice(start, at_once)) for start in range(0, max(1, batch.num_rows), at_once)]
        if len(pieces) == 1:
            return pieces[0]
        return {name: pa.concat_arrays([piece[name] for piece in pieces]) for name in pieces[0]}

    def score_piece(batch: pa.RecordBatch) -> dict[str, pa.Array]:
        nonlocal rows
        try:
            cells = _features(sources, scorer.columns, batch, scorer.config.data)
        except BadCellsError as error:
            at = f"first in partition {context.partitionId()}, row {rows + error.row}"
            raise ValueError(f"{error}; {at}") from error
        rows += batch.num_rows
        return opened.arrays(cells)

    return score


def to_arrow(value: Tensor | Ragged) -> pa.Array:
    """Converts a tensor to a column: [rows] to scalars, [rows, n] to arrays, [rows, n, m] to arrays of arrays.

    Rows of different lengths become arrays.
    """
    if isinstance(value, Ragged):
        inner = to_arrow(torch.from_numpy(np.ascontiguousarray(value.own_values)))
        offsets = value.offsets - value.offsets[0]
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner)
    array = pa.array(value.detach().cpu().contiguous().reshape(-1).numpy())
    lengths = value.shape
    for axis in range(len(lengths) - 1, 0, -1):
        count = int(np.prod(lengths[:axis]))
        array = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * lengths[axis], array)
    return array


def added_fields(scorer: Scorer) -> dict[str, Any]:
    """Returns the names and Spark types of the new columns. Called on the driver; computes two rows there."""
    from pyspark.sql.pandas.types import from_arrow_type

    return {name: from_arrow_type(to_arrow(value).type) for name, value in scorer.trial().items()}


def _features(
    sources: Sequence[SourceColumn], columns: Sequence[Column], batch: pa.RecordBatch, data: Data
) -> list[Array | Ragged]:
    """Returns the features as in training. # each (rows, *cell)

    Raises BadCellsError for nulls, NaN and Inf that are not filled or allowed, and for other invalid cells.
    """
    stored = [batch.column(batch.schema.get_field_index(s.path[0])) for s in sources]
    found = [pc.struct_field(a, list(s.path[1:])) if s.path[1:] else a for s, a in zip(sources, stored, strict=True)]
    values, _ = clean_batch(sources, found, data, may_drop=False)
    return [_as_trained(column, cells) for column, cells in zip(columns, values, strict=True)]


def _as_trained(column: Column, values: Array | Ragged) -> Array | Ragged:
    if column.codec == "image":
        values = cell_codec.decode(column, cell_codec.encode(column, values))
    if isinstance(values, Ragged):
        return values
    if values.shape[1:] != column.shape:
        raise ValueError(
            f"column {column.name!r}: found cells of shape {values.shape[1:]}, the model was trained on {column.shape}"
        )
    return np.array(values, dtype=column.dtype, order="C")
