"""What Spark itself says about the numbers of a column: SQL for what `docs/data.md` promises.

Nothing here uses the package.
"""

import decimal
import itertools

EXACT = decimal.Context(prec=80)
MICROS = {"D": 86_400_000_000, "s": 1_000_000, "ms": 1_000, "us": 1}
WHOLE = ("tinyint", "smallint", "int", "bigint")
FLOATS = ("float", "double")
_lambdas = itertools.count()


def quoted(*path):
    return ".".join("`" + part.replace("`", "``") + "`" for part in path)


def element_type(spark_type):
    """The type of the elements of nested arrays, and how deep they are."""
    depth = 0
    while spark_type.startswith("array<"):
        spark_type, depth = spark_type[len("array<") : -1], depth + 1
    return spark_type, depth


def each(expression, depth, of_element):
    """Applies SQL to the elements of nested arrays. # of_element: from SQL to SQL"""
    if not depth:
        return of_element(expression)
    x = f"x{next(_lambdas)}"
    return f"transform({expression}, {x} -> {each(x, depth - 1, of_element)})"


def any_of(expression, depth, of_element):
    """Whether a condition holds for an element, or for an array, of nested arrays."""
    if not depth:
        return of_element(expression)
    x = f"x{next(_lambdas)}"
    inner = f"exists({expression}, {x} -> coalesce({any_of(x, depth - 1, of_element)}, false))"
    return f"(coalesce({of_element(expression)}, false) OR coalesce({inner}, false))"


def is_null(expression, depth):
    return any_of(expression, depth, lambda x: f"({x} IS NULL)")


def is_nonfinite(expression, leaf, depth):
    """Whether a cell has NaN or Inf."""
    if leaf not in FLOATS:
        return "false"
    if not depth:
        return f"coalesce({is_nonfinite_value(expression)}, false)"
    x = f"x{next(_lambdas)}"
    return f"coalesce(exists({expression}, {x} -> {is_nonfinite(x, leaf, depth - 1)}), false)"


def is_nonfinite_value(x):
    return f"(isnan({x}) OR abs({x}) = CAST('Infinity' AS DOUBLE))"


def literal(leaf, raw):
    """SQL for a value of `values.py`. # raw: microseconds, days, text, bytes, a Decimal or a number"""
    if raw is None:
        return f"CAST(NULL AS {leaf})"
    if leaf == "string":
        return f"decode(unhex('{raw.encode().hex()}'), 'UTF-8')"
    if leaf == "binary":
        return f"unhex('{raw.hex()}')"
    if leaf == "boolean":
        return "true" if raw else "false"
    if leaf in FLOATS:
        return f"CAST('{raw!r}' AS {leaf})"
    if leaf in ("date", "timestamp", "timestamp_ntz", "interval day to second"):
        return from_raw(leaf, f"CAST('{raw}' AS {'INT' if leaf == 'date' else 'BIGINT'})")
    return f"CAST('{raw}' AS {'BIGINT' if leaf == 'microseconds' else leaf})"


def from_raw(leaf, x):
    """SQL for a time, from its days or its microseconds."""
    seconds = f"make_dt_interval(0, 0, 0, CAST(CAST({x} AS DECIMAL(20, 0)) * 0.000001BD AS DECIMAL(18, 6)))"
    return {
        "date": f"date_from_unix_date({x})",
        "timestamp": f"timestamp_micros({x})",
        "timestamp_ntz": f"(TIMESTAMP_NTZ'1970-01-01 00:00:00' + {seconds})",
        "interval day to second": seconds,
    }.get(leaf, x)


def _micros(interval):
    parts = (("DAY", 86_400_000_000), ("HOUR", 3_600_000_000), ("MINUTE", 60_000_000), ("SECOND", 1_000_000))
    sums = (f"CAST(extract({part} FROM {interval}) AS DECIMAL(20, 6)) * {n}BD" for part, n in parts)
    return f"CAST({' + '.join(sums)} AS DECIMAL(38, 0))"


def number(leaf, x, encode, words):
    """SQL for the value that becomes a number by `finished`. # leaf: its type, words: of its vocabulary, in order"""
    chosen = encode.get("as")
    if leaf == "string":
        if chosen == "bytes":
            return f"CAST({x} AS BINARY)"
        if chosen == "hash":
            return f"pmod(crc32(CAST({x} AS BINARY)), CAST({encode['buckets']} AS BIGINT))"
        place = f"array_position(array({', '.join(literal('string', word) for word in words)}), {x})" if words else "0L"
        # Without a place for unknown strings, they are an error: NULL.
        return f"nullif({place}, 0L) - 1L" if encode.get("unknown") == "error" else place
    if leaf == "date":
        return f"unix_date({x}) * {MICROS['D']}L"
    if leaf == "timestamp":
        return f"unix_micros({x})"
    if leaf == "timestamp_ntz":
        return _micros(f"({x} - TIMESTAMP_NTZ'1970-01-01 00:00:00')")
    return _micros(x) if leaf.startswith("interval day") else x


def is_float(leaf, encode):
    """Whether a decimal becomes the nearest float64."""
    return encode.get("as", "decimal" if leaf.endswith(",0)") else "float") == "float"


def finished(leaf, encode):
    """Returns what makes the number of a value of `number`. Spark's division of decimals rounds, and Python's not."""
    unit = encode.get("unit") or ("D" if leaf == "date" else "us")
    if leaf in ("date", "timestamp", "timestamp_ntz") or leaf.startswith(("interval day", "micros")):
        return lambda micros: micros * 1000 if unit == "ns" else int(micros) // MICROS[unit]
    if leaf.startswith("decimal"):
        scale = int(leaf[:-1].partition(",")[2])
        return float if is_float(leaf, encode) else lambda value: int(value.scaleb(scale, EXACT))
    return list if leaf == "binary" or encode.get("as") == "bytes" else lambda value: value
