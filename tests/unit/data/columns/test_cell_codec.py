"""Columns as they are stored: arrays to cells in Parquet, and back."""

import io

import numpy as np
import pyarrow as pa
import pytest

from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from tests.builders.images import pixels, png

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
    found = cell_codec.decode(column, cell_codec.encode(column, values))
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_come_back_as_they_were_stored(dtype):
    column, values = Column("x", dtype), values_of(dtype, ())
    stored = cell_codec.encode(column, values)
    assert stored.type == cell_codec.arrow_type(column) == pa.from_numpy_dtype(np.dtype(dtype))
    found = cell_codec.decode(column, stored)
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
@pytest.mark.parametrize(("start", "rows"), [(0, 0), (0, 2), (2, 3), (6, 0), (5, 1)])
def test_a_slice_of_stored_cells_is_decoded_as_that_slice(shape, start, rows):
    column, values = tensor("float64", shape), values_of("float64", shape)
    found = cell_codec.decode(column, cell_codec.encode(column, values).slice(start, rows))
    assert found.shape == (rows, *shape)
    np.testing.assert_array_equal(found, values[start : start + rows])


@pytest.mark.parametrize("codec", ["ndarray", "scalar"])
def test_chunks_are_decoded_as_one_array(codec):
    shape = (2,) if codec == "ndarray" else ()
    column, values = Column("x", "int32", shape, codec), values_of("int32", shape)
    stored = cell_codec.encode(column, values)
    chunked = pa.chunked_array([stored[:2], stored[2:2], stored[2:]])
    np.testing.assert_array_equal(cell_codec.decode(column, chunked), values)
    assert cell_codec.decode(column, pa.chunked_array([], stored.type)).shape == (0, *shape)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
def test_decoded_tensors_are_views_of_the_stored_bytes(shape):
    column = tensor("float32", shape)
    stored = cell_codec.encode(column, values_of("float32", shape))
    found = cell_codec.decode(column, stored)
    assert np.shares_memory(found, np.frombuffer(stored.buffers()[2], dtype=np.uint8))
    assert not found.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stored_cell_is_an_npy_file(dtype, shape):
    column, values = tensor(dtype, shape), values_of(dtype, shape)
    for cell, row in zip(cell_codec.encode(column, values).to_pylist(), values, strict=True):
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
    np.testing.assert_array_equal(cell_codec.decode(column, cell_codec.encode(column, values)), values)


@pytest.mark.parametrize("bad", [
    tensor("float32", (3,)), tensor("int32", (2,)), tensor("float32", (2, 1)), tensor("float32", (1, 2)),
])  # fmt: skip
def test_cells_of_another_dtype_or_shape_are_refused(bad):
    stored = cell_codec.encode(bad, values_of(bad.dtype, bad.shape))
    with pytest.raises(ValueError, match=r"column 'x'.*dtype float32 and shape \(2,\)"):
        cell_codec.decode(tensor(), stored)


@pytest.mark.parametrize("other_first", [True, False])
def test_the_first_and_the_last_cell_are_looked_at(other_first):
    right, wrong = (cell_codec.encode(c, values_of(c.dtype, (2,), rows=2)) for c in (tensor(), tensor("int32")))
    stored = pa.concat_arrays([wrong, right] if other_first else [right, wrong])
    with pytest.raises(ValueError, match="do not all have dtype float32"):
        cell_codec.decode(tensor(), stored)


def test_a_null_among_stored_cells_is_refused():
    cells = cell_codec.encode(tensor(), values_of("float32", (2,))).to_pylist()
    with pytest.raises(ValueError, match="column 'x'"):
        cell_codec.decode(tensor(), pa.array([*cells, None], pa.binary()))


def test_a_cell_of_another_dtype_in_the_middle_is_found():
    column = Column("x", "float32", (2,), "ndarray")
    good = cell_codec.encode(column, np.ones((1, 2), np.float32))[0].as_py()
    other = cell_codec.encode(Column("x", "int32", (2,), "ndarray"), np.ones((1, 2), np.int32))[0].as_py()
    with pytest.raises(ValueError, match="column 'x': stored cells do not all have dtype float32"):
        cell_codec.decode(column, pa.array([good, other, good], pa.binary()))


def test_no_rows_are_encoded_and_decoded():
    column = Column("x", "float32", (2, 3), "ndarray")
    assert cell_codec.decode(column, cell_codec.encode(column, np.zeros((0, 2, 3), np.float32))).shape == (0, 2, 3)


# Ragged columns, bytes and images


