"""The types of DataFrames and Parquet files, and what the settings make of them."""

import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as t

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.columns.types import arrow_source_column
from spark_dl.data.write.spark_types import source_columns

USER = t.StructType([
    t.StructField("age", t.IntegerType()),
    t.StructField("home", t.StructType([t.StructField("city", t.StringType()), t.StructField("at", VectorUDT())])),
])  # fmt: skip
FIELDS = t.StructType([
    t.StructField("flag", t.BooleanType()),
    t.StructField("byte", t.ByteType()),
    t.StructField("short", t.ShortType()),
    t.StructField("int", t.IntegerType()),
    t.StructField("long", t.LongType()),
    t.StructField("float", t.FloatType()),
    t.StructField("double", t.DoubleType()),
    t.StructField("image", t.ArrayType(t.ArrayType(t.FloatType()))),
    t.StructField("vector", VectorUDT()),
    t.StructField("text", t.StringType()),
    t.StructField("price", t.DecimalType(10, 2)),
    t.StructField("words", t.ArrayType(t.StringType())),
    t.StructField("day", t.DateType()),
    t.StructField("when", t.TimestampType()),
    t.StructField("local", t.TimestampNTZType()),
    t.StructField("took", t.DayTimeIntervalType()),
    t.StructField("days", t.ArrayType(t.DateType())),
    t.StructField("blob", t.BinaryType()),
    t.StructField("user", USER),
    t.StructField("a.b", t.LongType()),
    t.StructField("pairs", t.MapType(t.StringType(), t.LongType())),
    t.StructField("users", t.ArrayType(USER)),
])  # fmt: skip


def one(name, **settings):
    return source_columns(FIELDS, [name], {name: settings} if settings else {})[0]


@pytest.mark.parametrize(("name", "dtype", "kind", "depth"), [
    ("flag", "bool", "scalar", 0), ("byte", "int8", "scalar", 0), ("short", "int16", "scalar", 0),
    ("int", "int32", "scalar", 0), ("long", "int64", "scalar", 0), ("float", "float32", "scalar", 0),
    ("double", "float64", "scalar", 0), ("image", "float32", "array", 2), ("vector", "float64", "vector", 1),
    ("a.b", "int64", "scalar", 0),
])  # fmt: skip
def test_spark_types_keep_their_width(name, dtype, kind, depth):
    assert one(name) == SourceColumn(name, dtype, kind, depth, path=(name,))


@pytest.mark.parametrize(("name", "settings", "dtype", "encoding"), [
    ("day", {}, "int32", Encoding("timestamp", unit="D")),
    ("day", {"as": "timestamp", "unit": "s"}, "int64", Encoding("timestamp", unit="s")),
    ("when", {}, "int64", Encoding("timestamp", unit="us")),
    ("when", {"as": "timestamp", "unit": "D"}, "int32", Encoding("timestamp", unit="D")),
    ("local", {"as": "timestamp", "unit": "ms"}, "int64", Encoding("timestamp", unit="ms")),
    ("took", {}, "int64", Encoding("duration", unit="us")),
    ("price", {}, "float64", Encoding("float")),
    ("price", {"as": "float"}, "float64", Encoding("float")),
    ("price", {"as": "decimal"}, "int64", Encoding("decimal", scale=2)),
    ("text", {"as": "hash", "buckets": 9}, "int64", Encoding("hash", buckets=9)),
    ("text", {"as": "vocabulary", "values": ["a", "b"]}, "int64", Encoding("vocabulary", vocabulary=("a", "b"))),
    ("text", {"as": "vocabulary", "unknown": "error"}, "int64", Encoding("vocabulary", unknown="error")),
    ("text", {"as": "bytes"}, "uint8", Encoding("bytes")),
    ("blob", {}, "uint8", Encoding("bytes")),
    ("blob", {"as": "image"}, "uint8", Encoding("image", orientation="apply")),
    ("user.home.city", {"as": "hash", "buckets": 2}, "int64", Encoding("hash", buckets=2)),
    ("days", {}, "int32", Encoding("timestamp", unit="D")),
    ("words", {"as": "hash", "buckets": 5, "ragged": True}, "int64", Encoding("hash", buckets=5)),
])  # fmt: skip
def test_what_the_settings_make_of_a_type(name, settings, dtype, encoding):
    column = one(name, **settings)
    assert (column.dtype, column.encoding) == (dtype, encoding)
    assert column.ragged == (settings.get("ragged", False) or encoding.kind == "bytes")


