"""The rows of a dataset by row group: read, verified, decoded, and laid where the loader wants them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_dl import storage
from spark_dl.config.data import Nonfinite
from spark_dl.data.columns import policies
from spark_dl.data.columns.lookup import keeps_dictionary
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths, take
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.external import columns as external_columns
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet import filters
from spark_dl.data.parquet.buffer_pool import BufferPool
from spark_dl.data.parquet.byte_budget import ByteBudget
from spark_dl.data.petastorm.npy import unpacked_bytes
from spark_dl.data.plan import FILLER, Segment, Split, rows_held_out, split_rows
from spark_dl.data.read.shard_file import ShardFile, is_sliced
from spark_dl.data.store.cache import DiskCache, open_input

Places = Sequence[Array | None]
"""Where rows go, one for each column; None for a ragged one, and where another array is to be made. # (rows, *cell)"""
_OPEN_FILES = 16
_MIB = 1 << 20
HELD_ROW_GROUPS = 2
"""Decoded row groups that are kept for streams that meet in them."""


@dataclass(frozen=True)
class Limits:
    """ByteBudget for what the footers did not tell the size of."""

    memory: int
    """Bytes of all that is decoded at once, and so of each row group."""
    window: int
    """Bytes of a window, unless it is of one row group."""
    setting: str
    """What sets them, for messages."""


