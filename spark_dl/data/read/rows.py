"""The rows of a dataset by row group: read, checked, decoded, and written to the loader's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_dl import storage
from spark_dl.config.data import Nonfinite
from spark_dl.data.columns import cell_codec, policies
from spark_dl.data.columns.elements import keeps_dictionary
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths, take
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import NO_NULLS
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet import filters
from spark_dl.data.parquet.buffers import BufferPool, ByteBudget
from spark_dl.data.parquet.filters import NULL_PARTITION
from spark_dl.data.plan import FILLER, Draws, Ints, Segment, Split, rows_held_out, split_rows
from spark_dl.data.read.shard_file import CurrentReads, ShardFile, is_sliced

if TYPE_CHECKING:
    from spark_dl.data.store.cache import DiskCache

Places = Sequence[Array | None]
"""Target arrays by column; None for ragged columns, and if a new array should be made. # each (rows, *cell)"""
_OPEN_FILES = 16
_MIB = 1 << 20
HELD_ROW_GROUPS = 2
"""Decoded row groups that are kept for streams that share them."""


@dataclass(frozen=True)
class Limits:
    """Memory limits for columns whose decoded size is not in the footers."""

    memory: int
    """Maximum bytes that are decoded at a time, over all threads."""
    window: int
    """Maximum bytes of a window of several row groups."""
    setting: str
    """The setting of these limits, for messages."""


