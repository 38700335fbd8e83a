"""Shards without Spark: what a task writes from the batches it is given."""

import pyarrow as pa
import pytest

from spark_dl import Data
from spark_dl.data.shards import write_part
from spark_dl.data.source import SourceColumn
from tests.unit.test_cells import vectors


def part_of(folder, *batches, column=None, arrow=None, **data):
    """What a task makes of batches of one column, each a list of rows."""
    column = column or SourceColumn("x", "int64", "array", 1)
    arrow = arrow or pa.list_(pa.int64())
    records = [pa.RecordBatch.from_arrays([pa.array(rows, arrow)], names=["c0"]) for rows in batches]
    return write_part(iter(records), str(folder), "part-test", (column,), Data(**data), 7)


def test_an_array_of_another_length_is_named_by_its_row_in_the_partition(tmp_path):
    error = part_of(tmp_path, [[1, 2, 3]] * 4, [[4] * 5, [1, 2, 3], [1, 2, 3]]).error
    assert "found arrays of lengths [3, 5], expected one length; those elsewhere have 3, or set data.encode.x" in error
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
    assert "column 'x': the first cell of partition 7 is empty; it gives the shape of all; " in error
    assert "set data.encode.x: {ragged: true}" in error
    assert not list(tmp_path.iterdir())
