"""Shards without Spark: what a task writes from the batches it is given."""

import pyarrow as pa

from spark_dl import Data
from spark_dl.data.shards import write_part
from spark_dl.data.source import SourceColumn


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