class Rows:
    """The rows of a dataset, or its training or validation rows. Any number of threads may read."""

    def __init__(
        self,
        shards: ShardSet,
        columns: Sequence[Column],
        fraction: float,
        seed: int,
        split: Split,
        *,
        fold: int | None = None,
        cache: DiskCache | None = None,
        nonfinite: Nonfinite = "allow",
        fill: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        draws: Draws | None = None,
        drawn_by: str | None = None,
    ):
        """`nonfinite` is used for datasets that were not checked on writing. `fill` has its values with "fill"."""
        self._nonfinite: Nonfinite = "allow" if shards.is_checked else nonfinite
        self._fill = fill or {}
        self._limits, self._has_unknown = limits, False
        self._draws = draws
        self._drawn_by = None if draws is None else [c.name for c in columns].index(drawn_by or "")
        filter_columns = filters.columns_of(shards.filtered.conditions) if shards.filtered else []
        self._names = [*(c.name for c in columns), *filter_columns]
        self._string_columns = [c.name for c in columns if c.has_stored_strings]
        self._decoding = ByteBudget(limits.memory if limits else 0)
        self._shards, self.columns, self._cache = shards, tuple(columns), cache
        self._seed, self._split = seed, split
        self._passing = shards.group_rows
        self._fold = None if split == "all" else fold
        self._held_out = rows_held_out(self._passing, 0.0 if split == "all" else fraction, self._fold)
        self._folds = 0 if self._fold is None else round(1 / fraction)
        self.reads = CurrentReads(shards)
        self._memory = {c.name: BufferPool() for c in columns}
        self._of_thread = threading.local()  # pyarrow's file readers are not thread-safe
        self._held: OrderedDict[int, Future[list[Array | Ragged]]] = OrderedDict()
        self._held_lock = threading.Lock()
        if split == "validation":
            self.group_rows = self._held_out
        else:
            self.group_rows = self._passing - self._held_out if self._held_out.any() else self._passing

    def read_into(self, segments: Sequence[Segment], out: Sequence[Array | list[Ragged]]) -> None:
        """Writes the rows of segments one after another into `out`, which has one item per column.

        An item is an array, # (>= rows, *cell), or for a ragged column a list, to which each segment's rows are
        appended. Raises RuntimeError with the URL of a file that is missing, damaged or different from the manifest.
        """
        done = 0
        for segment in segments:
            try:
                self._read_segment(segment, out, done)
            finally:
                self._give_back()
            done += segment.rows
            if self._limits is not None and self._has_unknown:
                self._check_window(segment, out, self._limits)

    def _read_segment(self, segment: Segment, out: Sequence[Array | list[Ragged]], first: int) -> None:
        """Writes the rows of a segment into `out` from row `first` on."""
        places = [None if isinstance(t, list) else t[first : first + segment.rows] for t in out]
        if self._drawn_by is not None:
            self._draw_segment(segment, out, places)
            return
        arrays = self._row_group(segment, places)
        for column, array, target, place in zip(self.columns, arrays, out, places, strict=True):
            if array is place:
                continue
            if isinstance(array, Ragged):
                assert isinstance(target, list)
                target.append(self._own_rows(column, array, segment))
            elif place is not None:
                place[:] = array[segment.start : segment.stop]

    def _draw_segment(self, segment: Segment, out: Sequence[Array | list[Ragged]], places: Places) -> None:
        """Writes the drawn rows of a segment into `out`, or the `places` in it."""
        assert self._draws is not None
        assert self._drawn_by is not None
        arrays = self._row_group(segment, [None] * len(self.columns))
        weights = arrays[self._drawn_by]
        assert not isinstance(weights, Ragged)
        drawn = self._draws.rows_of(segment.epoch, segment.row_group, weights)[segment.start : segment.stop]
        for array, target, place in zip(arrays, out, places, strict=True):
            if isinstance(array, Ragged):
                assert isinstance(target, list)
                target.append(take(array, drawn))
            elif place is not None:
                place[:] = array[drawn]

    def _is_alone(self, segment: Segment) -> bool:
        """Whether no other stream reads the row group."""
        return (
            self._draws is None
            and segment.row_group != FILLER
            and segment.rows == int(self.group_rows[segment.row_group])
        )

    def _is_sliced(self, column: Column, number: int, conditions: filters.AnyOf) -> bool:
        """Whether a column of a row group can be read in slices.

        False if filters read the column, and if most rows do not pass: then many pages are not read at all.
        """
        passing, stored = int(self._passing[number]), int(self._shards.shards.group_rows[number])
        return is_sliced(column) and 2 * passing >= stored and column.name not in filters.columns_of(conditions)

    def _own_rows(self, column: Column, array: Ragged, segment: Segment) -> Ragged:
        """Returns the rows of a segment, copied if the array has other rows too."""
        if array.is_own and self._is_alone(segment):
            return array
        rows = array[segment.start : segment.stop]
        own = rows.own_values
        # A pooled buffer has the size of a row group, which is too large for a few rows.
        memory = self._memory[column.name] if 2 * own.nbytes >= array.own_values.nbytes else BufferPool()
        values = memory.take(own.shape, own.dtype)
        values[:] = own
        return Ragged(values, rows.offsets - rows.offsets[0])

    def end_thread(self) -> None:
        """Closes the files of the calling thread and releases Arrow's unused memory. Called before the thread ends.

        Otherwise the allocator's heap keeps its size after the thread has ended.
        """
        vars(self._of_thread).clear()
        pa.default_memory_pool().release_unused()

    def _check_window(self, segment: Segment, out: Sequence[Array | list[Ragged]], limits: Limits) -> None:
        """Raises ValueError if a window was too large before its last row group was added."""
        pieces = [column for column in out if isinstance(column, list)]
        size = sum(piece.own_values.nbytes for column in pieces for piece in column[:-1])
        if size > limits.window:
            shard, group, _ = self._shards.shards.place_of(segment.row_group)
            raise ValueError(
                f"the rows of {len(pieces[0]) - 1} row groups of {self._shards.url}, before row group {group} of "
                f"{self._shards.shards.name_of(shard)}, take {size / _MIB:.0f} MiB once they are decoded, more "
                "than the footers say, and more rows are shuffled with them; each stream has "
                f"{limits.window / _MIB:.0f} MiB of {limits.setting}; lower "
                "loader.shuffle_window_rows, or raise loader.memory_mib"
            )

    def _take(self, size: int) -> None:
        """Waits for memory to decode into. This thread gives it back after its rows are copied."""
        if size and self._limits is not None:
            self._decoding.take(size)
            self._of_thread.taken = size

    def _give_back(self) -> None:
        if size := getattr(self._of_thread, "taken", 0):
            self._decoding.give_back(size)
            self._of_thread.taken = 0

    def _row_group(self, segment: Segment, places: Places) -> list[Array | Ragged]:
        """Returns the rows of the segment's row group, within the split: `places` themselves for cells decoded there.

        # places: (segment.rows, *cell) for each column that is not ragged
        """
        number = segment.row_group
        if number == FILLER:
            assert self._shards.placement is not None
            return [_one_row(c, self._shards.placement.filler[c.name]) for c in self.columns]
        if self._is_alone(segment):
            return self._rows_of_split(number, places)
        with self._held_lock:  # several streams or sequences share this row group, so it will be used again
            held = self._held.get(number)
            is_mine = held is None
            if held is None:
                held = self._held[number] = Future()
                while len(self._held) > HELD_ROW_GROUPS:
                    self._held.popitem(last=False)
        if is_mine:  # other threads wait for the result, and do not decode the row group again
            try:
                held.set_result(self._rows_of_split(number, [None] * len(self.columns)))
            except BaseException as error:
                held.set_exception(error)
                with self._held_lock:
                    self._held.pop(number, None)
        try:
            return held.result()
        finally:
            del held  # its traceback refers to this frame

    def _rows_of_split(self, number: int, places: Places) -> list[Array | Ragged]:
        kept = self.kept_rows(number)
        with self.reads.of(number):
            arrays = self._decode(number, places if kept is None else [None] * len(self.columns))
        return arrays if kept is None else [take(a, kept) if isinstance(a, Ragged) else a[kept] for a in arrays]

    def kept_rows(self, number: int) -> Ints | None:
        """Returns which of the passing rows of a row group are in the split, sorted; None if all are."""
        if not self._held_out[number]:
            return None
        held_out = slice(int(self._held_out[number]))
        if self._fold is not None:
            first = int(self._passing[:number].sum())
            held_out = slice((self._fold - first) % self._folds, None, self._folds)
        return split_rows(int(self._passing[number]), held_out, self._seed, number)[self._split == "validation"]

    def _decode(self, number: int, places: Places) -> list[Array | Ragged]:
        shard, group, rows = self._shards.shards.place_of(number)
        passing = int(self._passing[number])
        url = storage.join(self._shards.url, self._shards.shards.name_of(shard))
        try:
            file = self._open(shard, url)
            groups = file.parquet.metadata.num_row_groups
            found = file.parquet.metadata.row_group(group).num_rows if group < groups else 0
            if found != rows:
                raise ValueError(f"found {found} rows ({groups} row groups in the file), expected {rows}")
            conditions = self._conditions(number)
            plain = {c.name: file.plain(c, group, rows, self._memory[c.name]) for c in self.columns}
            sliced = [
                (c, place)
                for c, place in zip(self.columns, places, strict=True)
                if plain[c.name] is None and self._is_sliced(c, number, conditions) and file.comes_in_slices(c, group)
            ]
            not_whole = {c.name for c, _ in sliced} | {c.name for c in self.columns if c.codec == "partition"}
            whole = [c.name for c in self.columns if plain[c.name] is None and c.name not in not_whole]
            kept: filters.Mask | None = None
            numbers: npt.NDArray[np.int64] | None = None
            if conditions:
                stored, kept = file.indexed.read_passing(group, whole, conditions)
                self._check_passing(number, kept)
                numbers = np.flatnonzero(kept)
            else:
                stored = file.read(group, whole)
            read = file.read_slices(group, passing, sliced, self._memory, kept)
            read |= {n: c if kept is None else c[kept] for n, c in plain.items() if c is not None}
            unknown = self._unknown_bytes(stored)
            self._take(sum(unknown.values()))
            arrays: list[Array | Ragged] = []
            for column, place in zip(self.columns, places, strict=True):
                name = column.name
                if name in read:
                    arrays.append(read[name])
                elif column.codec == "partition":
                    value = dict(self._shards.shards.partition_of(shard))[name]
                    arrays.append(_partition_cells(column, value, passing))
                else:
                    cells, size, memory = stored[name], unknown.get(name), self._memory[name]
                    arrays.append(file.decode(column, group, cells, size, place, memory, numbers))
            for i, (column, cells) in enumerate(zip(self.columns, arrays, strict=True)):
                if self._nonfinite != "allow" and (bad := policies.first_nonfinite_row(cells)) is not None:
                    fill = self._fill.get(column.name) if self._nonfinite == "fill" else None
                    if fill is None:
                        row = bad if numbers is None else int(numbers[bad])
                        found = policies.nonfinite_as_read(column.name)
                        raise ValueError(f"{found}; first in row {row} of the row group")
                    arrays[i] = policies.with_finite_values(cells, fill)
                if len(cells) != passing:
                    raise ValueError(f"column {column.name!r}: found {len(cells)} rows, expected {passing}")
            return arrays
        except Exception as error:
            passing_rows = "the rows that pass data.filters of " if passing < rows else ""
            raise _unreadable(f"cannot read {passing_rows}row group {group} of {url}: {error}", error) from error

    def _unknown_bytes(self, stored: Mapping[str, pa.ChunkedArray]) -> dict[str, int]:
        """Returns the decoded bytes of stored columns, by name, that the footer does not give.

        Raises ValueError if they do not fit into the memory.
        """
        sizes = {
            column.name: _unknown_bytes(column, stored[column.name])
            for column in self.columns
            if column.name in stored
            and not (column.has_stored_strings and keeps_dictionary(column.encoding, stored[column.name].type))
        }
        size = sum(sizes.values())
        self._has_unknown |= size > 0
        if self._limits is not None and size > self._limits.memory:
            name = max(sizes, key=lambda name: sizes[name])
            raise ValueError(
                f"column {name!r}: the cells have {stored[name].nbytes / _MIB:.1f} MiB as they are stored, and "
                f"{sizes[name] / _MIB:.0f} MiB once they are decoded, with {self._limits.setting}; raise "
                "loader.memory_mib, or write the dataset with smaller row groups"
            )
        return sizes

    def _check_passing(self, number: int, passes: filters.Mask) -> None:
        """Raises ValueError if the number of passing rows is not the driver's. # passes: (stored rows,)"""
        if (found := np.count_nonzero(passes)) != self._passing[number]:
            raise ValueError(
                f"found {found} rows that pass data.filters, data.nulls and data.nonfinite, expected "
                f"{self._passing[number]} as at the start of the run; the file has changed since, so start the run "
                "again"
            )

    def _conditions(self, number: int) -> filters.AnyOf:
        """Returns the conditions on the rows of a row group; none if all its rows are read."""
        shard, _, rows = self._shards.shards.place_of(number)
        if self._shards.filtered is None or self._passing[number] == rows:
            return ()
        return filters.of_partition(self._shards.filtered.conditions, self._shards.shards.partition_of(shard))

    def _open(self, shard: int, url: str) -> ShardFile:
        if not hasattr(self._of_thread, "opened"):
            self._of_thread.opened = OrderedDict()
        opened = self._of_thread.opened
        if shard not in opened:
            stored = self._shards.shards[shard]
            if self._cache is None:
                source = storage.open_input(url)
            else:
                source = self._cache.open_input(url, sha256=stored.sha256, size=stored.bytes)
            if (size := source.size()) != stored.bytes:
                raise ValueError(
                    f"found {size} bytes, expected {stored.bytes}; the file is not the one that was opened"
                )
            is_local = storage.is_local(url) or isinstance(source, pa.OSFile)  # a cached file
            opened[shard] = ShardFile(source, stored, self._names, self._string_columns, is_local=is_local)
            while len(opened) > _OPEN_FILES:
                opened.popitem(last=False)
        opened.move_to_end(shard)
        return opened[shard]  # type: ignore[no-any-return]


