"""Predictions of Arrow batches: from the columns of a DataFrame to features, and from tensors to columns."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from spark_dl.config import Data
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.policies import clean_batch
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.write import spark_types
from spark_dl.data.write.vocabulary import expression
from spark_dl.launch.code import payload
from spark_dl.launch.rank import gpus
from spark_dl.scoring.scorer import Scorer, loaded_model
from spark_dl.spark_job import collect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_log = logging.getLogger("spark_dl")
_DECODED_BYTES = 64 << 20
"""Bytes of the features of the rows that are decoded at once."""
_TRIED_ROWS = 1000
"""Rows of which the first two that training would keep tell what the model returns."""

_ROW = "row of the batch"


class OtherShapeError(ValueError):
    """Cells of another shape than the model was trained on."""


Outputs = dict[str, Tensor | Ragged]
"""New columns by name, each (rows, ...)."""


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
    for source, column in zip(sources, columns, strict=True):
        expected = replace(column.encoding, vocabulary=source.encoding.vocabulary)
        if "orientation" not in encode.get(column.name, {}):  # of a model from before there was this setting
            expected = replace(expected, orientation=source.encoding.orientation)
        if not source.encoding.fits(expected):
            raise ValueError(
                f"column {column.name!r}: found the encoding {source.encoding}, the model was trained on {expected}"
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

    @property
    def decoders(self) -> int:
        """Threads that decode the next rows while a GPU computes. On a CPU the tasks use all cores already."""
        return 0 if self.device.type == "cpu" else int(self.context.cpus())

    def arrays(self, cells: Sequence[Array | Ragged]) -> dict[str, pa.Array]:
        """Computes the new columns of some rows, by name. # cells: of each feature, (rows, *cell)"""
        columns = {name: to_arrow(v) for name, v in self.scorer.outputs(self.model, cells, self.device).items()}
        return _as_declared(columns, declared_fields(self.scorer)) if self.scorer.output_schema else columns


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
    from pyspark.sql.pandas.types import to_arrow_type

    scorer, context, has_said = opened.scorer, opened.context, False
    at_once = max(1, _DECODED_BYTES // max(1, sum(column.value_bytes for column in scorer.columns)))
    at_once = -(-at_once // max(1, opened.decoders))
    rows = 0

    def score(batch: pa.RecordBatch) -> dict[str, pa.Array]:
        nonlocal rows
        starts = range(0, max(1, batch.num_rows), at_once)
        some = [(rows + start, batch.slice(start, at_once)) for start in starts]
        rows += batch.num_rows
        compute = score_good if scorer.on_bad_rows == "null" else score_all
        decoded = _ahead(decode, some, opened.decoders)
        pieces = [compute(*piece, cells) for piece, cells in zip(some, decoded, strict=True)]
        if len(pieces) == 1:
            return pieces[0]
        return {name: pa.concat_arrays([piece[name] for piece in pieces]) for name in pieces[0]}

    def decode(first: int, batch: pa.RecordBatch) -> Any:
        if scorer.on_bad_rows == "null":
            return _good_rows(sources, scorer.columns, batch, scorer.config.data)
        try:
            return _features(sources, scorer.columns, batch, scorer.config.data)
        except BadCellsError as error:
            at = f"first in partition {context.partitionId()}, row {first + error.row}"
            raise ValueError(f"{error}; {at}") from error

    def score_all(first: int, batch: pa.RecordBatch, cells: list[Array | Ragged]) -> dict[str, pa.Array]:
        return opened.arrays(cells)

    def score_good(first: int, batch: pa.RecordBatch, found: list[_GoodRows]) -> dict[str, pa.Array]:
        nonlocal has_said
        parts = [part for part in found if len(part.rows)]
        arrays = [opened.arrays(part.cells) for part in parts]
        good = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)])
        if len(good) < batch.num_rows and not has_said:
            first += int(np.setdiff1d(np.arange(batch.num_rows), good)[0])
            why = next((part.why for part in parts if part.why), "")
            _log.warning("partition %d, row %d: the predictions are null; %s", context.partitionId(), first, why)
            has_said = True
        places = np.full(batch.num_rows, -1)
        places[good] = np.arange(len(good))
        indices = pa.array(places, mask=places < 0)
        empty = {name: pa.nulls(0, to_arrow_type(kind)) for name, kind in declared_fields(scorer).items()}
        return {
            name: pa.concat_arrays([none, *(part[name] for part in arrays)]).take(indices)
            for name, none in empty.items()
        }

    return score


