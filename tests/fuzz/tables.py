"""Random tables, read in every way. Each way gives the numbers that Spark gives, or is refused with a clear error."""

import contextlib
import datetime
import decimal
import json
import math
import pathlib
from dataclasses import dataclass, field, replace
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

import spark_dl
from spark_dl import Data, Loader
from spark_dl.ml import TorchEstimator
from tests.builders.settings import make_config
from tests.fuzz import judge
from tests.fuzz.echo import ECHO
from tests.fuzz.errors import clear_text, note, without_digits
from tests.fuzz.judge import quoted

NAMES = (
    "a",
    "B",
    "x y",
    "p.q",
    "tick`s",
    "tab\tnewline\n",
    "ünï",
    "class",
    "select",
    "_under",
    "1st",
    "data",
    "n" * 60,
)
STRINGS = (
    "rome",
    "oslo",
    "",
    " ",
    "Rome",
    "naïve",
    "e\u0301",
    "日本",
    "🙂",
    "a\x00b",
    "null",
    "1",
    "\n",
    "__HIVE_DEFAULT_PARTITION__",
)
ZONES = ("UTC", "Europe/Berlin", "America/Los_Angeles", "Asia/Kathmandu")
WRITERS = ("spark", "spark int96", "pyarrow", "pyarrow dictionary", "pyarrow large", "pandas", "polars")
DECIMALS = ("decimal(5,2)", "decimal(9,0)", "decimal(18,4)", "decimal(20,0)", "decimal(38,18)", "decimal(38,38)")
TIMES = ("date", "timestamp", "timestamp_ntz", "interval day to second")
TYPES = ("boolean", *judge.WHOLE, *judge.FLOATS, *DECIMALS, *TIMES, "string", "binary", "vector")
ID, WEIGHT = "row id", "row weight"
nan, inf = math.nan, math.inf  # as values are written


@dataclass(frozen=True)
class Column:
    """A column of a random table."""

    name: str
    type: str
    """Spark's type of a value, or of the elements of arrays."""
    cells: tuple
    """By row: numbers, text, bytes; days of a date, microseconds of other times; lists of them; None for a null."""
    depth: int = 0
    """How deep arrays are nested."""
    encode: dict = field(default_factory=dict)
    fill: object = None
    """The value of `data.fill` as the user gives it, and as `cells` have it."""
    raw_fill: object = None
    cast: str | None = None
    struct: str | None = None
    """The struct that has the column."""

    @property
    def feature(self):
        return f"{self.struct}.{self.name}" if self.struct else self.name

    @property
    def path(self):
        return (self.struct, self.name) if self.struct else (self.name,)

    @property
    def is_scalar(self):
        """Whether it is a column of one value for each row, at the top of the table."""
        return not self.depth and not self.struct and not self.is_ragged

    @property
    def is_ragged(self):
        return bool(self.encode.get("ragged")) or self.type == "binary" or self.encode.get("as") == "bytes"


@dataclass(frozen=True)
class Condition:
    """A condition of `data.filters`."""

    column: str
    op: str
    values: tuple
    """As `cells` have them."""


@dataclass(frozen=True)
class Case:
    """A random table with the settings to read it."""

    columns: tuple[Column, ...]
    nulls: str = "error"
    nonfinite: str = "error"
    zone: str = "UTC"
    ansi: bool = True
    writer: str = "spark"
    partition: str | None = None
    """The column by whose values Spark makes folders."""
    filters: tuple[Condition, ...] = ()
    partitions: int = 1
    group_rows: int = 4
    ragged: str = "pad"
    through_ml: bool = False
    """Whether an estimator is trained, too."""
    label: str | None = None
    """The column that is the label where a dataset is read; elsewhere it is a feature."""
    is_weighted: bool = False
    """Whether rows have weights where a dataset is read."""

    @property
    def rows(self):
        return len(self.columns[0].cells)

    @property
    def fills(self):
        return "fill" in (self.nulls, self.nonfinite)

    def without(self, name):
        """The case without a column."""
        left = tuple(c for c in self.columns if c.name != name)
        filters = tuple(f for f in self.filters if f.column != name)
        return replace(
            self, columns=left, filters=filters, partition=None if self.partition == name else self.partition,
            label=None if self.label == name else self.label,
        )  # fmt: skip

    def data(self, **others):
        columns = self.columns
        features, labels = ([c.feature for c in columns if (c.name == self.label) is kind] for kind in (False, True))
        return Data(
            features=(ID, *features), label=labels[0] if labels else None, weight=WEIGHT if self.is_weighted else None,
            nulls=self.nulls, nonfinite=self.nonfinite,
            encode={c.feature: c.encode for c in columns if c.encode},
            cast={c.feature: c.cast for c in columns if c.cast},
            fill={c.feature: c.fill for c in columns if c.fill is not None and self.fills},
            **others,
        )  # fmt: skip


