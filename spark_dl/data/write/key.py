"""The key of the shards of a DataFrame: equal for the same rows and settings, in any session and for any user.

The key is a SHA-256 of the analysed logical plan, the versions of the source files, the schema, the settings that
decide the content of the shards, and the version of their format. If the plan does not show all that decides the rows,
there is no key: a needless write costs time, but a wrong reuse would train on other rows. Over Spark Connect the
analysed plan stays on the server, so the user must name the rows. A name can also be given elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Operators whose rows follow from the plan and their input."""
_HIDDEN = re.compile(r"UDF|UDAF|Invoke|Subquery|ListQuery|Exists$|Lambda|Reflect|PythonUD|ScalaAgg|TypedAgg")
"""Expressions that run code or read rows that the plan does not show."""
_SPARK_FORMATS = {
    "org.apache.spark.sql.execution.datasources.": (
        "binaryfile.BinaryFileFormat", "csv.CSVFileFormat", "json.JsonFileFormat", "orc.OrcFileFormat",
        "parquet.ParquetFileFormat", "text.TextFileFormat",
    ),
    "org.apache.spark.sql.avro.": ("AvroFileFormat",),
}  # fmt: skip
"""Spark's own file formats, by package: their rows follow from the content of the data files alone."""
_SPARK_INDEXES = ("InMemoryFileIndex", "CatalogFileIndex", "MetadataLogFileIndex")
"""Spark's own file indexes. Table formats have others: their logs change rows without changing a data file."""
_NOW = re.compile(r"^(Current(?!Row)|Now$|Local(Date)?Timestamp|CurDate|Session)")
_TIME_OF_RUN = re.compile(r"(?i)\s*(now|today|tomorrow|yesterday)\b")
"""Strings that Spark resolves to the time of the run when they are cast to dates."""
_CONF = (
    "spark.sql.session.timeZone", "spark.sql.ansi.enabled", "spark.sql.caseSensitive",
    "spark.sql.legacy.timeParserPolicy", "spark.sql.parquet.mergeSchema", "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles", "spark.sql.columnNameOfCorruptRecord",
    "spark.sql.parquet.datetimeRebaseModeInRead", "spark.sql.parquet.int96RebaseModeInRead",
)  # fmt: skip
"""Session settings that change the result of a plan, and whose defaults differ by host, or by version of Spark."""
_HARMLESS = (
    # How rows are computed, and not which.
    "adaptive.", "autoBroadcastJoinThreshold", "broadcastTimeout", "cbo.", "codegen.", "files.maxPartition",
    "files.minPartitionNum", "files.openCostInBytes", "join.", "shuffle.", "sources.parallelPartitionDiscovery.",
    "statistics.",
    # What people see.
    "artifact.", "debug.", "event.", "maxPlanStringLength", "pyspark.", "queryExecutionListeners", "repl.",
    "thriftServer.", "ui.",
    # Plans that have no key: of Python's rows, of cached ones, of streams.
    "execution.arrow.", "inMemoryColumnarStorage.", "streaming.",
    # How files are written.
    "parquet.compression.", "parquet.outputTimestampType", "parquet.writeLegacyFormat",
    "sources.partitionOverwriteMode",
    # Where tables are. Their files are in the key.
    "catalog.", "catalogImplementation", "hive.metastore.", "warehouse.dir",
)  # fmt: skip
"""Settings `spark.sql.<...>` that change no row of a plan that has a key. Any other one that is set is in the key."""
_STAT_THREADS = 16
_OF_BATCHES = ("labels", "weight", "weight_mean", "cast", "assemble")
"""Settings of `data` that do not change the content of shards, beside the names of the columns."""


class NoKeyError(Exception):
    """A DataFrame has no key; the message says why."""


def store_key(
    df: DataFrame,
    data: Data,
    layout: Shards,
    columns: Sequence[str] = (),
    reference_columns: Sequence[Column] = (),
    *,
    name: str | None = None,
) -> str:
    """The key of the shards of a DataFrame, 64 hex digits. Called on the driver; runs no job.

    `reference_columns` give vocabularies, as in `write_shards`. With `name` the user guarantees that DataFrames of this
    name and one schema have the same rows; by default the plan decides. Raises NoKeyError for a plan that is not
    deterministic, or whose rows depend on something that is not visible.
    """
    rows = {"name": name} if name is not None else _plan(df)
    return key_of(rows, df.schema.jsonValue(), data, layout, columns, reference_columns)


