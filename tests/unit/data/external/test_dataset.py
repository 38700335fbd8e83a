"""Datasets that others wrote are read as they are, and refused with a reason where they cannot be."""

import datetime
import json
import os
import tracemalloc
import zlib
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Data
from spark_dl.data.columns import cell_codec
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.ragged import concatenate
from spark_dl.data.columns.schema import Column
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.parquet import thrift
from spark_dl.data.parquet.file import table_column
from spark_dl.data.petastorm.metadata import ROW_GROUPS_KEY, UNISCHEMA_KEY, write_common_metadata
from spark_dl.data.petastorm.unischema import Codec, Field, Unischema, UnsafeMetadataError
from tests.builders.cells import npy_cells, vectors
from tests.builders.images import pixels, png
from tests.builders.settings import make_config

ROWS = 100


def steps_of(shards, *names, **data):
    config = make_config(features=names, label=None, num_streams=4, **data, global_batch_size=20)
    return ShardLoader(shards, config, rank=0, world_size=1, shuffle=False).epoch(0)


def columns_of(shards, *names):
    """All rows of a dataset, in its order, through the loader."""
    batches = [batch for step in steps_of(shards, *names) for batch in step.micro_batches]
    return {n: np.concatenate([b[n].numpy()[b["weight"].numpy() == 1] for b in batches]) for n in names}


def table(first=0, rows=ROWS):
    ids = np.arange(first, first + rows)
    return pa.table(
        {
            "id": ids,
            "small": pa.array(ids % 100, pa.int8()),
            "flag": ids % 2 == 0,
            "list": pa.array([[float(i), 1.0, 2.0] for i in ids], pa.list_(pa.float32())),
            "large": pa.array([[i, i] for i in ids], pa.large_list(pa.int64())),
            "fixed": pa.array([[i, 7] for i in ids], pa.list_(pa.int32(), 2)),
            "nested": pa.array([[[i, 1], [2, 3]] for i in ids], pa.list_(pa.list_(pa.int16()))),
            "text": pa.array([str(i) for i in ids]),
        }
    )


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_plain_parquet_of_every_type_of_list(tmp_path, compression, is_folder):
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=33, compression=compression)
    shards = open_parquet(str(tmp_path if is_folder else tmp_path / "a.parquet"), table().schema.names[:-1])
    assert shards.rows == ROWS
    assert shards.shards.group_rows.tolist() == [33, 33, 33, 1]
    found = columns_of(shards, *table().schema.names[:-1])
    order = np.argsort(found["id"])
    np.testing.assert_array_equal(found["id"][order], np.arange(ROWS))
    assert {n: (str(a.dtype), a.shape[1:]) for n, a in found.items()} == {
        "id": ("int64", ()), "small": ("int8", ()), "flag": ("bool", ()), "list": ("float32", (3,)),
        "large": ("int64", (2,)), "fixed": ("int32", (2,)), "nested": ("int16", (2, 2)),
    }  # fmt: skip
    for name, position in (("list", 0), ("large", 1), ("fixed", 0), ("nested", (0, 0))):
        cells = found[name][order]
        index = (slice(None), *position) if isinstance(position, tuple) else (slice(None), position)
        np.testing.assert_array_equal(cells[index], np.arange(ROWS))


def test_hive_partitions_and_hidden_files(tmp_path):
    for year in (2024, 2025):
        folder = tmp_path / f"year={year}" / "kind=a%20b"
        folder.mkdir(parents=True)
        pq.write_table(table(rows=10), folder / "part-0.parquet")
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".part.crc").write_text("x")
    (tmp_path / "_metadata").mkdir()
    (tmp_path / "_metadata" / "half.parquet").write_text("no data")
    found = columns_of(open_parquet(str(tmp_path), ["id", "year"]), "id", "year")
    assert sorted(found["year"]) == [2024] * 10 + [2025] * 10
    with pytest.raises(ValueError, match=r"column 'kind' is a partition with values such as \['a b'\]"):
        open_parquet(str(tmp_path), ["kind"])


@pytest.mark.parametrize(("value", "match"), [
    ("²", "values such as"), ("--5", "values such as"), ("-", "values such as"), ("٣", "values such as"),
    ("1_0", "values such as"), ("5\n", "values such as"), (str(2**63), "values such as"),
    ("__HIVE_DEFAULT_PARTITION__", "null in some rows"), (str(-(2**63)), ""), ("-007", ""),
])  # fmt: skip
def test_values_of_partitions(tmp_path, value, match):
    for folder in (f"_day={value}", "_day=1"):
        (tmp_path / folder).mkdir()
        pq.write_table(table(rows=10), tmp_path / folder / "part-0.parquet")
    if match:
        with pytest.raises(ValueError, match=rf"column '_day' is a partition .*{match}"):
            open_parquet(str(tmp_path), ["id", "_day"])
    else:
        found = columns_of(open_parquet(str(tmp_path), ["id", "_day"]), "id", "_day")
        assert sorted(found["_day"]) == sorted([1] * 10 + [int(value)] * 10)


def test_a_column_of_folders_and_files_is_what_the_files_say(tmp_path):
    """Also for filters, which would otherwise choose rows by one and train on the other."""
    for folder in ("year=1", "year=2"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"id": [1, 2], "year": [9, 8]}), tmp_path / folder / "a.parquet")
    config = make_config(features=("id", "year"), label=None, filters=[["year", "==", 9]])
    shards = open_parquet(str(tmp_path), ["id", "year"], data=config.data)
    found = columns_of(filter_rows(shards, config), "id", "year")
    assert sorted(found["year"]) == [9, 9]


@pytest.mark.parametrize(("change", "match"), [
    (lambda files: files[0].unlink(), "cannot read .*a.parquet for data.filters: .*No such file"),
    (lambda files: files[1].unlink(), "cannot read .*b.parquet for data.filters: .*No such file"),
    (lambda files: pq.write_table(table(rows=7), files[1]), r"b.parquet has row groups of \(7,\) rows, expected"),
], ids=["the first file", "another file", "other rows"])  # fmt: skip
def test_a_file_that_changes_before_its_rows_are_filtered_is_an_error(tmp_path, change, match):
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for file in files:
        pq.write_table(table(rows=5), file)
    config = make_config(features=("id",), label=None, filters=[["id", ">", 1]])
    shards = open_parquet(str(tmp_path), ["id"], data=config.data)
    assert filter_rows(shards, config).rows == 6
    change(files)
    with pytest.raises(RuntimeError, match=match):
        filter_rows(shards, config)


def test_a_path_that_no_file_system_takes_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="cannot read the dataset .*/x{300}: .*File name too long"):
        open_parquet(str(tmp_path / ("x" * 300)), ["id"])