# ---- drawing


def _whole(kind):
    bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}[kind]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return st.one_of(st.sampled_from([0, 1, -1, low, high]), st.integers(low, high))


def _decimal(kind):
    precision, scale = (int(n) for n in kind[len("decimal(") : -1].split(","))
    most = 10**precision - 1
    digits = st.one_of(
        st.sampled_from([0, 1, -1, most, -most, 10**scale]), st.integers(-most, most), st.integers(-999, 999)
    )
    return digits.map(lambda n: Decimal(n if abs(n) <= most else 0).scaleb(-scale, judge.EXACT))


_SECOND = 1_000_000
_DAYS = st.one_of(
    st.integers(-800, 40_000),
    st.sampled_from([0, -1, 1, -719_162, 2_932_896, -141_428, -141_427]),
    st.integers(-719_162, 2_932_896),
)
_MICROS = st.one_of(
    st.integers(-3 * _SECOND, 3 * _SECOND),
    st.integers(-(2**31), 2**31).map(lambda s: s * _SECOND),
    st.integers(1_600_000_000 * _SECOND, 1_800_000_000 * _SECOND),
    st.sampled_from(
        [0, -1, 1_679_792_400 * _SECOND, 1_698_541_200 * _SECOND, -62_135_596_800 * _SECOND, 253_402_300_799_999_999]
    ),
    st.integers(-62_135_596_800 * _SECOND, 253_402_300_799 * _SECOND),
)
_TEXT = st.one_of(st.sampled_from(STRINGS), st.text(st.characters(exclude_categories=["Cs"]), max_size=6))


def raw_values(kind):
    """A strategy for the values of a type, as `Column.cells` has them."""
    if kind in judge.WHOLE:
        return _whole(kind)
    if kind in judge.FLOATS:
        return st.floats(width=32 if kind == "float" else 64)
    if kind.startswith("decimal"):
        return _decimal(kind)
    return {
        "boolean": st.booleans(),
        "date": _DAYS,
        "timestamp": _MICROS,
        "timestamp_ntz": _MICROS,
        "interval day to second": st.one_of(
            st.integers(-(10**13), 10**13), st.sampled_from([0, -1, -(10**17), 10**17])
        ),
        "string": _TEXT,
        "binary": st.binary(max_size=5),
        "vector": st.floats(width=64),
    }[kind]


@st.composite
def columns(draw, name, rows, nulls, nonfinite):
    """A column with `rows` cells."""
    kind = draw(st.sampled_from(TYPES))
    depth = 1 if kind == "vector" else 0 if kind == "binary" else draw(st.sampled_from([0, 0, 0, 1, 1, 2]))
    values = raw_values(kind)
    if kind in (*judge.FLOATS, "vector") and nonfinite in ("error", "drop") and draw(st.integers(0, 5)):
        values = values.filter(math.isfinite)
    if kind == "string" and draw(st.booleans()):
        values = st.sampled_from(STRINGS[:4])
    encode = draw(encodings(kind, depth))
    can_fill = kind != "binary" and encode.get("as") != "bytes"
    has_nulls = (can_fill or nulls != "fill") and draw(st.integers(0, 9)) > (
        8 if nulls == "error" else 6 if nulls == "drop" else 3
    )
    element = st.one_of(*[values] * 8, st.none()) if has_nulls and kind != "vector" else values
    cell = element
    if depth:
        length = draw(st.integers(0 if encode.get("ragged") else 1, 3))
        inner = draw(st.integers(1, 2))
        low, high = (0, 4) if encode.get("ragged") else (length, length)
        of_rows = st.lists(element, min_size=inner, max_size=inner) if depth == 2 else element
        cell = st.lists(of_rows, min_size=low, max_size=high)
        if has_nulls:
            cell = st.one_of(*[cell] * 8, st.none())
    cells = tuple(draw(st.lists(cell, min_size=rows, max_size=rows)))
    raw_fill = draw(st.one_of(*[values] * 9, st.none())) if "fill" in (nulls, nonfinite) else None
    if isinstance(raw_fill, float) and not math.isfinite(raw_fill):
        raw_fill = 1.5
    as_given, raw_fill = fill_of(kind, encode, raw_fill, draw(st.booleans()))
    casts = {
        "int": ["int64", "float64", "float32"],
        "bigint": ["float64", "float32", "int32"],
        "double": ["float32", "float16"],
        "smallint": ["float16", "int32"],
        "boolean": ["float32", "uint8"],
        "timestamp": ["float64"],
    }
    cast = draw(st.sampled_from([None, None, *casts.get(kind, [None])]))
    struct = (
        draw(st.sampled_from([None, None, None, "struct", "Outer one"]))
        if kind != "vector" and "." not in name
        else None
    )
    return Column(name, kind, cells, depth, encode, as_given, raw_fill, cast, struct)