def _one_row(column: Column, cell: Array) -> Array | Ragged:
    """Returns a cell as a column of one row."""
    return from_lengths(cell, np.array([len(cell)])) if column.is_ragged else cell[None]


def _unreadable(text: str, cause: Exception) -> RuntimeError:
    """Returns the error of a row group. The next attempt finds the same cells; a storage may answer then."""
    error: Any = RuntimeError(text)
    error.is_retryable = not isinstance(cause, ValueError) or isinstance(cause, pa.ArrowException)
    return cast("RuntimeError", error)


def _unknown_bytes(column: Column, stored: pa.ChunkedArray) -> int:
    """Returns the decoded bytes that the footer does not give: dictionaries, and compressed arrays."""
    if not column.codec.startswith("petastorm.compressed"):
        return parquet_file.decoded_bytes(stored)
    from spark_dl.data.petastorm.codecs import unpacked_bytes

    return parquet_file.decoded_bytes(stored) + unpacked_bytes(stored)


def _partition_cells(column: Column, value: str, rows: int) -> Array:
    """Returns the value of a partition, once for each row. # (rows,)"""
    if value == NULL_PARTITION and column.fill is None:
        raise ValueError(f"column {column.name!r}: found a partition that is null, expected {NO_NULLS}")
    if column.encoding.kind == "number":
        number = float if np.dtype(column.dtype).kind == "f" else int
        return np.full(rows, number(column.fill if value == NULL_PARTITION else value), column.dtype)
    cell = cell_codec.decode(column, pa.array([None if value == NULL_PARTITION else value], pa.string()))
    assert isinstance(cell, np.ndarray)
    return np.full(rows, cell[0])
