"""Checks of `loader.memory_mib`, on the driver before any task starts, and in every loader."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from spark_dl.config import Config, Loader
from spark_dl.data.columns.ragged import padded_bytes
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet

_log = logging.getLogger("spark_dl")

_MIB = 1 << 20
_DECODING = 3
"""Additional memory to read lists, vectors and bytes, relative to their values: encoded pages, levels and growing
buffers of Arrow. Measured with pyarrow 26: 45 MiB for lists of 11 MiB."""
_SLICED_DECODING_BYTES = 24 << 20
"""Maximum of it for decoding in slices: local files have 5 MiB in memory at a time, and Arrow's allocator (mimalloc)
keeps several times that for each thread. Columns of remote files are read as a whole, which takes no more than the
values in the arena."""


def check_memory(
    shards: ShardSet, columns: Sequence[Column], config: Config, num_ranks: int, num_datasets: int = 1
) -> None:
    """Raises ValueError if a row group, or a rank's rows of a global batch, do not fit into a loader's memory.

    Args:
        num_ranks: ranks that read the dataset.
        num_datasets: datasets that share the memory. Called on the driver, and by every loader.
    """
    check_row_groups(shards, columns, config.loader.memory_mib, num_datasets)
    loader = config.loader
    rows = -(-loader.num_streams // num_ranks) * (config.train.global_batch_size // loader.num_streams)
    row_bytes = sum(c.value_bytes for c in columns) * (config.sequences.length if config.sequences else 1)
    if rows * row_bytes > share_mib(loader.memory_mib, num_datasets) * _MIB:
        raise ValueError(
            f"{shards.url}: each rank has {rows} rows of {row_bytes} bytes in a global batch, "
            f"{rows * row_bytes / _MIB:.0f} MiB, and {memory_setting(loader.memory_mib, num_datasets)}; lower "
            "train.global_batch_size, raise loader.memory_mib, or use more ranks"
        )
    if loader.ragged == "pad":
        _check_padded(shards, columns, config, rows, num_datasets)


def _check_padded(shards: ShardSet, columns: Sequence[Column], config: Config, rows: int, num_datasets: int) -> None:
    """Raises ValueError if a padded batch will not fit. Before reading, only mean lengths per row group are known.

    # rows: of a rank's batch
    """
    memory_mib, batch_rows = config.loader.memory_mib, rows // config.train.accumulation_steps
    for column in columns if shards.filtered is None else ():
        if not column.is_ragged:
            continue
        values, (shard, group, group_rows) = _longest_mean(shards, column)
        size = padded_bytes(batch_rows, values, np.dtype(column.dtype).itemsize * math.prod(column.inner))
        if size > share_mib(memory_mib, num_datasets) * _MIB:
            raise ValueError(
                f"column {column.name!r}: the {group_rows} rows of row group {group} of {shards.shards.name_of(shard)} "
                f"in {shards.url} have {values} values or more on average; a batch of {batch_rows} rows padded to this "
                f"length takes {size / _MIB:.0f} MiB, and {memory_setting(memory_mib, num_datasets)}; set "
                "loader.ragged to offsets, which does not pad, lower train.global_batch_size, raise loader.memory_mib, "
                "or use more ranks"
            )


def _longest_mean(shards: ShardSet, column: Column) -> tuple[int, tuple[int, int, int]]:
    """Returns the largest mean number of values per row of a row group, and the row group: (shard, number, rows).

    The number is a lower bound, 0 if unknown. In external datasets the bytes in the file are not the bytes of the
    values, and an empty list counts as one value.
    """
    rows, counts = shards.shards.group_rows, shards.shards.elements.get(column.name)
    if counts is None or (column.codec != "list" and shards.external):
        return 0, shards.shards.place_of(0)
    elements = np.maximum(0, counts - rows) if shards.external else np.maximum(0, counts)
    values = elements // max(1, math.prod(column.inner)) // np.maximum(1, rows)
    longest = int(values.argmax())
    return int(values[longest]), shards.shards.place_of(longest)


def check_row_groups(shards: ShardSet, columns: Sequence[Column], memory_mib: int, num_datasets: int = 1) -> None:
    """Raises ValueError if the largest row group of the dataset does not fit into a loader's memory."""
    sizes = np.where(shards.group_rows > 0, shards.group_bytes(columns), -1)  # row groups that are read
    largest = int(sizes.argmax())
    (shard, group, rows), size = shards.shards.place_of(largest), int(sizes[largest])
    if size > share_mib(memory_mib, num_datasets) * _MIB:
        raise ValueError(
            f"row group {group} of {shards.shards.name_of(shard)} in {shards.url} has {rows} rows of "
            f"{size // rows} bytes, {size / _MIB:.0f} MiB; a row group is read as a whole, and "
            f"{memory_setting(memory_mib, num_datasets)}; raise loader.memory_mib, or write the dataset with smaller "
            "row groups (shards.rows_per_row_group)"
        )


def share_mib(memory_mib: int, num_datasets: int) -> int:
    """Returns the memory of each dataset, in MiB."""
    return max(1, memory_mib // num_datasets)


def memory_setting(memory_mib: int, num_datasets: int = 1) -> str:
    """Returns the setting of a loader's memory, for messages."""
    share = f" ({share_mib(memory_mib, num_datasets)} for each of {num_datasets} datasets)"
    return f"loader.memory_mib={memory_mib}{share if num_datasets > 1 else ''}"


def warn_of_memory(
    shards: ShardSet, columns: Sequence[Column], loader: Loader, num_ranks: int, num_datasets: int = 1
) -> None:
    """Logs a warning if the streams of a rank need more than `loader.memory_mib`. Called on the driver.

    Each stream has at least one segment in memory: a row group, or its part of one.
    """
    sizes = shards.group_bytes(columns)[shards.group_rows > 0]
    streams, segment = -(-loader.num_streams // num_ranks), min(int(sizes.max()), int(sizes.sum()) / loader.num_streams)
    if streams * segment > share_mib(loader.memory_mib, num_datasets) * _MIB:
        _log.warning(
            "each rank reads %d streams with at least %.0f MiB of a row group in memory, %.0f MiB of %s, more than "
            "%s; lower loader.num_streams, use more ranks, write smaller row groups "
            "(shards.rows_per_row_group), or raise loader.memory_mib if the host has more memory",
            streams, segment / _MIB, streams * segment / _MIB, shards.url,
            memory_setting(loader.memory_mib, num_datasets),
        )  # fmt: skip


def decoding_bytes(columns: Sequence[Column], size: int, *, is_filtered: bool) -> float:
    """Returns the additional memory to decode a row group, in bytes. # size: bytes of its values"""
    decoded = sum(c.value_bytes for c in columns if c.codec in ("list", "vector", "binary", "petastorm.ndarray"))
    at_once = _DECODING * size * decoded / max(1, sum(c.value_bytes for c in columns))
    return at_once if is_filtered else min(at_once, _SLICED_DECODING_BYTES)