@st.composite
def encodings(draw, kind, depth):
    """Settings of `data.encode` for a type."""
    found = {}
    if depth and kind != "vector" and draw(st.booleans()):
        found["ragged"] = True
    if kind == "string":
        found["as"] = draw(
            st.sampled_from(["vocabulary", "vocabulary", "hash", "bytes"] if not depth else ["vocabulary", "hash"])
        )
        if found["as"] == "hash":
            found["buckets"] = draw(st.sampled_from([1, 2, 7, 1000, 2**32, 2**40]))
        if found["as"] == "vocabulary":
            if draw(st.booleans()):
                found["values"] = draw(st.lists(_TEXT, min_size=1, max_size=4, unique=True))
            elif draw(st.booleans()):
                found["min_count"] = draw(st.integers(1, 3))
            if draw(st.booleans()):
                found["unknown"] = draw(st.sampled_from(["zero", "error"]))
    elif kind.startswith("decimal"):
        if (chosen := draw(st.sampled_from([None, "float", "decimal"]))) is not None:
            found["as"] = chosen
    elif kind in TIMES and draw(st.booleans()):
        found["as"] = "duration" if kind.startswith("interval") else "timestamp"
        found["unit"] = draw(st.sampled_from(["s", "ms", "us", "ns", *([] if kind.startswith("interval") else ["D"])]))
    return found


def fill_of(kind, encode, raw, as_text):
    """A fill as a user gives it, and as `cells` have it, which is the same value."""
    if raw is None or kind == "binary" or encode.get("as") == "bytes":
        return None, None
    if kind.startswith("decimal"):
        return str(raw), raw
    if kind in TIMES:
        unit = encode.get("unit") or ("D" if kind == "date" else "us")
        micros = raw * judge.MICROS["D"] if kind == "date" else raw
        if as_text and not kind.startswith("interval"):
            return iso(kind, raw), raw
        if unit == "ns":
            return micros * 1000, raw
        ticks = micros // judge.MICROS[unit]
        micros = ticks * judge.MICROS[unit]
        return ticks, micros // judge.MICROS["D"] if kind == "date" else micros
    return raw, raw


def iso(kind, raw):
    """A time as text in ISO 8601."""
    if kind == "date":
        return str(datetime.date.fromordinal(719_163 + raw))
    text = (datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=raw)).isoformat(" ")
    return text + ("Z" if kind == "timestamp" else "")


@st.composite
def cases(draw):
    """A random table of up to 12 rows and 5 columns."""
    rows = draw(st.integers(1, 12))
    nulls, nonfinite = (
        draw(st.sampled_from(["error", "drop", "fill"])),
        draw(st.sampled_from(["error", "drop", "fill", "allow"])),
    )
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    found = tuple(draw(columns(name, rows, nulls, nonfinite)) for name in names)
    scalars = [c for c in found if not c.depth and not c.struct and c.type not in ("vector", "binary")]
    filters = ()
    if scalars and not draw(st.integers(0, 2)):
        filters = tuple(draw(conditions(draw(st.sampled_from(scalars)))) for _ in range(draw(st.integers(1, 2))))
    writer = draw(st.sampled_from(WRITERS))
    parted = [
        c.name for c in scalars if c.type in ("string", "int", "bigint", "date", "boolean", "double") and len(found) > 1
    ]
    partition = (
        draw(st.sampled_from(parted)) if parted and writer.startswith("spark") and not draw(st.integers(0, 2)) else None
    )
    return Case(
        found, nulls, nonfinite, draw(st.sampled_from(ZONES)), draw(st.booleans()), writer, partition, filters,
        draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.sampled_from(["pad", "offsets"])),
        draw(st.integers(0, 14)) == 14, draw(st.sampled_from([None, *names])), draw(st.booleans()),
    )  # fmt: skip


@st.composite
def conditions(draw, column):
    """A condition on a column, on a value that it has or on another one."""
    op = draw(st.sampled_from(["==", "!=", "<", "<=", ">", ">=", "in", "not in"]))
    known = [c for c in column.cells if c is not None and not (isinstance(c, float) and not math.isfinite(c))]
    others = raw_values(column.type).filter(lambda v: not isinstance(v, float) or math.isfinite(v))
    one = st.one_of(st.sampled_from(known), others) if known else others
    count = draw(st.integers(1, 3)) if op.endswith("in") else 1
    return Condition(column.name, op, tuple(draw(st.lists(one, min_size=count, max_size=count))))


