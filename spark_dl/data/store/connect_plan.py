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
_FUNCTIONS = {
    # arithmetic, comparison, logic, casts
    "+", "-", "*", "/", "%", "&", "|", "^", "~", "=", "==", "<", "<=", ">", ">=", "<=>", "!", "and", "or", "not",
    "in", "when", "if", "negative", "positive", "div", "mod", "pmod", "try_add", "try_subtract", "try_multiply",
    "try_divide", "try_mod", "greatest", "least", "equal_null", "between", "cast", "try_cast", "bigint", "binary",
    "boolean", "date", "decimal", "double", "float", "int", "smallint", "string", "timestamp", "tinyint", "isnull",
    "isnotnull", "isnan", "coalesce", "ifnull", "nullif", "nvl", "nvl2", "nanvl", "nullifzero", "zeroifnull",
    "shiftleft", "shiftright", "shiftrightunsigned", "bit_count", "bit_get", "getbit",
    # mathematics
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bin", "bround", "cbrt", "ceil", "ceiling",
    "conv", "cos", "cosh", "cot", "csc", "degrees", "e", "exp", "expm1", "factorial", "floor", "hex", "hypot", "ln",
    "log", "log10", "log1p", "log2", "pi", "pow", "power", "radians", "rint", "round", "sec", "sign", "signum", "sin",
    "sinh", "sqrt", "tan", "tanh", "unhex", "width_bucket",
    # strings and bytes
    "ascii", "base64", "bit_length", "btrim", "char", "char_length", "character_length", "chr", "concat", "concat_ws",
    "contains", "crc32", "decode", "elt", "encode", "endswith", "find_in_set", "format_number", "format_string",
    "get_json_object", "hash", "ilike", "initcap", "instr", "json_array_length", "lcase", "left", "length",
    "levenshtein", "like", "locate", "lower", "lpad", "ltrim", "md5", "mask", "octet_length", "overlay", "parse_url",
    "position", "printf", "regexp", "regexp_count", "regexp_extract", "regexp_extract_all", "regexp_instr",
    "regexp_like", "regexp_replace", "regexp_substr", "repeat", "replace", "reverse", "right", "rlike", "rpad",
    "rtrim", "sha", "sha1", "sha2", "soundex", "split", "split_part", "startswith", "substr", "substring",
    "substring_index", "to_binary", "to_char", "to_number", "to_varchar", "translate", "trim", "ucase", "unbase64",
    "upper", "url_decode", "url_encode", "xxhash64",
    # dates and times that columns hold
    "add_months", "date_add", "date_diff", "date_format", "date_from_unix_date", "date_part", "date_sub",
    "date_trunc", "dateadd", "datediff", "datepart", "day", "dayname", "dayofmonth", "dayofweek", "dayofyear",
    "extract", "from_unixtime", "from_utc_timestamp", "hour", "last_day", "make_date", "make_timestamp", "minute",
    "month", "monthname", "months_between", "next_day", "quarter", "second", "timestamp_micros", "timestamp_millis",
    "timestamp_seconds", "to_date", "to_timestamp", "to_timestamp_ltz", "to_timestamp_ntz", "to_unix_timestamp",
    "to_utc_timestamp", "trunc", "try_to_timestamp", "unix_date", "unix_micros", "unix_millis", "unix_seconds",
    "weekday", "weekofyear", "year",
    # arrays, maps and structs
    "array", "array_append", "array_compact", "array_contains", "array_distinct", "array_except", "array_insert",
    "array_intersect", "array_join", "array_max", "array_min", "array_position", "array_prepend", "array_remove",
    "array_repeat", "array_size", "array_sort", "array_union", "arrays_overlap", "arrays_zip", "cardinality",
    "element_at", "explode", "explode_outer", "flatten", "get", "inline", "inline_outer", "map", "map_concat",
    "map_contains_key", "map_entries", "map_from_arrays", "map_from_entries", "map_keys", "map_values",
    "named_struct", "posexplode", "posexplode_outer", "sequence", "size", "slice", "sort_array", "stack", "struct",
    "try_element_at",
    # aggregates and windows
    "avg", "bit_and", "bit_or", "bit_xor", "bool_and", "bool_or", "corr", "count", "count_if", "covar_pop",
    "covar_samp", "every", "kurtosis", "max", "mean", "median", "min", "percentile", "skewness", "some", "std",
    "stddev", "stddev_pop", "stddev_samp", "sum", "try_avg", "try_sum", "var_pop", "var_samp", "variance",
    "cume_dist", "dense_rank", "lag", "lead", "nth_value", "ntile", "percent_rank", "rank", "row_number",
}  # fmt: skip
"""Built-in functions whose results follow from their arguments: all others may differ from run to run, as random
numbers, the time and the order of rows do, or may be functions that somebody registered."""
_BUILT_IN = "org.apache.spark.sql.catalyst.expressions."
_HIDDEN_WORDS = re.compile(
    r"(?i)(select|table|from|user|now|today|tomorrow|yesterday|current_\w+|session_\w+|local\w*time\w*)"
)
"""Words of SQL text that read other rows, or mean the time or the user without being called."""
_CALL = re.compile(r"""((?:[\w`"]+\s*\.\s*)*[\w`"]+)\s*\(""")
TIME_OF_RUN = re.compile(r"(?i)\s*(now|today|tomorrow|yesterday)\b")
"""Texts that Spark takes for the time of the run where they become dates."""


