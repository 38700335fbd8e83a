"""The record of a column: what its cells take, its way through JSON, and what it must agree with."""

import dataclasses
import json

import pytest

from spark_dl.data.columns import schema
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.schema import Column


@pytest.mark.parametrize("column", [
    Column("x", "int64"), Column("x", "float32", (2, 3), "ndarray"),
    Column("x", "int32", (None, 3), "list", mean_size=4.5),
    Column("x", "uint8", (4, 5, 3), "image", Encoding("image"), 200.5),
    Column("x", "int64", (), "scalar", Encoding("vocabulary", vocabulary=("a", "ß"), unknown="error")),
    Column("x", "int64", (), "scalar", Encoding("decimal", scale=2)),
])  # fmt: skip
def test_columns_travel_as_json(column):
    assert Column.from_plain(json.loads(json.dumps(dataclasses.asdict(column)))) == column


def test_columns_of_older_manifests_are_read():
    plain = {"name": "x", "dtype": "float32", "shape": [2, 3], "codec": "ndarray"}
    assert Column.from_plain(plain) == Column("x", "float32", (2, 3), "ndarray")


@pytest.mark.parametrize(("column", "stored", "decoded"), [
    (Column("x", "int64"), 8, 8),
    (Column("x", "float32", (2, 3), "ndarray"), 128 + 24, 24),
    (Column("x", "int32", (None, 3), "list", mean_size=4.5), 26, 26),
    (Column("x", "uint8", (None,), "binary", Encoding("bytes"), 10.0), 18, 18),
    (Column("x", "uint8", (4, 5, 3), "image", Encoding("image"), 200.5), 205, 60),
    (Column("x", "uint8", (4, 5, 3), "image", Encoding("image")), 4, 60),  # as of a dataset without rows
    (Column("x", "int32", (None, 3), "list"), 8, 8),
])  # fmt: skip
def test_bytes_of_a_row(column, stored, decoded):
    assert (column.row_bytes, column.value_bytes) == (stored, decoded)


@pytest.mark.parametrize(("shape", "is_good"), [
    ([2, 3], True), ([None, 3], True), ([0], True), ([-1], False), ([2, None], False), ([2.0], False), ([True], False),
    ([1] * 64, True), ([1] * 65, False), ([2**20, 2**20], False),
])  # fmt: skip
def test_a_manifest_with_an_invalid_shape_is_an_error_that_names_it(shape, is_good):
    plain = {**json.loads(json.dumps(dataclasses.asdict(Column("x", "float32", (1,), "ndarray")))), "shape": shape}
    if is_good:
        assert Column.from_plain(plain).shape == tuple(shape)
        return
    with pytest.raises(ValueError, match="column 'x': found the invalid shape"):
        Column.from_plain(plain)


@pytest.mark.parametrize(("key", "good", "bad"), [
    ("kind", "hash", "other"), ("unit", "ms", "h"), ("scale", 2, 2.5), ("buckets", 3, 0), ("buckets", 2**63 - 1, 2**63),
    ("vocabulary", ["a"], ["a", 1]), ("unknown", "zero", "one"), ("resize", [2, 3], [2, 0]), ("resize", None, [2]),
    ("mode", "RGB", "CMYK"), ("orientation", "apply", "east"), ("orientation", "ignore", None),
    ("interpolation", "nearest", "cubic?"), ("source_type", "decimal(9,2)", "decimal; x"), ("formats", ["PNG"], []),
])  # fmt: skip
def test_a_manifest_with_an_invalid_encoding_is_an_error_that_names_the_key(key, good, bad):
    plain = json.loads(json.dumps(dataclasses.asdict(Column("x", "int64"))))
    plain["encoding"][key] = good
    assert json.loads(json.dumps(getattr(Column.from_plain(plain).encoding, key))) == good
    plain["encoding"][key] = bad
    with pytest.raises(ValueError, match=f"encoding.{key}"):
        Column.from_plain(plain)


@pytest.mark.parametrize("other", [
    Column("x", "int32"), Column("x", "int64", (2,), "ndarray"),
    Column("x", "int64", (), "scalar", Encoding("hash", buckets=3)),
])  # fmt: skip
def test_columns_that_differ_from_those_of_the_training_dataset(other):
    schema.check_reference_columns([Column("x", "int64")], [Column("x", "int64", mean_size=3.0), Column("y", "bool")])
    with pytest.raises(ValueError, match="column 'x': found the .*as in the training dataset"):
        schema.check_reference_columns([other], [Column("x", "int64")])


@pytest.mark.parametrize(("settings", "key"), [
    ({"as": "vocabulary"}, "as"), ({"as": "hash", "buckets": 4}, "buckets"), ({"ragged": True}, "ragged"),
])  # fmt: skip
def test_settings_with_which_a_dataset_was_not_written(settings, key):
    column = Column("x", "int64", (), "scalar", Encoding("hash", buckets=3))
    schema.check_settings([column], {"x": {"as": "hash", "buckets": 3}, "y": {"ragged": True}})
    with pytest.raises(ValueError, match=rf"data.encode.x.{key}: found .* the dataset was written with"):
        schema.check_settings([column], {"x": settings})
