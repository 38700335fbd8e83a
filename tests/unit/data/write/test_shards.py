"""Shards without Spark: what a task writes from the batches it is given, and arrays in memory."""

import numpy as np
import pyarrow as pa
import pytest

from spark_dl import Data, Shards
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.write.arrays import write_arrays
from spark_dl.data.write.partition import write_part
from spark_dl.data.write.writer import rows_per_file
from tests.builders.cells import vectors


def part_of(folder, *batches, column=None, arrow=None, **data):
    """What a task makes of batches of one column, each a list of rows."""
    column = column or SourceColumn("x", "int64", "array", 1)
    arrow = arrow or pa.list_(pa.int64())
    records = [pa.RecordBatch.from_arrays([pa.array(rows, arrow)], names=["c0"]) for rows in batches]
    return write_part(iter(records), str(folder), "part-test", (column,), Data(**data), 7, layout=Shards())


def test_an_array_of_another_length_is_named_by_its_row_in_the_partition(tmp_path):
    error = part_of(tmp_path, [[1, 2, 3]] * 4, [[4] * 5, [1, 2, 3], [1, 2, 3]]).error
    assert "found arrays of lengths [3, 5], expected one length; the other cells have 3, or set data.encode.x" in error
    assert error.endswith("first in partition 7, row 4")


def test_the_length_of_filled_arrays_is_that_of_the_rows_before(tmp_path):
    column = SourceColumn("x", "int64", "array", 1, fill=9)
    part = part_of(tmp_path, [[1, 2, 3]], [None, None], column=column, nulls="fill", fill={"x": 9})
    assert (part.error, part.shapes, part.changes.filled) == ("", ((3,),), {"x": 2})


@pytest.mark.parametrize(("rows", "arrow", "column"), [
    ([[], []], pa.list_(pa.int64()), SourceColumn("x", "int64", "array", 1)),
    ([[[], []]], pa.list_(pa.list_(pa.int64())), SourceColumn("x", "int64", "array", 2)),
    ([{"type": 1, "size": None, "indices": None, "values": []}], vectors([1.0]).type,
     SourceColumn("x", "float64", "vector", 1)),
])  # fmt: skip
def test_arrays_without_values_give_no_shape(tmp_path, rows, arrow, column):
    error = part_of(tmp_path, rows, column=column, arrow=arrow).error
    assert "column 'x': the first cell of partition 7 is empty, and the first cell gives the shape of all; " in error
    assert "set data.encode.x: {ragged: true}" in error
    assert not list(tmp_path.iterdir())


TWO = np.array([1, 1])


@pytest.mark.parametrize(("columns", "match"), [
    ({}, r"no rows in the columns \[\], expected at least one column with one row"),
    ({"x": np.zeros(0), "y": np.zeros((0, 2))}, r"no rows in the columns \['x', 'y'\]"),
    ({"x": np.zeros(2), "y": np.zeros(3)}, r"unequal length: {'x': 2, 'y': 3}"),
    ({"x": np.zeros((3, 1)), "y": from_lengths(np.zeros(2), TWO)}, r"unequal length: {'x': 3, 'y': 2}"),
    ({"x": np.array(1.0)}, "'x': found an array without an axis, expected a NumPy array with an axis of rows"),
    ({"x": np.float32(1)}, "'x': found an array without an axis"),
    ({"x": [1, 2]}, "'x': found list, expected a NumPy array"),
    ({"": np.zeros(2)}, "found the column name ''"),
    ({3: np.zeros(2)}, "found the column name 3"),
])  # fmt: skip
def test_arrays_that_are_no_dataset_are_refused_before_anything_is_written(tmp_path, columns, match):
    with pytest.raises(ValueError, match=match):
        write_arrays(columns, str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("dtype", [
    ">f4", ">i8", "<U3", "S3", "M8[us]", "m8[us]", "longdouble", "clongdouble", object, [("a", "i4")], "complex64",
])  # fmt: skip
@pytest.mark.parametrize("kind", ["scalar", "array", "ragged"])
def test_arrays_of_what_is_no_number_are_refused_before_anything_is_written(tmp_path, dtype, kind):
    values = np.zeros((2, 3) if kind == "array" else 2, dtype)
    if (dtype, kind) == ("complex64", "array"):
        assert write_arrays({"x": values}, str(tmp_path / "d")).columns[0].dtype == "complex64"
        return
    with pytest.raises(ValueError, match="column 'x': found the dtype .* in this machine's byte order.*; convert it"):
        write_arrays({"x": from_lengths(values, TWO) if kind == "ragged" else values}, str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(("mean_size", "most"), [(500, 256), (1 << 20, 2), (200_000, 16)])
def test_a_row_group_of_images_fits_into_memory_when_it_is_decoded(mean_size, most):
    """Masks of 512 x 512 take 0.5 KB in a file: 4 MiB of files were 2 GiB of pixels."""
    column = Column("mask", "uint8", (512, 512), codec="image", encoding=Encoding("image"), mean_size=mean_size)
    assert rows_per_file([column], Shards())[0] == most
    assert rows_per_file(iter([column]), Shards(rows_per_row_group=7))[0] == 7
