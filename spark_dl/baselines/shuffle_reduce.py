"""Gradients added up by a shuffle: a reduce-scatter with Spark's `reduceByKey`, after which the driver gathers.

Every task cuts its gradient into as many blocks as there are ranks. Block k of all of them goes to reducer k, which
adds them, and the driver collects one sum of each block. So each task sends the bytes of one gradient, each reducer
gets as many, and so does the driver, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spark_dl.baselines import driver_loop
from spark_dl.baselines.parts import Part, add, join
from spark_dl.config import Config
from spark_dl.spec import Run

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession


def train(
    spark: SparkSession, run: Run, *, report: Callable[[Mapping[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Trains from the driver; returns what `spark_dl.loop.train` does, and raises as `driver_loop.train`."""
    return driver_loop.train(spark, run, _sum, report=report)


def _sum(parts: RDD[Part], config: Config) -> Part:
    num_ranks = config.launch.num_ranks
    return join(parts.flatMap(lambda part: part.cut(num_ranks)).reduceByKey(add, num_ranks).collect())
