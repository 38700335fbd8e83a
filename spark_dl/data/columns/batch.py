"""Batches: the rows of a step as dicts of tensors, one for each micro-batch.

Cells get the dtypes of `data.cast` and the weights of `data.weight`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spark_dl.config import Data
from spark_dl.data.columns.ragged import (
    Array,
    Ragged,
    concatenate,
    from_lengths,
    lengths_of,
    pad,
    padded_bytes,
    padded_length,
    take_rows,
)
from spark_dl.data.columns.schema import Column
from spark_dl.spec import NumberedBatch

_MIB = 1 << 20
WEIGHT_BYTES, _OFFSET_BYTES = 4, 8

Batch = dict[str, Tensor]
Prepare = Callable[[Batch, Sequence[Any]], Mapping[str, Tensor]]
"""(batch, `BatchKey`) -> the batch for the model."""


def cast_columns(columns: Sequence[Column], cast: Mapping[str, str]) -> tuple[Column, ...]:
    """Returns the columns as they are in a batch, with the dtypes of `data.cast`."""
    return tuple(dataclasses.replace(c, dtype=cast.get(c.name, c.dtype)) for c in columns)


def check_assembled(columns: Sequence[Column], data: Data) -> None:
    """Raises ValueError for a feature of varying length with `data.assemble`. # columns: the features, and others"""
    for column in columns if data.assemble is not None else ():
        if column.name in data.features and column.is_ragged:
            raise ValueError(
                f"data.assemble: column {column.name!r} has arrays of varying length, expected numbers, or arrays of "
                "one length; leave it out of data.features, or set data.assemble to null"
            )


def cast_cells(name: str, cells: Array | Ragged, dtype: str) -> Array | Ragged:
    """Returns cells in another dtype; the same cells if they have it already.

    Numbers are rounded to the nearest value of a floating-point dtype. Raises ValueError for a number that is too large
    for the dtype, for a fraction or NaN where the dtype is an integer or bool, and for different integers, such as ids
    or times, that are equal in a floating-point dtype.
    """
    values: Any = cells.values if isinstance(cells, Ragged) else cells
    if str(values.dtype) == dtype:
        return cells
    with np.errstate(all="ignore"):
        converted = values.astype(dtype)
        is_same = np.isfinite(converted) == np.isfinite(values) if converted.dtype.kind == "f" else converted == values
    if not is_same.all():
        raise ValueError(
            f"column {name!r}: found the value {values[~is_same][0]} of {values.dtype}, expected values that "
            f"{dtype} can hold (data.cast.{name}); choose another dtype, or change the values"
        )
    if converted.dtype.kind == "f" and values.dtype.kind in "iu":
        _check_different(name, values.reshape(-1), converted.reshape(-1))
    return Ragged(converted, cells.offsets) if isinstance(cells, Ragged) else converted


def _check_different(name: str, values: Array, found: Array) -> None:
    """Raises ValueError for integers that are different in `values` # (n,) and equal in `found` # (n,)"""
    whole = 2 ** (np.finfo(found.dtype).nmant + 1)  # up to which each integer is a value of the dtype
    if values.size == 0 or max(abs(int(values.max())), abs(int(values.min()))) <= whole:
        return
    order = np.argsort(values)
    ordered, rounded = values[order], found[order]
    same = (rounded[1:] == rounded[:-1]) & (ordered[1:] != ordered[:-1])
    if same.any():
        at = int(np.argmax(same))
        raise ValueError(
            f"column {name!r}: found the values {ordered[at]} and {ordered[at + 1]}, which are both {rounded[at]} in "
            f"{found.dtype} (data.cast.{name}); cast to float64, or subtract a common start, such as that of a time"
        )


def two_rows_of_zeros(column: Column, longest: int = 1) -> Array | Ragged:
    """Returns cells to try a model with, in the stored dtype. # (2, *cell)

    Args:
        longest: length of the second row of a ragged column; that of the first is 1.
    """
    if column.is_ragged:
        lengths = np.array([1, longest])
        return from_lengths(np.zeros((1 + longest, *column.inner), dtype=column.dtype), lengths)
    return np.zeros((2, *column.inner), dtype=column.dtype)


