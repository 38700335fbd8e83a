"""Measures the cost of a large dataset before its first row is read: opening, sending to a rank, and a rank's plan.

The manifest is real: the package commits and opens it, with all checks. The data files are sparse, with a size but
without content. Each rank is a process that unpacks its task, builds its loader as in training, and goes through all
windows of an epoch without reading rows.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ROOT
from benchmarks.peers.step import build_cnn
from spark_dl import worker
from spark_dl.config import Config, Data, Launch, Train
from spark_dl.config import Loader as Loading
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import commit, read_shards
from spark_dl.data.dataset.records import Shard, ShardSet, ShardTable
from spark_dl.data.load.build import build_train_loader
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.load.resume_check import for_ranks
from spark_dl.data.load.window_reader import ReadSchedule
from spark_dl.launch.code import payload
from spark_dl.spec import ModelSpec, Run

RANKS = (1, 8, 512)
_STREAMS = 512
_GROUP_ROWS, _ROW_FLOATS = 1024, 1024
_FILES_OF_A_TASK = 10
_MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    files: int = 100_000
    row_groups: int = 25
    """Row groups of each file, of 4 MiB each."""
    repeats: int = 3


def measure(options: Options) -> dict[str, Any]:
    """Measures median seconds to open the dataset, MiB sent to a rank, and a rank's plan by number of ranks.

    Without Spark. `plan_s` is the time from the received bytes to the last window of an epoch. `plan_mib` is the
    increase of the peak resident memory (VmHWM) during that time, with NumPy's arrays.
    """
    with tempfile.TemporaryDirectory() as folder:
        _timed("written", lambda: write_dataset(f"{folder}/data", options))
        opened = [_timed("opened", lambda: read_shards(f"{folder}/data")) for _ in range(options.repeats)]
        shards = read_shards(f"{folder}/data")
        packed = pack(shards)
        size = len(packed) - len(pack(ShardSet("", (), ShardTable.of(()))))  # without the sources of this program
        Path(folder, "packed").write_bytes(packed)
        _show(f"{shards.num_shards} files, {len(shards.group_rows)} row groups, {size} bytes to each rank")
        ranks = {str(n): _median([_ask_rank(f"{folder}/packed", n) for _ in range(options.repeats)]) for n in RANKS}
    return {"open_s": statistics.median(opened), "travels_mib": size / _MIB, "ranks": ranks}


def write_dataset(url: str, options: Options) -> ShardSet:
    """Writes a dataset of sparse files. The last row group of each file is not full."""
    rng = np.random.default_rng(0)
    Path(url).mkdir()
    columns = (Column("x", "float32", (_ROW_FLOATS,), "ndarray"), Column("y", "int64"))
    size = options.row_groups * _GROUP_ROWS * sum(c.row_bytes for c in columns)
    shards = []
    for number in range(options.files):
        task, file = divmod(number, _FILES_OF_A_TASK)
        name = f"part-0123abcd-{task:05d}-{task + 17}-{file:04d}.parquet"
        last, own_size = int(rng.integers(1, _GROUP_ROWS + 1)), size + int(rng.integers(0, 1000))
        with open(f"{url}/{name}", "wb") as out:
            out.truncate(own_size)
        rows = (*(_GROUP_ROWS,) * (options.row_groups - 1), last)
        shards.append(Shard(name, rows, own_size, rng.bytes(32).hex(), 2000, int(rng.integers(2**32))))
    return commit(ShardSet(url, columns, ShardTable.of(shards)))


def pack(shards: ShardSet) -> bytes:
    """Returns the call of a training run, as Spark sends it to a task."""
    config = Config(
        data=Data(features=("x",), label="y"),
        loader=Loading(num_streams=_STREAMS),
        train=Train(global_batch_size=8 * _STREAMS),
        launch=Launch(num_ranks=RANKS[-1]),
    )
    run = Run(spec=ModelSpec(build=build_cnn), config=config, train=for_ranks(shards, config), run_dir="")
    return payload.pack_call(worker.main, (run,), {"task": "train"})


def _ask_rank(packed: str, num_ranks: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", packed, str(num_ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    _show(f"a rank of {num_ranks}: {found}")
    return {name: found[name] for name in ("plan_s", "plan_mib")}


def _rank_main(packed: str, num_ranks: int) -> None:
    """Measures the middle rank, in a process of its own."""
    arrived = Path(packed).read_bytes()
    with contextlib.suppress(OSError):  # resets the peak, which imports may have raised
        Path("/proc/self/clear_refs").write_text("5")
    before, start = _resident_mib("VmRSS"), time.perf_counter()
    _, (run,), _ = payload.unpack_call(arrived)
    loader = build_train_loader(run.train, run.spec, run.config, rank=num_ranks // 2, world_size=num_ranks)
    assert isinstance(loader, ShardLoader)
    own = range(num_ranks // 2 * _STREAMS // num_ranks, (num_ranks // 2 + 1) * _STREAMS // num_ranks)
    reads = ReadSchedule(loader.plan.streams(0, own), loader.plan.stream_batch, 0).reads()
    rows = next(reads).window.rows
    first = time.perf_counter() - start
    rows += sum(read.window.rows for read in reads)
    seconds = time.perf_counter() - start
    figures = {"plan_s": seconds, "plan_mib": _resident_mib("VmHWM") - before, "first_window_s": first, "rows": rows}
    print(json.dumps(figures))


def _resident_mib(name: str) -> float:
    """Returns this process's VmRSS (resident memory now) or VmHWM (peak), in bytes. On Linux."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def _median(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def _timed(what: str, work: Any) -> float:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    _show(f"{what} in {seconds:.2f} s")
    return seconds


def _show(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    _rank_main(sys.argv[1], int(sys.argv[2]))
