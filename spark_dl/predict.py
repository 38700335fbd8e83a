"""Adds the predictions of a trained model to a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from spark_dl.config import Config, Data
from spark_dl.config.checks import suggestion
from spark_dl.config.load import build_config
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.batch import build_batch
from spark_dl.data.columns.policies import clean_batch
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.write import spark_types
from spark_dl.evaluate import load_model
from spark_dl.launch import gpus, payload
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint_files import MODEL
from spark_dl.spec import ModelSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

_ROWS_AT_ONCE = 1024


def predict(
    df: DataFrame, spec: ModelSpec, checkpoint_url: str | os.PathLike[str], config: Config | None = None
) -> DataFrame:
    """Adds the columns of `spec.predict` to a DataFrame. Lazy. Called on the driver.

    Rows keep their partition and order. Each task loads the model once, and uses the GPU that Spark assigned to it, if
    any. One value per row becomes a scalar column; more values become (nested) arrays.

    Nulls, NaN and Inf in features are filled or allowed as in `config`, by default the settings of training. All others
    fail the job, even if training dropped their rows: drop them in the DataFrame.
    Raises ValueError for a missing feature, a checkpoint of another model, or a column name that exists already.
    """
    saved = checkpoint.find(checkpoint_url, names=(MODEL,))
    config = config or build_config(saved.manifest["config"])
    columns = _trained_columns(saved, config)
    if config.sequences is not None:
        raise ValueError(
            f"predict: the model reads sequences (sequences.length={config.sequences.length}), found rows of a "
            "DataFrame; call the model of TrainResult.load_model on your own sequences"
        )
    sources = _trained_sources(df.schema, columns, config)
    added = _added_fields(spec, saved, columns, config)
    if taken := [name for name in added if name in df.columns]:
        raise ValueError(
            f"the DataFrame already has a column {taken[0]!r}, which spec.predict returns; rename one of them"
        )
    from pyspark.sql.types import StructType

    out = StructType(list(df.schema.fields))
    for name, data_type in added.items():
        out = out.add(name, data_type)
    sent = {
        "spec": spec,
        "url": saved.url,
        "sha256": saved.sha256,
        "sources": sources,
        "columns": columns,
        "config": config,
    }
    packed = payload.pack_call(_predict_batches, (), sent)

    def run_predict(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        fn, args, kwargs = payload.unpack_call(packed)
        yield from fn(batches, *args, **kwargs)

    return df.mapInArrow(run_predict, out)


def _trained_columns(saved: checkpoint.Saved, config: Config) -> list[Column]:
    """Returns the feature columns of training, in the order of `config`."""
    trained = {c.name: c for c in saved.columns}
    for name in config.data.features:
        if name not in trained:
            raise ValueError(
                f"data.features: the checkpoint {saved.url} has no column {name!r}, its columns are {list(trained)}"
                f"{suggestion(name, list(trained))}"
            )
    return [trained[name] for name in config.data.features]


def _added_fields(spec: ModelSpec, saved: checkpoint.Saved, columns: list[Column], config: Config) -> dict[str, Any]:
    """Returns names and Spark types of the new columns, by calling the model on the driver with two rows of zeros."""
    from pyspark.sql.pandas.types import from_arrow_type

    model = load_model(spec, saved.url, sha256=saved.sha256)
    outputs = _outputs(spec, model, columns, [_two_rows_of_zeros(c) for c in columns], config, "cpu")
    return {name: from_arrow_type(_to_arrow(value).type) for name, value in outputs.items()}


def _predict_batches(
    batches: Iterator[pa.RecordBatch],
    spec: ModelSpec,
    url: str,
    sha256: str,
    sources: tuple[SourceColumn, ...],
    columns: list[Column],
    config: Config,
) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    device = gpus.first(gpus.gpus_of_task("auto", context.resources()))
    model = load_model(spec, url, sha256=sha256).to(device)
    rows = 0
    for big in batches:
        for start in range(0, big.num_rows, _ROWS_AT_ONCE):
            batch = big.slice(start, _ROWS_AT_ONCE)
            try:
                features = _features(sources, columns, batch, config.data)
            except BadCellsError as error:
                at = f"first in partition {context.partitionId()}, row {rows + error.row}"
                raise ValueError(f"{error}; {at}") from error
            rows += batch.num_rows
            outputs = _outputs(spec, model, columns, features, config, device)
            added = {name: _to_arrow(value) for name, value in outputs.items()}
            arrays = [*batch.columns, *added.values()]
            yield pa.RecordBatch.from_arrays(arrays, names=[*batch.schema.names, *added])


def _trained_sources(fields: StructType, columns: list[Column], config: Config) -> tuple[SourceColumn, ...]:
    """Returns the features of the DataFrame with the vocabularies of the training dataset."""
    names = [c.name for c in columns]
    encode = {name: settings for name, settings in config.data.encode.items() if name in names}
    fill = {name: value for name, value in config.data.fill.items() if name in names}
    sources = spark_types.source_columns(fields, names, encode, fill)
    for found, column in zip(sources, columns, strict=True):
        expected = replace(column.encoding, vocabulary=found.encoding.vocabulary)
        if found.encoding != expected:
            raise ValueError(
                f"column {column.name!r}: found the encoding {found.encoding}, the model was trained on {expected}"
            )
    return tuple(replace(s, encoding=c.encoding) for s, c in zip(sources, columns, strict=True))


def _two_rows_of_zeros(column: Column) -> Array | Ragged:
    if column.is_ragged:
        return from_lengths(np.zeros((2, *column.inner), dtype=column.dtype), np.ones(2, dtype=np.int64))
    return np.zeros((2, *column.inner), dtype=column.dtype)


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


def _outputs(
    spec: ModelSpec, model: Any, columns: list[Column], cells: Sequence[Array | Ragged], config: Config, device: Any
) -> dict[str, torch.Tensor]:
    """Computes the new columns of a batch. # each (rows, ...)"""
    batch = spec.prepare(build_batch(columns, cells, config.loader.ragged))
    with torch.inference_mode():
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        output = spec.output(model, on_device, config.data.features)
        added = dict(spec.predict(output)) if spec.predict else {"prediction": output}
    for name, value in added.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != len(cells[0]):
            raise ValueError(f"spec.predict: column {name!r} must be a tensor with one entry per row")
    return added


def _to_arrow(value: torch.Tensor) -> pa.Array:
    """Converts a tensor to a column: [rows] to scalars, [rows, n] to arrays, [rows, n, m] to arrays of arrays."""
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()
    array = pa.array(value.detach().cpu().contiguous().reshape(-1).numpy())
    lengths = value.shape
    for axis in range(len(lengths) - 1, 0, -1):
        count = int(np.prod(lengths[:axis]))
        array = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * lengths[axis], array)
    return array
