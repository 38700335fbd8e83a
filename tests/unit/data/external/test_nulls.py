"""Nulls, NaN and Inf in datasets that others wrote: dropped or filled when they are read, or an early error."""

import contextlib
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_dl import Data
from spark_dl.data.external.dataset import open_parquet
from spark_dl.data.external.files import filter_rows
from spark_dl.data.load.build import build_loader
from spark_dl.data.parquet.filters import NULL_PARTITION
from spark_dl.data.petastorm.metadata import write_common_metadata
from spark_dl.data.petastorm.unischema import Codec, Field, Unischema
from tests.builders.batches import rows_of
from tests.builders.cells import npy_cells, vectors
from tests.builders.images import pixels, png
from tests.builders.settings import make_config

NAN, INF = float("nan"), float("inf")


VECTOR = pa.struct([
    ("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64())),
])  # fmt: skip


@pytest.fixture
def until_done():
    with contextlib.ExitStack() as stack:
        yield stack


ROWS = 24


def is_null(i, column):
    """Each column has its own nulls, and the row groups of 4 rows from the 12th row on have none."""
    return i < 12 and i % 6 == column


def plain_table():
    n = range(ROWS)
    some = lambda column, make: [None if is_null(i, column) else make(i) for i in n]  # noqa: E731
    return pa.table({
        "id": pa.array(n),
        "age": pa.array(some(0, lambda i: i), pa.int16()),
        "city": pa.array(some(1, lambda i: f"c{i % 3}")).dictionary_encode(),
        "user": pa.array(some(2, lambda i: {"size": float(i)})),
        "list": pa.array([[None if is_null(i, 3) else float(i), 1.0] for i in n], pa.list_(pa.float32())),
        "vector": vectors(*some(4, lambda i: [float(i), 2.0])),
        "photo": pa.array(some(5, lambda i: png((2, 3), i))),
    })  # fmt: skip


ENCODE = {"city": {"as": "vocabulary", "values": ["c0", "c1"]}, "photo": {"as": "image"}}
NAMES = ("id", "age", "city", "user.size", "list", "vector", "photo")


def test_rows_with_nulls_are_dropped(tmp_path, until_done, caplog):
    caplog.set_level("INFO", "spark_dl")
    pq.write_table(plain_table(), tmp_path / "a.parquet", row_group_size=4)
    found = rows_of(tmp_path, until_done, features=NAMES, encode=ENCODE, nulls="drop")
    kept = list(range(12, ROWS))
    assert found["id"] == found["age"] == found["user.size"] == kept
    assert "12 of 24 rows, in 3 of 6 row groups, pass no null in ['id', 'age'" in caplog.text
    few = ("id", "age", "list")
    found = rows_of(tmp_path, until_done, features=few, nulls="drop", filters=[["id", "<", 16]])
    kept = [i for i in range(16) if i not in (0, 3, 6, 9)]
    assert found["id"] == found["age"] == kept
    np.testing.assert_array_equal(found["list"], [[i, 1] for i in kept])
    assert "pass id < 16 and no null in ['id', 'age', 'list']" in caplog.text
    assert rows_of(tmp_path, until_done, features=("id",), nulls="drop")["id"] == list(range(ROWS))
    assert "pass no null in ['id'] in" in caplog.text
    assert caplog.text.rstrip().endswith("; 0 row groups were read to count them")


def test_the_first_row_may_have_nulls_in_columns_whose_first_cell_gives_the_shape(tmp_path, until_done):
    table = pa.table({
        "id": range(8),
        "list": [None, [None, 5], *([[i, 5] for i in range(2, 8)])],
        "ragged": [None, [[None, 1]], *([[[i, 2]] * i for i in range(2, 8)])],
        "photo": [None, None, *([png((3, 2), i) for i in range(2, 8)])],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    data = {
        "features": ("id", "list", "ragged", "photo"),
        "encode": {"ragged": {"ragged": True}, "photo": {"as": "image"}},
    }
    found = rows_of(tmp_path, until_done, nulls="drop", **data)
    assert found["id"] == list(range(2, 8))
    np.testing.assert_array_equal(found["photo"], [pixels((3, 2), i) for i in range(2, 8)])
    del data["encode"]["photo"]
    data["features"] = ("id", "list", "ragged")
    found = rows_of(tmp_path, until_done, nulls="fill", fill={"list": -1, "ragged": -2}, **data)
    np.testing.assert_array_equal(found["list"][:3], [[-1, -1], [-1, 5], [2, 5]])
    assert [row[mask].tolist() for row, mask in zip(found["ragged"][:3], found["ragged_mask"][:3], strict=True)] == [
        [], [[-2, 1]], [[2, 2], [2, 2]],
    ]  # fmt: skip


def test_nulls_are_filled(tmp_path, until_done, caplog):
    caplog.set_level("INFO", "spark_dl")
    pq.write_table(plain_table(), tmp_path / "a.parquet", row_group_size=4)
    fill = {"age": -1, "city": "c1", "user.size": 0.5, "list": 7.5, "vector": -3.0}
    found = rows_of(tmp_path, until_done, features=NAMES[:-1], encode={"city": ENCODE["city"]}, nulls="fill", fill=fill)
    n = range(ROWS)
    assert found["id"] == list(n)
    assert found["age"] == [-1 if is_null(i, 0) else i for i in n]
    assert found["age"][0].dtype == np.int16
    assert found["city"] == [2 if is_null(i, 1) else (1, 2, 0)[i % 3] for i in n]
    assert found["user.size"] == [0.5 if is_null(i, 2) else i for i in n]
    np.testing.assert_array_equal(found["list"], [[7.5 if is_null(i, 3) else i, 1] for i in n])
    np.testing.assert_array_equal(found["vector"], [[-3, -3] if is_null(i, 4) else [i, 2] for i in n])
    assert f"data.fill.age: 2 null(s) of {tmp_path} become -1" in caplog.text


def test_partitions_of_nulls(tmp_path, until_done):
    for day, first in (("3", 0), (NULL_PARTITION, 4), ("-5", 8)):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"id": range(first, first + 4)}), tmp_path / f"day={day}" / "a.parquet")
    names = ("id", "day")
    assert rows_of(tmp_path, until_done, features=names, nulls="drop")["day"] == [3] * 4 + [-5] * 4
    filled = rows_of(tmp_path, until_done, features=names, nulls="fill", fill={"day": 9})
    assert filled["day"] == [3] * 4 + [9] * 4 + [-5] * 4
    words = {"day": {"as": "vocabulary", "values": ["-5", "3"]}}
    filled = rows_of(tmp_path, until_done, features=names, encode=words, nulls="fill", fill={"day": "3"})
    assert filled["day"] == [2] * 8 + [1] * 4
    for encode in ({}, words):
        with pytest.raises(
            ValueError, match=r"column 'day' is a partition that is null .*set data.nulls to drop or fill"
        ):
            open_parquet(str(tmp_path), names, data=Data(features=names, label=None, encode=encode))


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_nan_and_inf_are_filled(tmp_path, until_done, compression):
    values = [1.5, NAN, 2.5, INF, -INF, 3.5, 4.5, 5.5]
    table = pa.table({
        "id": range(8), "x": values, "list": [[v, 1.0] for v in values], "ragged": [[v] * 2 for v in values],
        "both": [None, NAN, 1.0, None, 2.0, 3.0, 4.0, 5.0],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4, compression=compression, use_dictionary=False)
    data = {
        "features": table.column_names,
        "encode": {"ragged": {"ragged": True}},
        "nulls": "fill",
        "nonfinite": "fill",
    }
    found = rows_of(tmp_path, until_done, fill={"x": -1, "list": -2.0, "ragged": 0.25, "both": 9}, **data)
    finite = [v if np.isfinite(v) else None for v in values]
    assert found["x"] == [-1 if v is None else v for v in finite]
    np.testing.assert_array_equal(found["list"], [[-2 if v is None else v, 1] for v in finite])
    np.testing.assert_array_equal(found["ragged"], [[0.25 if v is None else v] * 2 for v in finite])
    assert found["both"] == [9, 9, 1, 9, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match=r"row group 0 .*column 'x': found NaN or Inf.*with data.fill.x.*in row 1 "):
        rows_of(tmp_path, until_done, fill={"list": -2.0, "ragged": 0.25, "both": 9}, **data)


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_rows_with_nan_and_inf_are_dropped(tmp_path, until_done, compression):
    """Of the second row group all rows are kept, and of the third none is; a null is no NaN, and NaN is no null."""
    x = [1.0, NAN, 2.0, INF, 3.0, 4.0, 5.0, 6.0, NAN, NAN, -INF, 7.0]
    y = [1.0, 2.0, None, 3.0, None, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, NAN]
    table = pa.table({
        "id": range(12), "x": x, "y": y, "list": [[v, 1.0] for v in x],
        "ragged": [[v] * (i % 3) for i, v in enumerate(x)],
        "vector": pa.array([{"type": 1, "values": [v, 0.0]} for v in x], VECTOR),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4, compression=compression, use_dictionary=False)

    def ids(*names, **data):
        settings = {"encode": {"ragged": {"ragged": True}}} if "ragged" in names else {}
        return rows_of(tmp_path, until_done, features=("id", *names), nonfinite="drop", **settings, **data)["id"]

    assert ids() == list(range(12))
    assert ids("x") == ids("list") == ids("vector") == [0, 2, 4, 5, 6, 7, 11]
    assert ids("ragged") == [0, 2, 3, 4, 5, 6, 7, 9, 11]
    assert ids("y", nulls="fill", fill={"y": -1}) == list(range(11))
    assert ids("x", "y", nulls="drop") == [0, 5, 6, 7]
    assert ids("x", filters=[["id", ">", 1], ["id", "<", 8]]) == [2, 4, 5, 6, 7]
    with pytest.raises(
        ValueError, match=r"^data.filters, data.nonfinite: none of the 12 rows .*no NaN or Inf in \['x'\]"
    ):
        ids("x", filters=[["id", "in", [1, 3, 8]]])


@pytest.mark.parametrize(("names", "data", "match"), [
    (["age"], {}, r"column 'age': found 2 null\(s\) in .*, first 1 in row group 0 of a.parquet, expected no nulls;"),
    (["user.size"], {}, r"column 'user.size': found 2 null\(s\)"),
    (["age", "id"], {"nulls": "fill", "fill": {"id": 3}}, "'age': .*data.nulls is fill, but this column has"),
    (["photo"], {"nulls": "fill", "encode": {"photo": ENCODE["photo"]}}, r"column 'photo': found 2 null\(s\)"),
    (["photo"], {"nulls": "fill", "encode": {"photo": ENCODE["photo"]}, "fill": {"photo": 0}},
     "data.fill.photo: image cannot be filled; set data.nulls to drop"),
    (["age"], {"nulls": "fill", "fill": {"age": 40_000}}, "data.fill.age: expected a value of type int16, found 40000"),
    (["age"], {"nulls": "fill", "fill": {"age": "x"}}, "data.fill.age: expected a value of type int16, found 'x'"),
    (["city"], {"nulls": "fill", "fill": {"city": 1}, "encode": {"city": ENCODE["city"]}},
     "data.fill.city: expected a value of type string, found 1"),
    (["age"], {"nulls": "fill", "fill": {"aged": 1}}, "data.fill.aged: no such column is read; did you mean 'age'"),
])  # fmt: skip
def test_what_cannot_be_is_an_error_when_the_dataset_is_opened(tmp_path, names, data, match):
    pq.write_table(plain_table(), tmp_path / "a.parquet", row_group_size=4)
    with pytest.raises(ValueError, match=match):
        open_parquet(str(tmp_path), names, data=Data(features=names, label=None, **data))


def test_rows_that_are_not_counted_or_not_there(tmp_path, until_done):
    table = pa.table({"id": range(4), "x": pa.array([None] * 4, pa.float32())})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"none of the 4 rows of .* passes no null in \['id', 'x'\]"):
        rows_of(tmp_path, until_done, features=("id", "x"), nulls="drop")
    pq.write_table(plain_table(), tmp_path / "a.parquet")
    config = make_config(features=("id", "age"), label=None, num_streams=2, nulls="drop")
    shards = open_parquet(str(tmp_path), config.data.features, data=config.data)
    with pytest.raises(ValueError, match="data.filters, data.nulls, data.nonfinite: all rows of .* would be read"):
        build_loader(shards, config, rank=0, world_size=1)
    counted = filter_rows(shards, config)
    assert (shards.rows, counted.rows) == (ROWS, ROWS - 2)


def test_other_rows_than_were_counted_are_an_error(tmp_path):
    config = make_config(features=("id", "age"), label=None, num_streams=2, nulls="drop", global_batch_size=4)
    pq.write_table(plain_table(), tmp_path / "a.parquet")
    counted = filter_rows(open_parquet(str(tmp_path), config.data.features, data=config.data), config)
    changed = replace(counted, filtered=replace(counted.filtered, group_rows=np.array([ROWS - 3])))
    with pytest.raises(RuntimeError, match="22 rows that pass data.filters, .* data.nonfinite, expected 21"):
        list(build_loader(changed, config, rank=0, world_size=1).epoch(0))


# --- Petastorm ---

SHAPES = [(2 + i % 2, 3) for i in range(12)]
FIELDS = (
    Field("id", "int64", (), Codec("scalar", spark_type="LongType")),
    Field("count", "int32", (), Codec("scalar", spark_type="IntegerType"), nullable=True),
    Field("fixed", "float32", (2,), Codec("ndarray"), nullable=True),
    Field("ragged", "int16", (None,), Codec("compressed_ndarray"), nullable=True),
    Field("square", "float64", (None, None), Codec("ndarray"), nullable=True),
    Field("plane", "float64", (None, None), Codec("ndarray")),
    Field("png", "uint8", (None, None, 3), Codec("image", "png"), nullable=True),
    Field("gray", "uint8", (None, None), Codec("image", "png")),
)


def fixed(i):
    return np.array([i, 0.5], dtype=np.float32)


def ragged(i):
    return np.arange(i % 4, dtype=np.int16) + i


def square(i):
    return np.full((2, 2), i, dtype=np.float64)


def plane(i):
    return np.full((1 + i % 3, 2), i, dtype=np.float64)


@pytest.fixture
def petastorm(tmp_path):
    """As Petastorm's `materialize_dataset` leaves one; nulls where the number of the row ends so."""
    n = range(12)

    def nullable(ends, cells):
        return [None if i % 4 == ends else cell for i, cell in zip(n, cells, strict=True)]

    def savez(out, array):
        np.savez_compressed(out, arr=array)

    table = pa.table({
        "id": pa.array(n),
        "count": pa.array(nullable(0, n), pa.int32()),
        "fixed": pa.array(nullable(1, npy_cells(*map(fixed, n)))),
        "ragged": pa.array(nullable(2, npy_cells(*map(ragged, n), write=savez))),
        "square": pa.array(nullable(0, npy_cells(*map(square, n)))),
        "plane": pa.array(npy_cells(*map(plane, n))),
        "png": pa.array(nullable(3, [png((*SHAPES[i], 3), i) for i in n])),
        "gray": pa.array([png((4, 4), i) for i in n]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=5)
    unischema = Unischema("Schema", FIELDS)
    write_common_metadata(str(tmp_path), table.schema, unischema=unischema, row_groups_per_file={"0.parquet": 3})
    return tmp_path


def test_nullable_fields_of_petastorm_are_dropped(petastorm, until_done):
    encode = {"ragged": {"ragged": True}, "plane": {"ragged": True}, "png": {"as": "image", "resize": [2, 4]},
              "square": {"ragged": False}}  # fmt: skip
    names = ("id", "count", "fixed", "ragged", "plane", "gray")
    found = rows_of(
        petastorm, until_done, features=names, encode={n: encode[n] for n in names if n in encode}, nulls="drop"
    )
    kept = [3, 7, 11]
    assert found["id"] == found["count"] == kept
    np.testing.assert_array_equal(found["fixed"], [fixed(i) for i in kept])
    np.testing.assert_array_equal(found["gray"], [pixels((4, 4), i) for i in kept])
    for name, cell in (("ragged", ragged), ("plane", plane)):
        for row, mask, i in zip(found[name], found[f"{name}_mask"], kept, strict=True):
            np.testing.assert_array_equal(row[mask], cell(i))
            assert row.dtype == cell(i).dtype
    names = ("id", "png", "square")
    found = rows_of(petastorm, until_done, features=names, encode={n: encode[n] for n in names[1:]}, nulls="drop")
    kept = [i for i in range(12) if i % 4 not in (0, 3)]
    assert found["id"] == kept
    np.testing.assert_array_equal(found["square"], [square(i) for i in kept])
    for row, i in zip(found["png"], kept, strict=True):
        assert (row.shape, row.dtype) == ((2, 4, 3), np.uint8)
        if SHAPES[i] == (2, 3):  # only the width is scaled: the outer columns are nearest to those of the image
            np.testing.assert_array_equal(row[:, 0], pixels((2, 3, 3), i)[:, 0])


def test_nullable_fields_of_petastorm_are_filled(petastorm, until_done):
    names = ("id", "count", "fixed", "ragged", "square")
    encode = {"ragged": {"ragged": True}, "square": {"ragged": False}}
    fill = {"count": -7, "fixed": 1.5, "ragged": 3, "square": 0}
    found = rows_of(petastorm, until_done, features=names, encode=encode, nulls="fill", fill=fill)
    n = range(12)
    assert found["count"] == [-7 if i % 4 == 0 else i for i in n]
    np.testing.assert_array_equal(found["fixed"], [[1.5, 1.5] if i % 4 == 1 else fixed(i) for i in n])
    np.testing.assert_array_equal(found["square"], [np.zeros((2, 2)) if i % 4 == 0 else square(i) for i in n])
    for row, mask, i in zip(found["ragged"], found["ragged_mask"], n, strict=True):
        assert row[mask].tolist() == ([] if i % 4 == 2 else ragged(i).tolist())


@pytest.mark.parametrize(("name", "data", "match"), [
    ("count", {}, r"column 'count': found 3 null\(s\) in .*, first 2 in row group 0 of 0.parquet, expected no nulls"),
    ("fixed", {}, r"column 'fixed': found 3 null\(s\)"),
    ("fixed", {"nulls": "fill", "fill": {"fixed": "x"}}, "data.fill.fixed: expected a value of type float"),
    ("fixed", {"nulls": "drop", "nonfinite": "drop"}, "data.nonfinite: found 'drop' for .* 'fixed' contains arrays"),
    ("png", {"nulls": "fill", "fill": {"png": 0}}, "data.fill.png: images and complex numbers cannot be filled; set"),
    ("gray", {"encode": {"gray": {"as": "hash", "buckets": 3}}}, r"data.encode.gray: .*; expected {as: image, resize"),
    ("fixed", {"encode": {"fixed": {"as": "image", "resize": [2, 2]}}}, "data.encode.fixed: .*; expected nothing"),
])  # fmt: skip
def test_what_fields_of_petastorm_cannot_be(petastorm, name, data, match):
    with pytest.raises(ValueError, match=match):
        open_parquet(str(petastorm), [name], data=Data(features=[name], label=None, **data))


@pytest.mark.parametrize(("name", "settings", "match"), [
    ("plane", {"ragged": False}, r"field 'plane', row 1: found a cell of shape \(2, 2\), expected the shape \(1, 2\)"),
    ("png", {"as": "image"}, r"field 'png', row 1: found an image of 3 x 3 pixels, expected the shape \(2, 3, 3\)"),
])  # fmt: skip
def test_fields_whose_shape_varies_have_that_of_their_first_cell(petastorm, until_done, name, settings, match):
    with pytest.raises(RuntimeError, match=match) as caught:
        rows_of(petastorm, until_done, features=("id", name), encode={name: settings}, nulls="drop")
    assert f"data.encode.{name}" in str(caught.value), "it does not say what to change"
    assert re.search(r"row group \d of .*0.parquet", str(caught.value))