def _ahead(
    decode: Callable[[int, pa.RecordBatch], Any], pieces: Sequence[tuple[int, pa.RecordBatch]], threads: int
) -> Iterator[Any]:
    """Yields what a function returns for each piece, in order; at most `threads` pieces are decoded ahead."""
    if threads == 0 or len(pieces) == 1:
        yield from (decode(*piece) for piece in pieces)
        return
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(threads, "spark_dl decode") as pool:
        for piece in pieces:
            waiting.append(pool.submit(decode, *piece))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@dataclass(frozen=True)
class _GoodRows:
    """Rows of a batch that can be features of the model."""

    rows: npt.NDArray[np.int64]
    cells: list[Array | Ragged]
    """Of each feature, (rows, *cell)."""
    why: str = ""
    """Why the next row cannot; empty if it is only null, NaN or Inf."""


def _good_rows(
    sources: Sequence[SourceColumn], columns: Sequence[Column], batch: pa.RecordBatch, data: Data
) -> list[_GoodRows]:
    """Returns the rows of a batch that can be features, in order.

    Rows with null, NaN or Inf are left out at once. The halves of a batch with another bad cell are tried on their own.
    """
    lenient = replace(
        data,
        nulls="drop" if data.nulls == "error" else data.nulls,
        nonfinite="drop" if data.nonfinite == "error" else data.nonfinite,
    )
    number = SourceColumn(_ROW, "int64", "scalar", path=(_ROW,))

    def find(start: int, stop: int) -> list[_GoodRows]:
        piece = batch.slice(start, stop - start)
        arrays = [*_stored(sources, piece), pa.array(np.arange(start, stop))]
        try:
            values, _ = clean_batch([*sources, number], arrays, lenient, may_drop=True)
            *cells, rows = values
            found = [_as_trained(column, cell) for column, cell in zip(columns, cells, strict=True)]
            return [_GoodRows(np.asarray(rows), found)]
        except (BadCellsError, OtherShapeError) as error:
            if stop - start == 1:
                return [_GoodRows(np.zeros(0, np.int64), [], str(error))]
            middle = (start + stop) // 2
            return [*find(start, middle), *find(middle, stop)]

    return find(0, batch.num_rows)


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


def trial(scorer: Scorer, of_first_rows: Callable[[], Outputs] | None = None) -> Outputs:
    """Returns new columns of the types and shapes that the model computes. Called on the driver.

    The model gets two rows of zeros there. Some functions do not take zeros, such as an embedding of years, or one that
    decodes files; they get the first rows.

    Args:
        of_first_rows: computes the columns of the first rows; None if there are no rows yet. Raises ValueError without
            it.
    """
    model = scorer.load()
    try:
        return scorer.outputs_of_zeros(model)
    except Exception as error:
        if str(error).startswith("spec.predict: "):
            raise
        if of_first_rows is None:
            raise ValueError(
                "the types of the columns that the model adds are not known: it was tried on two rows of zeros, and "
                f"failed ({type(error).__name__}: {error}); declare them, output_schema='prediction float', or pass "
                "rows that are there, data=..."
            ) from error
        _log.info("the model does not take rows of zeros (%s); the first rows tell what it returns", error)
    return of_first_rows()


def first_outputs(df: DataFrame, scorer: Scorer) -> Callable[[], Outputs] | None:
    """Returns what computes new columns like those of the first rows of a DataFrame; None for a stream."""
    return None if df.isStreaming else lambda: _outputs_of_first_rows(df, scorer)


def _outputs_of_first_rows(df: DataFrame, scorer: Scorer) -> Outputs:
    sources, packed = trained_sources(df.schema, scorer), pack(scorer)
    first = df.select(*(expression(source).alias(f"c{i}") for i, source in enumerate(sources))).limit(_TRIED_ROWS)

    def describe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            opened = open_scorer(packed)
            data = opened.scorer.config.data
            cells = _trained_cells(sources, opened.scorer.columns, batch.columns, data, may_drop=True)
            if len(cells[0]):
                cells = [of_column[:2] for of_column in cells]
                outputs = opened.scorer.outputs(opened.model, cells, opened.device)
                yield pa.RecordBatch.from_pydict({"outputs": [json.dumps({k: _kind(v) for k, v in outputs.items()})]})

    rows = collect(first.mapInArrow(describe, "outputs string"), "spark_dl: predicting the first rows")
    if not rows:
        raise ValueError(
            "the model does not take rows of zeros, and there are no rows to try it on, so that the types of the "
            "columns that it adds are not known; declare them, output_schema='prediction float'"
        )
    return {name: _zeros(*kind) for name, kind in json.loads(rows[0]["outputs"]).items()}


def _kind(value: Tensor | Ragged) -> tuple[str, list[int], bool]:
    """Returns the dtype of a column, the shape of a cell without a varying axis, and whether there is one."""
    if isinstance(value, Ragged):
        return str(value.own_values.dtype), [*value.inner], True
    return str(value.dtype).removeprefix("torch."), [*value.shape[1:]], False


