"""Gradients added up by a shuffle: a reduce-scatter with Spark's `reduceByKey`, after which the driver gathers.

Every task cuts its gradient into as many blocks as there are ranks. Block k of all of them goes to reducer k, which
adds them, and the driver collects one sum of each block. So each task sends the bytes of one gradient, each reducer
gets as many, and so does the driver, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from spark_dl.baselines.driver_loop.gradient_sum import GradientSum, add, join
from spark_dl.config.parallel import Parallel

if TYPE_CHECKING:
    from pyspark import RDD

    from spark_dl.config import Config


@dataclass(frozen=True, kw_only=True)
class ShuffleReduce(Parallel):
    """A reduce-scatter by a Spark shuffle: the driver trains, with one Spark job for each step."""

    strategy: ClassVar[str] = "shuffle_reduce"
    by_spark: ClassVar[bool] = True


def aggregate(parts: RDD[GradientSum], config: Config) -> GradientSum:
    """The sum of all ranks' parts. Called on the driver, as one Spark job."""
    num_ranks = config.launch.num_ranks
    return join(parts.flatMap(lambda part: part.cut(num_ranks)).reduceByKey(add, num_ranks).collect())