def row_weights(name: str, cells: Array | Ragged, is_true_row: Array) -> Array:
    """Returns the weights of rows from a column: 0 for padding. # is_true_row: (rows,) 1 or 0; returns (rows,) float32

    Raises ValueError for a column with more than one value per row, and for negative weights, NaN and Inf.
    """
    if isinstance(cells, Ragged) or cells.ndim != 1:
        raise ValueError(f"data.weight: expected one number per row in column {name!r}, found arrays")
    weights = cells.astype(np.float32)
    if not ((weights >= 0) & np.isfinite(weights)).all():
        bad = cells[~((weights >= 0) & np.isfinite(weights))][0]
        raise ValueError(f"data.weight: expected finite weights >= 0 in column {name!r}, found {bad}")
    weights_of_rows: Array = weights * is_true_row
    return weights_of_rows


@dataclass(frozen=True)
class StepRows:
    """The rows of a dataset that one rank uses in one step, as arrays."""

    cells: Sequence[Array | Ragged]
    """Cells by column. # each (rows, *cell)"""
    weight: Array
    """Weight of each row: 1, or 0 for padding. # (rows,)"""
    streams: range = range(0)
    """The streams that they are from, one after another, with equally many rows of each; none if that is not known."""


class StreamRows(NamedTuple):
    """Consecutive rows of a batch that are from one stream."""

    dataset: int
    stream: int
    first: int
    """Place of the first of them among the rows of this stream in the step."""
    rows: int


class BatchKey(NamedTuple):
    """Which batch `prepare` gets; unique in a run."""

    epoch: int
    step: int
    rank: int
    micro_batch: int
    streams: tuple[StreamRows, ...]
    """The rows of the batch, in order; empty if that is not known."""


@dataclass(frozen=True)
class StepBatches:
    """The batches of one rank in one step."""

    step: int
    """Number of the step in its epoch."""
    micro_batches: list[Batch]
    """Columns by name, [rows, *cell], and `weight`, [rows] float32: 1, or the value of `data.weight`, for a true row,
    0 for padding. On the CPU. Ragged columns as in `build_batch`."""
    rows: int
    """True rows of the global batch, over all ranks."""


def build_batch(
    columns: Sequence[Column], cells: Sequence[Array | Ragged], ragged: str, pad_to: Sequence[int] = ()
) -> Batch:
    """Makes tensors of arrays, sharing their memory if they have the dtypes of the columns. # cells: of each column

    With `ragged="pad"` a ragged column becomes `name`, [rows, longest, *inner], padded with zeros, and `name_mask`,
    [rows, longest] bool, where `longest` is a length of `pad_to`, if there are any. With `ragged="offsets"` it becomes
    `name`, [values, *inner], concatenated, and `name_offsets`, [rows + 1] int64.
    """
    batch: Batch = {}
    for column, stored in zip(columns, cells, strict=True):
        values = cast_cells(column.name, stored, column.dtype)
        if not isinstance(values, Ragged):
            batch[column.name] = torch.from_numpy(values)
        elif ragged == "pad":
            padded, mask = pad(values, padded_length(int(values.lengths.max(initial=0)), pad_to))
            batch[column.name], batch[f"{column.name}_mask"] = torch.from_numpy(padded), torch.from_numpy(mask)
        else:
            offsets = values.offsets - values.offsets[0]
            batch[column.name] = torch.from_numpy(np.array(values.own_values))
            batch[f"{column.name}_offsets"] = torch.from_numpy(offsets)
    return batch


