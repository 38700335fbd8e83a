"""Sum of gradients by a shuffle: a reduce-scatter with Spark's `reduceByKey`, then a gather on the driver.

Every task cuts its gradient into as many blocks as there are ranks. Reducer k gets block k of all tasks and adds them.
The driver collects the sum of each block. For any number of ranks, each task sends the bytes of one gradient, and each
reducer and the driver receive as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from spark_dl.baselines.driver_loop.gradient_sum import GradientSum, add, join
from spark_dl.baselines.driver_loop.loop import by_spark
from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel

if TYPE_CHECKING:
    from pyspark import RDD

    from spark_dl.config import Config


@named_settings
@dataclass(frozen=True, kw_only=True)
class ShuffleReduce(Parallel):
    """A reduce-scatter by a Spark shuffle: the driver trains, with one Spark job for each step.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.ShuffleReduce())
    """

    strategy: ClassVar[str] = "shuffle_reduce"
    by_spark: ClassVar[bool] = True


def aggregate(parts: RDD[GradientSum], config: Config) -> GradientSum:
    """Returns the sum of all ranks' gradients. Called on the driver; runs one Spark job."""
    num_ranks = config.launch.num_ranks
    return join(parts.flatMap(lambda part: part.cut(num_ranks)).reduceByKey(add, num_ranks).collect())


STRATEGY = by_spark(ShuffleReduce, aggregate)
