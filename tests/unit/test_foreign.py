"""Datasets that others wrote are read as they are, and refused with a reason where they cannot be."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Config, Data, Train
from spark_dl.data.foreign import open_parquet
from spark_dl.data.loader import Loader

ROWS = 100


def columns_of(shards, *names):
    """All rows of a dataset, in its order, through the loader."""
    config = Config(data=Data(features=names, label=None, num_streams=4), train=Train(global_batch_size=20))
    steps = Loader(shards, config, rank=0, world_size=1, shuffle=False).epoch(0)
    batches = [batch for step in steps for batch in step.micro_batches]
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
    assert [rows for _, _, rows in shards.row_groups] == [33, 33, 33, 1]
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
    (tmp_path / "_temporary").mkdir()
    (tmp_path / "_temporary" / "half.parquet").write_text("half written")
    found = columns_of(open_parquet(str(tmp_path), ["id", "year"]), "id", "year")
    assert sorted(found["year"]) == [2024] * 10 + [2025] * 10
    with pytest.raises(ValueError, match=r"column 'kind' is a partition with values such as \['a b'\]"):
        open_parquet(str(tmp_path), ["kind"])


def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path):
    def fails(match, *names, url=tmp_path):
        with pytest.raises(ValueError, match=match):
            open_parquet(str(url), names or ["id"])

    fails("found nothing", url=tmp_path / "nowhere")
    fails("without data files")
    (tmp_path / "b.parquet").write_bytes(b"")
    fails(r"b.parquet \(0 bytes\) is not a Parquet file")
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + b"x" * 100)
    fails(r"b.parquet \(104 bytes\) is not a Parquet file")
    pq.write_table(table(), tmp_path / "b.parquet")
    fails("no column 'idd' .* did you mean 'id'", "idd")
    fails("column 'text' has type string; say with data.encode", "text")
    pq.write_table(table().set_column(0, "id", pa.array(np.arange(ROWS, dtype=np.int32))), tmp_path / "c.parquet")
    fails("column 'id' has type int64 in b.parquet and int32 in c.parquet")
    pq.write_table(table().drop_columns(["id"]), tmp_path / "c.parquet")
    fails("None in b.parquet|int64 in b.parquet and is missing in c.parquet")
    pq.write_table(table(rows=0), tmp_path / "c.parquet")
    assert open_parquet(str(tmp_path), ["id"]).rows == ROWS  # a file without rows has nothing to disagree with


@pytest.mark.parametrize(
    ("column", "values", "match"),
    [
        ("x", pa.array([1, None, 3]), "column 'x': found 1 null.*first in row 1 of the row group"),
        ("x", pa.array([[1], [1, 2]]), "column 'x': found arrays of lengths"),
        ("x", pa.array([[1], None]), "column 'x': found 1 null"),
    ],
)
def test_nulls_and_ragged_lists_stop_the_loader_with_file_and_row_group(tmp_path, column, values, match):
    pq.write_table(pa.table({column: values}), tmp_path / "a.parquet")
    with pytest.raises(RuntimeError, match=rf"cannot read row group 0 of .*a.parquet: {match}"):
        columns_of(open_parquet(str(tmp_path), [column]), column)


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
    with pytest.raises(ValueError, match="column 'sensor_name' has dtype str"):
        open_parquet(str(url), ["sensor_name"])