def plan_of(df: Any) -> str:
    """A text that is equal for equal plans, in any session. Called on the driver; runs no job.

    Raises ValueError that says which part of the plan hides what it does.
    """
    plan = df._plan.to_proto(df.sparkSession._client)
    numbers: dict[int, int] = {}
    functions: set[str] = set()
    _normalise(plan.root, numbers, functions)
    _check_built_in(df.sparkSession, functions)
    found: bytes = plan.root.SerializeToString(deterministic=True)
    return found.hex()


def reads_files(df: Any) -> bool:
    """Whether a plan that `plan_of` takes reads any files; else its rows come from `range`."""
    return "data_source {" in str(df._plan.to_proto(df.sparkSession._client))


def _normalise(message: Any, numbers: dict[int, int], functions: set[str]) -> None:
    """Checks a part of the plan; drops the places in the source, and numbers its parts in the order they come.

    `functions` gets the names of those that it calls.
    """
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
        name = message.function_name.lower()
        if message.is_user_defined_function or name not in _FUNCTIONS:
            raise ValueError(
                f"it calls {message.function_name}(), which is none of the built-in functions that are known to give "
                "the same in every run"
            )
        functions.add(name)
    elif kind == "ExpressionString":
        functions |= _check_text(message.expression)
    elif kind == "Literal" and message.WhichOneof("literal_type") == "string" and TIME_OF_RUN.match(message.string):
        raise ValueError(f"it holds the text {message.string!r}, which as a date is another one each day")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if hasattr(value, "ListFields") else value:
            _normalise(part, numbers, functions)
    if kind in ("UnresolvedAttribute", "UnresolvedStar") and message.HasField("plan_id"):
        message.plan_id = numbers.setdefault(message.plan_id, len(numbers))


def _check(name: str | None, known: set[str]) -> None:
    if name not in known:
        raise ValueError(f"its plan holds {name}, which does not show all that decides the rows over Spark Connect")


def _check_text(expression: str) -> set[str]:
    """The functions that SQL text calls, which may call any that only the server knows, and may hold subqueries."""
    calls = [call.lower() for call in _CALL.findall(expression)]
    hidden = [word for word in re.findall(r"\w+", expression) if _HIDDEN_WORDS.fullmatch(word)]
    hidden += [call for call in calls if call not in _FUNCTIONS]
    hidden += re.findall(r"--|/\*", expression)  # a comment can stand between a name and its bracket
    if hidden:
        raise ValueError(f"its SQL text uses {hidden[0]}, which cannot be looked up over Spark Connect")
    return {*calls}


def _check_built_in(spark: Any, functions: set[str]) -> None:
    """Raises ValueError where a name no longer means the built-in function.

    Spark 4.3 looks among the built-in functions first, unless `spark.sql.functionResolution.sessionOrder` is `first` or
    a path of SQL says otherwise; before 4.2 a function that is registered under such a name takes its place. In any
    case the server tells the class of what a name means in this session.
    """
    for name in sorted(functions - {"try_cast"}):  # a word of the grammar
        try:
            found = spark.catalog.getFunction(f"`{name}`").className
        except Exception as error:  # of a class of Connect's own
            raise ValueError(f"it calls {name}(), which the server cannot look up: {error!s:.200}") from error
        if not str(found).startswith(_BUILT_IN):
            raise ValueError(f"it calls {name}(), which in this session is another function than the built-in one")