# ---- what Spark says


def data_frame(spark, case):
    """The table, as Spark has it."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import functions as F
    from pyspark.sql.types import LongType, StructField, StructType, _parse_datatype_string

    fields, cells = [StructField("r", LongType())], [range(case.rows)]
    for i, c in enumerate(case.columns):
        raw = {"date": "int", **dict.fromkeys(TIMES[1:], "bigint")}.get(c.type, c.type)
        if c.type == "vector":
            fields.append(StructField(f"r{i}", VectorUDT()))
            cells.append([v if v is None else Vectors.dense(v) if i % 2 else sparse(v) for v in c.cells])
        else:
            fields.append(StructField(f"r{i}", _parse_datatype_string("array<" * c.depth + raw + ">" * c.depth)))
            cells.append(c.cells)
    rows = list(zip(*cells, strict=True))
    df = spark.createDataFrame(rows, StructType(fields)).repartition(case.partitions, "r")
    made, structs = [F.col("r").alias(ID), (F.col("r") % 3 + 0.5).alias(WEIGHT)], {}
    for i, c in enumerate(case.columns):
        depth = 0 if c.type == "vector" else c.depth
        expression = judge.each(f"r{i}", depth, lambda x, kind=c.type: judge.from_raw(kind, x))
        structs.setdefault(c.struct or i, []).append(F.expr(expression).alias(c.name))
    made += [F.struct(*found).alias(name) if isinstance(name, str) else found[0] for name, found in structs.items()]
    return df.select(*made)


def sparse(values):
    from pyspark.ml.linalg import Vectors

    return Vectors.sparse(len(values), {i: v for i, v in enumerate(values) if v != 0})


def without_vectors(df):
    """The table with arrays in the place of Spark ML vectors, which SQL does not know."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as F

    vectors = [f.name for f in df.schema if type(f.dataType).__name__ == "VectorUDT"]
    for name in vectors:
        column = F.col(quoted(name))
        df = df.withColumn(name, F.when(column.isNotNull(), vector_to_array(column)))  # which takes no nulls
    return df


def leaf_at(df, column):
    """The type of the values of a column, as Spark has it in a DataFrame, and how deep they are."""
    kind = df.schema[column.path[0]].dataType
    for name in column.path[1:]:
        kind = kind[name].dataType
    if type(kind).__name__ == "VectorUDT":
        return "vector", 1
    return judge.element_type(kind.simpleString())


def words_of(df, case, column):
    """The vocabulary of a column: strings by how often they occur, then by code point."""
    if column.encode.get("values") is not None:
        return column.encode["values"]
    _, depth = leaf_at(df, column)
    flat = quoted(*column.path)
    for _ in range(depth - 1):
        flat = f"flatten({flat})"
    word = f"explode({flat})" if depth else flat
    counted = df.selectExpr(f"{word} AS word").filter("word IS NOT NULL").groupBy("word").count()
    counted = counted.filter(f"count >= {column.encode.get('min_count', 1)}").orderBy("count", "word")
    found = [(-row["count"], row["word"]) for row in counted.collect()]
    return [word for _, word in sorted(found)]


def expected_rows(df, case, *, filters=None):
    """The numbers that every way must give, by row id and column; REFUSED for cells that must not be read.

    filters: `of files`, whose nulls pass none; or `of shards`, in which nulls have been filled.
    """
    whole = df  # whose words are counted
    if filters:
        for condition in case.filters:
            df = df.filter(sql_of(df, case, condition, is_filled=filters == "of shards"))
    made = [quoted(ID) + " AS id"]
    finish = []
    for i, c in enumerate(case.columns):
        leaf, depth = leaf_at(df, c)
        x, kind = quoted(*c.path), leaf
        if leaf == "vector":
            kind = "double"
        if c.type.startswith("interval") and leaf == "bigint":  # as pyarrow writes it, and Spark reads it
            kind = "microseconds"
        made += [f"{judge.is_null(x, depth)} AS n{i}", f"{judge.is_nonfinite(x, kind, depth)} AS i{i}"]
        words = words_of(whole, case, c) if c.encode.get("as") == "vocabulary" else []
        if case.fills and c.raw_fill is not None:
            x = filled(x, kind, depth, c, case)
        made.append(f"{judge.each(x, depth, lambda y, k=kind, e=c.encode, w=words: judge.number(k, y, e, w))} AS v{i}")
        finish.append(judge.finished(kind, c.encode))
    found = {}
    for row in without_vectors(df).selectExpr(*made).toArrow().to_pylist():
        values = {}
        policies = [(row[f"n{i}"], case.nulls, c) for i, c in enumerate(case.columns)]
        policies += [(row[f"i{i}"], case.nonfinite, c) for i, c in enumerate(case.columns)]
        bad = [(policy, c) for is_bad, policy, c in policies if is_bad]
        if any(policy == "drop" for policy, _ in bad):
            continue
        for i, c in enumerate(case.columns):
            refused = any(o is c and (p in ("error", "drop") or (p == "fill" and c.raw_fill is None)) for p, o in bad)
            values[c.feature] = REFUSED if refused else cast(finish_cell(row[f"v{i}"], finish[i]), c)
        assert row["id"] not in found
        found[row["id"]] = values
    return found