def test_B14_a_column_that_only_some_files_have_names_one_with_it_and_one_without(tmp_path):
    (tmp_path / "year=1").mkdir()
    pq.write_table(table(rows=5), tmp_path / "year=1" / "a.parquet")
    pq.write_table(table(rows=5), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"column 'year' is in year=1/a.parquet and not in b.parquet of"):
        open_parquet(str(tmp_path), ["id", "year"])
    config = make_config(features=("id",), label=None, filters=[["year", "==", 1]])
    with pytest.raises(ValueError, match=r"column 'year' is in year=1/a.parquet and not in b.parquet of"):
        filter_rows(open_parquet(str(tmp_path), ["id"], data=config.data), config)
    pq.write_table(pa.table({"id": [1], "extra": [1]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"column 'extra' is in c.parquet and not in b.parquet of"):
        open_parquet(str(tmp_path), ["id", "extra"])


def test_whether_elements_may_be_null_is_no_difference_between_files(tmp_path):
    cells = [[1.0, 2.0]] * 5
    for name, nullable in (("a", True), ("b", False)):
        element = pa.field("element", pa.float32(), nullable=nullable)
        struct = pa.field("s", pa.struct([pa.field("n", pa.int32(), nullable=nullable)]))
        arrays = [pa.array(cells, pa.list_(element)), pa.array([{"n": 1}] * 5, struct.type)]
        pq.write_table(pa.Table.from_arrays(arrays, ["x", "s"]), tmp_path / f"{name}.parquet")
    found = columns_of(open_parquet(str(tmp_path), ["x", "s.n"]), "x", "s.n")
    assert found["x"].shape == (10, 2)
    assert found["s.n"].tolist() == [1] * 10


def test_links_that_lead_nowhere_or_twice_to_a_file_are_refused(tmp_path):
    pq.write_table(table(rows=5), tmp_path / "a.parquet")
    for link, target, match in (
        ("b.parquet", "/nowhere", "b.parquet is a link to /nowhere, which does not exist"),
        ("again", tmp_path, "are the same file, because of a link; remove"),
        ("c.parquet", tmp_path / "a.parquet", "c.parquet and a.parquet in .* are one file|a.parquet and c.parquet in"),
    ):
        (tmp_path / link).symlink_to(target)
        with pytest.raises(ValueError, match=match):
            open_parquet(str(tmp_path), ["id"])
        (tmp_path / link).unlink()
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(ValueError, match="pipe.parquet is neither a file nor a folder"):
        open_parquet(str(tmp_path), ["id"])
    (tmp_path / "pipe.parquet").unlink()
    (tmp_path / "data").symlink_to(tmp_path)
    assert open_parquet(str(tmp_path / "data" / "a.parquet"), ["id"]).rows == 5


def test_names_that_are_not_one_column(tmp_path):
    ids = pa.array(range(5))
    pq.write_table(pa.Table.from_arrays([ids, ids, ids], ["x", "x", "id"]), tmp_path / "a.parquet")
    assert open_parquet(str(tmp_path), ["id"]).rows == 5
    with pytest.raises(ValueError, match="found column 'x' 2 times in one file"):
        open_parquet(str(tmp_path), ["id", "x"])
    users = pa.StructArray.from_arrays([ids, ids], ["a.b", "age"])
    pq.write_table(pa.table({"user": users}), tmp_path / "a.parquet")
    assert open_parquet(str(tmp_path), ["user.age"]).rows == 5
    with pytest.raises(
        ValueError, match=r"column 'user.a.b': a struct field has a dot in its name, .*; rename the field"
    ):
        open_parquet(str(tmp_path), ["user.a.b"])
    with pytest.raises(ValueError, match=r"no column 'user.aeg' .* did you mean 'user.age'"):
        open_parquet(str(tmp_path), ["user.aeg"])


def test_the_first_cell_with_values_gives_the_inner_shape_of_a_ragged_column(tmp_path):
    pairs = pa.list_(pa.list_(pa.int64()))
    pq.write_table(pa.table({"x": pa.array([[]] * 5, pairs)}), tmp_path / "a.parquet")
    data = Data(features=("x",), label=None, encode={"x": {"ragged": True}})
    with pytest.raises(ValueError, match=r"column 'x': the cells of .*/a.parquet and of all other"):
        open_parquet(str(tmp_path), ["x"], data=data)
    pq.write_table(pa.table({"x": pa.array([[]] * 2000 + [[[1, 2]], [[3, 4], [5, 6]]], pairs)}), tmp_path / "b.parquet")
    shards = open_parquet(str(tmp_path), ["x"], data=data)
    assert shards.columns[0].shape == (None, 2)
    assert rows_of(read_all(shards)["x"]) == [[]] * 2005 + [[[1, 2]], [[3, 4], [5, 6]]]


def test_B13_what_cannot_be_read_is_an_error_that_names_it(tmp_path):
    def fails(match, *names, url=tmp_path):
        with pytest.raises(ValueError, match=match):
            open_parquet(str(url), names or ["id"])

    fails("found nothing", url=tmp_path / "nowhere")
    fails("without data files")
    (tmp_path / "b.parquet").write_bytes(b"")
    fails(r"b.parquet \(0 bytes\) is not a readable Parquet file")
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + b"x" * 100)
    fails(r"b.parquet \(104 bytes\) is not a readable Parquet file")
    pq.write_table(table(), tmp_path / "b.parquet")
    fails("no column 'idd' .* did you mean 'id'", "idd")
    fails("column 'text' has type string; set data.encode", "text")
    pq.write_table(table().set_column(0, "id", pa.array(np.arange(ROWS, dtype=np.int32))), tmp_path / "c.parquet")
    fails("column 'id' has type int64 in b.parquet and int32 in c.parquet")
    pq.write_table(table().drop_columns(["id"]), tmp_path / "c.parquet")
    fails("None in b.parquet|int64 in b.parquet and is missing in c.parquet")
    pq.write_table(table(rows=0), tmp_path / "c.parquet")
    assert open_parquet(str(tmp_path), ["id"]).rows == ROWS  # a file without rows has nothing to disagree with
    (tmp_path / "notes.txt").write_text("no data")
    fails(r"notes.txt \(7 bytes\) is not a readable Parquet file.*; remove files that are not data")


@pytest.mark.parametrize(("names", "what"), [
    (("metadata", "commits/0", "offsets/0"), "the checkpoint of a streaming query, .* checkpointLocation .* outside"),
    (("config.yaml", "checkpoints/step-1/model.pt"), "a run folder of spark_dl; choose a run_dir outside of the data"),
])  # fmt: skip
def test_B13_what_others_need_in_the_folder_is_not_said_to_be_removed(tmp_path, names, what):
    pq.write_table(table(), tmp_path / "a.parquet")
    for name in names:
        path = tmp_path / "inner" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    with pytest.raises(ValueError, match=f"is not a readable Parquet file: .*{tmp_path}/inner is {what}") as caught:
        open_parquet(str(tmp_path), ["id"])
    assert "remove" not in str(caught.value)


def spoil_magic(content):
    return content[:-1] + b"X"


def spoil_footer(content):
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return content[:start] + bytes(30) + content[start + 30 :]


def spoil_footer_length(content):
    return content[:-8] + b"\xff\xff\xff\x7f" + content[-4:]


@pytest.mark.parametrize("spoil", [
    spoil_magic, spoil_footer, spoil_footer_length, lambda c: c[: len(c) // 2], lambda c: c[:3], lambda c: c + b"x",
])  # fmt: skip
def test_B13_a_damaged_footer_is_an_error_that_names_the_file_and_no_file_is_passed_by(tmp_path, spoil):
    for name in ("a.parquet", "b.parquet", "c.parquet"):
        pq.write_table(table(), tmp_path / name)
    (tmp_path / "b.parquet").write_bytes(spoil((tmp_path / "b.parquet").read_bytes()))
    with pytest.raises(ValueError, match=r"/b.parquet \(\d+ bytes\) is not a readable Parquet file"):
        open_parquet(str(tmp_path), ["id"])


@pytest.mark.parametrize(("folder", "match"), [
    ("_temporary/0/task_1", "found _temporary in it; a Spark job is writing there or was killed"),
    (".spark-staging-7f/day=1", "found .spark-staging-7f in it; a Spark job is writing"),
    ("_spark_metadata", "found _spark_metadata in it; a streaming query wrote it"),
    ("_delta_log", "found _delta_log in it; it is a Delta table"), (".hoodie", "it is a Hudi table"),
])  # fmt: skip
def test_B13_a_folder_whose_files_are_not_the_dataset_is_refused(tmp_path, folder, match):
    pq.write_table(table(), tmp_path / "a.parquet")
    (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path), ["id"])
    day = tmp_path / "day=1"
    day.mkdir()
    (tmp_path / "a.parquet").rename(day / "a.parquet")
    with pytest.raises(ValueError, match=match):  # of the dataset that the folder is a partition of
        open_parquet(str(day), ["id"])


@pytest.mark.parametrize("folder", ["_temporary/0", "_delta_log"])
def test_also_further_down(tmp_path, folder):
    (tmp_path / "day=1" / folder).mkdir(parents=True)
    pq.write_table(table(), tmp_path / "day=1" / "a.parquet")
    with pytest.raises(ValueError, match=f"found day=1/{folder.split('/')[0]} in it"):
        open_parquet(str(tmp_path), ["id"])


@pytest.mark.parametrize("name", ["v1.metadata.json", "00000-6c3c.metadata.json", "v2.metadata.json.gz"])
@pytest.mark.parametrize("folder", ["data", "data/day=1/kind=a"])
def test_an_iceberg_table_is_refused(tmp_path, name, folder):
    """Also its data folder alone, which has files of older snapshots, and a partition of it."""
    data = tmp_path / "rows" / folder
    data.mkdir(parents=True)
    pq.write_table(table(), data / "a.parquet")
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "snapshots.json").write_text("{}")  # any dataset may lie beside such a folder
    (tmp_path / "rows" / "metadata").mkdir()
    assert open_parquet(str(data), ["id"]).rows == ROWS
    (tmp_path / "rows" / "metadata" / name).write_text("{}")
    with pytest.raises(ValueError, match=rf"found metadata/{name} in it; it is an Iceberg table"):
        open_parquet(str(tmp_path / "rows"), ["id"])
    with pytest.raises(ValueError, match=rf"found metadata/{name} in its parent folder .*; it is an Iceberg table"):
        open_parquet(str(data), ["id"])


