"""Measures seconds to write a cached DataFrame: our shards, Spark's Parquet, and Petastorm's converter, in one run."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loader import image_rows, table_rows, write_parquet
from benchmarks.peers.peer import Peer, absent, petastorm_command
from spark_dl.config import Data
from spark_dl.data.write.shards import write_shards

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def measure(spark: SparkSession, *, repeats: int, scale: float = 1.0, petastorm_python: str) -> dict[str, Any]:
    """Measures median seconds of each, for `img` and `tab` of the loader benchmark. Called on the driver.

    Petastorm runs in its own environment and version of Spark, with the same number of cores.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("img", image_rows(round(60_000 * scale))), ("tab", table_rows(round(1_000_000 * scale)))):
            source = f"{folder}/{name}"
            write_parquet(source, rows)
            columns, cores = tuple(rows), str(spark.sparkContext.defaultParallelism)
            rows.clear()
            command = petastorm_command(petastorm_python, "converter", source, cores)
            converter = Peer("petastorm_converter", command, absent=absent(petastorm_python, "setup-petastorm"))
            try:
                df = spark.read.parquet(f"{source}/parquet").cache()
                df.count()
                results[name] = _measure(df, columns, converter, repeats)
                df.unpersist(blocking=True)
            finally:
                converter.close()
            print(name, {k: round(v, 2) for k, v in results[name].items() if v is not None}, file=sys.stderr)
    return results


def _measure(df: DataFrame, columns: tuple[str, ...], converter: Peer, repeats: int) -> dict[str, float | None]:
    data = Data(features=columns, label=None)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/shards", f"{folder}/parquet"
        work: dict[str, Callable[[], object]] = {
            "spark_dl_s": lambda: write_shards(df, ours, data, overwrite=True),
            "df_write_s": lambda: df.write.parquet(theirs, mode="overwrite"),
        }
        seconds: dict[str, list[float]] = {**{name: [] for name in work}, "petastorm_converter_s": []}
        for _ in range(repeats + 1):
            for name, write in work.items():
                start = time.perf_counter()
                write()
                seconds[name].append(time.perf_counter() - start)
            if (done := converter.ask("write")) is not None:
                seconds["petastorm_converter_s"].append(done["seconds"])
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    return {name: statistics.median(s[1:]) if s[1:] else None for name, s in seconds.items()}  # the first warms up