REFUSED = "must be refused"


def filled(x, leaf, depth, column, case):
    value = judge.literal(leaf, column.raw_fill)
    if case.nulls == "fill":
        if depth:
            cell = next((c for c in column.cells if c is not None), [])
            empty = value
            if depth == 2 and not column.is_ragged:
                empty = f"array_repeat({value}, {len(cell[0]) if cell else 0})"
            whole = f"array_repeat({empty}, {0 if column.is_ragged else len(cell)})"
            x = f"coalesce({x}, {whole})" if depth == 1 or not column.is_ragged else f"coalesce({x}, array())"
        x = judge.each(x, depth, lambda y: f"coalesce({y}, {value})")
    if case.nonfinite == "fill" and leaf in judge.FLOATS:
        x = judge.each(x, depth, lambda y: f"CASE WHEN {judge.is_nonfinite_value(y)} THEN {value} ELSE {y} END")
    return x


def finish_cell(value, finish):
    if isinstance(value, list):
        return [finish_cell(v, finish) for v in value]
    return None if value is None else finish(value)


def cast(value, column):
    """A number as `data.cast` makes it; REFUSED for what the dtype cannot hold."""
    if isinstance(value, list):
        found = [cast(v, column) for v in value]
        return REFUSED if any(f is REFUSED for f in found) else found
    if value is None or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        return REFUSED
    if column.cast is None:
        return value
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(column.cast).item()


def sql_of(df, case, condition, *, is_filled):
    """A condition of `data.filters` in SQL. As documented, a null meets none, and NaN meets != and not in.

    is_filled: whether values are compared as shards have them: with nulls filled, and times in their unit.
    """
    column = next(c for c in case.columns if c.name == condition.column)
    leaf, depth = leaf_at(df, column)
    x = quoted(*column.path)
    if is_filled and case.fills and column.raw_fill is not None:
        x = filled(x, leaf, depth, column, case)
    values = [
        judge.literal(leaf if leaf in TYPES or leaf.startswith("decimal") else column.type, v) for v in condition.values
    ]
    if is_filled and leaf in ("timestamp", "timestamp_ntz"):
        micros, unit = judge.number(leaf, x, {}, []), judge.MICROS.get(column.encode.get("unit"), 1)
        x, values = f"({micros} - pmod({micros}, {unit}))", [f"{v}L" for v in condition.values]
    if is_filled and leaf.startswith("decimal") and judge.is_float(leaf, column.encode):
        x, values = f"CAST(CAST({x} AS STRING) AS DOUBLE)", [f"CAST('{v}' AS DOUBLE)" for v in condition.values]
    op = {"==": "=", "in": "IN", "not in": "NOT IN"}.get(condition.op, condition.op)
    right = f"({', '.join(values)})" if condition.op.endswith("in") else values[0]
    if leaf not in judge.FLOATS:
        return f"{x} {op} {right}"
    if condition.op in ("!=", "not in"):
        return f"(isnan({x}) OR {x} {op} {right})"
    return f"(NOT isnan({x}) AND {x} {op} {right})"


def filters_of(case):
    """The setting `data.filters`, with values as users write them."""
    by_name = {c.name: c for c in case.columns}

    def text(condition):
        kind = by_name[condition.column].type
        if kind.startswith("decimal"):
            return [str(v) for v in condition.values]
        if kind in ("date", "timestamp", "timestamp_ntz"):
            return [iso(kind, v) for v in condition.values]
        return list(condition.values)

    found = [(c, text(c)) for c in case.filters]
    return [[c.column, c.op, values if c.op.endswith("in") else values[0]] for c, values in found]


# ---- the ways


def normal(value):
    """A value that compares as it should: NaN equals NaN, and zeros differ by their sign."""
    if isinstance(value, list):
        return [normal(v) for v in value]
    return repr(float(value)) if isinstance(value, float) else int(value)