class Rows:
    """The rows of a dataset, or of the part of it that trains or validates. Any number of threads may read."""

    def __init__(
        self,
        shards: ShardSet,
        columns: Sequence[Column],
        fraction: float,
        seed: int,
        split: Split,
        *,
        cache: DiskCache | None = None,
        nonfinite: Nonfinite = "allow",
        fill: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ):
        """`nonfinite` is looked at for datasets that were not checked when they were written, as those of others.

        `fill` are the values of `data.fill`, which `nonfinite="fill"` puts in place of NaN and Inf.
        """
        self._nonfinite: Nonfinite = "allow" if shards.is_checked else nonfinite
        self._fill = fill or {}
        self._limits, self._has_unknown = limits, False
        asked = filters.columns_of(shards.filtered.conditions) if shards.filtered else []
        self._names = [*(c.name for c in columns), *asked]
        self._words = [c.name for c in columns if c.has_stored_strings]
        self._decoding = ByteBudget(limits.memory if limits else 0)
        self._shards, self.columns, self._cache = shards, tuple(columns), cache
        self._seed, self._split = seed, split
        self._passing = shards.group_rows
        self._held_out = rows_held_out(self._passing, 0.0 if split == "all" else fraction)
        self._memory = {c.name: BufferPool() for c in columns}
        self._of_thread = threading.local()  # pyarrow's readers of a file are not made for several threads
        self._held: OrderedDict[int, Future[list[Array | Ragged]]] = OrderedDict()
        self._held_lock = threading.Lock()
        if split == "validation":
            self.group_rows = self._held_out
        else:
            self.group_rows = self._passing - self._held_out if self._held_out.any() else self._passing

    def read_into(self, segments: Sequence[Segment], out: Sequence[Array | list[Ragged]]) -> None:
        """Writes the rows of some segments one after another into `out`, which has one item per column.

        That is an array, # (>= rows, *cell), or for a ragged column a list, to which each segment's rows are added.
        Raises RuntimeError that names the file for one that is missing, damaged or not what the dataset says.
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
        arrays = self._row_group(segment, places)
        for column, array, target, place in zip(self.columns, arrays, out, places, strict=True):
            if array is place:
                continue
            if isinstance(array, Ragged):
                assert isinstance(target, list)
                target.append(self._own_rows(column, array, segment))
            elif place is not None:
                place[:] = array[segment.start : segment.stop]

    def _is_alone(self, segment: Segment) -> bool:
        """Whether no other stream asks for the row group."""
        return segment.row_group != FILLER and segment.rows == int(self.group_rows[segment.row_group])

    def _is_sliced(self, column: Column, number: int, conditions: filters.AnyOf) -> bool:
        """Whether a column of a row group may be read in slices: not where many of its pages need not be read at all,
        nor where filters look at it.
        """
        passing, stored = int(self._passing[number]), int(self._shards.shards.group_rows[number])
        return is_sliced(column) and 2 * passing >= stored and column.name not in filters.columns_of(conditions)

    def _own_rows(self, column: Column, array: Ragged, segment: Segment) -> Ragged:
        """The rows of a segment, without the rest of what was read of the row group."""
        if array.is_own and self._is_alone(segment):
            return array
        rows = array[segment.start : segment.stop]
        own = rows.own_values
        # ByteBudget that is used again has room for a row group, which is too much for a few rows.
        memory = self._memory[column.name] if 2 * own.nbytes >= array.own_values.nbytes else BufferPool()
        values = memory.take(own.shape, own.dtype)
        values[:] = own
        return Ragged(values, rows.offsets - rows.offsets[0])

    def end_thread(self) -> None:
        """Gives up what the thread that calls this has open, and what Arrow's allocator keeps for it: it reads no more.

        A heap of that allocator stays as large as it was when its thread ends.
        """
        vars(self._of_thread).clear()
        pa.default_memory_pool().release_unused()

    def _check_window(self, segment: Segment, out: Sequence[Array | list[Ragged]], limits: Limits) -> None:
        """Raises ValueError for a window that was as large as it may be without its last row group."""
        pieces = [column for column in out if isinstance(column, list)]
        size = sum(piece.own_values.nbytes for column in pieces for piece in column[:-1])
        if size > limits.window:
            shard, group, _ = self._shards.shards.place_of(segment.row_group)
            raise ValueError(
                f"the rows of {len(pieces[0]) - 1} row groups of {self._shards.url}, those before row group {group} of "
                f"{self._shards.shards[shard].name}, take {size / _MIB:.0f} MiB once they are decoded, more than the "
                f"footers tell, and are to be shuffled together with more; each stream has {limits.window / _MIB:.0f} "
                f"MiB of {limits.setting}: lower loader.shuffle_window_rows, or raise loader.memory_mib"
            )

    def _take(self, size: int) -> None:
        """Waits for memory to decode into, which this thread gives back when it has copied what it read."""
        if size and self._limits is not None:
            self._decoding.take(size)
            self._of_thread.taken = size

    def _give_back(self) -> None:
        if size := getattr(self._of_thread, "taken", 0):
            self._decoding.give_back(size)
            self._of_thread.taken = 0

    def _row_group(self, segment: Segment, places: Places) -> list[Array | Ragged]:
        """All rows of the segment's row group that are of this part; `places` themselves where they were decoded there.

        # places: (segment.rows, *cell) for each column that is not ragged
        """
        number = segment.row_group
        if number == FILLER:
            assert self._shards.placement is not None
            return [_one_row(c, self._shards.placement.filler[c.name]) for c in self.columns]
        if self._is_alone(segment):
            return self._rows_of_split(number, places)
        with self._held_lock:  # streams meet in this row group, or sequences pass into it: it is asked for again
            held = self._held.get(number)
            is_mine = held is None
            if held is None:
                held = self._held[number] = Future()
                while len(self._held) > HELD_ROW_GROUPS:
                    self._held.popitem(last=False)
        if is_mine:  # the others wait for it, and do not decode it too
            try:
                held.set_result(self._rows_of_split(number, [None] * len(self.columns)))
            except BaseException as error:
                held.set_exception(error)
                with self._held_lock:
                    self._held.pop(number, None)
        try:
            return held.result()
        finally:
            del held  # its error has this frame

    def _rows_of_split(self, number: int, places: Places) -> list[Array | Ragged]:
        if self._held_out[number]:
            places = [None] * len(self.columns)
        arrays = self._decode(number, places)
        if self._held_out[number]:
            kept = split_rows(int(self._passing[number]), int(self._held_out[number]), self._seed, number)
            rows = kept[self._split == "validation"]
            return [take(a, rows) if isinstance(a, Ragged) else a[rows] for a in arrays]
        return arrays

    def _decode(self, number: int, places: Places) -> list[Array | Ragged]:
        shard, group, rows = self._shards.shards.place_of(number)
        passing = int(self._passing[number])
        url = storage.join(self._shards.url, self._shards.shards[shard].name)
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
            other = {c.name for c, _ in sliced} | {c.name for c in self.columns if c.codec == "partition"}
            rest = [c.name for c in self.columns if plain[c.name] is None and c.name not in other]
            kept: filters.Mask | None = None
            numbers: npt.NDArray[np.int64] | None = None
            if conditions:
                stored, kept = file.indexed.read_passing(group, rest, conditions)
                self._check_passing(number, kept)
                numbers = np.flatnonzero(kept)
            else:
                stored = file.read(group, rest)
            read = file.read_slices(group, passing, sliced, self._memory, kept)
            read |= {n: c if kept is None else c[kept] for n, c in plain.items() if c is not None}
            unknown = self._unknown_bytes(stored)
            self._take(sum(unknown.values()))
            partition = dict(self._shards.shards[shard].partition)
            arrays: list[Array | Ragged] = []
            for column, place in zip(self.columns, places, strict=True):
                name = column.name
                if name in read:
                    arrays.append(read[name])
                elif column.codec == "partition":
                    arrays.append(external_columns.partition_cells(column, partition[name], passing))
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
            of_rows = "the rows that pass data.filters of " if passing < rows else ""
            raise RuntimeError(f"cannot read {of_rows}row group {group} of {url}: {error}") from error

    def _unknown_bytes(self, stored: Mapping[str, pa.ChunkedArray]) -> dict[str, int]:
        """What stored columns take once they are decoded, by their names, as far as the footer does not tell it.

        Raises ValueError for more than there is memory for.
        """
        found = {
            column.name: _unknown_bytes(column, stored[column.name])
            for column in self.columns
            if column.name in stored
            and not (column.has_stored_strings and keeps_dictionary(column.encoding, stored[column.name].type))
        }
        size = sum(found.values())
        self._has_unknown |= size > 0
        if self._limits is not None and size > self._limits.memory:
            name = max(found, key=lambda name: found[name])
            raise ValueError(
                f"column {name!r}: the cells have {stored[name].nbytes / _MIB:.1f} MiB as they are stored, and "
                f"{found[name] / _MIB:.0f} MiB once they are decoded; {self._limits.setting}: raise it, or write the "
                "dataset with smaller row groups"
            )
        return found

    def _check_passing(self, number: int, passes: filters.Mask) -> None:
        """Raises ValueError unless as many rows of a row group pass as the driver counted. # passes: (stored rows,)"""
        if (found := np.count_nonzero(passes)) != self._passing[number]:
            raise ValueError(
                f"{found} rows pass data.filters, data.nulls and data.nonfinite, where {self._passing[number]} did "
                "when the run began; the file has changed since"
            )

    def _conditions(self, number: int) -> filters.AnyOf:
        """What rows of a row group must hold; nothing where all of them are read."""
        shard, _, rows = self._shards.shards.place_of(number)
        if self._shards.filtered is None or self._passing[number] == rows:
            return ()
        return filters.of_partition(self._shards.filtered.conditions, self._shards.shards[shard].partition)

    def _open(self, shard: int, url: str) -> ShardFile:
        if not hasattr(self._of_thread, "opened"):
            self._of_thread.opened = OrderedDict()
        opened = self._of_thread.opened
        if shard not in opened:
            stored = self._shards.shards[shard]
            source = open_input(url, cache=self._cache, sha256=stored.sha256, size=stored.bytes)
            if (size := source.size()) != stored.bytes:
                raise ValueError(
                    f"found {size} bytes, expected {stored.bytes}; the file is not the one that was opened"
                )
            is_local = storage.is_local(url) or isinstance(source, pa.OSFile)  # of the cache
            opened[shard] = ShardFile(source, stored, self._names, self._words, is_local=is_local)
            while len(opened) > _OPEN_FILES:
                opened.popitem(last=False)
        opened.move_to_end(shard)
        return opened[shard]  # type: ignore[no-any-return]


def _one_row(column: Column, cell: Array) -> Array | Ragged:
    """A cell as the rows of a column."""
    return from_lengths(cell, np.array([len(cell)])) if column.is_ragged else cell[None]


def _unknown_bytes(column: Column, stored: pa.ChunkedArray) -> int:
    """What cells take once they are decoded beyond what the footer tells: dictionaries, and compressed arrays."""
    is_compressed = column.codec.startswith("petastorm.compressed")
    return parquet_file.decoded_bytes(stored) + (unpacked_bytes(stored) if is_compressed else 0)
