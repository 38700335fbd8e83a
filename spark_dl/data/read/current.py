"""The reads of row groups that threads are at, so that a read that does not come to an end can be named."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from spark_dl import storage
from spark_dl.data.dataset.records import ShardSet


class CurrentReads:
    """The row groups of a dataset that threads read now."""

    def __init__(self, shards: ShardSet):
        self._shards = shards
        self._begun: dict[int, tuple[float, int]] = {}
        """Of each thread: when its read has begun, and the number of the row group."""

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Notes that this thread reads a row group in the block."""
        thread = threading.get_ident()
        self._begun[thread] = time.monotonic(), number
        try:
            yield
        finally:
            del self._begun[thread]

    def longest(self) -> str:
        """Returns the oldest read, such as `row group 3 of /data/part-0 for 12 s`; empty if no thread reads."""
        if not (begun := sorted(self._begun.copy().values())):
            return ""
        since, number = begun[0]
        shard, group, _ = self._shards.shards.place_of(number)
        url = storage.join(self._shards.url, self._shards.shards.name_of(shard))
        return f"row group {group} of {url} for {time.monotonic() - since:.0f} s"
