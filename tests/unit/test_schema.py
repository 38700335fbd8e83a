"""Cells: from a DataFrame's columns to arrays, to stored bytes, and back."""

import io

import numpy as np
import pyarrow as pa
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as t

from spark_dl.data import schema
from spark_dl.data.schema import BadCellsError, Column, SourceColumn

DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64"]
SHAPES = [(1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)]


def values_of(dtype, shape, rows=6):
    return (np.random.default_rng(1).normal(size=(rows, *shape)) * 50).astype(dtype)


def tensor(dtype="float32", shape=(2,)):
    return Column("x", dtype, shape, codec="ndarray")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_come_back_as_they_were_stored(dtype, shape):
    column, values = tensor(dtype, shape), values_of(dtype, shape)
    found = schema.decode(column, schema.encode(column, values))
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_come_back_as_they_were_stored(dtype):
    column, values = Column("x", dtype), values_of(dtype, ())
    stored = schema.encode(column, values)
    assert stored.type == schema.arrow_type(column) == pa.from_numpy_dtype(np.dtype(dtype))
    found = schema.decode(column, stored)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
@pytest.mark.parametrize(("start", "rows"), [(0, 0), (0, 2), (2, 3), (6, 0), (5, 1)])
def test_a_slice_of_stored_cells_is_decoded_as_that_slice(shape, start, rows):
    column, values = tensor("float64", shape), values_of("float64", shape)
    found = schema.decode(column, schema.encode(column, values).slice(start, rows))
    assert found.shape == (rows, *shape)
    np.testing.assert_array_equal(found, values[start : start + rows])


@pytest.mark.parametrize("codec", ["ndarray", "scalar"])
def test_chunks_are_decoded_as_one_array(codec):
    shape = (2,) if codec == "ndarray" else ()
    column, values = Column("x", "int32", shape, codec), values_of("int32", shape)
    stored = schema.encode(column, values)
    chunked = pa.chunked_array([stored[:2], stored[2:2], stored[2:]])
    np.testing.assert_array_equal(schema.decode(column, chunked), values)
    assert schema.decode(column, pa.chunked_array([], stored.type)).shape == (0, *shape)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
def test_decoded_tensors_are_views_of_the_stored_bytes(shape):
    column = tensor("float32", shape)
    stored = schema.encode(column, values_of("float32", shape))
    found = schema.decode(column, stored)
    assert np.shares_memory(found, np.frombuffer(stored.buffers()[2], dtype=np.uint8))
    assert not found.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stored_cell_is_an_npy_file(dtype, shape):
    column, values = tensor(dtype, shape), values_of(dtype, shape)
    for cell, row in zip(schema.encode(column, values).to_pylist(), values, strict=True):
        assert len(cell) == column.row_bytes
        found = np.load(io.BytesIO(cell), allow_pickle=False)
        assert found.dtype == row.dtype
        np.testing.assert_array_equal(found, row)


@pytest.mark.parametrize("values", [
    np.arange(12, dtype="float32").reshape(3, 4).T,
    np.arange(8, dtype=">f4").reshape(4, 2),
    np.arange(24, dtype="float32").reshape(4, 6)[:, ::3],
], ids=["fortran", "big-endian", "strided"])  # fmt: skip
def test_arrays_of_any_layout_are_stored_alike(values):
    column = tensor("float32", values.shape[1:])
    np.testing.assert_array_equal(schema.decode(column, schema.encode(column, values)), values)


@pytest.mark.parametrize("bad", [
    tensor("float32", (3,)), tensor("int32", (2,)), tensor("float32", (2, 1)), tensor("float32", (1, 2)),
])  # fmt: skip
def test_cells_of_another_dtype_or_shape_are_refused(bad):
    stored = schema.encode(bad, values_of(bad.dtype, bad.shape))
    with pytest.raises(ValueError, match=r"column 'x'.*dtype float32 and shape \(2,\)"):
        schema.decode(tensor(), stored)


@pytest.mark.parametrize("other_first", [True, False])
def test_the_first_and_the_last_cell_are_looked_at(other_first):
    right, wrong = (schema.encode(c, values_of(c.dtype, (2,), rows=2)) for c in (tensor(), tensor("int32")))
    stored = pa.concat_arrays([wrong, right] if other_first else [right, wrong])
    with pytest.raises(ValueError, match="do not all have dtype float32"):
        schema.decode(tensor(), stored)


def test_a_null_among_stored_cells_is_refused():
    cells = schema.encode(tensor(), values_of("float32", (2,))).to_pylist()
    with pytest.raises(ValueError, match="column 'x'"):
        schema.decode(tensor(), pa.array([*cells, None], pa.binary()))


# From a DataFrame's columns


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_cells(dtype):
    values = values_of(dtype, ())
    found = schema.cells(SourceColumn("c", dtype, "scalar"), pa.array(values))
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


def nested(values, depth, inner):
    kind = inner
    for _ in range(depth):
        kind = pa.list_(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_array_cells(dtype, shape):
    values = values_of(dtype, shape)
    stored = nested(values.tolist(), len(shape), pa.from_numpy_dtype(np.dtype(dtype)))
    column = SourceColumn("c", dtype, "array", len(shape))
    for start, stop in [(0, 6), (2, 5), (5, 6)]:
        found = schema.cells(column, stored[start:stop])
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values[start:stop])


