"""The loader: follows the plan and yields the batches of one rank, step by step, read ahead by one thread."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.data import foreign, schema
from spark_dl.data.plan import Plan, Stream, Window, rows_held_out, split_rows, streams_of_rank, windows_from
from spark_dl.data.schema import Array, Column
from spark_dl.data.shards import ShardSet

Part = Literal["all", "train", "validation"]
_HELD_ROW_GROUPS = 4
_STEPS_AT_ONCE = 16
_GATHER_BYTES = 1 << 20
_OPEN_FILES = 16


@dataclass(frozen=True)
class StepBatches:
    """What one rank works on in one step."""

    step: int
    """Number of the step in its epoch."""
    micro_batches: list[dict[str, Tensor]]
    """Columns by name, [rows, *cell], and `weight`, [rows] float32; on the CPU."""
    rows: int
    """True rows of the global batch, over all ranks."""


class Loader:
    """The batches of one rank. Not collective: every rank has its own, and they need not talk to each other.

    `part` chooses the rows that train or validate where `data.validation_fraction` splits one dataset. With
    `shuffle=False` the rows come in the order of the dataset.
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
    ):
        data, train = config.data, config.train
        self.columns = shards.select(data.columns)
        self._rows = _Rows(shards, self.columns, data.validation_fraction, train.seed, part)
        self.plan = Plan(
            group_rows=self._rows.group_rows,
            global_batch_size=train.global_batch_size,
            num_streams=data.num_streams,
            window_rows=data.shuffle_window_rows,
            shuffle=data.shuffle and shuffle,
            seed=train.seed,
        )
        self._streams = streams_of_rank(data.num_streams, rank, world_size)
        self._micro_batches = micro_batches
        self._prefetch = data.prefetch_batches

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[StepBatches]:
        """The steps of an epoch, from `start_step` on. Reading ahead stops when the iterator is closed."""
        return _read_ahead(self._steps(epoch, start_step), self._prefetch)

    def _steps(self, epoch: int, start_step: int) -> Iterator[StepBatches]:
        batch = self.plan.stream_batch
        all_streams = self.plan.streams(epoch)
        readers = [_StreamReader(all_streams[s], self._rows, batch, start_step) for s in self._streams]
        step_bytes = len(readers) * batch * sum(c.row_bytes for c in self.columns)
        # Several small steps are gathered at once: what Python costs for each stream is then paid once for all of them.
        at_once = max(1, min(_STEPS_AT_ONCE, _GATHER_BYTES // max(1, step_bytes)))
        for first in range(start_step, self.plan.steps, at_once):
            steps = min(at_once, self.plan.steps - first)
            shape = (steps, len(readers), batch)
            out = {c.name: np.empty((*shape, *c.shape), dtype=c.dtype) for c in self.columns}
            weight = np.empty(shape, dtype=np.float32)
            for i, reader in enumerate(readers):
                reader.fill([array[:, i] for array in out.values()], weight[:, i])
            out["weight"] = weight
            for k in range(steps):
                tensors = {name: torch.from_numpy(a[k].reshape(-1, *a.shape[3:])) for name, a in out.items()}
                yield StepBatches(first + k, _split(tensors, self._micro_batches), self.plan.batch_rows(first + k))


def _split(tensors: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    if parts == 1:
        return [tensors]
    pieces = {name: torch.tensor_split(tensor, parts) for name, tensor in tensors.items()}
    return [{name: p[i] for name, p in pieces.items()} for i in range(parts)]


class _StreamReader:
    """Walks through one stream of an epoch, from the first row of `start_step` on."""

    def __init__(self, stream: Stream, rows: _Rows, batch: int, start_step: int):
        self._stream, self._source = stream, rows
        self._windows = windows_from(stream, start_step * batch)
        self._arrays: list[Array] = []
        self._order = np.empty(0, dtype=np.int64)
        self._last: list[Array] | None = None

    def fill(self, out: list[Array], weight: Array) -> None:
        """Writes the next rows of the stream into `out`; once they have run out, copies of its last row, weight 0.

        # out: each (steps, batch, *cell), weight: (steps, batch)
        """
        rows = weight.size
        in_place = len(weight) == 1
        flat = [a[0] if in_place else np.empty((rows, *a.shape[2:]), dtype=a.dtype) for a in out]
        done = 0
        while done < rows:
            if len(self._order) == 0 and not self._next_window():
                break
            take, self._order = self._order[: rows - done], self._order[rows - done :]
            for array, target in zip(self._arrays, flat, strict=True):
                target[done : done + len(take)] = array[take]  # np.take would first copy all of a strided view
            done += len(take)
        if done:
            self._last = [target[done - 1].copy() for target in flat]
        if done < rows:
            self._last = self._last or self._any_row()
            for row, target in zip(self._last, flat, strict=True):
                target[done:] = row
        weight[...] = (np.arange(rows) < done).reshape(weight.shape)
        if not in_place:
            for target, a in zip(flat, out, strict=True):
                a[...] = target.reshape(a.shape)

    def _next_window(self) -> bool:
        found = next(self._windows, None)
        if found is None:
            return False
        window, skip = found
        self._arrays = self._source.read(window)
        self._order = window.order()[skip:]
        return True

    def _any_row(self) -> list[Array]:
        """A row to fill batches with, for a stream that has none left when a run is resumed, or has none at all."""
        if self._stream.windows:
            window = self._stream.windows[-1]
            row = int(window.order()[-1])
            return [a[row] for a in self._source.read(window)]
        filler = Window((self._stream.filler,), 0, None)
        return [a[0] for a in self._source.read(filler)]


class _Rows:
    """The rows of a dataset, or of the part of it that trains or validates, by row group."""

    def __init__(self, shards: ShardSet, columns: Sequence[Column], fraction: float, seed: int, part: Part):
        self._shards, self._columns = shards, columns
        self._seed, self._part = seed, part
        self._stored = [rows for _, _, rows in shards.row_groups]
        self._held_out = rows_held_out(self._stored, 0.0 if part == "all" else fraction)
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._held: OrderedDict[int, list[Array]] = OrderedDict()
        if part == "validation":
            self.group_rows = self._held_out
        else:
            self.group_rows = tuple(n - h for n, h in zip(self._stored, self._held_out, strict=True))

    def read(self, window: Window) -> list[Array]:
        """The columns of a window's rows, unshuffled. # each (window rows, *cell)"""
        pieces = [[a[s.start : s.stop] for a in self._row_group(s.row_group)] for s in window.segments]
        if len(pieces) == 1:
            return pieces[0]
        return [np.concatenate([p[i] for p in pieces]) for i in range(len(self._columns))]

    def _row_group(self, number: int) -> list[Array]:
        """The columns of a row group, of the rows of this part. Two streams can meet in one: the last few are kept."""
        if number not in self._held:
            arrays = self._decode(number)
            if self._held_out[number]:
                kept = split_rows(self._stored[number], self._held_out[number], self._seed, number)
                arrays = [a[kept[self._part == "validation"]] for a in arrays]
            self._held[number] = arrays
            while len(self._held) > _HELD_ROW_GROUPS:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        return self._held[number]

    def _decode(self, number: int) -> list[Array]:
        shard, group, rows = self._shards.row_groups[number]
        url = storage.join(self._shards.url, self._shards.shards[shard].name)
        partition = dict(self._shards.shards[shard].partition)
        names = [c.name for c in self._columns if c.codec != "partition"]
        try:
            table = self._file(shard, url).read_row_group(group, names, use_threads=False)
            if table.num_rows != rows:
                raise ValueError(f"{table.num_rows} rows, where the manifest has {rows}")
            return [
                np.full(rows, int(partition[c.name])) if c.codec == "partition" else _decode(c, table.column(c.name))
                for c in self._columns
            ]
        except Exception as error:
            raise RuntimeError(f"cannot read row group {group} of {url}: {error}") from error

    def _file(self, shard: int, url: str) -> Any:
        if shard not in self._open:
            filesystem, path = storage.resolve(url)
            source = filesystem.open_input_file(path)
            self._open[shard] = pq.ParquetFile(source, page_checksum_verification=True)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close(force=True)
        self._open.move_to_end(shard)
        return self._open[shard]


def _decode(column: Column, stored: Any) -> Array:
    return foreign.decode(column, stored) if column.codec.startswith("petastorm.") else schema.decode(column, stored)


def _read_ahead(steps: Iterator[StepBatches], depth: int) -> Iterator[StepBatches]:
    """Runs an iterator in a thread, at most `depth` items ahead; its exceptions are raised here."""
    ready: queue.Queue[StepBatches | BaseException | None] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: StepBatches | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in steps:
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
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
