"""Gradients added up by Spark's `treeReduce`, as Spark's own MLlib does it.

The tasks' gradients are added in `parallel.tree_depth` levels. Between two levels whole gradients are shuffled to fewer
tasks, and the tasks of the last level send theirs to the driver, which adds them. Spark leaves out a level that would
not save anything: with depth 2 and up to 4 ranks the driver gets all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from spark_dl.baselines import driver_loop
from spark_dl.baselines.parts import Part, add
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
    total: Part = parts.treeReduce(add, config.parallel.tree_depth)
    return total