def opened(source, data, case):
    """Reads a dataset as a rank does."""
    loader = Loader(ragged=case.ragged, shuffle=False, num_streams=1)
    dataset = spark_dl.open_dataset(source, data, batch_size=3, loader=loader, shuffle=False)
    found = {}
    for batch in dataset:
        for row in np.flatnonzero(batch["weight"].numpy() > 0).tolist():
            key = batch[ID][row].item()
            assert key not in found, f"row {key} was read twice"
            weight = batch["weight"][row].item()
            assert weight == (weight_of(key) if case.is_weighted else 1.0), f"row {key} has the weight {weight}"
            found[key] = {c.feature: cell_of(batch, c, row, case) for c in case.columns}
    return found


def weight_of(row):
    return 0.5 + row % 3


def cell_of(batch, column, row, case):
    name = column.feature
    if not column.is_ragged:
        return batch[name][row].tolist()
    if case.ragged == "pad":
        return batch[name][row][batch[f"{name}_mask"][row]].tolist()
    start, stop = batch[f"{name}_offsets"][row : row + 2].tolist()
    return batch[name][start:stop].tolist()


def predicted(df, case, names=None):
    """The rows of predictions. # names: of the columns; None for those of the model"""
    names = names or {c.feature: f"feature_{i + 1}" for i, c in enumerate(case.columns)}
    rows = df.select(quoted(ID), *(quoted(name) for name in names.values())).toArrow().to_pylist()
    found = {row[ID]: {feature: row[name] for feature, name in names.items()} for row in rows}
    assert len(found) == len(rows), "rows were predicted twice"
    return found


def attempt(way, case, call):
    """Calls a way, without the columns for which it is refused. Returns the case that is left, and its result."""
    for _ in range(len(case.columns) + 1):
        if not case.columns:
            return None, None
        try:
            return case, call(case)
        except Exception as error:
            text = clear_text(error)
            if text is None:
                raise
            named = [c for c in case.columns if names_column(text, c)]
            note(f"{way} refused: {kind_of(text, case)}")
            if not named:
                if not is_about_all(text):
                    raise AssertionError(f"{way}: an error that names no column: {text}") from error
                return None, None
            case = case.without(max(named, key=lambda c: len(c.feature)).name)
    return None, None


def names_column(text, column):
    """Whether an error names a column, or a setting of it."""
    keys = (f"data.{section}.{column.feature}" for section in ("encode", "fill", "cast"))
    return any(shown in text for shown in (repr(column.feature), json.dumps(column.feature), repr(column.name), *keys))


def is_about_all(text):
    return any(words in text for words in ("no rows", "data.filters", "has no row", "all rows were dropped"))


def kind_of(text, case):
    """An error without what is of this table."""
    for c in case.columns:
        text = text.replace(repr(c.feature), "<column>").replace(f"data.encode.{c.feature}", "data.encode.<column>")
    return without_digits(text)


def check_way(way, case, want, call):
    """Compares a way with what Spark says. # want: from a case to the expected rows"""
    left, found = attempt(way, case, call)
    if left is None:
        return
    wanted = want(left)
    assert sorted(found) == sorted(wanted), f"{way}: rows {sorted(found)}, Spark has {sorted(wanted)}"
    for key, cells in wanted.items():
        for name, value in cells.items():
            got = found[key][name]
            assert value is not REFUSED, f"{way}: row {key} of {name!r} is {got!r}, and must be refused"
            assert normal(got) == normal(value), f"{way}: row {key} of {name!r} is {got!r}, Spark says {value!r}"


def write_files(df, case, folder):
    """Writes the table with another program. Raises what that program does if it cannot."""
    url = str(folder / "files")
    kind, _, how = case.writer.partition(" ")
    if kind == "spark":
        writer = df.write.option("parquet.block.size", "4096").option("parquet.page.size", "256")
        if case.partition:
            writer = writer.partitionBy(case.partition)
        writer.parquet(url)
        return url
    pathlib.Path(url).mkdir()
    table = df.toArrow()
    if kind == "polars":
        import polars

        polars.from_arrow(table).write_parquet(f"{url}/a.parquet", row_group_size=case.group_rows)
    elif kind == "pandas":
        table.to_pandas().to_parquet(f"{url}/a.parquet", row_group_size=case.group_rows)
    else:
        if how == "large":
            table = table.cast(pa.schema([large(f) for f in table.schema]))
        if how == "dictionary":
            arrays = [c.dictionary_encode() if pa.types.is_string(c.type) else c for c in table.columns]
            table = pa.table(arrays, names=table.column_names)
        pq.write_table(table, f"{url}/a.parquet", row_group_size=case.group_rows, write_page_index=True)
    return url


def is_kept(read, column):
    """Whether Spark reads a column as a type of ours: other programs write vectors as structs."""
    return (leaf_at(read, column)[0] == "vector") == (column.type == "vector")


