"""Petastorm's loaders and converter as peers of the benchmarks, in Petastorm's environment, without spark_dl."""

import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BATCH, BUFFER_ROWS = 256, 32768


def build_loader(name: str, folder: str) -> Any:
    """Returns the epochs of one of Petastorm's loaders over the plain Parquet files."""
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    url = Path(folder, "parquet").as_uri()
    loader_class = BatchedDataLoader if name == "petastorm_batched" else DataLoader

    def epoch(number: int) -> Iterator[Any]:
        reader = make_batch_reader(url, num_epochs=1, shuffle_row_groups=True, seed=number)
        with loader_class(reader, batch_size=BATCH, shuffling_queue_capacity=BUFFER_ROWS) as loader:
            for batch in loader:
                yield batch["label"]

    return epoch


def build_converter(folder: str, cores: str) -> Callable[[str], dict[str, Any]]:
    """Writes the cached rows through `make_spark_converter` for each request."""
    from petastorm.spark import SparkDatasetConverter, make_spark_converter
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    spark = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false").getOrCreate()
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, Path(tempfile.mkdtemp()).as_uri())
    df = spark.read.parquet(f"{folder}/parquet").cache()
    df.count()
    written = 0

    def write(line: str) -> dict[str, Any]:
        nonlocal written
        written += 1
        fresh = df.withColumn("run", F.lit(written))  # with the same plan, the converter would reuse earlier files
        start = time.perf_counter()
        converter = make_spark_converter(fresh)
        seconds = time.perf_counter() - start
        converter.delete()
        return {"seconds": seconds}

    return write


if __name__ == "__main__":
    peer = runpy.run_path(str(Path(__file__).with_name("peer.py")))
    what, *arguments = sys.argv[1:]
    answer = build_converter(*arguments) if what == "converter" else peer["answers"](build_loader(what, *arguments))
    peer["serve"](answer)
