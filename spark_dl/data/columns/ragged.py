"""Ragged arrays: rows of different lengths, stored as concatenated values and the offset of each row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from spark_dl.config import Loader
    from spark_dl.data.columns.schema import Column

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
MAX_AXES = 64
"""Maximum number of axes of a NumPy 2 array (NumPy 1: 32)."""
_LONG_ROWS = 256
"""Mean length from which rows are copied one by one; indexing takes 24 bytes of memory per value."""
_INDEXED_AT_ONCE = 1 << 17  # values, about


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths: row `i` is `values[offsets[i] : offsets[i + 1]]`.

    A slice of rows, `ragged[start:stop]`, shares the values.
    """

    values: Array
    """Concatenated values of all rows. # (total, *inner)"""
    offsets: npt.NDArray[np.int64]
    """Start of each row, and the end of the last. # (rows + 1,), non-decreasing"""
    is_own: bool = False
    """Whether no other array shares the memory of the values."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> Ragged:
        start, stop, step = rows.indices(len(self))
        assert step == 1
        return Ragged(self.values, self.offsets[start : max(start, stop) + 1])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Values of each row. # (rows,)"""
        return np.diff(self.offsets)

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of one value."""
        return tuple(self.values.shape[1:])

    @property
    def own_values(self) -> Array:
        """The values of these rows only, without those before and after a slice. # (total, *inner)"""
        return self.values[self.offsets[0] : self.offsets[-1]]


class Stacked:
    """Concatenates batches of rows into one preallocated array."""

    def __init__(self, array: Array, *, is_ragged: bool):
        """# array: (>= rows, *cell), or (>= values, *inner) where the rows are ragged"""
        self._array, self._used = array, 0
        self.room_bytes = array.nbytes
        self._lengths: list[npt.NDArray[np.int64]] | None = [] if is_ragged else None
        self.rows = 0
        """Rows added so far."""

    def add(self, piece: Array | Ragged) -> None:
        """Appends rows. Raises ValueError if the array is full."""
        values = piece
        if isinstance(piece, Ragged):
            assert self._lengths is not None
            self._lengths.append(piece.lengths)
            values = piece.own_values
        stop = self._used + len(values)
        if stop > len(self._array):
            raise ValueError(f"found {stop} values or more, expected {len(self._array)}")
        if len(values):  # rows without values have no inner shape
            self._array[self._used : stop] = values
        self._used, self.rows = stop, self.rows + len(piece)

    def cells(self) -> Array | Ragged:
        """All rows added; the array itself if it is full."""
        full = self._array if self._used == len(self._array) else self._array[: self._used]
        if self._lengths is None:
            return full
        lengths = np.concatenate([np.empty(0, np.int64), *self._lengths])
        return dataclasses.replace(from_lengths(full, lengths), is_own=True)


def from_lengths(values: Array, lengths: npt.NDArray[Any]) -> Ragged:
    """Ragged rows of these lengths. # values: (total, *inner), lengths: (rows,)"""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    assert offsets[-1] == len(values)
    return Ragged(values, offsets)


def take(ragged: Ragged, rows: npt.NDArray[np.integer[Any]]) -> Ragged:
    """Copies the given rows, in this order. # rows: (n,)"""
    lengths, starts = ragged.lengths[rows], ragged.offsets[:-1][rows]
    taken = from_lengths(np.empty((int(lengths.sum()), *ragged.inner), ragged.values.dtype), lengths)
    copy_rows(ragged.values, starts, lengths, taken.values, taken.offsets[:-1])
    return taken


def take_rows(cells: Array | Ragged, rows: npt.NDArray[np.integer[Any]]) -> Array | Ragged:
    """Copies the given rows of an array, or of a ragged array, in this order. # rows: (n,)"""
    return take(cells, rows) if isinstance(cells, Ragged) else cells[rows]