def test_each_partition_may_be_a_job_of_its_own(tmp_path):
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        pq.write_table(table(rows=5), tmp_path / day / "part-00000-1b2c.snappy.parquet")
        with pytest.raises(ValueError, match=rf"found {day}/part-00000.*no _SUCCESS"):
            open_parquet(str(tmp_path), ["id"])
        (tmp_path / day / "_SUCCESS").write_text("")
    assert open_parquet(str(tmp_path), ["id"]).rows == 10


def test_B13_what_spark_wrote_needs_the_file_that_it_writes_last(tmp_path):
    partition = tmp_path / "year=2024" / "month=5"
    partition.mkdir(parents=True)
    pq.write_table(table(), partition / "part-00000-1b2c.snappy.parquet")
    for folder, file in ((tmp_path, "year=2024/month=5/part-00000-1b2c"), (partition, "part-00000-1b2c")):
        with pytest.raises(
            ValueError, match=rf"{folder} may be incomplete: found {file}.*no _SUCCESS.*require_success"
        ):
            open_parquet(str(folder), ["id"])
        assert open_parquet(str(folder), ["id"], data=Data(require_success=False)).rows == ROWS
    (tmp_path / "_SUCCESS").write_text("")
    for folder in (tmp_path, partition):
        assert open_parquet(str(folder), ["id"]).rows == ROWS


def test_B14_files_may_differ_in_the_order_and_number_of_columns_and_in_what_may_be_null(tmp_path):
    """Columns are read by name."""
    ids = pa.array(range(10))
    required = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.float32(), nullable=False)])
    pq.write_table(pa.table({"id": ids, "x": ids.cast(pa.float32())}).cast(required), tmp_path / "a.parquet")
    pq.write_table(pa.table({"more": ids, "x": ids.cast(pa.float32()), "id": ids}), tmp_path / "b.parquet")
    found = columns_of(open_parquet(str(tmp_path), ["id", "x"]), "id", "x")
    assert sorted(found["id"]) == sorted([*range(10)] * 2)
    np.testing.assert_array_equal(found["id"], found["x"])


@pytest.mark.parametrize("other", [
    pa.array(["1"] * 5), pa.array([1.0] * 5, pa.float32()), pa.array([1] * 5, pa.uint64()),
    pa.array([True] * 5), pa.array([b"1"] * 5, pa.large_binary()),
])  # fmt: skip
def test_B14_a_type_that_differs_between_files_names_both(tmp_path, other):
    pq.write_table(table(), tmp_path / "a.parquet")
    pq.write_table(table(), tmp_path / "b.parquet")
    pq.write_table(pa.table({"id": other}), tmp_path / "c.parquet")
    match = rf"column 'id' has type int64 in b.parquet and {other.type} in c.parquet of {tmp_path}; read the files"
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path), ["id"])


def test_B09_empty_files_and_row_groups_are_no_rows(tmp_path):
    full = table(rows=7)
    empty = full.slice(0, 0)
    with pq.ParquetWriter(tmp_path / "a.parquet", full.schema) as writer:
        for part in (empty, full, empty, table(first=7, rows=3), empty):
            writer.write_table(part)
    pq.write_table(empty, tmp_path / "b.parquet")
    shards = open_parquet(str(tmp_path), ["id", "list"])
    assert shards.rows == 10
    assert sorted(columns_of(shards, "id", "list")["id"]) == [*range(10)]
    pq.write_table(empty, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"the dataset .* has no rows"):
        open_parquet(str(tmp_path), ["id"])


def delete(path):
    path.unlink()


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def fewer_row_groups(path):
    pq.write_table(pq.read_table(path).slice(0, 50), path, row_group_size=10)