def _zeros(dtype: str, shape: Sequence[int], is_ragged: bool) -> Tensor | Ragged:
    if is_ragged:
        return from_lengths(np.zeros((2, *shape), dtype), np.ones(2, dtype=np.int64))
    return torch.zeros((2, *shape), dtype=getattr(torch, dtype))


def added_fields(scorer: Scorer, of_first_rows: Callable[[], Outputs] | None = None) -> dict[str, Any]:
    """Returns the names and Spark types of the new columns. Called on the driver. # of_first_rows: as for `trial`"""
    from pyspark.sql.pandas.types import from_arrow_type

    if scorer.output_schema:
        return declared_fields(scorer)
    return {name: from_arrow_type(to_arrow(value).type) for name, value in trial(scorer, of_first_rows).items()}


def as_struct(added: Mapping[str, DataType]) -> StructType:
    """Returns new columns, by name, as a struct."""
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(name, kind) for name, kind in added.items()])


def with_declared(scorer: Scorer, output_schema: StructType | str | None) -> Scorer:
    """Returns the scorer with the new columns as the caller declared them, in Spark's words or as a StructType.

    Called on the driver. Raises ValueError for another value, and for a type that Arrow does not have.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType, _parse_datatype_string

    if output_schema is None:
        return scorer
    try:
        declared = _parse_datatype_string(output_schema) if isinstance(output_schema, str) else output_schema
        if not isinstance(declared, StructType) or not declared.fields:
            raise TypeError(f"a {type(declared).__name__}")
        to_arrow_schema(declared)
    except Exception as error:  # PySpark's
        words = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"output_schema: expected the new columns, such as 'prediction float, scores array<float>', found "
            f"{output_schema!r} ({words})"
        ) from None
    return replace(scorer, output_schema=declared.json())


def declared_fields(scorer: Scorer) -> dict[str, Any]:
    """Returns the names and Spark types of the new columns, as they were declared."""
    from pyspark.sql.types import StructType

    return {field.name: field.dataType for field in StructType.fromJson(json.loads(scorer.output_schema))}


def _as_declared(found: Mapping[str, pa.Array], declared: Mapping[str, DataType]) -> dict[str, pa.Array]:
    """Returns the new columns with the declared types. Raises ValueError for others. Called in a task."""
    from pyspark.sql.pandas.types import to_arrow_type

    if found.keys() != declared.keys():
        raise ValueError(
            f"output_schema: expected the columns {list(found)} that the model adds, found {list(declared)}"
        )
    try:
        return {name: found[name].cast(to_arrow_type(kind)) for name, kind in declared.items()}
    except pa.ArrowException as error:
        types = ", ".join(f"{name} {array.type}" for name, array in found.items())
        raise ValueError(
            f"output_schema: the model adds {types}, which does not fit what was declared ({error})"
        ) from error


def _features(
    sources: Sequence[SourceColumn], columns: Sequence[Column], batch: pa.RecordBatch, data: Data
) -> list[Array | Ragged]:
    """Returns the features as in training. # each (rows, *cell)

    Raises BadCellsError for nulls, NaN and Inf that are not filled or allowed, and for other invalid cells.
    """
    return _trained_cells(sources, columns, _stored(sources, batch), data, may_drop=False)


def _stored(sources: Sequence[SourceColumn], batch: pa.RecordBatch) -> list[pa.Array]:
    """Returns the columns of a batch that are read, or their fields."""
    columns = [batch.column(batch.schema.get_field_index(s.path[0])) for s in sources]
    return [pc.struct_field(a, list(s.path[1:])) if s.path[1:] else a for s, a in zip(sources, columns, strict=True)]


def _trained_cells(
    sources: Sequence[SourceColumn],
    columns: Sequence[Column],
    arrays: Sequence[pa.Array],
    data: Data,
    *,
    may_drop: bool,
) -> list[Array | Ragged]:
    values, _ = clean_batch(sources, arrays, data, may_drop=may_drop)
    return [_as_trained(column, cells) for column, cells in zip(columns, values, strict=True)]


def _as_trained(column: Column, values: Array | Ragged) -> Array | Ragged:
    if column.codec == "image":
        values = cell_codec.decode(column, cell_codec.encode(column, values))
    if isinstance(values, Ragged):
        return values
    if values.shape[1:] != column.shape:
        raise OtherShapeError(
            f"column {column.name!r}: found cells of shape {values.shape[1:]}, the model was trained on {column.shape}"
        )
    return np.array(values, dtype=column.dtype, order="C")