class _Piece(NamedTuple):
    """The rows of a micro-batch."""

    cells: Sequence[Array | Ragged]
    """Cells by column. # each (rows, *cell)"""
    weight: Array
    streams: tuple[StreamRows, ...]
    """The streams that the rows are from, as `BatchKey` has them."""


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the micro-batches of a step of one rank."""

    stored: Sequence[Column]
    """The columns of the dataset, in the order of `data.columns`."""
    data: Data
    micro_batches: int = 1
    ragged: str = "pad"
    prepare: Prepare | None = None
    pin: bool = False
    """Whether batches are copied to page-locked memory, for asynchronous copies to a GPU."""
    memory: int | None = None
    """Maximum bytes of the micro-batches of a step; None for no limit."""
    memory_setting: str = ""
    """The setting of the memory limit, for error messages."""
    numbered: bool = False
    """Whether batches know the numbers of their rows."""
    max_tokens: int | None = None
    """Values of the longest ragged column in a micro-batch, with padding; None for `micro_batches` of equal sizes."""
    pad_to: Sequence[int] = ()
    """`loader.pad_to`."""

    @functools.cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns in the dtypes of `data.cast`."""
        return cast_columns(self.stored, self.data.cast)

    def bytes_of(self, parts: Sequence[StepRows], key: Sequence[int]) -> int:
        """Bytes of what `build` makes of these rows, before `prepare`.

        Raises ValueError if this is more than `memory`.
        """
        rows = sum(len(part.weight) for part in parts)
        size = rows * self._fixed_bytes
        if not self._ragged:
            return size
        pieces = self._pieces(parts)
        ragged_bytes = {c.name: self._ragged_bytes(c, [piece.cells[i] for piece in pieces]) for i, c in self._ragged}
        size += sum(of_column for of_column, _ in ragged_bytes.values())
        if self.memory is not None and size > self.memory:
            name, (most, longest) = max(ragged_bytes.items(), key=lambda item: item[1])
            padded, change = "", ""
            if self.ragged == "pad":
                padded = ", to which all others are padded"
                change = "set loader.ragged to offsets, which does not pad, "
            raise ValueError(
                f"column {name!r}: the {rows} rows of rank {key[2]} in step {key[1]} of epoch {key[0]} take "
                f"{most / _MIB:.0f} MiB, of {size / _MIB:.0f} MiB with all columns, and {self.memory_setting}; the "
                f"longest of them has {longest} values{padded}: {change}lower train.global_batch_size, raise "
                "loader.memory_mib, or use more ranks"
            )
        return size

    @functools.cached_property
    def _fixed_bytes(self) -> int:
        """Bytes of a row and its weight, without ragged columns."""
        return WEIGHT_BYTES + sum(c.value_bytes for c in self.columns if not c.is_ragged)

    @functools.cached_property
    def _weight_index(self) -> int:
        return [c.name for c in self.stored].index(self.data.weight or "")

    @functools.cached_property
    def _ragged(self) -> list[tuple[int, Column]]:
        return [(i, c) for i, c in enumerate(self.columns) if c.is_ragged]

    def _ragged_bytes(self, column: Column, cells: Sequence[Array | Ragged]) -> tuple[int, int]:
        """Bytes of a column in all micro-batches, and values of its longest row. # cells: of each micro-batch"""
        value_bytes = np.dtype(column.dtype).itemsize * math.prod(column.inner)
        size, most = 0, 0
        for piece in cells:
            assert isinstance(piece, Ragged)
            longest = int(piece.lengths.max(initial=0))
            most = max(most, longest)
            if self.ragged == "pad":
                size += padded_bytes(len(piece), padded_length(longest, self.pad_to), value_bytes)
            else:
                size += value_bytes * int(piece.lengths.sum()) + _OFFSET_BYTES * (len(piece) + 1)
        return size, most

    def build(self, parts: Sequence[StepRows], key: Sequence[int]) -> list[Batch]:
        """Builds the micro-batches of a step: of near-equal sizes, larger ones first, or as `max_tokens` says.

        # parts: rows of each dataset. Every micro-batch of near-equal sizes has rows of each. `prepare` gets each with
        its `BatchKey`.

        Args:
            key: epoch, step and rank.
        """
        epoch, number, rank = key
        batches = []
        for i, piece in enumerate(self._pieces(parts)):
            batch = build_batch(self.columns, piece.cells, self.ragged, self.pad_to)
            weight = piece.weight
            for name in self.data.not_in_batch:
                del batch[name]
            if self.data.weight is not None:
                weight = row_weights(self.data.weight, piece.cells[self._weight_index], weight)
            batch["weight"] = torch.from_numpy(weight)
            if self.prepare is not None:
                batch = dict(self.prepare(batch, BatchKey(epoch, number, rank, i, piece.streams)))
            batch = {name: t.pin_memory() for name, t in batch.items()} if self.pin else batch
            if self.numbered:
                batch = NumberedBatch(batch, (epoch, number), piece.streams)
            batches.append(batch)
        return batches

    def _pieces(self, parts: Sequence[StepRows]) -> list[_Piece]:
        """Returns the rows of each micro-batch. # parts: rows of each dataset"""
        if self.max_tokens is not None:
            return self._by_tokens(parts, self.max_tokens)
        bounds = [self._bounds(len(part.weight)) for part in parts]
        return [self._piece(parts, of_micro_batch) for of_micro_batch in zip(*bounds, strict=True)]

    def _piece(self, parts: Sequence[StepRows], bounds: Sequence[tuple[int, int]]) -> _Piece:
        """Returns a micro-batch of rows of each dataset. # bounds: of each the first row, and the row after the last"""
        # Arrays are concatenated before they become tensors: longest rows and offsets differ between datasets.
        sliced = [
            [cells[a:b] for cells in (part.weight, *part.cells)] for part, (a, b) in zip(parts, bounds, strict=True)
        ]
        weight, *cells = (concatenate(of_column) for of_column in zip(*sliced, strict=True))
        assert not isinstance(weight, Ragged)
        return _Piece(cells, weight, _streams(parts, bounds))

    def _by_tokens(self, parts: Sequence[StepRows], most: int) -> list[_Piece]:
        """Cuts the rows, the longest first, into micro-batches of at most `most` values with their padding."""
        whole = self._piece(parts, [(0, len(part.weight)) for part in parts])
        lengths = lengths_of(whole.cells, len(whole.weight))
        order = np.argsort(-lengths, kind="stable")
        by_row = [
            StreamRows(each.dataset, each.stream, each.first + i, 1) for each in whole.streams for i in range(each.rows)
        ]
        pieces, start = [], 0
        while start < len(order):
            longest = padded_length(int(lengths[order[start]]), self.pad_to)
            rows = order[start : start + max(1, most // max(1, longest))]
            cells = [take_rows(c, rows) for c in whole.cells]
            pieces.append(_Piece(cells, whole.weight[rows], tuple(by_row[i] for i in rows) if by_row else ()))
            start += len(rows)
        return pieces

    def _bounds(self, rows: int) -> list[tuple[int, int]]:
        """Returns the first row of each micro-batch, and the row after its last one."""
        size, more = divmod(rows, self.micro_batches)
        return list(itertools.pairwise(i * size + min(i, more) for i in range(self.micro_batches + 1)))


def _streams(parts: Sequence[StepRows], bounds: Sequence[tuple[int, int]]) -> tuple[StreamRows, ...]:
    """Returns which streams some rows are from, in their order. # bounds: as for `BatchBuilder._piece`"""
    if not all(part.streams for part in parts):
        return ()
    pieces = []
    for dataset, (part, (low, high)) in enumerate(zip(parts, bounds, strict=True)):
        of_stream = len(part.weight) // len(part.streams)
        for place, stream in enumerate(part.streams):
            first, stop = max(low, place * of_stream), min(high, (place + 1) * of_stream)
            if first < stop:
                pieces.append(StreamRows(dataset, stream, first - place * of_stream, stop - first))
    return tuple(pieces)
