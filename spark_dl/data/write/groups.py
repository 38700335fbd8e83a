"""One row per group of rows, for losses and metrics that compare the rows of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spark_dl.config.checks import suggestion
from spark_dl.spark_job import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ALL = "spark_dl_rows"


def group_rows(df: DataFrame, by: str | Sequence[str], *, order_by: str | Sequence[str] = ()) -> DataFrame:
    """Returns a DataFrame with one row per group, in which each other column is an array of the values of the group.

    For losses and metrics that compare the rows of a group, such as the items of a query or of a session. All rows of a
    group are then in one micro-batch, exactly once. The arrays become ragged columns (`data.encode: {price: {ragged:
    true}}`). Called on the driver; nothing is computed before the DataFrame is used. Works with Spark Connect, too.

    Args:
        by: columns whose values are the same in all rows of a group, and which stay as they are. Nulls are a group.
        order_by: columns by which the values of a group are ordered, nulls first, before all other columns. With all of
            them, equal data give equal arrays, whatever the order in which Spark reads the rows.

    Raises:
        ValueError: For a column that is not there, for a DataFrame without another column, and for a column, such as a
            map, whose values have no order.

    Example:
        >>> rows = spark_dl.build_session("docs", master="local[2]").range(6)
        >>> spark_dl.group_rows(rows.selectExpr("id % 2 AS query", "id AS item"), "query")
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    keys, first = _names(by), _names(order_by)
    for name in (*keys, *first):
        if name not in df.columns:
            raise ValueError(f"group_rows: there is no column {name!r}{suggestion(name, df.columns)}")
    others = [name for name in df.columns if name not in keys]
    if not keys or not others:
        raise ValueError(f"group_rows: expected columns to group by, and others, found by={keys} of {df.columns}")
    for field in df.schema.fields:
        if field.name in others and "map<" in field.dataType.simpleString():
            raise ValueError(
                f"group_rows: the column {field.name!r} has the type {field.dataType.simpleString()}, whose values "
                "have no order; drop it, or select its entries"
            )
    vectors = {field.name for field in df.schema.fields if type(field.dataType).__name__ == "VectorUDT"}

    def value(name: str) -> Any:
        return vector_to_array(F.col(quoted(name))) if name in vectors else F.col(quoted(name))

    def entry(i: int) -> Callable[[Any], Any]:
        return lambda row: row[f"c{i}"]

    first = [name for name in first if name not in keys]
    ordered = [*first, *(name for name in others if name not in first)]
    # Of structs, as a list of values would leave out nulls.
    row = F.struct(*(value(name).alias(f"c{i}") for i, name in enumerate(ordered)))
    groups = df.groupBy(*map(quoted, keys)).agg(F.sort_array(F.collect_list(row)).alias(_ALL))
    arrays = {name: F.transform(_ALL, entry(i)).alias(name) for i, name in enumerate(ordered)}
    return groups.select(*(quoted(name) if name in keys else arrays[name] for name in df.columns))


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
