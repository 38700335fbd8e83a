"""Sum of gradients by Spark's `treeReduce`, as in Spark MLlib.

Gradients are added in `parallel.tree_depth` levels. Between two levels whole gradients are shuffled to fewer tasks. The
tasks of the last level send their sums to the driver, which adds them. Spark skips a level that would not save work:
with depth 2 and up to 4 ranks the driver gets all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from spark_dl.baselines.driver_loop.gradient_sum import GradientSum, add
from spark_dl.baselines.driver_loop.loop import by_spark
from spark_dl.config.checks import check_number
from spark_dl.config.fields import named_settings
from spark_dl.config.parallel import Parallel

if TYPE_CHECKING:
    from pyspark import RDD

    from spark_dl.config import Config


@named_settings
@dataclass(frozen=True, kw_only=True)
class TreeReduce(Parallel):
    """Spark's `treeReduce`: the driver trains, with one Spark job for each step.

    Example:
        >>> spark_dl.Config(parallel=spark_dl.TreeReduce(tree_depth=3))
    """

    strategy: ClassVar[str] = "tree_reduce"
    by_spark: ClassVar[bool] = True
    tree_depth: int = 2
    """Levels of `treeReduce`."""

    def __post_init__(self) -> None:
        check_number(self, "tree_depth", 1, whole=True)


def aggregate(parts: RDD[GradientSum], config: Config) -> GradientSum:
    """Returns the sum of all ranks' gradients. Called on the driver; runs one Spark job."""
    assert isinstance(config.parallel, TreeReduce)
    total: GradientSum = parts.treeReduce(add, config.parallel.tree_depth)
    return total


STRATEGY = by_spark(TreeReduce, aggregate)
