"""No damage of a shard gives other rows: every bit of a file matters, or is an error that names the file."""

import dataclasses
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardTable
from spark_dl.data.external.files import filter_rows
from spark_dl.data.parquet import file as parquet_file
from spark_dl.data.parquet.filters import NULL_PARTITION
from spark_dl.data.plan import Segment
from spark_dl.data.read import rows
from spark_dl.data.read.rows import Rows
from spark_dl.scoring import keys
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config

ROWS = {
    "id": np.arange(24),
    "x": np.arange(48, dtype=np.float32).reshape(24, 2),
    "flag": np.arange(24) % 3 == 0,
}


def read(shards):
    out = [np.empty((shards.rows, *c.shape), dtype=c.dtype) for c in shards.columns]
    segments = [Segment(g, 0, n) for g, n in enumerate(shards.shards.group_rows.tolist())]
    Rows(shards, shards.columns, 0.0, 0, "all").read_into(segments, out)
    return out


def error_or_rows(shards):
    try:
        return read(shards)
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.skipif(not parquet_file.HAS_CHECKSUMS, reason="pyarrow 14 has no checksums of pages")
def test_F15_a_flipped_bit_anywhere_gives_an_error_or_the_same_rows(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), ROWS, group_rows=8, shard_rows=24)
    expected = read(shards)
    path = tmp_path / "d" / shards.shards[0].name
    content = path.read_bytes()
    assert shards.shards[0].footer_bytes == int.from_bytes(content[-8:-4], "little") + 8
    errors = 0
    for position in range(len(content)):
        bit = position % 8  # one of each byte: all take too long
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        found = error_or_rows(shards)
        errors += isinstance(found, str)
        if isinstance(found, str):
            assert found.startswith("cannot read row group ")
            assert f" of {path}: " in found
            continue
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"bit {bit} of byte {position}")
    assert errors > len(content) / 3


@pytest.mark.skipif(not hasattr(pq.ParquetWriter, "add_key_value_metadata"), reason="not in pyarrow 14")
def test_a_shard_in_the_place_of_another_is_an_error(tmp_path):
    """Two shards of one size had one footer, and rows of one were read for those of the other."""
    shards = write_dataset(str(tmp_path / "d"), {"x": ROWS["x"]}, group_rows=4, shard_rows=12)
    first, second = (tmp_path / "d" / shard.name for shard in shards.shards)
    assert first.stat().st_size == second.stat().st_size
    first.write_bytes(second.read_bytes())
    assert "the footer's checksum does not match its bytes" in error_or_rows(shards)


@pytest.mark.skipif(not parquet_file.HAS_CHECKSUMS, reason="pyarrow 14 has no checksums of pages")
def test_a_damaged_key_is_an_error(tmp_path):
    """Keys are read beside the features, from columns that nothing else reads."""
    shards = write_dataset(str(tmp_path / "d"), ROWS, group_rows=8, shard_rows=24)
    path = tmp_path / "d" / shards.shards[0].name
    found = keys.find_keys(shards, ["id"])
    assert keys.KeyReader(shards, found).read(1)["id"].to_pylist() == [*range(8, 16)]
    content, page = bytearray(path.read_bytes()), np.arange(8, 16).tobytes()
    content[content.index(page)] ^= 1
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=f"cannot read the keys of row group 1 of {path}: .*"):
        keys.KeyReader(shards, found).read(1)


def test_a_flipped_bit_of_a_footer_is_an_error_of_filters_too(tmp_path):
    """What they count rows by is parsed on the driver, which a bit of a footer can crash."""
    shards = write_dataset(str(tmp_path / "d"), ROWS, group_rows=8, shard_rows=16)
    above = make_config(filters=[("id", ">=", 4)])
    assert filter_rows(shards, above).filtered.group_rows.tolist() == [4, 8, 8]
    for shard in shards.shards:
        path = tmp_path / "d" / shard.name
        content = path.read_bytes()
        for position in range(len(content) - shard.footer_bytes, len(content), 5):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(
                RuntimeError, match=rf"^cannot read the footer of {path} for data.filters: the footer's"
            ):
                filter_rows(shards, above)
        path.write_bytes(content[: shard.footer_bytes - 1])
        with pytest.raises(RuntimeError, match=rf"^cannot read the footer of {path} for data.filters: "):
            filter_rows(shards, above)
        path.write_bytes(content)


def test_F15_a_file_cut_short_anywhere_is_an_error(tmp_path):
    shards = write_dataset(str(tmp_path / "d"), ROWS, group_rows=8, shard_rows=24)
    path = tmp_path / "d" / shards.shards[0].name
    content = path.read_bytes()
    for length in range(0, len(content), 17):
        path.write_bytes(content[:length])
        with pytest.raises(RuntimeError, match=rf"of {path}: found {length} bytes, expected {len(content)}"):
            read(shards)


@pytest.mark.parametrize(
    ("row_groups", "found"), [((8, 8, 7), r"found 8 rows \(3 row groups"), ((8, 8, 8, 8), "found 0 rows")]
)
def test_a_manifest_with_other_row_groups_than_the_file_is_an_error(tmp_path, row_groups, found):
    shards = write_dataset(str(tmp_path / "d"), ROWS, group_rows=8, shard_rows=24)
    shard = dataclasses.replace(shards.shards[0], row_groups=row_groups)
    other = dataclasses.replace(shards, shards=ShardTable.of([shard]))
    assert re.match(rf"cannot read row group \d of .*: {found}", error_or_rows(other))


def test_a_partition_that_is_null_needs_a_fill():
    column = Column("day", "int64", (), "partition")
    with pytest.raises(ValueError, match="column 'day': found a partition that is null, expected no nulls"):
        rows._partition_cells(column, NULL_PARTITION, 3)
    assert rows._partition_cells(column, "-5", 3).tolist() == [-5] * 3
    filled = dataclasses.replace(column, fill=7)
    assert rows._partition_cells(filled, NULL_PARTITION, 2).tolist() == [7, 7]


@pytest.mark.parametrize(("cause", "may_change"), [
    (OSError("no answer"), True), (pa.ArrowInvalid("a page"), True), (ValueError("a cell"), False),
])  # fmt: skip
def test_cells_are_the_same_in_another_attempt_and_what_a_storage_answers_is_not(cause, may_change):
    assert rows._unreadable("a row group", cause).is_retryable is may_change


def test_a_partition_is_read_as_the_number_that_it_is():
    """Whole numbers that float64 does not have, and numbers with places."""
    assert rows._partition_cells(Column("id", "int64", (), "partition"), "9007199254740993", 1).tolist() == [2**53 + 1]
    assert rows._partition_cells(Column("share", "float32", (), "partition"), "0.5", 2).tolist() == [0.5, 0.5]
