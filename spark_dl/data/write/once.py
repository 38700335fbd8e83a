"""Rows that several jobs read, and that must be the same in each of them.

Spark computes a DataFrame again in each job. If the plan does not show all that decides its rows, as with a Python
UDF, the rows can differ from job to job. Then a split by a column loses some rows and uses others twice, and a
vocabulary lacks words of the rows that are written.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_dl.spark_job import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_EXPRESSIONS = "org.apache.spark.sql.catalyst.expressions."
_USER_CODE = re.compile(
    r"UDF|UDAF|UDTF|Invoke|Reflect|PythonUD|ScalaAgg|TypedAgg|InPandas|InArrow|MapPartitions|MapElements|MapGroups"
    r"|TypedFilter|SerializeFromObject|ScriptTransformation|WithPython|TransformWithState"
)
"""Operators and expressions that run code which the plan does not show."""
_NOW = re.compile(r"^(Current(?!Row|Database|Catalog|User)|Now$|Local(Date)?Timestamp|CurDate)")


@contextlib.contextmanager
def read_once(df: DataFrame, what: str) -> Iterator[DataFrame]:
    """Yields a DataFrame with the rows of `df`, which are the same in all jobs of the block. Called on the driver.

    That is `df` itself if its plan decides its rows, or it is cached. Otherwise the rows are computed once, and kept on
    the executors until the block ends (`DataFrame.localCheckpoint`); if an executor is lost, a job that reads them
    fails, so that no row is computed again.

    what: what reads the rows several times, for messages. Raises ValueError over a Spark Connect server that cannot
    keep rows (Spark 3.5).
    """
    if _is_decided(df):
        yield df
        return
    try:
        kept = df.localCheckpoint(eager=True)
    except (AttributeError, NotImplementedError) as error:  # PySparkNotImplementedError is one of the latter
        raise ValueError(
            f"{what} reads the DataFrame more than once, and whether its rows are the same each time is not known; "
            "cache it (df.cache()), or write it first and pass its path"
        ) from error
    try:
        yield kept
    finally:
        _release(kept)


def _is_decided(df: DataFrame) -> bool:
    """Whether each job computes the same rows, as far as the plan shows."""
    level = df.storageLevel
    if level.useMemory or level.useDisk:
        return True
    if is_connect(df.sparkSession):
        return False  # the plan stays on the server
    plan: Any = df._jdf.queryExecution().analyzed()  # type: ignore[operator]
    try:
        nodes = json.loads(plan.toJSON())
    except Exception:  # of py4j, for an operator that Spark cannot write as JSON
        return False
    if not plan.deterministic() or any(map(_is_open, _classes(nodes))):
        return False
    leaves = plan.collectLeaves()
    return all(_is_kept(leaves.apply(i)) for i in range(leaves.size()))


def _is_open(name: str) -> bool:
    package, _, short = name.rpartition(".")
    is_now = f"{package}." == _EXPRESSIONS and _NOW.search(short)
    return bool(_USER_CODE.search(short) or is_now)


def _classes(nodes: Any) -> Iterator[str]:
    """Yields the classes of all operators and expressions of a plan, at any depth."""
    if isinstance(nodes, dict):
        if "class" in nodes:
            yield nodes["class"]
        nodes = list(nodes.values())
    if isinstance(nodes, list):
        for node in nodes:
            yield from _classes(node)


def _is_kept(leaf: Any) -> bool:
    """Whether a leaf of a plan has the same rows in each job. An RDD has not: Spark computes it again."""
    name = leaf.getClass().getSimpleName()
    return bool(leaf.rdd().isCheckpointed()) if name == "LogicalRDD" else name != "ExternalRDD"


def _release(kept: DataFrame) -> None:
    """Frees the kept rows, where the driver can. Over Spark Connect the server does it, with its garbage collection."""
    with contextlib.suppress(Exception):  # the session may have ended
        kept._jdf.queryExecution().analyzed().rdd().unpersist(False)  # type: ignore[operator]
