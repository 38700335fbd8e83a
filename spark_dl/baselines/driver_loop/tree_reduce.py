"""Gradients added up by Spark's `treeReduce`, as Spark's own MLlib does it.

The tasks' gradients are added in `parallel.tree_depth` levels. Between two levels whole gradients are shuffled to fewer
tasks, and the tasks of the last level send theirs to the driver, which adds them. Spark leaves out a level that would
not save anything: with depth 2 and up to 4 ranks the driver gets all gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_dl.baselines.driver_loop.gradient_sum import GradientSum, add
from spark_dl.config import Config

if TYPE_CHECKING:
    from pyspark import RDD


def aggregate(parts: RDD[GradientSum], config: Config) -> GradientSum:
    """The sum of all ranks' parts. Called on the driver, as one Spark job."""
    total: GradientSum = parts.treeReduce(add, config.parallel.tree_depth)
    return total