def copy_rows(
    values: Array,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: Array,
    places: npt.NDArray[np.int64],
) -> None:
    """Copies rows: `lengths` values from each of `starts` to each of `places`. # values, out: (total, *inner)"""
    total = int(lengths.sum())
    if total == 0:  # rows without values have no inner shape
        return
    if total <= _LONG_ROWS * len(lengths):
        size = max(1, len(lengths) * _INDEXED_AT_ONCE // total)
        for first in range(0, len(lengths), size):
            rows = slice(first, first + size)
            out[_positions(places[rows], lengths[rows])] = values[_positions(starts[rows], lengths[rows])]
        return
    for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
        out[place : place + length] = values[start : start + length]


def pad(ragged: Ragged, length: int | None = None, fill: Any = 0) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Pads the rows to `length` (default: the longest row).

    Returns the padded array and the mask of true values. # (rows, length, *inner), (rows, length) bool
    Raises ValueError if a row is longer than `length`.
    """
    lengths = ragged.lengths
    longest = int(lengths.max(initial=0))
    length = longest if length is None else length
    if longest > length:
        row = int(np.argmax(lengths > length))
        raise ValueError(f"found {int(lengths[row])} values in row {row}, expected at most {length}")
    mask = np.arange(length) < lengths[:, None]
    out = np.full((len(ragged), length, *ragged.inner), fill, dtype=ragged.values.dtype)
    if lengths.sum() <= _LONG_ROWS * len(ragged):
        out[mask] = ragged.own_values
        return out, mask
    for row, (a, b) in enumerate(itertools.pairwise(ragged.offsets.tolist())):
        out[row, : b - a] = ragged.values[a:b]
    return out, mask


def lengths_of(cells: Sequence[Array | Ragged], rows: int) -> Ints:
    """Returns the length of each row: that of its longest ragged cell, 0 without one. # (rows,)"""
    lengths = np.zeros(rows, dtype=np.int64)
    for of_column in cells:
        if isinstance(of_column, Ragged):
            np.maximum(lengths, of_column.lengths, out=lengths)
    return lengths


def padded_length(longest: int, pad_to: Sequence[int]) -> int:
    """Returns the length that rows are padded to, of which the longest has `longest` values (`loader.pad_to`)."""
    if not pad_to or not longest:
        return longest
    return next((length for length in pad_to if length >= longest), -(-longest // pad_to[-1]) * pad_to[-1])


def padded_bytes(rows: int, longest: int, value_bytes: int) -> int:
    """Bytes of the array and the mask that `pad` returns."""
    return rows * longest * (value_bytes + 1)


def concatenate(parts: Sequence[Array | Ragged]) -> Array | Ragged:
    """Concatenates arrays, or ragged arrays."""
    if len(parts) == 1:
        return parts[0]
    ragged = [p for p in parts if isinstance(p, Ragged)]
    if not ragged:
        return np.concatenate(parts)  # type: ignore[arg-type]
    assert len(ragged) == len(parts)
    filled = [p.own_values for p in ragged if len(p.own_values)]  # rows without values have no inner shape
    return from_lengths(np.concatenate(filled or [ragged[0].own_values]), np.concatenate([p.lengths for p in ragged]))


def check_lengths(columns: Sequence[Column], loader: Loader) -> None:
    """Raises ValueError for settings of lengths if all rows have the same. Called on the driver, and on
    ranks that have written their rows."""
    if any(column.is_ragged for column in columns):
        return
    for name in ("group_by_length", "max_tokens", "pad_to"):
        if found := getattr(loader, name):
            raise ValueError(
                f"loader.{name}: expected a column with arrays of varying length, found none among "
                f"{[column.name for column in columns]}, so that all rows have the same length; remove it (it is "
                f"{found})"
            )


def check_one_batch(loader: Loader) -> None:
    """Raises ValueError for `loader.max_tokens` where a step has one batch. Called on ranks."""
    if loader.max_tokens is not None:
        raise ValueError(
            f"loader.max_tokens: expected null, found {loader.max_tokens}: a loop of your own gets one batch in each "
            "step, and would lose the rows of the other micro-batches; set a smaller batch_size"
        )


def _positions(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`start, start + 1, ...` of each row, concatenated. # (sum of lengths,)"""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    positions: npt.NDArray[np.int64] = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return positions
