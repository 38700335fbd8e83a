"""What the results of all partitions say of the columns, and which error they have."""

import dataclasses
import json

import pytest

from spark_dl.data.columns.policies import Changes
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.records import Shard
from spark_dl.data.write.partition import PartitionResult, agreed_columns

SOURCES = [SourceColumn("x", "float32", "array", 1)]


def written(partition, size, **fields):
    return PartitionResult(partition, ((size,),), (size,), (Shard("a.parquet", (3,), 9),), **fields)


@pytest.mark.parametrize(("errors", "more"), [
    (1, "$"), (2, r" \(and in 1 more partitions\)$"), (4, r" \(and in 3 more partitions\)$"),
])  # fmt: skip
def test_the_first_error_is_told_with_the_number_of_others(errors, more):
    parts = [written(0, 2), *(PartitionResult(i, error=f"error {i}") for i in range(1, 1 + errors))]
    with pytest.raises(ValueError, match=f"^error 1{more}"):
        agreed_columns(SOURCES, parts)


def test_no_rows_are_an_error_that_says_what_was_dropped():
    with pytest.raises(ValueError, match="^the DataFrame has no rows; training needs at least one"):
        agreed_columns(SOURCES, [PartitionResult(0)])
    parts = [PartitionResult(i, changes=Changes(dropped_rows=2)) for i in range(3)]
    with pytest.raises(
        ValueError, match="^the DataFrame has no rows: 6 were dropped for nulls, NaN, Inf or bad images;"
    ):
        agreed_columns(SOURCES, parts)


def test_partitions_without_rows_have_no_say_and_the_others_agree():
    (column,) = agreed_columns(SOURCES, [PartitionResult(0), written(1, 2), written(2, 2)])
    assert (column.name, column.shape) == ("x", (2,))
    with pytest.raises(ValueError, match=r"column 'x'.*\(2,\).*\(3,\)|column 'x'.*\(3,\).*\(2,\)"):
        agreed_columns(SOURCES, [written(1, 2), written(2, 3)])


def test_what_a_task_has_written_travels_as_json():
    shard = Shard("a.parquet", (3, 1), 9, "0" * 64, 7, 5, elements={"x": (4, 2)})
    changes = Changes(2, {"x": 1}, {"y": 3})
    result = PartitionResult(3, ((2,), None, (None, 4)), (2, 0, 8), (shard,), changes, "")
    assert PartitionResult.from_plain(json.loads(json.dumps(dataclasses.asdict(result)))) == result