def test_fields_of_structs_are_found_by_their_path():
    assert one("user.age").path == ("user", "age")
    assert one("user.home.at").kind == "vector"
    with pytest.raises(ValueError, match=r"no column 'user.agee'.*did you mean 'user.age'"):
        one("user.agee")
    with pytest.raises(ValueError, match=r"column 'user' has type struct.*read its fields: \['user.age', 'user.home'"):
        one("user")


def test_columns_come_in_the_order_in_which_they_are_asked_for():
    assert [c.name for c in source_columns(FIELDS, ["long", "flag"])] == ["long", "flag"]


@pytest.mark.parametrize("name", ["pairs", "users"])
def test_a_type_that_cannot_become_a_tensor_is_an_error_that_says_what_can(name):
    with pytest.raises(ValueError, match=rf"column '{name}' has type .*supported are numbers, .*convert it"):
        source_columns(FIELDS, ["flag", name])


def test_a_string_is_an_error_that_says_what_to_write():
    with pytest.raises(ValueError, match=r"'text' has type string; .*\{text: \{as: vocabulary\}\}.*\{as: bytes\}"):
        one("text")
    with pytest.raises(ValueError, match=r"'words' has type array<string>; .*with ragged: true where lengths vary"):
        one("words")


def test_a_missing_column_is_an_error_that_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"no column 'imgae'.*did you mean 'image'.*data\.features"):
        source_columns(FIELDS, ["imgae"])


@pytest.mark.parametrize(("name", "settings", "match"), [
    ("long", {"as": "hash", "buckets": 3}, r"data.encode.long.as: expected one of \['number'\] for type bigint"),
    ("text", {"as": "image"}, r"data.encode.text.as: expected one of \['vocabulary', 'hash', 'bytes'\]"),
    ("long", {"ragged": True}, "data.encode.long.ragged: expected an array, found type bigint"),
    ("words", {"as": "bytes"}, "data.encode.words: expected a column without arrays for as: bytes"),
    ("vector", {"ragged": True}, "data.encode.vector: found .*, expected none for Spark ML vectors"),
])  # fmt: skip
def test_settings_that_do_not_fit_the_type(name, settings, match):
    with pytest.raises(ValueError, match=match):
        one(name, **settings)


def test_a_field_whose_name_has_a_dot_is_an_error_that_says_so():
    fields = t.StructType([t.StructField("user", t.StructType([t.StructField("a.b", t.LongType())]))])
    with pytest.raises(
        ValueError, match=r"column 'user.a.b': a struct field has a dot in its name, .*; rename the field"
    ):
        source_columns(fields, ["user.a.b"])


def test_settings_of_a_column_that_is_not_read():
    with pytest.raises(ValueError, match=r"data.encode.txt: no such column is read; did you mean 'text'"):
        source_columns(FIELDS, ["text"], {"txt": {"as": "bytes"}})
    with pytest.raises(ValueError, match=r"data.fill.lng: no such column is read; did you mean 'long'"):
        source_columns(FIELDS, ["long"], {}, {"lng": 3})


@pytest.mark.parametrize(("name", "value"), [
    ("flag", True), ("byte", 127), ("float", 0.1), ("double", 3), ("price", 9.99), ("price", "1"), ("image", 0.5),
    ("vector", 0), ("day", "2020-01-31"), ("day", 3), ("when", 3), ("took", 3),
    ("when", "2020-01-31T10:00:00Z"), ("local", "2020-01-31 10:00:00"),
])  # fmt: skip
def test_fills_that_fit(name, value):
    assert source_columns(FIELDS, [name], {}, {name: value})[0].fill == value