def other_rows(path):
    pq.write_table(pq.read_table(path).slice(0, 90), path, row_group_size=9)


@pytest.mark.parametrize("damage", [delete, truncate, fewer_row_groups, other_rows])
def test_a_file_that_changes_after_it_was_opened_is_an_error_that_names_it(tmp_path, damage):
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=10)
    shards = open_parquet(str(tmp_path), ["id"])
    damage(tmp_path / "a.parquet")
    with pytest.raises(RuntimeError, match=r"cannot read row group \d of .*/a.parquet: "):
        columns_of(shards, "id")


@pytest.mark.parametrize(
    ("column", "values", "match"),
    [
        ("x", pa.array([1, None, 3]), "column 'x': found 1 null.*first in row 1 of the row group"),
        ("x", pa.array([[1], [1, 2]]), "column 'x': found arrays of lengths"),
        ("x", pa.array([[1], None]), "column 'x': found 1 null"),
    ],
)
def test_nulls_and_ragged_lists_stop_the_loader_with_file_and_row_group(tmp_path, column, values, match):
    pq.write_table(pa.table({column: values}), tmp_path / "a.parquet", write_statistics=False)
    with pytest.raises(RuntimeError, match=rf"cannot read row group 0 of .*a.parquet: {match}"):
        columns_of(open_parquet(str(tmp_path), [column]), column)


def test_an_array_of_another_length_is_named_by_its_row_and_the_length_of_the_dataset(tmp_path):
    rows = [[3] * 3] * 4 + [[5] * 5, [3] * 3, [3] * 3, [3] * 3]
    pq.write_table(pa.table({"x": rows}), tmp_path / "a.parquet", row_group_size=4)
    match = r"row group 1 of .*lengths \[3, 5\].*have 3, or set data.encode.x: \{ragged: true\}; first in row 0 of"
    with pytest.raises(RuntimeError, match=match):
        columns_of(open_parquet(str(tmp_path), ["x"]), "x")


@pytest.fixture
def petastorm(tmp_path):
    """A folder with Petastorm's metadata: two files in partitions, of two and of three row groups, and an empty one."""
    for year, rows in ((2024, 20), (2025, 30), (2026, 0)):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(table(rows=rows), tmp_path / f"year={year}" / "a.parquet", row_group_size=10)
    write_petastorm_list(tmp_path, {"year=2024/a.parquet": 2, "year=2025/a.parquet": 3})
    return tmp_path


def write_petastorm_list(folder, row_groups):
    metadata = row_groups if isinstance(row_groups, bytes) else json.dumps(row_groups).encode()
    pq.write_metadata(table().schema.with_metadata({ROW_GROUPS_KEY: metadata}), folder / "_common_metadata")


@pytest.mark.parametrize(("damage", "match"), [
    (lambda d: (d / "year=2025/a.parquet").unlink(), "found nothing at 'year=2025/a.parquet', expected 3 row groups"),
    (lambda d: pq.write_table(table(rows=30), d / "year=2025/a.parquet"), "found 1 row groups at .*, expected 3"),
    (lambda d: pq.write_table(table(), d / "b.parquet"), "found 1 row groups at 'b.parquet', expected no such file"),
    (lambda d: write_petastorm_list(d, {"../a.parquet": 1}), "found nothing at '../a.parquet', expected 1 row groups"),
])  # fmt: skip
def test_files_other_than_petastorm_lists_are_an_error_that_names_them(petastorm, damage, match):
    assert open_parquet(str(petastorm), ["id"]).rows == 50
    damage(petastorm)
    with pytest.raises(ValueError, match=rf"the dataset {petastorm} is incomplete: {match}"):
        open_parquet(str(petastorm), ["id"])
    part = petastorm / "year=2024"
    assert open_parquet(str(part), ["id"]).rows == open_parquet(str(part / "a.parquet"), ["id"]).rows == 20


@pytest.mark.parametrize("listed", [
    b"{", b"\xff", b"[]", b"null", b"[" * 100_000, {"a": "1"}, {"a": -1}, {"a": 1.5}, {"a": True}, {"a": {}},
])  # fmt: skip
def test_a_list_of_petastorm_that_is_none_is_an_error_that_names_the_file(petastorm, listed):
    write_petastorm_list(petastorm, listed)
    with pytest.raises(ValueError, match=rf"^{petastorm}/_common_metadata: the list of row groups per file cannot"):
        open_parquet(str(petastorm), ["id"])


def test_a_schema_of_petastorm_that_is_none_is_an_error_that_names_the_file(petastorm):
    metadata = {UNISCHEMA_KEY: b"cos\nsystem\n(S'true'\ntR."}
    pq.write_metadata(table().schema.with_metadata(metadata), petastorm / "_common_metadata")
    with pytest.raises(UnsafeMetadataError, match=rf"^{petastorm}/_common_metadata: the pickled Unischema"):
        open_parquet(str(petastorm), ["id"])


@pytest.mark.parametrize("junk", [b"", b"junk", b"PAR1" + bytes(100) + b"PAR1"])
def test_metadata_that_are_none_are_an_error_that_names_the_file(petastorm, junk):
    (petastorm / "_common_metadata").write_bytes(junk)
    with pytest.raises(ValueError, match=rf"^{petastorm}/_common_metadata is not metadata of a Parquet dataset: "):
        open_parquet(str(petastorm), ["id"])


FLOAT16 = pytest.param("float16", marks=pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 15, reason="pyarrow writes float16 to Parquet from version 15 on"
))  # fmt: skip
BAD_IN_ROW_5 = {
    "scalar": pa.array([1.0] * 5 + [np.nan] + [2.0] * 4),
    "float16": pa.array(np.array([1.0] * 5 + [-np.inf] + [2.0] * 4, dtype=np.float16)),
    "both": pa.array([1.0] * 5 + [np.inf] + [2.0, -np.inf] * 2, pa.float32()),
    "list": pa.array([[1.0, 2.0]] * 5 + [[0.0, np.nan]] + [[1.0, np.inf]] * 4, pa.list_(pa.float32())),
    "nested": pa.array([[[1.0], [2.0]]] * 5 + [[[np.inf], [2.0]]] + [[[1.0], [2.0]]] * 4),
    "ragged": pa.array([[1.0], [], [1.0, 2.0], [], [], [1.0, np.nan], [np.inf], [], [], []]),
    "vector": vectors(*[(2, {1: float("nan") if i == 5 else 1.0}) for i in range(10)]),
}


