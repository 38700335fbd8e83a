"""Measures what Parquet's page index saves for `data.filters`: seconds and bytes with and without it, in one run.

The same random rows are written with and without a page index. Without it, only the statistics of row groups are used.
The filter selects a range of `key`, which is sorted over all files (`sorted`), sorted within each row group, so that
every row group has rows in the range (`clustered`), or not sorted (`shuffled`).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_dl.config import Config, Data, Train
from spark_dl.config import Loader as Loading
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.loader import ShardLoader

LAYOUTS = ("sorted", "clustered", "shuffled")
_FILES = 2
_MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    rows: int = 400_000
    """Rows of each of the two files. A file is one row group."""
    floats: int = 64
    """Elements of a row's float32 cell."""
    shares: tuple[float, ...] = (0.01, 0.1)
    """Fractions of the rows that pass."""
    repeats: int = 5


def measure(options: Options) -> dict[str, Any]:
    """Measures median seconds and MiB by layout and share, with and without the page index. Without Spark, on Linux.

    `count` is what the driver does before training. `epoch` is one epoch of one rank. MiB are those of this process's
    read calls (`rchar`), with a warm page cache. Over a network, bytes cost more.
    """
    results: dict[str, Any] = {}
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("page_index", "footers"):
                _write(f"{folder}/{name}", layout, options, has_index=name == "page_index")
            results[layout] = {str(share): _measure(folder, layout, share, options) for share in options.shares}
    return results


def _write(folder: str, layout: str, options: Options, *, has_index: bool) -> None:
    rng, rows = np.random.default_rng(0), options.rows
    os.mkdir(folder)
    for file in range(_FILES):
        first = file * rows if layout == "sorted" else 0
        key = rng.permutation(rows) if layout == "shuffled" else np.arange(first, first + rows)
        ends = pa.array(np.arange(rows + 1, dtype=np.int32) * options.floats)
        cells = pa.ListArray.from_arrays(ends, pa.array(rng.random(rows * options.floats, dtype=np.float32)))
        table = pa.table({"key": key, "x": cells, "y": rng.integers(0, 10, rows)})
        path = f"{folder}/{file}.parquet"
        pq.write_table(table, path, row_group_size=rows, write_page_index=has_index, use_dictionary=False)


def _measure(folder: str, layout: str, share: float, options: Options) -> dict[str, dict[str, float]]:
    keys = options.rows * (_FILES if layout == "sorted" else 1)
    first, asked = round(0.4 * options.rows), max(1, round(share * keys))
    filters = [[["key", ">=", first], ["key", "<", first + asked]]]
    config = Config(
        data=Data(features=("x",), label="y", filters=filters),
        loader=Loading(num_streams=_FILES, memory_mib=2048),
        train=Train(global_batch_size=256),
    )
    found: dict[str, list[dict[str, float]]] = {"page_index": [], "footers": []}
    for _ in range(options.repeats + 1):
        for name, of_name in found.items():
            of_name.append(_read(f"{folder}/{name}", config))
    medians = {
        name: {key: statistics.median(each[key] for each in of_name[1:]) for key in of_name[0]}  # the first warms up
        for name, of_name in found.items()
    }
    for name, figures in medians.items():
        print(layout, share, name, {key: round(value, 3) for key, value in figures.items()}, file=sys.stderr)
    return medians


def _read(folder: str, config: Config) -> dict[str, float]:
    opened = open_parquet(folder, config.data.columns, data=config.data)
    shards, count_s, count_mib = _cost(lambda: filter_rows(opened, config))

    def epoch() -> int:
        return sum(step.rows for step in ShardLoader(shards, config, rank=0, world_size=1).epoch(0))

    rows, epoch_s, epoch_mib = _cost(epoch)
    assert rows == shards.rows
    return {"rows": rows, "count_s": count_s, "epoch_s": epoch_s, "count_mib": count_mib, "epoch_mib": epoch_mib}


def _cost(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns the result of `call`, its seconds, and the MiB that this process read."""
    before, start = _read_bytes(), time.perf_counter()
    result = work()
    return result, time.perf_counter() - start, (_read_bytes() - before) / _MIB


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])
