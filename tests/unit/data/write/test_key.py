"""What makes the key of shards, without Spark; the plans of a real Spark are in tests/spark/test_store.py."""

import dataclasses
import os
import re

import pytest

from spark_dl import Data, Shards
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.schema import Column
from spark_dl.data.write.key import (
    NoKeyError,
    check_nodes,
    decisive_settings,
    key_of,
    normalised,
    reason_without_key,
    versions_of,
)

SOURCES = "org.apache.spark.sql.execution.datasources"
DELTA_INDEX = "org.apache.spark.sql.delta.files.TahoeLogFileIndex"
PARQUET = f"{SOURCES}.parquet.ParquetFileFormat"


@pytest.mark.parametrize(("file_format", "index", "found"), [
    ("org.apache.spark.sql.delta.DeltaParquetFileFormat", DELTA_INDEX, "Delta"),
    (PARQUET, DELTA_INDEX, "TahoeLogFileIndex"),
    (PARQUET, "org.apache.hudi.HoodieFileIndex", "HoodieFileIndex"),
    (f"{SOURCES}.parquet.Spark35LegacyHoodieParquetFileFormat", f"{SOURCES}.InMemoryFileIndex", "Hoodie"),
    (PARQUET, "org.example.InMemoryFileIndex", "org.example"), (PARQUET, f"{SOURCES}.NewFileIndex", "NewFileIndex"),
    ("org.example.ParquetFileFormat", f"{SOURCES}.InMemoryFileIndex", "org.example"),
])  # fmt: skip
def test_table_formats_have_no_key(file_format, index, found):
    assert found in reason_without_key(file_format, index)


@pytest.mark.parametrize("file_format", [
    PARQUET, f"{SOURCES}.orc.OrcFileFormat", f"{SOURCES}.csv.CSVFileFormat", f"{SOURCES}.json.JsonFileFormat",
    f"{SOURCES}.text.TextFileFormat", "org.apache.spark.sql.avro.AvroFileFormat",
])  # fmt: skip
@pytest.mark.parametrize("index", ["InMemoryFileIndex", "CatalogFileIndex", "MetadataLogFileIndex"])
def test_spark_s_own_formats_have_one(file_format, index):
    assert reason_without_key(file_format, f"{SOURCES}.{index}") is None


ROWS, SCHEMA = {"plan": ["a"], "files": [["f", 1, 2]]}, {"fields": ["x", "y"]}
DATA = Data(features=("x",), label="y")
WORDS = Column("x", "int64", (), "scalar", Encoding("vocabulary", vocabulary=("a", "b")))
CHANGES = {
    "rows": {"rows": {**ROWS, "files": [["f", 1, 3]]}}, "a name": {"rows": {"name": "n"}},
    "another name": {"rows": {"name": "m"}}, "schema": {"schema": {"fields": ["x", "z"]}},
    "rows of a group": {"layout": Shards(rows_per_row_group=7)},
    "rows of a shard": {"layout": Shards(rows_per_shard=7)},
    "columns": {"columns": ("y", "x")}, "words": {"reference_columns": (WORDS,)},
    "other words": {"reference_columns": (
        dataclasses.replace(WORDS, encoding=dataclasses.replace(WORDS.encoding, vocabulary=("b", "a"))),
    )},
    "words of another column": {"reference_columns": (dataclasses.replace(WORDS, name="y"),)},
    "nulls": {"data": dataclasses.replace(DATA, nulls="drop")},
    "nonfinite": {"data": dataclasses.replace(DATA, nonfinite="allow")},
    "fill": {"data": dataclasses.replace(DATA, nulls="fill", fill={"x": 1})},
    "another fill": {"data": dataclasses.replace(DATA, nulls="fill", fill={"x": 2})},
    "encode": {"data": dataclasses.replace(DATA, encode={"x": {"as": "number"}})},
}  # fmt: skip
"""What makes another key, each for itself."""


def key(**changed):
    return key_of(**{"rows": ROWS, "schema": SCHEMA, "data": DATA, "layout": Shards(), **changed})


def test_each_thing_that_decides_the_rows_makes_another_key():
    keys = {name: key(**change) for name, change in {"": {}, **CHANGES}.items()}
    assert len({*keys.values()}) == len(keys)
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in keys.values())


@pytest.mark.parametrize("same", [
    {}, {"data": dataclasses.replace(DATA, cast={"y": "int32"})},
    {"data": dataclasses.replace(DATA, assemble="float32")},
    {"columns": ("x", "y")}, {"layout": Shards(storage="local")}, {"layout": Shards(store="/other")},
    {"reference_columns": (Column("x", "float32", (), "scalar"),)},
], ids=str)  # fmt: skip
def test_how_rows_are_read_makes_no_other_key(same):
    assert key(**same) == key()


LOGICAL, EXPRESSIONS = (f"org.apache.spark.sql.catalyst.{name}" for name in ("plans.logical.", "expressions."))
RELATION = f"{SOURCES}.LogicalRelation"