@pytest.mark.parametrize("kind", [FLOAT16, *(kind for kind in BAD_IN_ROW_5 if kind != "float16")])
@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_nan_and_inf_stop_the_loader_unless_they_are_allowed(tmp_path, kind, compression):
    bad, encode = BAD_IN_ROW_5[kind], {"x": {"ragged": True}} if kind == "ragged" else {}
    good = bad.take(pa.array([0] * 10))
    table = pa.table({"id": np.arange(30), "x": pa.chunked_array([good, bad, good])})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, compression=compression, use_dictionary=False)
    shards = open_parquet(str(tmp_path), ["x"], data=Data(encode=encode))
    match = "cannot read row group 1 of .*a.parquet: column 'x': found NaN or Inf.*; first in row 5 of the row group"
    with pytest.raises(RuntimeError, match=match):
        list(steps_of(shards, "x", encode=encode))
    assert len(list(steps_of(shards, "x", encode=encode, nonfinite="allow"))) == 2
    without = filter_rows(shards, make_config(filters=[[("id", "<", 13)], [("id", ">", 19)]]))
    assert len(list(steps_of(without, "x", encode=encode))) == 2
    with pytest.raises(
        RuntimeError, match=match.replace("row group 1", "the rows that pass data.filters of row group 1", 1)
    ):
        list(steps_of(filter_rows(shards, make_config(filters=[("id", ">", 12)])), "x", encode=encode))


@pytest.mark.parametrize("dtype", [FLOAT16, "float32", "float64"])
def test_large_numbers_are_finite_though_their_sum_is_not(tmp_path, dtype):
    large = np.full(20, np.finfo(dtype).max)
    pq.write_table(pa.table({"x": large}), tmp_path / "a.parquet")
    np.testing.assert_array_equal(columns_of(open_parquet(str(tmp_path), ["x"]), "x")["x"], large)


@pytest.mark.parametrize("version", ["0.4.0", "0.7.6"])
def test_datasets_of_old_petastorm_versions(version):
    if "SPARK_DL_TEST_DATA" not in os.environ:
        pytest.skip("SPARK_DL_TEST_DATA does not name a folder with petastorm_legacy")
    url = Path(os.environ["SPARK_DL_TEST_DATA"], "petastorm_legacy", version)
    names = ["id", "id2", "matrix", "matrix_uint16", "image_png", "python_primitive_uint8"]
    found = columns_of(open_parquet(str(url), names), *names)
    assert sorted(found["id"]) == list(range(ROWS))
    assert {n: (str(a.dtype), a.shape[1:]) for n, a in found.items()} == {
        "id": ("int64", ()), "id2": ("int32", ()), "matrix": ("float32", (32, 16, 3)),
        "matrix_uint16": ("uint16", (32, 16, 3)), "image_png": ("uint8", (32, 16, 3)),
        "python_primitive_uint8": ("uint8", ()),
    }  # fmt: skip
    np.testing.assert_array_equal(found["id2"], found["id"] % 2)
    with pytest.raises(ValueError, match="column 'sensor_name' has type list<item: string>; .*data.encode"):
        open_parquet(str(url), ["sensor_name"])


# Types that become numbers when they are read


def read_all(shards):
    """Columns as a loader reads them: row group by row group."""
    files = [pq.ParquetFile(f"{shards.url}/{s.name}") for s in shards.shards]
    groups = [f.read_row_group(g, [c.name for c in shards.columns]) for f in files for g in range(f.num_row_groups)]
    return {
        c.name: concatenate([cell_codec.decode(c, table_column(g, c.name)) for g in groups]) for c in shards.columns
    }  # fmt: skip


def rows_of(cells):
    return [cells.values[a:b].tolist() for a, b in zip(cells.offsets[:-1], cells.offsets[1:], strict=True)]


def rich_table():
    n = range(10)
    day = [datetime.date(1970, 1, 1) + datetime.timedelta(days=i) for i in n]
    return pa.table({
        "day": pa.array(day),
        "at": pa.array([i * 1_000_001 for i in n], pa.int64()).cast(pa.timestamp("us", "Europe/Berlin")),
        "took": pa.array([i * 1000 for i in n], pa.duration("ms")),
        "price": pa.array([Decimal(i) / 4 for i in n], pa.decimal128(20, 2)),
        "name": pa.array([f"n{i % 3}" for i in n]).dictionary_encode(),
        "blob": pa.array([b"x" * i for i in n]),
        "ragged": pa.array([[i] * (i % 4) for i in n], pa.list_(pa.int16())),
        "pairs": pa.array([[[i, 1]] * (i + 1) for i in n], pa.large_list(pa.list_(pa.float32()))),
        "number": pa.array([i * 7 for i in n]).dictionary_encode(),
        "photo": pa.array([png((2, 3), i) for i in n]),
        "user": pa.array([{"age": i, "home": {"city": f"c{i}", "at": [1.0, float(i)]}} for i in n]),
        "vector": vectors(*[[float(i), 1.0] if i % 2 else (2, {1: 1.0, 0: float(i)}) for i in n]),
    })  # fmt: skip


ENCODE = {
    "at": {"as": "timestamp", "unit": "ms"}, "price": {"as": "float"},
    "name": {"as": "vocabulary", "values": ["n1", "n0"]},
    "ragged": {"ragged": True}, "pairs": {"ragged": True}, "photo": {"as": "image"},
    "user.home.city": {"as": "hash", "buckets": 11},
}  # fmt: skip
NAMES = ["day", "at", "took", "price", "name", "blob", "ragged", "pairs", "number", "photo", "vector",
         "user.age", "user.home.city", "user.home.at"]  # fmt: skip


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_every_type_of_parquet_becomes_numbers(tmp_path, use_dictionary):
    pq.write_table(rich_table(), tmp_path / "a.parquet", row_group_size=4, use_dictionary=use_dictionary)
    shards = open_parquet(str(tmp_path), NAMES, data=Data(encode=ENCODE))
    found = read_all(shards)
    n = np.arange(10)
    expected = {
        "day": n, "at": n * 1_000_001 // 1000, "took": n * 1000, "price": n / 4, "name": np.array([2, 1, 0] * 4)[:10],
        "number": n * 7, "vector": np.stack([n, np.ones(10)], axis=1), "user.age": n,
        "user.home.city": [zlib.crc32(f"c{i}".encode()) % 11 for i in n],
        "user.home.at": np.stack([np.ones(10), n], axis=1), "photo": np.array([pixels((2, 3), i) for i in n]),
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert [bytes(b) for b in rows_of(found["blob"])] == [b"x" * i for i in n]
    for name in ("ragged", "pairs"):
        assert rows_of(found[name]) == rich_table()[name].to_pylist()
    about = {c.name: (c.dtype, c.shape) for c in shards.columns}
    assert about["pairs"] == ("float32", (None, 2))
    assert about["photo"] == ("uint8", (2, 3))
    means = {c.name: c.mean_size for c in shards.columns}
    assert means["pairs"] == 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10) / 10
    assert shards.shards[0].elements["pairs"] == (2 * 10, 2 * 26, 2 * 19)
    for column in shards.columns:
        cells = found[column.name]
        assert (cells.values if column.is_ragged else cells).dtype == column.dtype