def key_of(
    rows: Mapping[str, Any],
    schema: Mapping[str, Any],
    data: Data,
    layout: Shards,
    columns: Sequence[str] = (),
    reference_columns: Sequence[Column] = (),
) -> str:
    """The key of shards, from what decides their rows and what decides how rows are written. A pure function.

    Args:
        rows: a name that the user has given, or the plan with the versions of its files.
        schema: of the DataFrame, as JSON.
    """
    content = {
        **rows,
        "schema": schema,
        "data": {k: v for k, v in dataclasses.asdict(data).items() if k not in _OF_BATCHES},
        "layout": [layout.rows_per_row_group, layout.rows_per_shard],
        "columns": list(columns or data.columns),
        "words": {c.name: c.encoding.vocabulary for c in reference_columns if c.encoding.vocabulary is not None},
        "format": [FORMAT, VERSION],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plan(df: DataFrame) -> dict[str, Any]:
    if not hasattr(df, "_jdf"):
        raise NoKeyError(
            "over Spark Connect the plan that decides its rows stays on the server; name the rows with "
            "store_shards(df, data, key='...') or spark-dl prepare --key, and train on the resulting dataset"
        )
    execution: Any = df._jdf.queryExecution()
    plan = execution.analyzed()
    try:
        nodes = json.loads(plan.toJSON())
    except Exception as error:  # raised by py4j for an operator that Spark cannot write as JSON
        raise NoKeyError(f"Spark cannot write its plan as JSON: {error}") from error
    check_nodes(nodes)
    if not plan.deterministic():
        raise NoKeyError("its plan is not deterministic (rand, uuid, shuffle ...)")
    if "InMemoryRelation" in execution.withCachedData().toString():
        raise NoKeyError("it is cached in Spark's memory, which may be older than its files")
    relations = _relations(df.sparkSession.sparkContext._jvm, plan)
    return {
        "plan": normalised(nodes),
        # The printed plan has details that the JSON omits, such as the mode of a cast. Column ids differ by session.
        "text": re.sub(r"#\d+L?", "#", _text(df, plan)),
        "relations": relations,
        "files": versions_of(df.inputFiles()) if relations else [],
        "conf": {**_settings(df), **{name: df.sparkSession.conf.get(name) for name in _CONF}},  # these, set or not
    }


def _settings(df: Any) -> dict[str, str]:
    entries = df._jdf.sparkSession().sessionState().conf().getAllConfs().iterator()
    usual, settings = df.sparkSession.sparkContext._jvm.org.apache.spark.sql.internal.SQLConf(), {}
    while entries.hasNext():
        entry = entries.next()
        settings[entry._1()] = entry._2()

    def default_of(name: str) -> str | None:
        with contextlib.suppress(Exception):  # py4j: a setting that Spark does not know has no default
            return str(usual.getConfString(name))
        return None

    return decisive_settings(settings, default_of)


def decisive_settings(settings: Mapping[str, str], default_of: Callable[[str], str | None]) -> dict[str, str]:
    """Returns the settings of Spark SQL that are not their defaults, nor known to change no row. A pure function."""
    return {
        name: value
        for name, value in settings.items()
        if name.startswith("spark.sql.")
        and not name.removeprefix("spark.sql.").startswith(_HARMLESS)
        and default_of(name) != value
    }


def check_nodes(nodes: Any) -> None:
    """Raises NoKeyError for a plan, as Spark's JSON, whose rows depend on more than it shows. A pure function."""
    for node in _plan_nodes(nodes):
        name = node["class"]
        short = name.rpartition(".")[2].rstrip("$")
        if name.startswith(f"{_CATALYST}plans.logical."):
            if short not in _NODES:
                raise NoKeyError(f"its plan has {short}, whose rows do not follow from the plan")
        elif name.startswith(f"{_CATALYST}expressions."):
            if _HIDDEN.search(short):
                raise NoKeyError(f"its plan has {short}, which can depend on more than the plan shows")
            if _NOW.search(short):
                raise NoKeyError(f"its rows depend on {short}, which differs from run to run")
            if short == "Literal" and _TIME_OF_RUN.match(str(node.get("value"))):
                raise NoKeyError(
                    f"its plan has the string {node['value']!r}, which as a date depends on the day of the run"
                )
        elif name != _RELATION:
            raise NoKeyError(f"its plan reads from {short}, whose rows do not follow from the plan")


def _plan_nodes(nodes: Any) -> Iterator[dict[str, Any]]:
    """Yields all operators and expressions of a plan, at any depth."""
    if isinstance(nodes, dict):
        if "class" in nodes:
            yield nodes
        nodes = list(nodes.values())
    if isinstance(nodes, list):
        for node in nodes:
            yield from _plan_nodes(node)


def normalised(nodes: Any) -> Any:
    """A plan as JSON with its column ids, which Spark counts per session, numbered by first occurrence."""
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
    """The plan as Spark prints it, without truncation.

    Spark takes the length from the session that is active in this thread, which need not be the session of `df`.
    """
    jvm: Any = df.sparkSession.sparkContext._jvm
    conf, name = jvm.org.apache.spark.sql.internal.SQLConf.get(), "spark.sql.debug.maxToStringFields"
    before = conf.getConfString(name) if conf.contains(name) else None
    conf.setConfString(name, str(2**31 - 1))
    try:
        return str(plan.toString())
    finally:
        conf.unsetConf(name) if before is None else conf.setConfString(name, before)


def _relations(jvm: Any, plan: Any) -> list[dict[str, Any]]:
    """Format, options, folders and columns of each file relation, in the order of the plan."""
    leaves, relations = plan.collectLeaves(), []
    for i in range(leaves.size()):
        leaf = leaves.apply(i)
        if leaf.getClass().getName() != _RELATION:
            continue
        relation = leaf.relation()
        if relation.getClass().getSimpleName() != "HadoopFsRelation":
            raise NoKeyError(
                f"its plan reads from {relation.getClass().getSimpleName()}, whose versions are not visible"
            )
        file_format, index = (x.getClass().getName() for x in (relation.fileFormat(), relation.location()))
        if reason := reason_without_key(file_format, index):
            raise NoKeyError(reason)
        options, pairs = relation.options().iterator(), []
        while options.hasNext():
            pair = options.next()
            pairs.append([pair._1(), pair._2()])
        roots = relation.location().rootPaths()
        relations.append(
            {
                "format": file_format,
                "options": sorted(pairs),
                "folders": [roots.apply(r).toString() for r in range(roots.size())],
                "columns": [relation.dataSchema().json(), relation.partitionSchema().json()],
                "partitions": _partitions(jvm, relation) if index.endswith("CatalogFileIndex") else [],
            }
        )
    return relations


def _partitions(jvm: Any, relation: Any) -> list[list[str]]:
    """Returns the folder and the values of each partition of a table, which can have any folder."""
    nothing = getattr(getattr(jvm.scala.collection.immutable, "Nil$"), "MODULE$")
    listed, partitions = relation.location().listFiles(nothing, nothing), []
    for i in range(listed.size()):
        partition = listed.apply(i)
        if partition.files().nonEmpty():
            folder = partition.files().head().getPath().getParent().toString()
            partitions.append([folder, partition.values().toString()])
    return sorted(partitions)


def reason_without_key(file_format: str, index: str) -> str | None:
    """Returns why files read with these Java classes have no key, or None if they have one.

    Delta, Hudi and other table formats mark rows as deleted in separate files (deletion vectors, logs), so equal
    data files do not mean equal rows.
    """
    names = [f"{package}{name}" for package, formats in _SPARK_FORMATS.items() for name in formats]
    if file_format not in names:
        return f"its plan reads files with {file_format}, which is not one of Spark's own file formats"
    package, _, name = index.rpartition(".")
    if not package.startswith("org.apache.spark.sql.execution.") or name not in _SPARK_INDEXES:
        return f"its plan lists files with {index}, which is not one of Spark's own file indexes"
    return None


def versions_of(urls: list[str]) -> list[list[Any]]:
    """Path, bytes and modification time of the source files, sorted by path."""

    def version(url: str) -> list[Any]:
        with contextlib.suppress(OSError, ValueError):
            info = storage.info(url)
            if info.size is not None:
                return [url, info.size, info.mtime_ns]
        raise NoKeyError(f"the driver cannot read the size and modification time of its source file {url}")

    if not urls:
        raise NoKeyError("Spark does not list its source files")
    with ThreadPoolExecutor(_STAT_THREADS) as threads:
        return list(threads.map(version, sorted(urls)))