@pytest.mark.parametrize(("name", "value"), [
    ("byte", 128), ("long", 0.5), ("long", "3"), ("float", "x"), ("price", 9.999), ("price", "x"), ("image", "x"),
    ("day", "2020-02-31"), ("day", 3.5), ("vector", "x"), ("blob", "x"), ("float", 1e300), ("float", -1e39),
    ("byte", True), ("flag", 1), ("flag", 0.0), ("image", 1e39), ("double", False), ("price", True), ("flag", "true"),
    ("when", True),
])  # fmt: skip
def test_fills_that_do_not_fit_are_an_error_that_names_the_key(name, value):
    with pytest.raises(ValueError, match=rf"^data.fill.{name}: "):
        source_columns(FIELDS, [name], {}, {name: value})


@pytest.mark.parametrize(("arrow", "dtype", "encoding"), [
    (pa.uint16(), "uint16", Encoding()), (pa.float16(), "float16", Encoding()), (pa.bool_(), "bool", Encoding()),
    (pa.date32(), "int32", Encoding("timestamp", unit="D")), (pa.date64(), "int32", Encoding("timestamp", unit="D")),
    (pa.timestamp("ms", "UTC"), "int64", Encoding("timestamp", unit="ms")),
    (pa.duration("ns"), "int64", Encoding("duration", unit="ns")),
    (pa.decimal128(20, 3), "float64", Encoding("float")),
    (pa.decimal128(20, 0), "int64", Encoding("decimal", scale=0)),
    (pa.decimal128(5, -2), "float64", Encoding("float")),
    (pa.dictionary(pa.int32(), pa.int64()), "int64", Encoding()),
    (pa.binary(4), "uint8", Encoding("bytes")), (pa.large_binary(), "uint8", Encoding("bytes")),
    (pa.large_list(pa.list_(pa.date32())), "int32", Encoding("timestamp", unit="D")),
])  # fmt: skip
def test_types_of_parquet(arrow, dtype, encoding):
    column = arrow_source_column("c", arrow, {})
    assert (column.dtype, column.encoding) == (dtype, encoding)


VECTOR = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}


@pytest.mark.parametrize("other", [
    {"type": pa.string()}, {"size": pa.float64()}, {"indices": pa.int64()}, {"values": pa.float64()},
    {"indices": pa.list_(pa.string())}, {"values": pa.list_(pa.string())},
])  # fmt: skip
def test_a_struct_is_a_vector_of_spark_ml_by_the_names_and_types_of_its_fields(other):
    assert arrow_source_column("c", pa.struct(VECTOR), {}).kind == "vector"
    with pytest.raises(ValueError, match="column 'c' has Parquet type struct<.*, which cannot become a tensor"):
        arrow_source_column("c", pa.struct({**VECTOR, **other}), {})


@pytest.mark.parametrize("arrow", [pa.map_(pa.string(), pa.int64()), pa.struct([("a", pa.int64())]), pa.null(),
                                   pa.time64("us")])  # fmt: skip
def test_types_of_parquet_that_cannot_become_a_tensor(arrow):
    with pytest.raises(ValueError, match="column 'c' has Parquet type .*, which cannot become a tensor"):
        arrow_source_column("c", arrow, {})


@pytest.mark.parametrize(("encoding", "expected"), [
    (Encoding(), None), (Encoding("hash", buckets=7), 7), (Encoding("vocabulary", vocabulary=("a", "b")), 3),
    (Encoding("vocabulary", vocabulary=("a", "b"), unknown="error"), 2),
])  # fmt: skip
def test_the_size_of_an_embedding(encoding, expected):
    assert encoding.num_values == expected