def test_the_vocabulary_is_that_of_the_training_dataset(tmp_path):
    pq.write_table(pa.table({"name": ["a", "b", "c"]}), tmp_path / "a.parquet")
    reference_columns = [Column("name", "int64", (), "scalar", Encoding("vocabulary", vocabulary=("c", "a")))]
    data = Data(encode={"name": {"as": "vocabulary"}})
    assert read_all(open_parquet(str(tmp_path), ["name"], data=data, reference_columns=reference_columns))[
        "name"
    ].tolist() == [2, 0, 1]
    with pytest.raises(
        ValueError, match=r"data.encode.name.values: expected the vocabulary, .* only when Spark writes"
    ):
        open_parquet(str(tmp_path), ["name"], data=data)


@pytest.mark.parametrize(("data", "match"), [
    (Data(encode={"idd": {"as": "bytes"}}), "data.encode.idd: no such column is read; did you mean 'id'"),
    (Data(encode={"id": {"as": "hash", "buckets": 3}}), r"data.encode.id.as: expected one of \['number'\]"),
])  # fmt: skip
def test_settings_that_do_not_fit_a_dataset_of_others(tmp_path, data, match):
    pq.write_table(table(), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path), ["id"], data=data)


def test_timestamps_of_spark_are_the_microseconds_of_its_dataframe(tmp_path):
    """Spark writes them with 96 bits unless it is told otherwise; in nanoseconds the last one is in 1816."""
    times = [datetime.datetime(1900, 1, 1), datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime(9999, 12, 31)]
    found = {}
    for is_old in (True, False):
        url = str(tmp_path / f"{is_old}.parquet")
        rows = pa.table({"at": pa.array(times, pa.timestamp("us")), "list": pa.array([[t] for t in times])})
        pq.write_table(rows, url, use_deprecated_int96_timestamps=is_old)
        shards = open_parquet(url, ["at", "list"])
        assert [c.encoding for c in shards.columns] == [Encoding("timestamp", unit="us")] * 2
        found[is_old] = columns_of(shards, "at", "list")
        assert filter_rows(shards, make_config(filters=[("at", ">", "9000-01-01")])).rows == 1
    expected = [(t - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1) for t in times]
    for cells in found.values():
        assert cells["at"].tolist() == expected
        assert cells["list"].tolist() == [[n] for n in expected]


@pytest.mark.parametrize("is_plain", [True, False])
def test_columns_of_one_shape_of_every_type_are_dealt_by_the_loader(tmp_path, is_plain):
    layout = {"compression": "none" if is_plain else "snappy", "use_dictionary": not is_plain}
    pq.write_table(rich_table(), tmp_path / "a.parquet", row_group_size=4, **layout)
    names = ["day", "at", "price", "name", "photo", "vector", "user.age", "user.home.city"]
    shards = open_parquet(str(tmp_path), names, data=Data(encode={n: s for n, s in ENCODE.items() if n in names}))
    found, expected = columns_of(shards, *names), read_all(shards)
    assert sorted(found["day"].tolist()) == list(range(10))
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name][found["day"]])


# Petastorm datasets whose fields are no tensors of one shape


def petastorm_dataset(folder):
    """As Petastorm's `materialize_dataset` leaves one, in two folders of a text partition."""
    n = range(12)
    lists = [np.arange(i % 4, dtype=np.int16) + i for i in n]
    pairs = [np.full((i % 3, 2), i, dtype=np.float32) for i in n]
    columns = {
        "id": pa.array(n),
        "name": pa.array([f"n{i % 3}" for i in n]),
        "maybe": pa.array([None if i == 7 else "a" for i in n]),
        "price": pa.array([Decimal(i) / 4 for i in n], pa.decimal128(10, 3)),
        "at": pa.array([i * 10**6 for i in n], pa.int64()).cast(pa.timestamp("us")),
        "blob": pa.array([b"x" * i for i in n]),
        "lists": pa.array(npy_cells(*lists)),
        "pairs": pa.array(npy_cells(*pairs, write=lambda out, a: np.savez_compressed(out, arr=a))),
        "any": pa.array(npy_cells(*(np.zeros((1, i)) for i in n))),
    }
    table = pa.table(columns)
    for kind, part in (("a b", table.slice(0, 6)), ("c", table.slice(6))):
        (folder / f"kind={kind}").mkdir(parents=True)
        pq.write_table(part, folder / f"kind={kind}" / "0.parquet", row_group_size=4)
    fields = (
        Field("id", "int64", (), Codec("scalar", spark_type="LongType")),
        Field("name", "str", (), Codec("scalar", spark_type="StringType")),
        Field("maybe", "str", (), Codec("scalar", spark_type="StringType"), nullable=True),
        Field("price", "decimal", (), Codec("scalar", spark_type="DecimalType(10,3)")),
        Field("at", "datetime64", (), Codec("scalar", spark_type="TimestampType")),
        Field("blob", "bytes", (), None),
        Field("lists", "int16", (None,), Codec("ndarray")),
        Field("pairs", "float32", (None, 2), Codec("compressed_ndarray")),
        Field("any", "float64", (None, None), Codec("ndarray")),
        Field("kind", "str", (), Codec("scalar", spark_type="StringType")),
    )
    row_groups = {"kind=a b/0.parquet": 2, "kind=c/0.parquet": 2}
    unischema = Unischema("Schema", fields)
    write_common_metadata(str(folder), table.schema, unischema=unischema, row_groups_per_file=row_groups)
    return lists, pairs


def test_fields_of_petastorm_of_every_type_become_numbers_as_columns_of_plain_parquet_do(tmp_path):
    lists, pairs = petastorm_dataset(tmp_path)
    encode = {
        "name": {"as": "vocabulary", "values": ["n2", "n0"]}, "price": {"as": "float"},
        "at": {"as": "timestamp", "unit": "s"},
        "lists": {"ragged": True}, "pairs": {"ragged": True}, "kind": {"as": "hash", "buckets": 9},
    }  # fmt: skip
    names = ("id", "name", "price", "at", "blob", "lists", "pairs", "kind")
    fields = {"num_streams": 4, "ragged": "offsets", "global_batch_size": 4}
    config = make_config(features=names, label=None, encode=encode, **fields)
    shards = open_parquet(str(tmp_path), names, data=config.data)
    found = {}
    for step in ShardLoader(shards, config, rank=0, world_size=1).epoch(0):
        (batch,) = step.micro_batches
        for i in np.flatnonzero(batch["weight"].numpy()):
            row = {n: batch[n][i].item() for n in ("name", "price", "at", "kind")}
            for n in ("blob", "lists", "pairs"):
                row[n] = batch[n][batch[f"{n}_offsets"][i] : batch[f"{n}_offsets"][i + 1]].numpy()
            found[int(batch["id"][i])] = row
    for i in range(12):
        assert (found[i]["name"], found[i]["price"], found[i]["at"]) == ([2, 0, 1][i % 3], i / 4, i)
        assert found[i]["kind"] == zlib.crc32(b"a b" if i < 6 else b"c") % 9
        assert found[i]["blob"].tobytes() == b"x" * i
        for name, cells in (("lists", lists), ("pairs", pairs)):
            np.testing.assert_array_equal(found[i][name], cells[i])
            assert found[i][name].dtype == cells[i].dtype
    vocabulary = {"kind": {"as": "vocabulary", "values": ["c"]}}
    words = open_parquet(str(tmp_path), ["id", "kind"], data=Data(encode=vocabulary))
    assert sorted(columns_of(words, "kind")["kind"]) == [0] * 6 + [1] * 6