def large(arrow_field):
    kinds = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return arrow_field.with_type(kinds.get(arrow_field.type, arrow_field.type))


@contextlib.contextmanager
def conf(spark, settings):
    before = {key: spark.conf.get(key) for key in settings}
    for key, value in settings.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)


def check(spark, folder, case):
    """Reads a random table in all ways. # folder: an empty one, for the files"""
    outputs = "INT96" if case.writer == "spark int96" else "TIMESTAMP_MICROS"
    settings = {
        "spark.sql.session.timeZone": case.zone, "spark.sql.ansi.enabled": str(case.ansi).lower(),
        "spark.sql.parquet.outputTimestampType": outputs,
    }  # fmt: skip
    folder = pathlib.Path(folder)
    with decimal.localcontext(judge.EXACT), conf(spark, settings):
        folder.mkdir(parents=True)
        _check_all(spark, folder, case)


def _check_all(spark, folder, case):
    df = data_frame(spark, case).cache()
    counter = iter(range(100))

    def write(some, source=df):
        url = str(folder / f"shards{next(counter)}")
        shards = make_config(rows_per_row_group=some.group_rows).shards
        return spark_dl.write_shards(source, url, some.data(), shards=shards)

    def from_shards(some, source=df):
        data = some.data(filters=filters_of(some))
        return opened(write(some, source).url, reading(data), some)

    check_way("shards", case, lambda some: expected_rows(df, some, filters="of shards"), from_shards)
    left, shards = attempt("shards", replace(case, filters=()), write)
    if left is not None:
        _check_predictions(spark, df, shards, left, folder)
    try:
        url = write_files(df, case, folder)
        read = spark.read.parquet(url).cache()
        read.count()
    except Exception as error:
        note(f"{case.writer}: not written or not read by Spark: {type(error).__name__}")
        return
    # Spark has the columns of partitions last, and all types as it reads them.
    here = replace(case, columns=tuple(c for c in case.columns if c.path[0] in read.columns and is_kept(read, c)))
    in_place = lambda some: opened(url, some.data(filters=filters_of(some)), some)  # noqa: E731
    if not here.columns:
        return
    if not here.filters and here.nulls != "drop" and here.nonfinite != "drop":
        config = lambda some: replace(make_config(ragged="pad"), data=some.data())  # noqa: E731
        # Vocabularies of files are counted for a training only, so that a model without one asks for values.
        listed = replace(
            here,
            ragged="pad",
            label=None,
            is_weighted=False,
            columns=tuple(c for c in here.columns if c.encode.get("as") != "vocabulary" or "values" in c.encode),
        )
        keys = [ID, *(c.feature for c in listed.columns if not c.depth and not c.struct)]
        check_way(
            "predict of files",
            listed,
            lambda some: expected_rows(read, some),
            lambda some: by_url(spark, url, some, config(some), keys, read),
        )
    check_way("files", here, lambda some: expected_rows(read, some, filters="of files"), in_place)
    check_way(
        "shards of files",
        replace(here, filters=()),
        lambda some: expected_rows(read, some),
        lambda some: from_shards(some, read),
    )


def reading(data):
    """The settings for a dataset that was written with `data`."""
    return replace(data, nulls="error" if data.nulls != "fill" else "fill", encode={}, fill=data.fill)


def _check_predictions(spark, df, shards, case, folder):
    """Compares what a model gets from a DataFrame, from a function, from datasets and as a stage of Spark ML."""
    from pyspark.sql import functions as F

    # Padded: a model that returns the values of all rows in one, as offsets have them, is refused.
    case = replace(case, ragged="pad", label=None, is_weighted=False)
    config = replace(make_config(ragged="pad", rows_at_once=2), data=with_words(case.data(), shards))
    kept = sorted(expected_rows(df, case))
    if not kept:
        return
    rows = df.filter(F.col(quoted(ID)).isin(kept))

    row_id = F.col(quoted(ID))

    def want(some):  # with the words of all rows, as the dataset has them
        return {row: cells for row, cells in expected_rows(df, some).items() if row in kept}

    def settings(some):
        return replace(config, data=with_words(some.data(), shards))

    check_way("predict", case, want, lambda some: predicted(spark_dl.predict(rows, ECHO, None, settings(some)), some))

    def by_function(some):
        function = spark_dl.predict_udf(ECHO, None, settings(some), data=rows)
        names = {c.feature: f"feature_{i + 1}" for i, c in enumerate(some.columns)}
        scored = rows.select(row_id, function(row_id, *(F.col(quoted(*c.path)) for c in some.columns)).alias("f"))
        return predicted(scored.select(row_id, *(F.col("f").getField(n).alias(n) for n in names.values())), some)

    def by_saved_model(some):
        url = str(folder / f"model{len(list(folder.iterdir()))}")
        spark_dl.save_model(url, ECHO, config=settings(some), data=rows)
        return predicted(spark_dl.predict(rows, url), some)

    def by_stage(some):
        found = settings(some)  # estimators make float32 of doubles that have no cast
        floats = {c.feature: "float64" for c in some.columns if is_double(c)}
        data = replace(found.data, cast={**floats, **found.data.cast})
        config = run_config(replace(found, data=data))
        estimator = TorchEstimator(ECHO, config, runDir=str(folder / "fits"), progress=False)
        return predicted(estimator.fit(rows).transform(rows), some)

    check_way("predict_udf", case, want, by_function)
    check_way("saved model", case, want, by_saved_model)
    if case.through_ml:
        check_way("stage", with_float_decimals(case), want, by_stage)

    keys = [ID, *(c.feature for c in case.columns if c.is_scalar)]
    check_way(
        "predict of shards",
        case,
        want,
        lambda some: by_url(spark, shards, some, settings(some), keys, df),
    )


