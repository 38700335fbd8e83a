"""What a batch has of stored cells: other dtypes, and the weights of the rows."""

import numpy as np
import pytest

from spark_dl import Data, Shards
from spark_dl.data.columns.batch import cast_cells, row_weights
from spark_dl.data.columns.ragged import from_lengths
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.write.arrays import write_arrays
from tests.builders.settings import make_config

ROWS = 50


def shards(tmp_path, **columns):
    columns = {"x": np.arange(ROWS, dtype=np.float64)[:, None] / 3, "label": np.arange(ROWS) % 5.0, **columns}
    data = Data(features=("x",), weight="weight" if "weight" in columns else None)
    return write_arrays(columns, str(tmp_path / "d"), data, shards=Shards(rows_per_row_group=9))


def batches(dataset, world_size=1, **data):
    config = make_config(features=("x",), num_streams=4, global_batch_size=12, accumulation_steps=2, **data)
    loaders = [ShardLoader(dataset, config, rank=r, world_size=world_size, micro_batches=2) for r in range(world_size)]
    return [batch for loader in loaders for step in loader.epoch(0) for batch in step.micro_batches]


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_have_the_dtypes_of_the_setting_and_files_keep_theirs(tmp_path, world_size):
    dataset = shards(tmp_path)
    for batch in batches(dataset, world_size, cast={"x": "float32", "label": "int64"}):
        assert (batch["x"].numpy().dtype, batch["label"].numpy().dtype) == (np.float32, np.int64)
        ids = (batch["x"] * 3).round().flatten().long()
        assert (batch["label"] == ids % 5).all()
    assert {c.dtype for c in dataset.columns} == {"float64"}


def test_ragged_columns_are_cast(tmp_path):
    words = from_lengths(np.arange(6, dtype=np.int32), np.array([1, 2, 3]))
    cast = cast_cells("words", words, "float32")
    assert cast.values.dtype == np.float32
    assert cast.lengths.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0.0, 0.5], "int64"), ([np.nan], "int64"), ([1e30], "int64"), ([300], "uint8"), ([-1], "uint8"), ([2], "bool"),
        ([1e300], "float32"), ([70000], "float16"),
    ],
)  # fmt: skip
def test_a_value_that_the_dtype_cannot_hold_is_an_error_that_names_it(values, dtype):
    match = rf"column 'c': found the value {values[-1]:g} of .*, expected values that {dtype} can hold \(data.cast.c\)"
    with pytest.raises(ValueError, match=match.replace("+", r"\+")):
        cast_cells("c", np.array(values), dtype)


def test_a_float_is_rounded_and_keeps_nan_and_inf():
    cast = cast_cells("c", np.array([0.1, np.nan, np.inf]), "float32")
    np.testing.assert_array_equal(cast, np.array([0.1, np.nan, np.inf], dtype=np.float32))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["weight", "w"])
def test_weights_are_those_of_the_column_and_0_for_padding(tmp_path, world_size, name):
    dataset = shards(tmp_path, **{name: np.arange(ROWS) % 4 * 0.5}) if name == "weight" else shards(
        tmp_path, w=np.arange(ROWS) % 4 * 0.5
    )  # fmt: skip
    total = 0.0
    for batch in batches(dataset, world_size, weight=name):
        assert batch.keys() == {"x", "label", "weight"}
        ids = (batch["x"] * 3).round().flatten().long()
        assert set((batch["weight"] - ids % 4 * 0.5).tolist()) <= {0.0, *(-i * 0.5 for i in range(4))}
        total += float(batch["weight"].sum())
    assert total == sum(i % 4 * 0.5 for i in range(ROWS))


@pytest.mark.parametrize("bad", [-0.5, np.nan, np.inf])
def test_a_weight_that_is_negative_or_not_finite_is_an_error_that_names_the_column(bad):
    with pytest.raises(ValueError, match=r"data.weight: expected finite weights >= 0 in column 'w', found"):
        row_weights("w", np.array([1.0, bad]), np.ones(2, np.float32))


def test_weights_are_one_number_per_row():
    with pytest.raises(ValueError, match=r"data.weight: expected one number per row in column 'w'"):
        row_weights("w", np.ones((2, 1)), np.ones(2, np.float32))


@pytest.mark.parametrize(("values", "dtype", "is_error"), [
    ((1 << 40) + np.arange(64), "float32", True), (1_790_000_000 + np.arange(48), "float32", True),
    (-(1 << 40) - np.arange(64), "float32", True), (np.array([2049, 2050, 2048], np.int16), "float16", True),
    (np.array([1 << 62, (1 << 62) + 1]), "float64", True),
    (np.array([1 << 63, (1 << 63) + 1], np.uint64), "float64", True),
    ((1 << 40) + np.arange(64), "float64", False), (np.arange(2000), "float16", False),
    (np.array([(1 << 40) + 1] * 64), "float32", False), ((1 << 40) + (1 << 20) * np.arange(64) + 1, "float32", False),
    (np.array([2**24 + 1, 2**30 + 7]), "float32", False), (np.zeros(0, np.int64), "float32", False),
    (np.array([[1 << 40, (1 << 40) + 1]]), "float32", True),
])  # fmt: skip
def test_integers_that_a_cast_makes_equal_are_an_error(values, dtype, is_error):
    """64 ids near 2^40 were one value in float32, without a word. Rounding that keeps them apart is asked for."""
    for cells in (values, from_lengths(values, np.array([len(values)]))):
        if is_error:
            with pytest.raises(
                ValueError, match=rf"column 'id': found the values -?\d+ and -?\d+, which are both .*{dtype}"
            ):
                cast_cells("id", cells, dtype)
        else:
            assert str(getattr(cast_cells("id", cells, dtype), "values", cast_cells("id", cells, dtype)).dtype) == dtype