def ragged(codec="list", dtype="int32", shape=(None,), kind="number"):
    return Column("x", dtype, shape, codec, Encoding(kind))


def rows_of(cells):
    return [cells.values[a:b].tolist() for a, b in zip(cells.offsets[:-1], cells.offsets[1:], strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [(), (3,), (2, 2)])
@pytest.mark.parametrize("lengths", [[], [0, 0], [2, 0, 3, 1, 0]])
def test_ragged_columns_are_lists_without_nulls(dtype, inner, lengths):
    column = ragged("list", dtype, (None, *inner))
    values = from_lengths(values_of(dtype, inner, sum(lengths)), np.array(lengths, dtype=np.int64))
    stored = cell_codec.encode(column, values)
    assert stored.type == cell_codec.arrow_type(column)
    assert not stored.type.value_field.nullable
    assert stored.to_pylist() == rows_of(values)
    found = cell_codec.decode(column, stored)
    assert (found.values.dtype, found.inner) == (dtype, inner)
    assert rows_of(found) == rows_of(values)
    assert rows_of(cell_codec.decode(column, stored[1:4])) == rows_of(values)[1:4]
    part = cell_codec.encode(column, values[1:3])  # a slice of rows is stored alone
    assert part.to_pylist() == rows_of(values)[1:3]


def test_bytes_are_binary_cells_and_come_back_without_a_copy():
    cells = pa.array([b"ab", b"", b"cde"])
    column = ragged("binary", "uint8", kind="bytes")
    found = cell_codec.decode(column, cells)
    assert rows_of(found) == [[*b"ab"], [], [*b"cde"]]
    assert np.shares_memory(found.values, np.frombuffer(cells.buffers()[2], dtype=np.uint8))
    assert cell_codec.encode(column, found).equals(cells)
    assert cell_codec.encode(column, found[1:]).equals(cells[1:])


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
@pytest.mark.parametrize("rows", [0, 3])
def test_images_are_kept_as_files_and_decoded(shape, rows):
    files = pa.array([png(shape, seed) for seed in range(rows)], pa.binary())
    column = ragged("image", "uint8", shape, kind="image")
    found = cell_codec.decode(column, files)
    assert (found.shape, found.dtype) == ((rows, *shape), np.uint8)
    np.testing.assert_array_equal(found, np.array([pixels(shape, seed) for seed in range(rows)]).reshape(-1, *shape))


@pytest.mark.parametrize(("bad", "match"), [
    (b"", "row 1: found a cell that cannot be read: not a PNG or JPEG file"),
    (png((5, 4)), r"row 1: found an image of 5 x 4 pixels, expected the shape \(4, 5\); data.encode.x.resize"),
    (png((4, 5, 3)), r"row 1: found an image of shape \(4, 5, 3\)"),
])  # fmt: skip
def test_a_bad_image_is_an_error_that_names_the_row(bad, match):
    with pytest.raises(ValueError, match=rf"column 'x', {match}"):
        cell_codec.decode(ragged("image", "uint8", (4, 5), kind="image"), pa.array([png((4, 5)), bad]))


@pytest.mark.parametrize(("stored", "match"), [
    (pa.array([[1], None], pa.list_(pa.int32())), "1 null.*first in row 1 of the row group"),
    (pa.array([[1], [2, None]], pa.list_(pa.int32())), "a null inside an array.*first in row 1 of the row group"),
])  # fmt: skip
def test_nulls_in_stored_lists_are_an_error(stored, match):
    with pytest.raises(ValueError, match=match):
        cell_codec.decode(ragged(), stored)


def test_lists_of_another_inner_shape_are_an_error():
    stored = cell_codec.encode(ragged(shape=(None, 2)), from_lengths(np.zeros((3, 2), np.int32), np.array([1, 2])))
    with pytest.raises(
        ValueError, match=r"'x': found arrays of lengths \[2\], .* the other cells have 3; .*; first in row 0"
    ):
        cell_codec.decode(ragged(shape=(None, 3)), stored)


@pytest.mark.parametrize(("rows", "size", "change"), [
    (3, 2**30 - 128, "set shards.rows_per_row_group to at most 1"),
    (1, 3 * 2**30, "a single row is larger: store smaller cells"),
])  # fmt: skip
def test_B06_what_does_not_fit_into_a_row_group_is_an_error_that_says_what_does(rows, size, change):
    column = Column("x", "bool", (size,), "ndarray")
    with pytest.raises(ValueError, match=rf"column 'x': {rows} row\(s\) of {size + 128} bytes do not fit .*; {change}"):
        cell_codec.encode(column, np.zeros((rows, size), dtype=bool))
