"""The key of a dataset that a DataFrame would be written as: equal work has an equal key, in any session, by any user.

The key is a SHA-256 of the analysed logical plan, the versions of the source files, the schema, the settings that
decide what shards hold, and the version of their format. Where something that decides the rows cannot be seen, there is
no key: a needless write costs time, a wrong reuse would train on other rows. Over Spark Connect the analysed plan stays
in the server, so there the user names the rows; a name can be given elsewhere, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from spark_dl import storage
from spark_dl.config import Data, Shards
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import FORMAT, VERSION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CATALYST = "org.apache.spark.sql.catalyst."
_RELATION = "org.apache.spark.sql.execution.datasources.LogicalRelation"
_NODES = (
    "Aggregate", "Deduplicate", "Distinct", "Except", "Expand", "Filter", "Generate", "GlobalLimit", "Intersect",
    "Join", "LocalLimit", "Offset", "OneRowRelation", "Project", "Range", "Repartition", "RepartitionByExpression",
    "Sort", "SubqueryAlias", "Union", "View", "Window",
)  # fmt: skip
"""Operators whose rows follow from what the plan shows and from their input."""
_HIDDEN = re.compile(r"UDF|UDAF|Invoke|Subquery|ListQuery|Exists$|Lambda|Reflect|PythonUD|ScalaAgg|TypedAgg")
"""Expressions that run code or read rows that the plan does not show."""
_NOW = re.compile(r"^(Current(?!Row)|Now$|Local(Date)?Timestamp|CurDate|Session)")
_TIME_OF_RUN = re.compile(r"(?i)\s*(now|today|tomorrow|yesterday)\b")
"""Texts that Spark takes for the time of the run where they become dates."""
_CONF = (
    "spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive",
    "spark.sql.legacy.timeParserPolicy", "spark.sql.parquet.mergeSchema", "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles", "spark.sql.columnNameOfCorruptRecord",
    "spark.sql.parquet.datetimeRebaseModeInRead", "spark.sql.parquet.int96RebaseModeInRead",
)  # fmt: skip
"""Settings of the session that change what a plan yields."""
_STAT_THREADS = 16


class NoKeyError(Exception):
    """There is no key for a DataFrame; the text says why."""


def store_key(
    df: DataFrame,
    data: Data,
    layout: Shards,
    columns: Sequence[str] = (),
    like: Sequence[Column] = (),
    *,
    name: str | None = None,
) -> str:
    """The key of a DataFrame's shards that are written `like` some columns, 64 hex digits. On the driver; runs no job.

    With `name` the user vouches that DataFrames of that name and of one schema have the same rows; else the plan tells.
    Raises NoKeyError for a plan that is not deterministic, or of which the rows do not follow from what can be seen.
    """
    content = {
        **({"name": name} if name is not None else _plan(df)),
        "schema": df.schema.jsonValue(),
        "data": dataclasses.asdict(data),
        "layout": [layout.rows_per_row_group, layout.rows_per_shard],
        "columns": list(columns or data.columns),
        "words": {c.name: c.encoding.vocabulary for c in like if c.encoding.vocabulary is not None},
        "format": [FORMAT, VERSION],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plan(df: DataFrame) -> dict[str, Any]:
    if not hasattr(df, "_jdf"):
        raise NoKeyError(
            "over Spark Connect the plan that decides its rows stays in the server; name them, "
            "store_shards(df, data, key='...') or jobs/prepare.py --key, and train on the dataset that this gives"
        )
    execution: Any = df._jdf.queryExecution()
    plan = execution.analyzed()
    try:
        nodes = json.loads(plan.toJSON())
    except Exception as error:  # py4j's, of an operator that Spark cannot write as JSON
        raise NoKeyError(f"Spark cannot show its plan: {error}") from error
    _check_nodes(nodes)
    if not plan.deterministic():
        raise NoKeyError("its plan is not deterministic (rand, uuid, shuffle ...)")
    if "InMemoryRelation" in execution.withCachedData().toString():
        raise NoKeyError("it is cached in Spark's memory, which may be older than its files")
    relations = _relations(plan)
    return {
        "plan": _normalised(nodes),
        # What the JSON leaves out, such as the mode of a cast; the numbers of its columns differ between sessions.
        "text": re.sub(r"#\d+L?", "#", _text(df, plan)),
        "relations": relations,
        "files": _versions(df.inputFiles()) if relations else [],
        "conf": {name: df.sparkSession.conf.get(name, None) for name in _CONF},
    }


def _check_nodes(nodes: Any) -> None:
    for node in _plan_nodes(nodes):
        name = node["class"]
        short = name.rpartition(".")[2].rstrip("$")
        if name.startswith(f"{_CATALYST}plans.logical."):
            if short not in _NODES:
                raise NoKeyError(f"its plan holds {short}, whose rows cannot be told from the plan")
        elif name.startswith(f"{_CATALYST}expressions."):
            if _HIDDEN.search(short):
                raise NoKeyError(f"its plan holds {short}, which does not show all that decides the rows")
            if _NOW.search(short):
                raise NoKeyError(f"its rows depend on {short}, which differs from run to run")
            if short == "Literal" and _TIME_OF_RUN.match(str(node.get("value"))):
                raise NoKeyError(f"it holds the text {node['value']!r}, which as a date is another one each day")
        elif name != _RELATION:
            raise NoKeyError(f"its plan reads from {short}, whose rows cannot be told from the plan")


def _plan_nodes(nodes: Any) -> Iterator[dict[str, Any]]:
    """Operators and expressions, at any depth."""
    if isinstance(nodes, dict):
        if "class" in nodes:
            yield nodes
        nodes = list(nodes.values())
    if isinstance(nodes, list):
        for node in nodes:
            yield from _plan_nodes(node)


def _normalised(nodes: Any) -> Any:
    """A plan as JSON with its column ids, which Spark counts through a session, numbered in the order they come."""
    seen: dict[Any, int] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(n) for n in node]
        if not isinstance(node, dict):
            return node
        if node.get("product-class") == f"{_CATALYST}expressions.ExprId":
            return seen.setdefault((node["id"], node["jvmId"]), len(seen))
        return {key: walk(value) for key, value in node.items()}

    return walk(nodes)


def _text(df: DataFrame, plan: Any) -> str:
    """The plan as Spark prints it, with nothing left out for length."""
    conf, name = df.sparkSession.conf, "spark.sql.debug.maxToStringFields"
    before = conf.get(name, None)
    conf.set(name, str(2**31 - 1))
    try:
        return str(plan.toString())
    finally:
        conf.unset(name) if before is None else conf.set(name, before)


def _relations(plan: Any) -> list[dict[str, Any]]:
    """What the plan reads files with: format, options, folders, in the order of the plan."""
    leaves, found = plan.collectLeaves(), []
    for i in range(leaves.size()):
        leaf = leaves.apply(i)
        if leaf.getClass().getName() != _RELATION:
            continue
        relation = leaf.relation()
        if relation.getClass().getSimpleName() != "HadoopFsRelation":
            raise NoKeyError(
                f"its plan reads from {relation.getClass().getSimpleName()}, whose versions cannot be seen"
            )
        options, pairs = relation.options().iterator(), []
        while options.hasNext():
            pair = options.next()
            pairs.append([pair._1(), pair._2()])
        roots = relation.location().rootPaths()
        found.append(
            {
                "format": relation.fileFormat().getClass().getName(),
                "options": sorted(pairs),
                "folders": [roots.apply(r).toString() for r in range(roots.size())],
                "columns": [relation.dataSchema().json(), relation.partitionSchema().json()],
            }
        )
    return found


def _versions(urls: list[str]) -> list[list[Any]]:
    """Path, bytes and time of change of the source files, by path."""

    def version(url: str) -> list[Any]:
        with contextlib.suppress(OSError, ValueError):
            found = storage.info(url)
            if found.size is not None:
                return [url, found.size, found.mtime_ns]
        raise NoKeyError(f"the driver cannot see the version of its source file {url}")

    if not urls:
        raise NoKeyError("Spark does not say which files it reads")
    with ThreadPoolExecutor(_STAT_THREADS) as threads:
        return list(threads.map(version, sorted(urls)))
