"""The plan of a DataFrame over Spark Connect, where the analysed one stays in the server: what the client has built.

Only what shows all that decides its rows is let through: files read by path, and the operators and functions below. A
table, a view or SQL text names things that the server alone can look up.
"""

from __future__ import annotations

import re
from typing import Any

_RELATIONS = {
    "read", "project", "filter", "join", "set_op", "sort", "limit", "offset", "aggregate", "range", "subquery_alias",
    "repartition", "repartition_by_expression", "with_columns", "with_columns_renamed", "drop", "deduplicate", "to_df",
    "to_schema", "drop_na", "fill_na", "hint",
}  # fmt: skip
_EXPRESSIONS = {
    "literal", "unresolved_attribute", "unresolved_star", "unresolved_function", "expression_string", "alias", "cast",
    "sort_order", "window", "unresolved_extract_value",
}  # fmt: skip
_FORMATS = {"parquet", "orc", "csv", "json", "text", "avro"}
_CHANGING = re.compile(
    r"(?i)^(rand|randn|random|uniform|randstr|uuid|shuffle|monotonically_increasing_id|spark_partition_id|now|curdate|"
    r"user|input_file\w*|current_\w+|session_\w+|local\w*timestamp|unix_timestamp|try_reflect|reflect|java_method|"
    r"aes_encrypt|version)$"
)
_PLAIN_CALLS = {
    "in",
    "and",
    "or",
    "not",
    "cast",
    "try_cast",
    "abs",
    "coalesce",
    "length",
    "lower",
    "upper",
    "isnotnull",
}


def plan_of(df: Any) -> str:
    """A text that is equal for equal plans, in any session. Called on the driver; asks the server for nothing.

    Raises ValueError that says which part of the plan hides what it does.
    """
    plan = df._plan.to_proto(df.sparkSession._client)
    numbers: dict[int, int] = {}
    _normalise(plan.root, numbers)
    found: bytes = plan.root.SerializeToString(deterministic=True)
    return found.hex()


def reads_files(df: Any) -> bool:
    """Whether a plan that `plan_of` takes reads any files; else its rows come from `range`."""
    return "data_source {" in str(df._plan.to_proto(df.sparkSession._client))


def _normalise(message: Any, numbers: dict[int, int]) -> None:
    """Checks a part of the plan; drops the places in the source, and numbers its parts in the order they come."""
    kind = message.DESCRIPTOR.name
    if kind == "Relation":
        _check(message.WhichOneof("rel_type"), _RELATIONS)
        number = numbers.setdefault(message.common.plan_id, len(numbers))
        message.ClearField("common")
        message.common.plan_id = number
    elif kind == "Expression":
        _check(message.WhichOneof("expr_type"), _EXPRESSIONS)
        message.ClearField("common")
    elif kind == "Read":
        if message.WhichOneof("read_type") != "data_source" or message.data_source.format not in _FORMATS:
            raise ValueError("it reads a table or view, whose definition cannot be seen over Spark Connect")
    elif kind == "UnresolvedFunction":
        if message.is_user_defined_function or _CHANGING.search(message.function_name):
            raise ValueError(f"its rows depend on {message.function_name}(), which differs from run to run")
    elif kind == "ExpressionString":
        _check_text(message.expression)
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if hasattr(value, "ListFields") else value:
            _normalise(part, numbers)
    if kind in ("UnresolvedAttribute", "UnresolvedStar") and message.HasField("plan_id"):
        message.plan_id = numbers.setdefault(message.plan_id, len(numbers))


def _check(name: str | None, known: set[str]) -> None:
    if name not in known:
        raise ValueError(f"its plan holds {name}, which does not show all that decides the rows over Spark Connect")


def _check_text(expression: str) -> None:
    """SQL text may call functions that only the server knows, and may hold subqueries."""
    words = re.findall(r"\w+", expression)
    calls = re.findall(r"(\w+)\s*\(", expression)
    hidden = [w for w in words if _CHANGING.search(w) or w.lower() == "select"]
    hidden += [c for c in calls if c.lower() not in _PLAIN_CALLS]
    if hidden:
        raise ValueError(f"its SQL text uses {hidden[0]}, which cannot be looked up over Spark Connect")