@pytest.mark.parametrize(("name", "encode", "match"), [
    ("name", {}, "column 'name' has type string; set data.encode"),
    ("lists", {}, r"column 'lists' has the shape \(None,\), .*{lists: {ragged: true}}, or {lists: {ragged: false}} if"),
    ("lists", {"lists": {"ragged": False}}, "column 'lists': the first cell of .* is empty.* set data.encode.lists"),
    ("any", {}, r"column 'any' has the shape \(None, None\), .*{ragged: true}"),
    ("lists", {"lists": {"as": "hash", "buckets": 3}}, r"data.encode.lists: .*; expected {ragged: true} or {ragged: f"),
    ("id", {"id": {"as": "float"}}, "data.encode.id: .*; expected nothing"),
    ("kind", {}, "column 'kind' is a partition .*set data.encode: {kind: {as: hash"),
    ("kind", {"kind": {"as": "bytes"}}, "data.encode.kind.as: expected vocabulary or hash for a partition"),
    ("kind", {"kind": {"as": "vocabulary"}}, "data.encode.kind.values: expected the vocabulary"),
])  # fmt: skip
def test_fields_of_petastorm_that_need_a_setting_or_have_none_say_so(tmp_path, name, encode, match):
    petastorm_dataset(tmp_path)
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path), [name], data=Data(encode=encode))


TAGS = [["ä", "b"], ["b", "longer"], ["", "ä"], ["c", "b"]]


def dataset_of_tags(folder, cells, *, kind="ndarray", shape=(2,), codec=True):
    """Cells of arrays of strings, each of its own width, as Petastorm's codec writes them; None is a null."""
    arrays = [None if cell is None else np.array(cell, dtype=str) for cell in cells]
    write = (lambda out, a: np.savez_compressed(out, arr=a)) if kind == "compressed_ndarray" else np.save
    packed = [None if a is None else npy_cells(a, write=write)[0] for a in arrays]
    stored = pa.table({"id": range(len(cells)), "tags": packed if codec else pa.array(cells, pa.list_(pa.string()))})
    folder.mkdir()
    pq.write_table(stored, folder / "0.parquet", row_group_size=3)
    tags = Field("tags", "str", shape, Codec(kind) if codec else None, nullable=None in cells)
    unischema = Unischema("Schema", (Field("id", "int64", (), Codec("scalar", spark_type="LongType")), tags))
    row_groups = {"0.parquet": -(-len(cells) // 3)}
    write_common_metadata(str(folder), stored.schema, unischema=unischema, row_groups_per_file=row_groups)
    return str(folder)


def tags_of(url, settings, **data):
    """The numbers of each row's words, by the way of the loader."""
    config = make_config(
        features=("id", "tags"), label=None, num_streams=2, encode={"tags": settings}, ragged="offsets",
        global_batch_size=2, **data,
    )  # fmt: skip
    found, shards = {}, filter_rows(open_parquet(url, config.data.features, data=config.data), config)
    for step in ShardLoader(shards, config, rank=0, world_size=1).epoch(0):
        (batch,) = step.micro_batches
        for i in np.flatnonzero(batch["weight"].numpy()):
            ends = batch["tags_offsets"][i : i + 2].tolist() if "tags_offsets" in batch else None
            found[int(batch["id"][i])] = (batch["tags"][slice(*ends)] if ends else batch["tags"][i]).tolist()
    return [found[i] for i in sorted(found)]


HASHED, WORDS = {"as": "hash", "buckets": 97}, {"as": "vocabulary", "values": ["b", "ä"]}


def hashed(cells):
    return [[zlib.crc32(word.encode()) % 97 for word in cell] for cell in cells]


@pytest.mark.parametrize(("codec", "kind"), [(True, "ndarray"), (True, "compressed_ndarray"), (False, "ndarray")])
def test_arrays_of_strings_of_petastorm_become_numbers_as_those_of_spark_do(tmp_path, codec, kind):
    own = {"kind": kind, "codec": codec}
    fixed = dataset_of_tags(tmp_path / "fixed", TAGS, **own)
    assert tags_of(fixed, HASHED) == hashed(TAGS)
    assert tags_of(fixed, WORDS) == [[2, 1], [1, 0], [0, 2], [0, 1]]
    single = [[word] for word, _ in TAGS]
    assert tags_of(dataset_of_tags(tmp_path / "single", single, shape=(1,), **own), HASHED) == hashed(single)
    rows = [["a"] * (i % 4) + ["b"] * (i % 3) for i in range(1, 12)]
    ragged = dataset_of_tags(tmp_path / "ragged", rows, shape=(None,), **own)
    assert tags_of(ragged, {**HASHED, "ragged": True}) == hashed(rows)
    same = dataset_of_tags(tmp_path / "same", TAGS, shape=(None,), **own)
    assert tags_of(same, {**HASHED, "ragged": False}) == hashed(TAGS)


def test_nulls_among_arrays_of_strings_of_petastorm_are_dropped_or_filled_with_a_word(tmp_path):
    url = dataset_of_tags(tmp_path / "data", [TAGS[0], None, *TAGS[1:]])
    assert tags_of(url, WORDS, nulls="drop") == [[2, 1], [1, 0], [0, 2], [0, 1]]
    filled = tags_of(url, WORDS, nulls="fill", fill={"tags": "ä"})
    assert filled == [[2, 1], [2, 2], [1, 0], [0, 2], [0, 1]]
    with pytest.raises(ValueError, match=r"data\.fill\.tags: expected a value of type string"):
        tags_of(url, WORDS, nulls="fill", fill={"tags": 3})


@pytest.mark.parametrize(("shape", "settings", "match"), [
    ((2,), {}, r"column 'tags' has type list<.*set data\.encode to encode strings as numbers: {tags: {as: vocabulary"),
    ((2,), {"as": "bytes"}, r"data\.encode\.tags"),
    ((2,), {"as": "vocabulary"}, r"data\.encode\.tags\.values: expected the vocabulary"),
    ((2,), {**HASHED, "ragged": True}, r"data\.encode\.tags\.ragged: found true for a column of shape \(2,\)"),
    ((None,), HASHED, r"column 'tags' has the shape \(None,\), .*{ragged: true}"),
])  # fmt: skip
def test_arrays_of_strings_of_petastorm_need_settings_that_fit(tmp_path, shape, settings, match):
    url = dataset_of_tags(tmp_path / "data", TAGS, shape=shape)
    with pytest.raises(ValueError, match=match):
        tags_of(url, settings)


def test_a_word_that_no_vocabulary_has_and_four_bytes_that_are_no_character_name_their_row(tmp_path):
    url = dataset_of_tags(tmp_path / "data", TAGS)
    with pytest.raises(RuntimeError, match=r"'tags', row 1: found 'longer', expected one of 4 known strings"):
        tags_of(url, {**WORDS, "values": ["ä", "b", "", "c"], "unknown": "error"}, filters=[["id", "==", 1]])
    for name, character in (("half", 0xD800), ("none", 0x7FFFFFFF)):
        cell = np.array(["a", "b"])
        cell.view(np.uint32)[1] = character
        (tmp_path / name).mkdir()
        bad = [TAGS[0], TAGS[1]]
        url = dataset_of_tags(tmp_path / name / "data", bad)
        table = pq.read_table(f"{url}/0.parquet")
        packed = pa.array([table["tags"][0].as_py(), npy_cells(cell)[0]], pa.binary())
        pq.write_table(table.set_column(1, "tags", packed), f"{url}/0.parquet")
        with pytest.raises(RuntimeError, match=r"'tags', row 1: found an invalid string"):
            tags_of(url, HASHED)


def test_a_null_in_a_field_of_petastorm_is_an_error_with_its_row(tmp_path):
    petastorm_dataset(tmp_path)
    data = Data(encode={"maybe": {"as": "hash", "buckets": 3}}, filters=[["id", ">", 0]])
    with pytest.raises(ValueError, match=r"column 'maybe': found 1 null.* in row group 0 of kind=c/0.parquet"):
        open_parquet(str(tmp_path), ["maybe"], data=replace(data, filters=()))
    shards = open_parquet(str(tmp_path), ["maybe"], data=data)  # as the rows with nulls may not pass
    with pytest.raises(RuntimeError, match=r"row group 0 of .*kind=c/0.parquet: column 'maybe': found 1 null.*row 1"):
        columns_of(shards, "maybe")


@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_compressed_arrays_that_do_not_fit_are_an_error_before_they_are_unpacked(tmp_path, is_ragged, use_dictionary):
    """20 cells of 2 MB of zeros, of 2 kB each in the file; a batch of 4 of them fits, and so does a row group of 5."""
    cell = np.zeros((500_000,), np.float32)
    (packed,) = npy_cells(cell, write=lambda out, a: np.savez_compressed(out, arr=a))
    table = pa.table({"x": pa.array([packed] * 20), "id": range(20)})
    fields = Field("x", "float32", (None,), Codec("compressed_ndarray")), Field("id", "int64", (), None)
    encode = {"x": {"ragged": is_ragged}}

    def batches(group_rows, memory_mib):
        pq.write_table(table, tmp_path / "0.parquet", row_group_size=group_rows, use_dictionary=use_dictionary)
        write_common_metadata(
            str(tmp_path), table.schema, unischema=Unischema("Schema", fields),
            row_groups_per_file={"0.parquet": 20 // group_rows},
        )  # fmt: skip
        config = make_config(
            features=("x",), label="id", num_streams=2, encode=encode, memory_mib=memory_mib, shuffle_window_rows=5,
            global_batch_size=4,
        )  # fmt: skip
        shards = open_parquet(str(tmp_path), ["x", "id"], data=config.data)
        loader = ShardLoader(shards, config, rank=0, world_size=1)
        return [m for step in loader.epoch(0) for m in step.micro_batches]

    found = batches(5, 16)
    assert sorted(int(i) for m in found for i in m["id"]) == list(range(20))
    assert all(m["x"].shape == (4, 500_000) and not m["x"].any() for m in found)
    del found
    match = "row group 0 of .* has 20 rows of 20\\d{5} bytes, 38 MiB; .*loader.memory_mib=16; raise loader.memory_mib"
    if is_ragged:
        match = (
            r"cannot read row group 0 of .*0.parquet: column 'x': the cells have 0.\d MiB as they are stored, and \d\d "
            "MiB once they are decoded, with loader.memory_mib=16; raise loader.memory_mib, or write the dataset"
        )
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeError if is_ragged else ValueError, match=match):
            batches(20, 16)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


STRINGS = ["a", "b", "a", "c"]
HINTS = {  # Arrow's types of a column of Parquet strings
    "pandas 2": pa.array(STRINGS, pa.string()),
    "pandas 3": pa.array(STRINGS, pa.large_string()),
    "categories": pa.array(STRINGS).dictionary_encode(),
    "ordered categories": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 0, 2], pa.int8()), ["a", "b", "c"], ordered=True
    ),
    **({"views": pa.array(STRINGS).cast(pa.string_view())} if hasattr(pa, "string_view") else {}),  # pyarrow 16
}


