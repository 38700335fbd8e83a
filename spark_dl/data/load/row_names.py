"""Names the rows of a rank in a step, by file, row group and row, for messages. Reads nothing: the plan has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.plan import Ints, Plan, Stream, windows_from
from spark_dl.data.read.rows import Rows
from spark_dl.data.read.sequences import SequenceRows

_MOST_ROWS = 96
"""About so many rows are named with their numbers."""
_MOST_GROUPS = 16


class NamesRows(Protocol):
    """A loader that knows the rows of its rank."""

    def name_rows(self, epoch: int, step: int) -> str:
        """Names the rows of the rank in a step of an epoch, both from 0. Empty if it is not known where they are."""


def name_rows(loader: NamesRows, epoch: int, step: int) -> str:
    """Calls `name_rows` of a loader. Called on a rank that explains a failure, so it does not raise."""
    try:
        return loader.name_rows(epoch, step)
    except Exception as error:
        return f"not known ({type(error).__name__}: {error})"


def rows_of_steps(plan: Plan, streams: range, epoch: int, step: int, end: int) -> Ints:
    """Returns the rows of some streams from a step to the one before `end`, sorted, without padding.

    # (rows, 2): row group, row
    """
    first, stop = step * plan.stream_batch, end * plan.stream_batch
    parts = [places_of_stream(stream, first, min(stop, stream.rows)) for stream in plan.streams(epoch, streams)]
    found: Ints = np.unique(np.concatenate(parts), axis=0)
    return found


def places_of_stream(stream: Stream, first: int, stop: int) -> Ints:
    """Returns the rows of a stream from one position to another, in the order of use. # (rows, 2): row group, row"""
    parts = [np.empty((0, 2), np.int64)]
    for window, skip in windows_from(stream, first):
        if window.first >= stop:
            break
        places = window.order()[skip : stop - window.first]
        segments = window.segments
        ends = np.cumsum([segment.rows for segment in segments])
        starts = np.array([(s.row_group, s.stop - end) for s, end in zip(segments, ends.tolist(), strict=True)])
        group, offset = starts[np.searchsorted(ends, places, side="right")].T
        parts.append(np.stack([group, places + offset], axis=1))
    return np.concatenate(parts)


def kept_places(rows: Rows, places: Ints) -> Ints:
    """Returns the places of rows of a split among all rows that pass. # places, returns: (rows, 2): row group, row"""
    found: Ints = places.copy()
    for number in np.unique(found[:, 0]).tolist():
        if (kept := rows.kept_rows(number)) is not None:
            of_group = found[:, 0] == number
            found[of_group, 1] = kept[found[of_group, 1]]
    return found


def describe_rows(shards: ShardSet, rows: Rows | SequenceRows, found: Ints) -> str:
    """Names rows of a dataset, as `rows_of_steps` returns them. A long list is shortened."""
    if isinstance(rows, SequenceRows):
        found, what = rows.first_rows(found), "the sequences from "
    else:
        found, what = kept_places(rows, found), ""
    if not len(found):
        return "none but padding"
    groups = np.unique(found[:, 0]).tolist()
    most = _MOST_ROWS // min(len(groups), _MOST_GROUPS)
    named = []
    for number in groups[:_MOST_GROUPS]:
        shard, group, _ = shards.shards.place_of(number)
        numbers = np.sort(found[found[:, 0] == number, 1]).tolist()
        named.append(f"{_shortened(numbers, most)} of row group {group} of {shards.shards.name_of(shard)}")
    if others := groups[_MOST_GROUPS:]:
        named.append(f"{np.isin(found[:, 0], others).sum()} rows of {len(others)} other row groups")
    is_filtered = bool((shards.group_rows[groups] < shards.shards.group_rows[groups]).any())
    count = "numbered from 0" + (" among the rows that pass data.filters, data.nulls and data.nonfinite" * is_filtered)
    where = f"{shards.url}, a folder of this run on the rank's host" if shards.placement is not None else shards.url
    return f"{what}{', '.join(named)} in {where} ({count})"


def _shortened(numbers: Sequence[int], most: int) -> str:
    """Returns row numbers in words: `row 17`, `rows 17 and 45`, `rows 17, 45 and 30 others`."""
    left = len(numbers) - most
    if left < 2:
        *shown, last = map(str, numbers)
    else:
        shown, last = [str(number) for number in numbers[:most]], f"{left} others"
    return f"rows {', '.join(shown)} and {last}" if shown else f"row {last}"