def plan(*classes, **fields):
    """A plan as Spark writes it as JSON, with nodes below each other and in lists."""
    node = {"class": f"{LOGICAL}Project"}
    for name in classes:
        node = {"class": name, "child": [node], "num-children": 1, **fields}
    return [{"class": f"{LOGICAL}Filter", "condition": [[node]]}]


@pytest.mark.parametrize(("plan", "reason"), [
    (plan(f"{LOGICAL}MapPartitions"), "MapPartitions, whose rows do not follow"),
    (plan(f"{LOGICAL}LocalRelation"), "LocalRelation, whose rows do not follow"),
    *((plan(f"{EXPRESSIONS}{name}"), f"{name}, which can depend on more") for name in (
        "PythonUDF", "ScalaUDF", "StaticInvoke", "ScalarSubquery", "ListQuery", "Exists", "LambdaFunction", "ScalaUDAF",
        "CallMethodViaReflection", "ScalaAggregator", "TypedAggregateExpression",
    )),
    *((plan(f"{EXPRESSIONS}{name}"), f"depend on {name}, which differs") for name in (
        "CurrentTimestamp", "CurrentDate", "Now", "LocalTimestamp", "CurDateExpressionBuilder", "SessionUser",
        "CurrentUser",
    )),
    *((plan(f"{EXPRESSIONS}Literal", value=text), f"the string {text!r}") for text in ("now", " TODAY", "tomorrow x")),
    (plan("org.example.Relation"), "reads from Relation, whose rows"),
    (plan("org.apache.spark.sql.execution.ExternalRDD"), "reads from ExternalRDD"),
    (plan(RELATION, f"{EXPRESSIONS}Rand", f"{LOGICAL}Sample"), "Sample"),
])  # fmt: skip
def test_a_plan_whose_rows_depend_on_more_has_no_key(plan, reason):
    with pytest.raises(NoKeyError, match=re.escape(reason)):
        check_nodes(plan)


@pytest.mark.parametrize("plan", [
    plan(), plan(RELATION),
    *(plan(f"{EXPRESSIONS}Literal", value=text) for text in ("nowhere", "a day", "is it now")),
    plan(f"{EXPRESSIONS}CurrentRow$"), plan(f"{EXPRESSIONS}Literal", value=None),
    *(plan(f"{LOGICAL}{name}") for name in ("Aggregate", "Join", "OneRowRelation", "Range", "SubqueryAlias", "Window")),
    *(plan(f"{EXPRESSIONS}{name}") for name in ("Add", "ExistsJoin", "MakeTimestamp", "DateAdd")),
])  # fmt: skip
def test_a_plan_that_shows_all_has_one(plan):
    check_nodes(plan)


def column(number, session):
    of_id = {"product-class": "org.apache.spark.sql.catalyst.expressions.ExprId", "id": number, "jvmId": session}
    return {"class": f"{EXPRESSIONS}AttributeReference", "name": "x", "exprId": of_id}


def test_columns_are_numbered_as_they_come_in_any_session():
    one = [column(7, "a"), column(9, "a"), {"children": [column(7, "a")]}]
    assert normalised(one) == normalised([column(1, "b"), column(3, "b"), {"children": [column(1, "b")]}])
    assert normalised(one) != normalised([column(7, "a"), column(9, "a"), {"children": [column(9, "a")]}])
    assert normalised([column(7, "a"), column(7, "b")]) != normalised([column(7, "a"), column(7, "a")])
    assert normalised([column(7, "a")])[0]["exprId"] == 0


def test_settings_that_are_set_and_can_change_rows_are_in_the_key():
    defaults = {"spark.sql.ansi.enabled": "true", "spark.sql.shuffle.partitions": "200", "spark.sql.mapKeyDedup": "ON"}
    settings = {
        "spark.sql.ansi.enabled": "false", "spark.sql.mapKeyDedup": "ON", "spark.sql.shuffle.partitions": "7",
        "spark.sql.extensions": "org.example", "spark.executor.cores": "2", "spark.sql.parquet.writeLegacyFormat": "x",
        "spark.sql.parquet.filterPushdown": "false", "sparks.sql.no": "1",
    }  # fmt: skip
    assert decisive_settings(settings, defaults.get) == {
        "spark.sql.ansi.enabled": "false", "spark.sql.extensions": "org.example",
        "spark.sql.parquet.filterPushdown": "false",
    }  # fmt: skip
    assert decisive_settings({}, defaults.get) == {}


def test_files_are_named_with_their_sizes_and_times(tmp_path):
    for name, size in (("b", 3), ("a", 5)):
        (tmp_path / name).write_bytes(bytes(size))
        os.utime(tmp_path / name, ns=(0, 7_000_000_000 + size))
    urls = [(tmp_path / name).as_uri() for name in ("b", "a")]
    assert versions_of(urls) == [[urls[1], 5, 7_000_000_005], [urls[0], 3, 7_000_000_003]]
    for bad, reason in (((tmp_path / "none").as_uri(), "none"), (tmp_path.as_uri(), tmp_path.name)):
        with pytest.raises(NoKeyError, match=f"cannot read the size and modification time of .*{reason}"):
            versions_of([*urls, bad])
    with pytest.raises(NoKeyError, match="does not list its source files"):
        versions_of([])