@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("first", ["pandas 2", "categories"])
def test_files_may_differ_in_arrow_s_hints_of_one_type_of_parquet(tmp_path, first, hint):
    for name, words in (("0", HINTS[first]), ("1", HINTS[hint])):
        pq.write_table(pa.table({"word": words, "x": pa.array(range(4), pa.int64())}), tmp_path / f"{name}.parquet")
    encode = {"word": {"as": "vocabulary", "values": ["a", "b", "c"]}}
    shards = open_parquet(str(tmp_path), ["word", "x"], data=Data(features=("word", "x"), label=None, encode=encode))
    batches = [batch for step in steps_of(shards, "word", "x", encode=encode) for batch in step.micro_batches]
    index = np.concatenate([b["word"].numpy()[b["weight"].numpy() == 1] for b in batches])
    assert np.unique(index, return_counts=True)[1].tolist() == [4, 2, 2]


def test_a_column_that_is_null_in_all_rows_of_a_file_has_the_type_that_other_files_have(tmp_path):
    ids = pa.array(range(4), pa.int64())
    pq.write_table(pa.table({"id": ids, "x": pa.nulls(4)}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"id": ids, "x": pa.array([1.5] * 4, pa.float32())}), tmp_path / "1.parquet")
    shards = open_parquet(str(tmp_path), ["id", "x"])
    assert {c.name: c.dtype for c in shards.columns} == {"id": "int64", "x": "float32"}


@pytest.mark.parametrize("rows", [10**12, 2**62, -5, 2**31, 99])
@pytest.mark.parametrize("where", ["file", "group", "both"])
def test_S23_a_footer_with_a_number_of_rows_that_cannot_be_is_an_error_that_names_the_file(tmp_path, rows, where):
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"x": np.arange(100.0)}), path)
    content = path.read_bytes()
    footer_at = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer, _ = thrift.read_struct(content[footer_at:-8])
    if where != "group":
        footer[3] = thrift.TField(thrift.I64, rows)
    if where != "file":
        footer[4].value.items[0][3] = thrift.TField(thrift.I64, rows)
    end = thrift.write_struct(footer)
    path.write_bytes(content[:footer_at] + end + len(end).to_bytes(4, "little") + b"PAR1")
    if (rows, where) == (99, "both"):
        return  # a footer that could be
    with pytest.raises(ValueError, match=r"d\.parquet .* is not a readable Parquet file: "):
        open_parquet(str(path), ["x"])
