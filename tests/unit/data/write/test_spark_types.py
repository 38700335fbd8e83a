"""What the columns of a DataFrame are, by its schema alone."""

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DecimalType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from spark_dl.data.write.spark_types import source_columns


def schema(**fields):
    return StructType([StructField(name, kind) for name, kind in fields.items()])


IMAGE = StructType([StructField("origin", StringType()), StructField("height", IntegerType()),
                    StructField("width", IntegerType()), StructField("nChannels", IntegerType()),
                    StructField("mode", IntegerType()), StructField("data", BinaryType())])  # fmt: skip


def test_fields_of_structs_have_their_path_and_arrays_their_depth():
    found = source_columns(
        schema(id=LongType(), inner=schema(pair=ArrayType(ArrayType(FloatType())))), ["id", "inner.pair"], {}, {}
    )
    assert [(c.name, c.path, c.dtype, c.kind, c.depth) for c in found] == [
        ("id", ("id",), "int64", "scalar", 0), ("inner.pair", ("inner", "pair"), "float32", "array", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("fields", "name", "is_empty_null"), [
    ({"data": BinaryType()}, "data", False), ({"image": IMAGE}, "image.data", True),
    ({"image": schema(data=BinaryType())}, "image.data", False),
], ids=["a column", "of Spark's images", "of another struct"])  # fmt: skip
def test_bytes_of_the_name_data_are_pixels_in_spark_s_images_alone(fields, name, is_empty_null):
    (column,) = source_columns(schema(**fields), [name], {name: {"as": "bytes"}}, {})
    assert (column.dtype, column.empty_is_null) == ("uint8", is_empty_null)


def test_a_column_that_is_not_there_is_named_with_one_that_is_near():
    with pytest.raises(ValueError, match="no column 'labl' in the DataFrame; did you mean 'label'"):
        source_columns(schema(label=LongType()), ["labl"], {}, {})


INNER = schema(a=LongType(), b=schema(c=FloatType()))


@pytest.mark.parametrize(("kind", "found"), [
    (INNER, r"struct<a:bigint,b:struct<c:float>>, which .*; read its fields: \['x.a', 'x.b', 'x.b.c'\]$"),
    (ArrayType(INNER), "array<struct<a:bigint,b:struct<c:float>>>, which .*; convert it in the DataFrame$"),
    (MapType(StringType(), LongType()), "map<string,bigint>, which .*; convert it in the DataFrame$"),
])  # fmt: skip
def test_a_type_that_no_tensor_can_be_is_an_error_that_says_what_to_do(kind, found):
    with pytest.raises(ValueError, match=f"^column 'x' has type {found}"):
        source_columns(schema(x=kind), ["x"], {}, {})


@pytest.mark.parametrize(("kind", "advice"), [
    (StringType(), r"\{x: \{as: hash, buckets: 1000\}\} or \{x: \{as: bytes\}\}$"),
    (ArrayType(StringType()), r"\{x: \{as: hash, buckets: 1000\}\}; with ragged: true where lengths vary$"),
])  # fmt: skip
def test_strings_need_an_encoding_that_suits_them(kind, advice):
    with pytest.raises(ValueError, match=f"set data.encode to encode strings as numbers: .*{advice}"):
        source_columns(schema(x=kind), ["x"], {}, {})


def test_only_arrays_are_ragged():
    ragged = {"x": {"ragged": True}}
    (column,) = source_columns(schema(x=ArrayType(LongType())), ["x"], ragged, {})
    assert column.ragged
    with pytest.raises(ValueError, match=r"data.encode.x.ragged: expected an array, found type bigint"):
        source_columns(schema(x=LongType()), ["x"], ragged, {})


@pytest.mark.parametrize(("precision", "scale", "dtype", "kind"), [
    (9, 0, "int64", "decimal"), (9, 2, "float64", "float"), (18, 0, "int64", "decimal"),
])  # fmt: skip
def test_decimals_are_whole_numbers_if_they_have_no_places(precision, scale, dtype, kind):
    (column,) = source_columns(schema(x=DecimalType(precision, scale)), ["x"], {}, {})
    assert (column.dtype, column.encoding.kind) == (dtype, kind)