def with_float_decimals(case):
    """The case as an estimator of Spark ML reads it: decimals are floats unless `as` says what they are."""
    encodes = [{"as": "float", **c.encode} if c.type.startswith("decimal") else c.encode for c in case.columns]
    columns = [replace(c, encode=encode) for c, encode in zip(case.columns, encodes, strict=True)]
    return replace(case, columns=tuple(columns))


def is_double(column):
    """Whether a feature is float64, with `with_float_decimals`."""
    return column.type in ("double", "vector") or (column.type[:7] == "decimal" and column.encode["as"] == "float")


def run_config(config):
    """Settings that train one step on one rank."""
    train = replace(config.train, max_steps=1, global_batch_size=4)
    loader = replace(config.loader, num_streams=1)
    return replace(config, train=train, loader=loader, launch=replace(config.launch, num_ranks=1))


def with_words(data, shards):
    """The settings with the vocabularies of a dataset: a model without a checkpoint has none."""
    words = {c.name: c.encoding.vocabulary for c in shards.columns if c.encoding.vocabulary is not None}
    encode = {name: {k: v for k, v in settings.items() if k != "min_count"} for name, settings in data.encode.items()}
    for name in encode.keys() & words.keys():
        encode[name]["values"] = list(words[name])
    return replace(data, encode=encode)


def by_url(spark, source, case, config, keys, df):
    """Predicts a dataset, and compares the keys that come back with the table."""
    keys = [key for key in keys if key == ID or any(c.feature == key for c in case.columns)]
    while True:
        try:
            found = spark_dl.predict(source, ECHO, None, config, keys=keys, spark=spark)
            break
        except ValueError as error:
            bad = [key for key in keys if repr(key) in str(error)]
            if not str(error).startswith("keys: ") or not bad:
                raise
            note(f"key refused: {kind_of(str(error), case)}")
            keys.remove(bad[0])
    check_keys(found, df, case, keys, is_filled=not isinstance(source, str))  # files have their nulls
    return predicted(found, case)


def check_keys(found, df, case, keys, *, is_filled):
    from pyspark.sql import functions as F

    expected = {}
    for c in case.columns:
        if c.feature in keys:
            kind = df.schema[c.feature].dataType
            assert found.schema[c.feature].dataType == kind, (
                f"key {c.feature!r} is {found.schema[c.feature].dataType}, and {kind} in the table"
            )
            x, leaf = quoted(c.feature), leaf_at(df, c)[0]
            if is_filled and case.fills and c.raw_fill is not None:
                x = filled(x, leaf, 0, c, case)
            if is_filled and c.encode.get("as") == "vocabulary":
                known = ", ".join(judge.literal("string", word) for word in words_of(df, case, c))
                x = f"CASE WHEN array_contains(array({known}), {x}) THEN {x} END" if known else "NULL"
            expected[c.feature] = x
    if not expected:
        return
    there = df.select(
        F.col(quoted(ID)).alias("id"), *(F.expr(x).alias(f"e{i}") for i, x in enumerate(expected.values()))
    )
    here = found.select(
        F.col(quoted(ID)).alias("id"), *(F.col(quoted(name)).alias(f"f{i}") for i, name in enumerate(expected))
    )
    joined = here.join(there, "id")
    different = [
        F.sum(F.when(~F.col(f"e{i}").eqNullSafe(F.col(f"f{i}")), 1).otherwise(0)).alias(str(i))
        for i in range(len(expected))
    ]
    counts = joined.agg(F.count("*").alias("n"), *different).collect()[0]
    for i, name in enumerate(expected):
        assert not counts[str(i)], f"key {name!r}: {counts[str(i)]} of {counts['n']} values differ from the table's"
