"""The loader: follows the plan and yields the batches of one rank, step by step, read ahead in threads.

Reader threads lay the windows of the rank's streams into an arena; one more thread gathers batches from it. The order
of everything is the plan's, whatever thread is faster. Memory is the arena's, which is of a set size.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import weakref
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from spark_dl.config import Config, Data
from spark_dl.data.arena import Arena
from spark_dl.data.batch import WEIGHT_BYTES, BatchBuilder, Prepare, StepBatches, StepRows
from spark_dl.data.cache import build_cache
from spark_dl.data.manifest import ShardSet
from spark_dl.data.memory import Ready
from spark_dl.data.plan import FILLER, Ints, Plan, Stream, Window, check_held_out, streams_of_rank, windows_from
from spark_dl.data.ragged import Array, Ragged, padded_bytes
from spark_dl.data.rows import HELD_ROW_GROUPS, Limits, Part, Rows, is_sliced
from spark_dl.data.schema import Column
from spark_dl.data.sequences import SequenceRows, build_rows

_log = logging.getLogger("spark_dl")

READY_SHARE = 4
"""Batches that are ready have the memory divided by this."""
_LOTS = 8
"""Parts of that memory which steps are gathered for at once: several are being made, waiting and in use."""
_STEPS_AT_ONCE = 16
_GATHER_BYTES = 4 << 20
_MIB = 1 << 20
_DECODING = 3
"""Memory to read lists and vectors, over that of their values, beyond them: Arrow holds encoded pages, levels and
values that grow. Measured with pyarrow 26: 45 MiB for lists of 11 MiB."""
_SLICED_DECODING_BYTES = 24 << 20
"""The same where they are decoded in slices, at most: of local files 5 MiB are held at a time, and Arrow's allocator
(mimalloc) keeps several times that for each thread until it ends. Of remote files a column is read as a whole; that is
no more than the values, which lie in the arena."""


class Loader:
    """The batches of one rank. Not collective: every rank has its own, and they need not talk to each other.

    `part` chooses the rows that train or validate where `data.validation_fraction` splits one dataset. With
    `shuffle=False` the rows come in the order of the dataset. `prepare` is called with each micro-batch in the loader's
    thread, and (epoch, step, rank, number of the micro-batch); with `pin` it is then copied to page-locked memory.
    `data.memory_mib` is shared by the loaders of `num_datasets`.

    Raises ValueError if a row group or a batch does not fit into its memory, or if there are no rows to read.
    """

    def __init__(
        self,
        shards: ShardSet,
        config: Config,
        *,
        rank: int,
        world_size: int,
        part: Part = "all",
        shuffle: bool = True,
        micro_batches: int = 1,
        prepare: Prepare | None = None,
        pin: bool = False,
        num_datasets: int = 1,
    ):
        data, train = config.data, config.train
        self.columns = shards.select(data.columns)
        self._budget = _share_mib(data.memory_mib, num_datasets) * _MIB
        check_memory(shards, self.columns, config, world_size, num_datasets)
        if part != "all":
            check_held_out(shards.rows, data.validation_fraction)
        reader = rank if shards.spread is None else shards.spread.part
        self._streams = streams_of_rank(data.num_streams, reader, world_size)
        said = said_memory(data.memory_mib, num_datasets)
        limits = Limits(self._budget, self._budget // max(1, len(self._streams)), said)
        self._rows = build_rows(shards, self.columns, config, part, build_cache(data), limits)
        self._row_bytes = sum(c.value_bytes for c in self._rows.columns)
        self._is_ragged = any(c.is_ragged for c in self.columns)
        group_bytes = shards.group_bytes(self.columns)
        self._largest_bytes = max(b for b, rows in zip(group_bytes, shards.group_rows, strict=True) if rows)
        self._group_row_bytes: tuple[float, ...] = ()
        if self._is_ragged:  # else the rows of all row groups are alike
            stored = [rows for _, _, rows in shards.row_groups]
            decoded = shards.decoded_bytes(self.columns)
            self._group_row_bytes = tuple(b / max(1, rows) for b, rows in zip(decoded, stored, strict=True))
        self.plan = Plan(
            group_rows=self._rows.group_rows,
            global_batch_size=train.global_batch_size,
            num_streams=data.num_streams,
            window_rows=max(1, min(data.shuffle_window_rows, self._budget // 4 // max(1, self._row_bytes))),
            shuffle=data.shuffle and shuffle,
            seed=train.seed,
            parts=shards.part_groups,
            row_bytes=self._group_row_bytes,
            window_bytes=self._budget // 4,
        )
        self._rank = rank
        self._builder = BatchBuilder(
            self._rows.columns, micro_batches, data.ragged, prepare, pin, memory=self._budget, said_memory=said
        )
        # Row groups as the threads read them, and those that are held for streams that meet in them.
        # Rows of a part are copied from those of the row group, and all rows where some are filled.
        holds_out = part != "all" and data.validation_fraction > 0
        copies = 1 + holds_out + (data.nonfinite == "fill" and not shards.is_checked)
        decoding = _decoding_bytes(self.columns, self._largest_bytes, is_filtered=shards.filtered is not None)
        one_in_hand = copies * self._largest_bytes + decoding
        batch_bytes = max(1, len(self._streams) * self.plan.stream_batch * self._row_bytes)
        self._ready_bytes = self._budget // READY_SHARE
        self.prefetch = max(1, min(data.prefetch_batches, self._ready_bytes // batch_bytes))
        """Batches that may be ready: as many as fit into a quarter of the memory, and one in any case. By the mean of
        ragged rows: where they are longer fewer are ready."""
        # Several small steps are gathered at once: what Python costs is then paid once for all of them. They are also
        # handed over at once, which wakes the training loop once, unless `prepare` takes its time with each of them.
        self._lot_bytes = max(1, min(_GATHER_BYTES, self._ready_bytes // _LOTS))
        self._at_once = max(1, min(_STEPS_AT_ONCE, int(self._lot_bytes // self._most_batch_bytes())))
        self._lot = self._at_once if prepare is None else 1
        self._lots_ahead = -(-self.prefetch // self._lot)
        self._threads = max(1, min(data.reader_threads, int(self._budget // max(1, one_in_hand))))
        self._in_hand = self._threads * one_in_hand + HELD_ROW_GROUPS * self._largest_bytes
        self._spare: list[Arena] = []

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[StepBatches, None, None]:
        """The steps of an epoch, from `start_step` on. Reading ahead stops when the iterator is closed."""
        room = Ready(self._ready_bytes)
        return read_ahead(self._batches(epoch, start_step, room), self._lots_ahead, room)

    def _batches(self, epoch: int, start_step: int, room: Ready) -> Generator[list[StepBatches], None, None]:
        step = start_step
        with closing(self.steps(epoch, start_step)) as lots:
            for rows in lots:
                sizes = [self._builder.bytes_of([own], (epoch, i, self._rank)) for i, own in enumerate(rows, step)]
                for first, stop in _lots(sizes, self._lot, self._lot_bytes):
                    room.take(sum(sizes[first:stop]))
                    yield [
                        StepBatches(
                            step + i, self._builder.build([rows[i]], (epoch, step + i, self._rank)),
                            self.plan.batch_rows(step + i),
                        )
                        for i in range(first, stop)
                    ]  # fmt: skip
                step += len(rows)

    def _most_batch_bytes(self) -> float:
        """Of the rank's rows of a step before they are padded: of ragged ones by the row group of the longest rows."""
        row_bytes = max([self._row_bytes, *self._group_row_bytes])
        return max(1, len(self._streams) * self.plan.stream_batch * (row_bytes + WEIGHT_BYTES))

    def steps(self, epoch: int, start_step: int = 0) -> Generator[list[StepRows], None, None]:
        """The rank's rows of the steps of an epoch, from `start_step` on, gathered by who asks for them, some at once.

        Windows are read ahead, in threads, until the iterator is closed.
        """
        if start_step >= self.plan.steps:
            return
        all_streams = self.plan.streams(epoch)
        reads = _schedule([all_streams[s] for s in self._streams], self.plan.stream_batch, start_step)
        arena = self._arena(reads)
        with closing(_Reader(self._rows, reads, arena, self._threads, self._slots_bytes)) as reader:
            yield from self._gather(arena, reader, start_step)
        self._spare.append(arena)

    def _arena(self, reads: Sequence[_Read]) -> Arena:
        """An arena of a slot for each stream and, as far as the budget goes, another to read ahead into.

        That of the epoch before is used again: fresh memory costs as much as reading does.
        """
        slot_rows = max(r.window.rows for r in reads)
        slot_bytes = max(self._window_bytes(r.window) for r in reads)
        streams = len(self._streams)
        batches = (self._lots_ahead + 2) * max(self._lot_bytes, streams * self.plan.stream_batch * self._row_bytes)
        if self._is_ragged:
            batches = max(batches, self._ready_bytes)
        self._slots_bytes = max(0, self._budget - batches - self._in_hand)
        fits = int(self._slots_bytes // max(1, slot_bytes))
        num_slots = min(max(fits, streams), 2 * streams, len(reads))
        while self._spare:
            arena = self._spare.pop()
            if arena.num_slots >= num_slots and arena.slot_rows >= slot_rows:
                return arena
        return Arena(
            self._rows.columns,
            num_slots=num_slots,
            slot_rows=slot_rows,
            num_tails=streams,
            tail_rows=self.plan.stream_batch,
        )

    def _window_bytes(self, window: Window) -> float:
        if not self._group_row_bytes:
            return window.rows * self._row_bytes
        of_group = self._group_row_bytes
        return sum(
            s.rows * (self._row_bytes if s.row_group == FILLER else of_group[s.row_group]) for s in window.segments
        )

    def _gather(self, arena: Arena, reader: _Reader, start_step: int) -> Iterator[list[StepRows]]:
        batch, streams, end = self.plan.stream_batch, len(self._streams), self.plan.steps
        cursors = [_Cursor(i, arena, reader, batch) for i in range(streams)]
        step = start_step
        while step < end:
            ahead = [cursor.fill((end - step) * batch) // batch for cursor in cursors]
            steps = min(self._at_once, end - step, *ahead)
            positions = np.empty((steps, streams, batch), dtype=np.int64)
            weight = np.empty((steps, streams, batch), dtype=np.float32)
            for i, cursor in enumerate(cursors):
                taken, weights = cursor.take(steps * batch)
                positions[:, i] = taken.reshape(steps, batch)
                weight[:, i] = weights.reshape(steps, batch)
            gathered, weights = arena.take(positions.reshape(steps, -1)), weight.reshape(steps, -1)
            yield [StepRows([g[k] for g in gathered], weights[k]) for k in range(steps)]
            step += steps


def check_memory(
    shards: ShardSet, columns: Sequence[Column], config: Config, num_ranks: int, num_datasets: int = 1
) -> None:
    """Raises ValueError if a row group, or a rank's part of a global batch, does not fit into a loader's memory.

    `num_ranks` read the dataset, and `num_datasets` share the memory. Called on the driver, and by every loader.
    """
    check_row_groups(shards, columns, config.data.memory_mib, num_datasets)
    data = config.data
    rows = -(-data.num_streams // num_ranks) * (config.train.global_batch_size // data.num_streams)
    row_bytes = sum(c.value_bytes for c in columns) * max(1, data.sequence_length)
    if rows * row_bytes > _share_mib(data.memory_mib, num_datasets) * _MIB:
        raise ValueError(
            f"each rank has {rows} rows of {row_bytes} bytes of {shards.url} in a global batch, "
            f"{rows * row_bytes / _MIB:.0f} MiB, and {said_memory(data.memory_mib, num_datasets)}: lower "
            "train.global_batch_size, raise data.memory_mib, or use more ranks"
        )
    if data.ragged == "pad":
        _check_padded(shards, columns, config, rows, num_datasets)


def _check_padded(shards: ShardSet, columns: Sequence[Column], config: Config, rows: int, num_datasets: int) -> None:
    """Raises ValueError if a batch will not fit once it is padded, as far as that is known before it is read: a row
    group has a row that is as long as its mean. # rows: of a rank's batch
    """
    memory_mib, together = config.data.memory_mib, rows // config.train.accumulation_steps
    for column in columns if shards.filtered is None else ():
        if not column.is_ragged:
            continue
        values, (shard, group, group_rows) = _longest_mean(shards, column)
        size = padded_bytes(together, values, np.dtype(column.dtype).itemsize * math.prod(column.inner))
        if size > _share_mib(memory_mib, num_datasets) * _MIB:
            raise ValueError(
                f"column {column.name!r}: the {group_rows} rows of row group {group} of {shards.shards[shard].name} in "
                f"{shards.url} have {values} values or more on average; a batch of {together} rows that is padded to "
                f"one of them takes {size / _MIB:.0f} MiB, and {said_memory(memory_mib, num_datasets)}: set "
                "data.ragged to offsets, which pads none, lower train.global_batch_size, raise data.memory_mib, or use "
                "more ranks"
            )


def _longest_mean(shards: ShardSet, column: Column) -> tuple[int, tuple[int, int, int]]:
    """The most values that rows of a row group have on average, at least, and that row group: (shard, number, rows).

    0 where it is not known: of others, bytes in the file are not those of the values, and empty lists count as one.
    """
    found = []
    for place in shards.row_groups:
        shard, group, rows = place
        counts = shards.shards[shard].elements.get(column.name)
        is_known = counts is not None and (column.codec == "list" or not shards.foreign)
        elements = counts[group] - (rows if shards.foreign else 0) if counts is not None and is_known else 0
        found.append((max(0, elements) // max(1, math.prod(column.inner)) // max(1, rows), place))
    return max(found)


def check_row_groups(shards: ShardSet, columns: Sequence[Column], memory_mib: int, num_datasets: int = 1) -> None:
    """Raises ValueError if the largest row group of the dataset does not fit into a loader's memory."""
    sized = zip(shards.row_groups, shards.group_bytes(columns), strict=True)
    read = (group for group, rows in zip(sized, shards.group_rows, strict=True) if rows)
    (shard, group, rows), size = max(read, key=lambda found: found[1])
    if size > _share_mib(memory_mib, num_datasets) * _MIB:
        raise ValueError(
            f"row group {group} of {shards.shards[shard].name} in {shards.url} has {rows} rows of "
            f"{size // rows} bytes, {size / _MIB:.0f} MiB; a row group is read as a whole, and "
            f"{said_memory(memory_mib, num_datasets)}: raise it, or write the dataset with smaller row groups "
            "(data.rows_per_row_group)"
        )


def _share_mib(memory_mib: int, num_datasets: int) -> int:
    return max(1, memory_mib // num_datasets)


def said_memory(memory_mib: int, num_datasets: int = 1) -> str:
    """What sets the memory of a loader, for messages."""
    share = f", of which each of {num_datasets} datasets has {_share_mib(memory_mib, num_datasets)}"
    return f"data.memory_mib={memory_mib}{share if num_datasets > 1 else ''}"


def warn_of_memory(
    shards: ShardSet, columns: Sequence[Column], data: Data, num_ranks: int, num_datasets: int = 1
) -> None:
    """Logs it if the streams of a rank need more than `data.memory_mib`, though each row group fits. On the driver.

    Each stream has at least one segment in memory: a row group, or all that the stream has of it.
    """
    sizes = [size for size, rows in zip(shards.group_bytes(columns), shards.group_rows, strict=True) if rows]
    streams, segment = -(-data.num_streams // num_ranks), min(max(sizes), sum(sizes) / data.num_streams)
    if streams * segment > _share_mib(data.memory_mib, num_datasets) * _MIB:
        _log.warning(
            "each rank reads %d streams with at least %.0f MiB of a row group in memory, %.0f MiB of %s, more than "
            "%s; lower data.num_streams, use more ranks, write smaller row groups "
            "(data.rows_per_row_group), or raise data.memory_mib to say that there is room",
            streams, segment / _MIB, streams * segment / _MIB, shards.url, said_memory(data.memory_mib, num_datasets),
        )  # fmt: skip


def _decoding_bytes(columns: Sequence[Column], size: int, *, is_filtered: bool) -> float:
    """Memory to decode a row group, beyond that of its values. # size: theirs, in bytes"""
    lists = [c for c in columns if c.codec in ("list", "vector", "binary", "petastorm.ndarray")]
    factor = _DECODING * size / max(1, sum(c.value_bytes for c in columns))
    sliced = factor * sum(c.value_bytes for c in lists if is_sliced(c) and not is_filtered)
    return factor * sum(c.value_bytes for c in lists) - sliced + min(sliced, _SLICED_DECODING_BYTES)


@dataclass(frozen=True)
class _Read:
    """A window that a stream needs from step `step` on, without the first `skip` rows of its order."""

    step: int
    stream: int
    """Number of the stream among those of the rank."""
    window: Window
    skip: int


def _schedule(streams: Sequence[Stream], batch: int, start_step: int) -> list[_Read]:
    """The windows that some streams need, in the order of need.

    A stream that has no rows left at the start gets a window of which all is skipped: its last row fills the batches.
    """
    reads = []
    for i, stream in enumerate(streams):
        windows = list(windows_from(stream, start_step * batch))
        if not windows:
            last = stream.windows[-1] if stream.windows else Window((stream.filler,), 0, None)
            windows = [(last, last.rows)]
        for window, skip in windows:
            reads.append(_Read(max(start_step, (window.first + skip) // batch), i, window, skip))
    return sorted(reads, key=lambda r: (r.step, r.stream, r.window.first))


_EXIT_WAIT_S = 5.0
_READERS: weakref.WeakSet[_Reader] = weakref.WeakSet()


@atexit.register
def _end_readers() -> None:
    """A thread that comes back from C++ to an interpreter that is gone can hang the exit of the process."""
    for reader in [*_READERS]:
        reader.end(_EXIT_WAIT_S)


class _Reader:
    """Reads windows into free slots of the arena, in the order of need, in threads.

    It cannot come to a halt: each stream needs one window at a time, so with a slot for each of them the window that is
    needed next has a slot, or a stream is about to free one. More slots than that are used as long as windows as large
    as the largest one so far fit into `memory`, which the footers of some files do not tell.
    """

    def __init__(self, rows: Rows | SequenceRows, reads: Sequence[_Read], arena: Arena, threads: int, memory: float):
        self._rows, self._arena = rows, arena
        self._memory, self._largest = memory, 0
        self._pending = deque(reads)
        self._free = list(range(arena.num_slots))
        self._coming: dict[int, deque[tuple[_Read, int, Future[None]]]] = {r.stream: deque() for r in reads}
        self._left = Counter(r.stream for r in reads)
        self._asked: queue.SimpleQueue[tuple[Window, int, Future[None]] | None] = queue.SimpleQueue()
        self._has_ended = False
        self._threads: list[threading.Thread] = []
        _READERS.add(self)
        try:
            for i in range(threads):
                thread = threading.Thread(target=self._work, name=f"spark_dl reader {i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # no more threads
            self.close()
            raise
        self._submit()

    def has_more(self, stream: int) -> bool:
        """Whether the stream has windows that it has not taken yet."""
        return self._left[stream] > 0

    def next(self, stream: int) -> tuple[_Read, int]:
        """Waits for the next window of a stream: what it is, and its slot."""
        read, slot, done = self._coming[stream].popleft()
        try:
            done.result()
        finally:
            del done  # its error has this frame
        self._left[stream] -= 1
        return read, slot

    def free(self, slot: int) -> None:
        """Gives a slot back, whose rows are not needed any more."""
        self._arena.clear(slot)
        self._free.append(slot)
        self._submit()

    def end(self, timeout_s: float | None = None) -> None:
        """Ends the threads, once they have read what they are at, and waits so long for each of them."""
        self._has_ended = True
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def close(self) -> None:
        """Ends the threads, and forgets what they have read: an error in it has frames that have this reader."""
        self.end()
        self._coming.clear()

    def _submit(self) -> None:
        while self._free and self._pending:
            used = self._arena.num_slots - len(self._free)
            if used >= len(self._coming) and (used + 1) * self._largest > self._memory:
                break
            read, slot = self._pending.popleft(), self._free.pop()
            done: Future[None] = Future()
            self._coming[read.stream].append((read, slot, done))
            self._asked.put((read.window, slot, done))

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None and not self._has_ended:
            self._answer(*asked)
            del asked  # while it waits for the next
        self._rows.end_thread()

    def _answer(self, window: Window, slot: int, done: Future[None]) -> None:
        try:
            self._read_into(window, self._arena.slot(slot))
        except BaseException as error:  # raised again by who waits for the window
            done.set_exception(error)
            del self, done  # the error has this frame
        else:
            done.set_result(None)

    def _read_into(self, window: Window, out: Sequence[Array | list[Ragged]]) -> None:
        self._rows.read_into(window.segments, out)
        ragged = (piece for column in out if isinstance(column, list) for piece in column)
        self._largest = max(self._largest, sum(piece.own_values.nbytes for piece in ragged))


class _Cursor:
    """Walks through one stream: where its next rows are in the arena."""

    def __init__(self, stream: int, arena: Arena, reader: _Reader, batch: int):
        self._stream, self._arena, self._reader, self._batch = stream, arena, reader, batch
        self._order: Ints = np.empty(0, dtype=np.int64)
        self._last: Ints = self._order
        """Of the row that was used last."""
        self._true_rows = 0
        """Of `_order`; the others fill batches and have weight 0."""
        self._slot: int | None = None

    def fill(self, rows_to_end: int) -> int:
        """Makes at least one batch of positions ready, waiting for windows if need be, and returns how many there are.

        Once the stream has run out, its last row is repeated up to the end of the epoch.
        """
        while len(self._order) < self._batch:
            left = self._order if len(self._order) else self._last
            tail = self._arena.to_tail(self._stream, left)
            if self._slot is not None:
                self._reader.free(self._slot)
                self._slot = None
            if not self._reader.has_more(self._stream):
                missing = rows_to_end - len(self._order)
                self._order = np.concatenate([tail[: len(self._order)], np.repeat(tail[-1:], missing)])
                break
            read, self._slot = self._reader.next(self._stream)
            order = self._arena.slot_start(self._slot) + read.window.order()
            self._order = np.concatenate([tail[: len(self._order)], order[read.skip :]])
            self._last = order[-1:]
            self._true_rows = len(self._order)
        return len(self._order)

    def take(self, rows: int) -> tuple[Ints, Array]:
        """The next positions and their weights. # (rows,), (rows,)"""
        taken, self._order = self._order[:rows], self._order[rows:]
        weights = (np.arange(rows) < self._true_rows).astype(np.float32)
        self._true_rows = max(0, self._true_rows - rows)
        self._last = taken[-1:]
        return taken, weights


def _lots(sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(First, stop) of items that go together: at most `most`, and `most_bytes` unless it is one alone."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and (i - first == most or total + size > most_bytes):
            yield first, i
            first, total = i, 0
        total += size
    if sizes:
        yield first, len(sizes)


def read_ahead(
    lots: Iterator[list[StepBatches]], depth: int, room: Ready | None = None
) -> Generator[StepBatches, None, None]:
    """The items of some lists. The iterator runs in a thread, at most `depth` lists ahead; its exceptions are raised
    here. From `room` it takes memory for each list before it makes it, which is given back when the list is taken.
    """
    ready: queue.Queue[list[StepBatches] | BaseException | None] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: list[StepBatches] | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            with closing(lots):  # type: ignore[type-var]  # a generator: its own threads end with it
                for item in lots:
                    if not put(item):
                        return
            put(None)
        except BaseException as error:  # raised again by the reader of the queue
            put(error)

    thread = threading.Thread(target=work, name="spark_dl loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # it has this frame
            if room is not None:
                room.give_first_back()
            yield from item
    finally:
        stop.set()
        if room is not None:
            room.close()
        thread.join()
