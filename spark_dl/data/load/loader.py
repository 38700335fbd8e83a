"""The loader: follows the plan and yields the batches of one rank, step by step, prefetched in threads.

Reader threads write the windows of the rank's streams into an arena. One more thread gathers batches from the arena.
The order of rows follows from the plan, not from the speed of the threads. The arena has a fixed size.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spark_dl.config import Config
from spark_dl.data.columns.batch import WEIGHT_BYTES, BatchBuilder, Prepare, StepBatches, StepRows
from spark_dl.data.columns.ragged import Array
from spark_dl.data.dataset.memory import check_memory, decoding_bytes, memory_setting, share_mib
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.draws import draws_of
from spark_dl.data.load.row_names import describe_rows, kept_places, rows_of_steps
from spark_dl.data.load.window_reader import Arena, ReadSchedule, WindowReader
from spark_dl.data.parquet.buffers import PrefetchBudget
from spark_dl.data.plan import Ints, Plan, Split, check_held_out, order_by_length, streams_of_rank
from spark_dl.data.read.rows import HELD_ROW_GROUPS, Limits, Rows
from spark_dl.data.read.sequences import build_rows

READY_SHARE = 4
"""Prefetched batches have this fraction of the memory: one over the number."""
_BUNDLES = 8
"""Bundles that share the memory of prefetched batches: several are being built, waiting and in use."""
_STEPS_AT_ONCE = 16
_GATHER_BYTES = 4 << 20
_MIB = 1 << 20


@dataclass(frozen=True)
class LoaderMemory:
    """How a loader shares out its memory: row groups that are decoded, windows to shuffle, batches that are ready.

    Sizes are in bytes. At least one thread, one batch and one slot for each stream are used, whatever they need:
    `check_memory` has refused what does not fit.
    """

    budget: int
    streams: int
    """Streams of the rank, each with a window of its own."""
    stream_batch: int
    """Rows of a stream in a step."""
    row_bytes: float
    """Mean size of a decoded row."""
    longest_row_bytes: float
    """Mean size in the row group with the longest ragged rows; 0 without ragged columns."""
    is_ragged: bool
    group_bytes: int
    """The largest row group, decoded."""
    thread_bytes: float
    """Memory of one thread that decodes a row group."""
    most_threads: int
    most_prefetched: int
    """`loader.prefetch_batches`."""
    sorted_rows: int = 0
    """Rows of a stream that are sorted by length together, and kept until they are used; 0 if they are not."""
    prepares: bool = False
    """Whether a function of the caller prepares each batch."""

    @property
    def ready_bytes(self) -> int:
        """Memory for batches that are ready."""
        return self.budget // READY_SHARE

    @property
    def _batch_bytes(self) -> float:
        return self.streams * self.stream_batch * self.row_bytes

    @property
    def prefetch(self) -> int:
        """Prefetched batches. Ragged rows count with their mean size; if they are longer, fewer are prefetched."""
        return max(1, min(self.most_prefetched, int(self.ready_bytes // max(1, self._batch_bytes))))

    @property
    def bundle_bytes(self) -> int:
        """Memory for one bundle: small steps that are gathered together, which saves time in Python."""
        return max(1, min(_GATHER_BYTES, self.ready_bytes // _BUNDLES))

    @property
    def at_once(self) -> int:
        """Steps that are gathered together."""
        row_bytes = max(self.row_bytes, self.longest_row_bytes) + WEIGHT_BYTES
        batch_bytes = max(1, self.streams * self.stream_batch * row_bytes)
        return max(1, min(_STEPS_AT_ONCE, int(self.bundle_bytes // batch_bytes)))

    @property
    def bundle(self) -> int:
        """Steps that are passed on together, which wakes the training loop once, unless each waits for `prepare`."""
        return 1 if self.prepares else self.at_once

    @property
    def bundles_ahead(self) -> int:
        """Bundles that are ready."""
        return -(-self.prefetch // self.bundle)

    @property
    def threads(self) -> int:
        """Threads that read and decode."""
        return max(1, min(self.most_threads, int(self.budget // max(1, self.thread_bytes))))

    @property
    def slots_bytes(self) -> int:
        """Memory for windows: the rest, after row groups and batches. Two more bundles are being built and in use."""
        batches = (self.bundles_ahead + 2) * max(self.bundle_bytes, self._batch_bytes)
        if self.is_ragged:
            batches = max(batches, self.ready_bytes)
        decoding = self.threads * self.thread_bytes + HELD_ROW_GROUPS * self.group_bytes
        kept = self.streams * self.sorted_rows * max(self.row_bytes, self.longest_row_bytes)
        return int(max(0, self.budget - batches - decoding - kept))

    def num_slots(self, slot_bytes: float, num_reads: int) -> int:
        """Slots for windows: one for each stream, and a second one to prefetch into as far as the memory allows."""
        fits = int(self.slots_bytes // max(1, slot_bytes))
        return min(max(fits, self.streams), 2 * self.streams, num_reads)


class ShardLoader:
    """The batches of one rank. Not collective: every rank has its own loader, and loaders do not communicate.

    `split` selects the training or the validation rows if `train.validation_fraction` splits one dataset. With
    `shuffle=False` the rows come in the order of the dataset. `prepare` is called in the loader's thread, with each
    micro-batch and (epoch, step, rank, number of the micro-batch). With `pin` the result is copied to page-locked
    memory. The loaders of `num_datasets` datasets share `loader.memory_mib`.

    Raises ValueError if a row group or a batch does not fit into its memory, or if there are no rows to read.
    """

    def __init__(
        self,
        shards: ShardSet,
        config: Config,
        *,
        rank: int,
        world_size: int,
        split: Split = "all",
        shuffle: bool = True,
        micro_batches: int = 1,
        prepare: Prepare | None = None,
        pin: bool = False,
        num_datasets: int = 1,
    ):
        loader, train = config.loader, config.train
        self._shards, self.columns = shards, shards.select(config.data.columns)
        self._budget = share_mib(loader.memory_mib, num_datasets) * _MIB
        check_memory(shards, self.columns, config, world_size, num_datasets)
        if split != "all":
            check_held_out(shards.rows, train.validation_fraction, train.validation_fold)
        reader = rank if shards.placement is None else shards.placement.part
        self._streams = streams_of_rank(loader.num_streams, reader, world_size)
        setting = memory_setting(loader.memory_mib, num_datasets)
        limits = Limits(self._budget, self._budget // max(1, len(self._streams)), setting)
        cache = None
        if config.shards.cache_dir:
            from spark_dl.data.store.cache import build_cache

            cache = build_cache(config.shards)
        draws = draws_of(shards, config) if split == "train" else None
        self._rows = build_rows(shards, self.columns, config, split, cache, limits, draws=draws)
        self._row_bytes = sum(c.value_bytes for c in self._rows.columns)
        largest_group = int(shards.group_bytes(self.columns)[shards.group_rows > 0].max())
        self._group_row_bytes: npt.NDArray[np.float64] | None = None
        is_ragged = any(c.is_ragged for c in self.columns)
        if is_ragged:  # otherwise all rows have the same size
            self._group_row_bytes = shards.decoded_bytes(self.columns) / np.maximum(1, shards.shards.group_rows)
        self.plan = Plan(
            group_rows=self._rows.group_rows,
            global_batch_size=train.global_batch_size,
            num_streams=loader.num_streams,
            window_rows=max(1, min(loader.shuffle_window_rows, self._budget // 4 // max(1, self._row_bytes))),
            shuffle=loader.shuffle and shuffle,
            seed=train.seed,
            parts=shards.part_groups,
            row_bytes=self._group_row_bytes,
            window_bytes=self._budget // 4,
            sorts_by_length=loader.group_by_length,
            draws=draws,
        )
        self._rank = rank
        self._builder = BatchBuilder(
            self._rows.columns, config.data, micro_batches, loader.ragged, prepare, pin, memory=self._budget,
            memory_setting=setting, numbered=train.random_by == "row", max_tokens=loader.max_tokens,
            pad_to=loader.pad_to,
        )  # fmt: skip
        # Selecting the rows of a split, and drawing rows, copies them. Filling NaN and Inf copies all rows.
        has_split = split != "all" and train.validation_fraction > 0
        copies = 1 + has_split + (draws is not None) + (config.data.nonfinite == "fill" and not shards.is_checked)
        decoding = decoding_bytes(self.columns, largest_group, is_filtered=shards.filtered is not None)
        self._memory = LoaderMemory(
            self._budget, streams=len(self._streams), stream_batch=self.plan.stream_batch, row_bytes=self._row_bytes,
            longest_row_bytes=0.0 if self._group_row_bytes is None else float(self._group_row_bytes.max()),
            is_ragged=is_ragged, group_bytes=largest_group,
            thread_bytes=copies * largest_group + decoding, most_threads=loader.reader_threads,
            most_prefetched=loader.prefetch_batches, prepares=prepare is not None,
            sorted_rows=self.plan.stream_batch * self.plan.length_steps * loader.group_by_length,
        )  # fmt: skip
        self.prefetch = self._memory.prefetch
        """Maximum number of prefetched batches."""
        self._spare: list[Arena] = []
        self._wait_s = config.launch.collective_timeout_s

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[StepBatches, None, None]:
        """Yields the steps of an epoch, from `start_step` on. Prefetching stops when the iterator is closed."""
        room = PrefetchBudget(self._memory.ready_bytes)
        return read_ahead(self._batches(epoch, start_step, room), self._memory.bundles_ahead, room)

    def of_dataset(self, places: Ints) -> Ints:
        """Returns the places of rows of the plan in the row groups. # places, returns: (rows, 2): row group, row"""
        assert isinstance(self._rows, Rows)
        return kept_places(self._rows, places)

    def name_rows(self, epoch: int, step: int) -> str:
        """Names the rows of this rank in a step, for messages; all that it is sorted by length with, if it is."""
        if self.plan.draws is not None:
            return "rows that data.sampling_weight has drawn"
        first = step // self.plan.length_steps * self.plan.length_steps
        stop = first + self.plan.length_steps
        named = describe_rows(self._shards, self._rows, rows_of_steps(self.plan, self._streams, epoch, first, stop))
        among = f"among those of {stop - first} steps that are sorted by length (loader.group_by_length): "
        return named if stop - first == 1 else among + named

    def _batches(self, epoch: int, start_step: int, room: PrefetchBudget) -> Generator[list[StepBatches], None, None]:
        step, memory = start_step, self._memory
        with closing(self.steps(epoch, start_step)) as bundles:
            for rows in bundles:
                sizes = [self._builder.bytes_of([own], (epoch, i, self._rank)) for i, own in enumerate(rows, step)]
                for first, stop in _bundles(sizes, memory.bundle, memory.bundle_bytes):
                    room.take(sum(sizes[first:stop]))
                    yield [
                        StepBatches(
                            step + i, self._builder.build([rows[i]], (epoch, step + i, self._rank)),
                            self.plan.batch_rows(step + i),
                        )
                        for i in range(first, stop)
                    ]  # fmt: skip
                step += len(rows)

    def steps(self, epoch: int, start_step: int = 0) -> Generator[list[StepRows], None, None]:
        """Yields bundles of steps of an epoch, from `start_step` on: the rank's rows, gathered in the caller's thread.

        Windows are prefetched in threads until the iterator is closed.
        """
        if start_step >= self.plan.steps:
            return
        # Rows that are sorted by length together are read from the first of their steps on.
        first_step = start_step // self.plan.length_steps * self.plan.length_steps
        schedule = ReadSchedule(self.plan.streams(epoch, self._streams), self.plan.stream_batch, first_step)
        arena, threads = self._arena(schedule), self._memory.threads
        reader = WindowReader(self._rows, schedule, arena, threads, self._memory.slots_bytes, wait_s=self._wait_s)
        with closing(reader):
            yield from self._gather(arena, reader, epoch, first_step, start_step)
        self._spare.append(arena)

    def _arena(self, schedule: ReadSchedule) -> Arena:
        """Makes an arena with one slot per stream, and a second one to prefetch into as far as the budget allows.

        The arena of the previous epoch is reused if possible: new memory costs as much time as reading.
        """
        slot_rows = max(1, *(s.windows.largest_rows for s in schedule.streams))
        slot_bytes: float = self._row_bytes * slot_rows
        if (row_bytes := self._group_row_bytes) is not None:
            slot_bytes = max(self._row_bytes, *(s.windows.largest_bytes(row_bytes) for s in schedule.streams))
        num_slots = self._memory.num_slots(slot_bytes, sum(schedule.num_reads))
        while self._spare:
            arena = self._spare.pop()
            if arena.num_slots >= num_slots and arena.slot_rows >= slot_rows:
                return arena
        return Arena(
            self._rows.columns,
            num_slots=num_slots,
            slot_rows=slot_rows,
            num_tails=len(self._streams),
            tail_rows=self.plan.stream_batch * self.plan.length_steps,
        )

    def _gather(
        self, arena: Arena, reader: WindowReader, epoch: int, first_step: int, start_step: int
    ) -> Iterator[list[StepRows]]:
        batch, streams, end = self.plan.stream_batch, len(self._streams), self.plan.steps
        at_once = self._memory.at_once
        cursors = [_Cursor(i, arena, reader, self.plan, epoch, first_step) for i in range(streams)]
        for cursor in cursors:
            cursor.skip((start_step - first_step) * batch, (end - first_step) * batch)
        step = start_step
        while step < end:
            ahead = [cursor.fill((end - step) * batch) // batch for cursor in cursors]
            steps = min(at_once, end - step, *ahead)
            positions = np.empty((steps, streams, batch), dtype=np.int64)
            weight = np.empty((steps, streams, batch), dtype=np.float32)
            for i, cursor in enumerate(cursors):
                taken, weights = cursor.take(steps * batch)
                positions[:, i] = taken.reshape(steps, batch)
                weight[:, i] = weights.reshape(steps, batch)
            gathered, weights = arena.take(positions.reshape(steps, -1)), weight.reshape(steps, -1)
            yield [StepRows([g[k] for g in gathered], weights[k], self._streams) for k in range(steps)]
            step += steps


class _Cursor:
    """A cursor in one stream: the positions of its next rows in the arena."""

    def __init__(self, stream: int, arena: Arena, reader: WindowReader, plan: Plan, epoch: int, step: int):
        self._stream, self._arena, self._reader, self._plan, self._epoch = stream, arena, reader, plan, epoch
        self._batch, self._together = plan.stream_batch, plan.length_steps
        self._step = step
        """The next step whose rows are not sorted by length."""
        self._order: Ints = np.empty(0, dtype=np.int64)
        self._ready = 0
        """Number of positions in `_order` that are in the order of use."""
        self._last: Ints = self._order
        """Position of the last used row."""
        self._true_rows = 0
        """Number of true rows in `_order`; the rest pads batches with weight 0."""
        self._slot: int | None = None

    def fill(self, rows_to_end: int) -> int:
        """Prepares at least one batch of positions, and returns their number. Waits for windows if necessary.

        At the end of the stream its last row is repeated up to the end of the epoch.
        """
        while self._ready < self._batch:
            left = self._order if len(self._order) else self._last
            tail = self._arena.to_tail(self._stream, left)
            if self._slot is not None:
                self._reader.free(self._slot)
                self._slot = None
            if not self._reader.has_more(self._stream):
                missing = rows_to_end - len(self._order)
                left = self._by_length(tail[: len(self._order)])
                self._order = np.concatenate([left, np.repeat(tail[-1:], missing)])
                self._ready = len(self._order)
                break
            read, self._slot = self._reader.next(self._stream)
            order = self._arena.slot_start(self._slot) + read.window.order()
            self._order = np.concatenate([tail[: len(self._order)], order[read.skip :]])
            self._last = order[-1:]
            self._true_rows = len(self._order)
            self._ready = len(self._order)
            if self._together > 1:
                self._ready -= self._ready % (self._batch * self._together)
                self._order[: self._ready] = self._by_length(self._order[: self._ready])
        return self._ready

    def _by_length(self, positions: Ints) -> Ints:
        """Sorts the next rows of the stream, from a step on whose rows begin to be sorted together."""
        if self._together == 1:
            return positions
        rows, lengths = self._batch * self._together, self._arena.lengths(positions)
        ordered = [positions[:0]]
        for first in range(0, len(positions), rows):
            places = self._plan.places_by_length(self._epoch, self._step)
            order = order_by_length(lengths[first : first + rows], self._batch, places)
            ordered.append(positions[first : first + rows][order])
            self._step += self._together
        return np.concatenate(ordered)

    def skip(self, rows: int, rows_to_end: int) -> None:
        """Leaves out the next rows. # rows_to_end: up to the end of the epoch, with padding"""
        while rows:
            taken, _ = self.take(min(rows, self.fill(rows_to_end)))
            rows, rows_to_end = rows - len(taken), rows_to_end - len(taken)

    def take(self, rows: int) -> tuple[Ints, Array]:
        """Returns the next positions and their weights. # (rows,), (rows,)"""
        taken, self._order = self._order[:rows], self._order[rows:]
        self._ready -= rows
        weights = np.zeros(rows, dtype=np.float32)
        weights[: self._true_rows] = 1
        self._true_rows = max(0, self._true_rows - rows)
        self._last = taken[-1:]
        return taken, weights


def _bundles(sizes: Sequence[int], most: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first, stop) of each bundle: at most `most` items, and `most_bytes` bytes unless it has one item."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and (i - first == most or total + size > most_bytes):
            yield first, i
            first, total = i, 0
        total += size
    if sizes:
        yield first, len(sizes)


def read_ahead(
    bundles: Iterator[list[StepBatches]], depth: int, room: PrefetchBudget | None = None
) -> Generator[StepBatches, None, None]:
    """Yields the items of lists that are made in a thread, at most `depth` lists ahead. Raises the thread's exceptions.

    The thread takes memory for each list from `room`. It is given back when the list is consumed.
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
            with closing(bundles):  # type: ignore[type-var]  # a generator: closing it ends its threads
                for item in bundles:
                    if not put(item):
                        return
            put(None)
        except BaseException as error:  # raised again in the consumer's thread
            put(error)

    thread = threading.Thread(target=work, name="spark_dl loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # its traceback refers to this frame
            if room is not None:
                room.release_first()
            yield from item
    finally:
        stop.set()
        if room is not None:
            room.close()
        thread.join()
