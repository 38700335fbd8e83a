"""The writer of shards: rows in batches of any size become row groups and files of the sizes that were asked for."""

import hashlib
import itertools
import zlib

import numpy as np
import pyarrow.parquet as pq
import pytest

from spark_dl import Shards
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.columns.schema import Column
from spark_dl.data.columns.source import BadCellsError
from spark_dl.data.write.writer import ShardWriter, rows_per_file

ID, PAIR = Column("id", "int64"), Column("pair", "float32", (2,), "ndarray")
WORDS = Column("words", "int32", (None,), "list")
BYTES = Column("text", "uint8", (None,), "binary", Encoding("bytes"))


def rows(first, count):
    ids = np.arange(first, first + count)
    return [ids, np.stack([ids, -ids], 1).astype(np.float32)]


def sizes_of(total, group, shard):
    """The row groups of each file: groups are full but for the last one, and the group that fills a file ends it."""
    groups = [group] * (total // group) + ([total % group] if total % group else [])
    per_file = max(1, -(-shard // group))
    return [tuple(groups[i : i + per_file]) for i in range(0, len(groups), per_file)]


@pytest.mark.parametrize("batches", [[1] * 23, [23], [5, 5, 5, 5, 3], [7, 16], [4, 4, 4], [10, 0, 2], [0], []], ids=str)
@pytest.mark.parametrize(("group", "shard"), [(4, 8), (4, 9), (4, 4), (1, 3), (30, 30), (5, 1)])
def test_rows_come_in_groups_and_files_whatever_the_batches_are(tmp_path, batches, group, shard):
    writer = ShardWriter(str(tmp_path), "part", (ID, PAIR), group, shard)
    for first, count in zip(itertools.accumulate(batches, initial=0), batches, strict=False):
        writer.append(rows(first, count))
        assert writer._held_rows < group  # what is held in memory
        assert sum(len(held[0]) for held in writer._held) == writer._held_rows
    shards, total = writer.close(), sum(batches)
    assert [each.row_groups for each in shards] == sizes_of(total, group, shard)
    assert [each.name for each in shards] == [f"part-{i:04d}.parquet" for i in range(len(shards))]
    assert writer.sizes == [total, 2 * total]
    files = [pq.ParquetFile(tmp_path / each.name) for each in shards]
    found = [number for file in files for number in file.read(["id"])["id"].to_pylist()]
    assert found == list(range(total))
    for each, file in zip(shards, files, strict=True):
        groups = range(file.metadata.num_row_groups)
        assert tuple(file.metadata.row_group(i).num_rows for i in groups) == each.row_groups
        content = (tmp_path / each.name).read_bytes()
        assert (each.bytes, each.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert each.footer_bytes == int.from_bytes(content[-8:-4], "little") + 8
        assert each.footer_crc32 == zlib.crc32(content[-each.footer_bytes :])


def test_elements_of_ragged_columns_are_counted_by_row_group_and_file(tmp_path):
    writer = ShardWriter(str(tmp_path), "part", (ID, WORDS, BYTES), 2, 4)
    lengths = np.array([0, 3, 1, 2, 5])
    words, text = from_lengths(np.arange(11, dtype=np.int32), lengths), from_lengths(np.ones(11, np.uint8), lengths)
    writer.append([np.arange(5), words, text])
    first, second = writer.close()
    assert first.elements["words"] == (3, 3)
    assert second.elements["words"] == (5,)
    assert set(first.elements) | set(first.stored) == {"words", "text"}
    assert writer.sizes == [5, 11, 11]


def test_the_first_row_with_values_gives_the_inner_shape_of_a_ragged_column(tmp_path):
    column = Column("points", "float32", (None, 0), "list")
    writer = ShardWriter(str(tmp_path), "part", (column,), 2, 4)
    assert writer.known_shapes() == (None,)
    writer.append([from_lengths(np.ones((0, 0), np.float32), np.array([0, 0]))])
    assert writer.known_shapes() == (None,)
    writer.append([from_lengths(np.ones((3, 2), np.float32), np.array([3]))])
    assert writer.known_shapes() == ((None, 2),)
    with pytest.raises(BadCellsError, match=r"cells of shape \(None, 3\), expected \(None, 2\) as in the rows before$"):
        writer.append([from_lengths(np.ones((1, 3), np.float32), np.array([1]))])
    writer.abort()


def test_cells_of_another_shape_are_an_error_that_says_what_takes_them(tmp_path):
    writer = ShardWriter(str(tmp_path), "part", (PAIR,), 2, 4)
    with pytest.raises(
        BadCellsError, match=r"shape \(3,\), expected \(2,\) as .*, or set data.encode.pair: {ragged: true}"
    ):
        writer.append([np.ones((1, 3), np.float32)])
    writer.abort()
    assert writer.close() == []


@pytest.mark.parametrize(("columns", "layout", "sizes"), [
    ((ID,), Shards(rows_per_row_group=7, rows_per_shard=7), (7, 7)),
    ((ID,), Shards(rows_per_row_group=7, rows_per_shard=8), (7, 14)),
    ((ID,), Shards(rows_per_row_group=7, rows_per_shard=1), (7, 7)),
    ((ID,), Shards(), (65_536, 8_388_608)),
    ((Column("x", "float32", (1 << 10,), "ndarray"),), Shards(), (512, 16_384)),
    ((Column("x", "uint8", (1 << 26,), "ndarray"),), Shards(), (1, 1)),
    # 200 bytes are stored, and a megabyte is held in memory by each reader
    ((Column("x", "uint8", (1 << 10, 1 << 10), "image", Encoding("image"), 200.0),), Shards(rows_per_shard=100), None),
    ((), Shards(), (65_536, 64 << 20)),
])  # fmt: skip
def test_rows_of_a_group_and_a_file(columns, layout, sizes):
    group, shard = rows_per_file(columns, layout)
    assert shard % group == 0
    if sizes is None:
        assert group & (group - 1) == 0
        assert group * columns[0].value_bytes <= 64 << 20
        assert shard - group < 100 <= shard
    else:
        assert (group, shard) == sizes


@pytest.mark.skipif(not hasattr(pq.ParquetWriter, "add_key_value_metadata"), reason="came with pyarrow 15")
def test_a_footer_differs_with_the_rows_of_its_file(tmp_path):
    """So that a shard in the place of another one with as many bytes and pages is noticed by its footer alone."""
    shards = []
    for name, first in (("a", 0), ("b", 7), ("a again", 0)):
        (tmp_path / name).mkdir()
        writer = ShardWriter(str(tmp_path / name), "part", (Column("half", "float32"),), 4, 8)
        writer.append([np.arange(first, first + 8).astype(np.float32) / 2])
        shards += writer.close()
        metadata = pq.read_metadata(tmp_path / name / shards[-1].name).metadata
        assert len(metadata[b"spark_dl.rows"]) == 64
    a, b, again = shards
    assert a.footer_crc32 == again.footer_crc32 != b.footer_crc32