def vectors(*rows):
    """Spark ML vectors in their Arrow form: a list is a dense one, (size, {index: value}) a sparse one."""
    fields = {"type": pa.int8(), "size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float64())}
    plain = [
        {"type": 1, "size": None, "indices": None, "values": row}
        if isinstance(row, list)
        else {"type": 0, "size": row[0], "indices": list(row[1]), "values": list(row[1].values())}
        for row in rows
    ]
    return pa.array(plain, pa.struct(fields))


VECTOR = SourceColumn("c", "float64", "vector", 1)
MIXED = [[1.0, 2.0, 3.0], (3, {0: 7.0, 2: 9.0}), (3, {}), [4.0, 5.0, 6.0], (3, {1: -1.0})]
AS_ARRAY = np.array([[1, 2, 3], [7, 0, 9], [0, 0, 0], [4, 5, 6], [0, -1, 0]], dtype=np.float64)


@pytest.mark.parametrize("kept", [slice(0, 5), slice(0, 1), slice(1, 3), slice(1, 5), slice(3, 4), slice(4, 5)])
def test_dense_and_sparse_vectors_in_any_mixture(kept):
    found = schema.cells(VECTOR, vectors(*MIXED)[kept])
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, AS_ARRAY[kept])


def array_column(depth=1):
    return SourceColumn("c", "int32", "array", depth)


@pytest.mark.parametrize(("column", "stored", "row", "message"), [
    (SourceColumn("c", "int32", "scalar"), pa.array([1, 2, None], pa.int32()), 2, "1 null"),
    (SourceColumn("c", "bool", "scalar"), pa.array([None, True, None]), 0, "2 null"),
    (array_column(), nested([[1], None], 1, pa.int32()), 1, "1 null"),
    (array_column(), nested([[1, 2], [3, 4], [5, None]], 1, pa.int32()), 2, "null inside an array"),
    (array_column(2), nested([[[1], [2]], [[3], [None]]], 2, pa.int32()), 1, "null inside an array"),
    (array_column(), nested([[1, 2], [3, 4], [5]], 1, pa.int32()), 2, r"lengths \[1, 2\].*the first has 2"),
    (array_column(2), nested([[[1, 2]], [[3, 4]], [[5]]], 2, pa.int32()), 2, r"lengths \[1, 2\]"),
    (array_column(2), nested([[[1], [2]], [[3], [4, 5]]], 2, pa.int32()), 1, r"lengths \[1, 2\]"),
    (array_column(2), nested([[[1], [2]], [[3]]], 2, pa.int32()), 1, r"lengths \[1, 2\]"),
    (VECTOR, vectors([1.0, 2.0], (2, {}), (3, {})), 2, r"sizes \[2, 3\].*the first has 2"),
    (VECTOR, vectors((2, {0: 1.0}), [1.0]), 1, r"sizes \[1, 2\]"),
])  # fmt: skip
def test_bad_cells_are_an_error_that_names_the_column_and_the_row(column, stored, row, message):
    with pytest.raises(BadCellsError, match=rf"column 'c': found .*{message}") as caught:
        schema.cells(column, stored)
    assert caught.value.row == row


def test_the_row_of_a_bad_cell_counts_from_the_start_of_a_slice():
    with pytest.raises(BadCellsError) as caught:
        schema.cells(array_column(), nested([[1], [1], [1], [1, 2]], 1, pa.int32())[1:])
    assert caught.value.row == 2


# Types of a DataFrame

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
    t.StructField("when", t.TimestampType()),
    t.StructField("pairs", t.MapType(t.StringType(), t.LongType())),
])  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "kind", "depth"), [
    ("flag", "bool", "scalar", 0), ("byte", "int8", "scalar", 0), ("short", "int16", "scalar", 0),
    ("int", "int32", "scalar", 0), ("long", "int64", "scalar", 0), ("float", "float32", "scalar", 0),
    ("double", "float64", "scalar", 0), ("image", "float32", "array", 2), ("vector", "float64", "vector", 1),
])  # fmt: skip
def test_spark_types_keep_their_width(name, dtype, kind, depth):
    assert schema.source_columns(FIELDS, [name]) == (SourceColumn(name, dtype, kind, depth),)


def test_columns_come_in_the_order_in_which_they_are_asked_for():
    assert [c.name for c in schema.source_columns(FIELDS, ["long", "flag"])] == ["long", "flag"]


@pytest.mark.parametrize("name", ["text", "price", "words", "when", "pairs"])
def test_a_type_that_cannot_become_a_tensor_is_an_error_that_says_what_can(name):
    with pytest.raises(
        ValueError, match=rf"column '{name}' has type .*supported are .*bigint.*CAST\({name} AS DOUBLE\)"
    ):
        schema.source_columns(FIELDS, ["flag", name])


def test_a_missing_column_is_an_error_that_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"no column 'imgae'.*did you mean 'image'.*data\.features"):
        schema.source_columns(FIELDS, ["imgae"])


def test_a_cell_of_another_dtype_in_the_middle_is_found():
    column = Column("x", "float32", (2,), "ndarray")
    good = schema.encode(column, np.ones((1, 2), np.float32))[0].as_py()
    other = schema.encode(Column("x", "int32", (2,), "ndarray"), np.ones((1, 2), np.int32))[0].as_py()
    with pytest.raises(ValueError, match="column 'x': stored cells do not all have dtype float32"):
        schema.decode(column, pa.array([good, other, good], pa.binary()))


def test_no_rows_are_encoded_and_decoded():
    column = Column("x", "float32", (2, 3), "ndarray")
    assert schema.decode(column, schema.encode(column, np.zeros((0, 2, 3), np.float32))).shape == (0, 2, 3)


def test_a_null_inner_array_is_reported_with_its_row():
    array = pa.array([[[1], [2]], [[1], None]], pa.list_(pa.list_(pa.int32())))
    with pytest.raises(BadCellsError, match="a null inside an array") as error:
        schema.cells(SourceColumn("x", "int32", "array", 2), array)
    assert error.value.row == 1
