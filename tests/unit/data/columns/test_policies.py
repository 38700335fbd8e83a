"""What becomes of nulls, NaN and Inf: on every kind of column, under every policy."""

import math

import numpy as np
import pyarrow as pa
import pytest

from spark_dl import Data
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.policies import Changes, add_changes, clean_batch, first_nonfinite_row
from spark_dl.data.columns.ragged import Ragged
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from tests.builders.cells import vectors
from tests.builders.images import png

NAN, INF = math.nan, math.inf
ROWS = 6


def source(kind="scalar", dtype="float32", depth=0, ragged=False, fill=None, encoding=Encoding(), name="c"):
    return SourceColumn(name, dtype, kind, depth, ragged, encoding, fill=fill)


FLOATS = pa.float32()
NULLS = {  # a column with nulls in rows 1 and 4
    "scalar": (source(), pa.array([0, None, 2, 3, None, 5], FLOATS)),
    "int": (source(dtype="int64"), pa.array([0, None, 2, 3, None, 5])),
    "dictionary": (source(dtype="int64"), pa.array([0, None, 2, 3, None, 5]).dictionary_encode()),
    "array": (source("array", depth=1), pa.array([[1, 2], None, [3, 4], [5, 6], [None, 7], [8, 9]], pa.list_(FLOATS))),
    "matrix": (
        source("array", depth=2),
        pa.array([[[1, 2]], [[None, 3]], [[4, 5]], [[6, 7]], None, [[8, 9]]], pa.list_(pa.list_(FLOATS))),
    ),
    "ragged": (
        source("array", depth=1, ragged=True), pa.array([[], [None], [1], [2, 3], [4, None], []], pa.list_(FLOATS)),
    ),
    "vector": (
        source("vector", "float64", 1),
        pa.concat_arrays([vectors([1.0, 2.0]), pa.nulls(1, vectors([1.0]).type), vectors((2, {1: 3.0}), [4.0, 5.0]),
                          pa.nulls(1, vectors([1.0]).type), vectors((2, {}))]),
    ),
    "vector's values": (
        source("vector", "float64", 1),
        vectors([1.0, 2.0], (2, {0: None}), (2, {1: 3.0}), [4.0, 5.0], [None, 6.0], (2, {})),
    ),
    "hash": (source(dtype="int64", encoding=Encoding("hash", buckets=9)), pa.array(["a", None, "b", "", None, "c"])),
    "bytes": (
        source(dtype="uint8", ragged=True, encoding=Encoding("bytes")), pa.array(["a", None, "b", "", None, "c"]),
    ),
    "image": (
        source(dtype="uint8", encoding=Encoding("image")),
        pa.array([png((2, 3)), None, png((2, 3)), png((2, 3)), None, png((2, 3))]),
    ),
}  # fmt: skip
NONFINITE = {  # a column with NaN or Inf in rows 1 and 4
    "scalar": (source(), pa.array([0, NAN, 2, 3, INF, 5], FLOATS)),
    "double": (source(dtype="float64"), pa.array([0, NAN, 2, 3, -INF, 5])),
    "array": (
        source("array", depth=1), pa.array([[0, 1], [NAN, 2], [3, 4], [5, 6], [INF, 7], [8, 9]], pa.list_(FLOATS)),
    ),
    "ragged": (
        source("array", depth=1, ragged=True), pa.array([[], [NAN], [1], [2, 3], [4, INF], []], pa.list_(FLOATS)),
    ),
    "vector": (
        source("vector", "float64", 1),
        vectors([1.0, 2.0], (2, {0: NAN}), [4.0, 5.0], (2, {}), [1.0, -INF], (2, {1: 1.0})),
    ),
}  # fmt: skip
IDS = source(dtype="int64", name="id")
ROW_IDS = pa.array(range(ROWS))


def clean(case, **settings):
    column, array = case
    return clean_batch([IDS, column], [ROW_IDS, array], Data(**settings))


def rows_of(cells):
    if isinstance(cells, Ragged):
        return [cells.values[a:b].tolist() for a, b in zip(cells.offsets[:-1], cells.offsets[1:], strict=True)]
    return cells.tolist()


@pytest.mark.parametrize("kind", NULLS)
def test_nulls_are_an_error_that_names_column_count_and_row(kind):
    found = r"column 'c': found null\(s\) in 2 row\(s\) of a batch of 6, .*set data.nulls to"
    with pytest.raises(BadCellsError, match=found) as caught:
        clean(NULLS[kind])
    assert caught.value.row == 1


@pytest.mark.parametrize("kind", NULLS)
def test_rows_with_nulls_are_dropped_and_counted(kind):
    (ids, cells), changes = clean(NULLS[kind], nulls="drop")
    assert ids.tolist() == [0, 2, 3, 5]
    assert changes == Changes(2, {"c": 2}, {})
    column, array = NULLS[kind]
    (_, expected), _ = clean_batch([IDS, column], [ROW_IDS.take([0, 2, 3, 5]), array.take([0, 2, 3, 5])], Data())
    assert rows_of(cells) == rows_of(expected)


@pytest.mark.parametrize("kind", NULLS)
def test_nulls_are_filled_only_where_a_value_is_given(kind):
    with pytest.raises(BadCellsError, match=r"data.fill.c|none in (bytes|image); set data.nulls to drop"):
        clean(NULLS[kind], nulls="fill")


@pytest.mark.parametrize("kind", [k for k in NULLS if k not in ("bytes", "image")])
def test_nulls_are_filled_and_counted(kind):
    column, array = NULLS[kind]
    fill = "z" if kind == "hash" else 7
    filled = SourceColumn(**{**vars(column), "fill": fill})
    (ids, cells), changes = clean((filled, array), nulls="fill")
    assert ids.tolist() == [*range(ROWS)]
    assert changes == Changes(0, {}, {"c": 2})
    kept = [0, 2, 3, 5]
    assert [rows_of(cells)[i] for i in kept] == rows_of(clean((column, array), nulls="drop")[0][1])


@pytest.mark.parametrize("kind", NONFINITE)
def test_nan_and_inf_are_an_error_that_names_column_count_and_row(kind):
    found = r"column 'c': found NaN or Inf in 2 row\(s\) of a batch of 6, .*data.nonfinite"
    with pytest.raises(BadCellsError, match=found) as caught:
        clean(NONFINITE[kind], nulls="drop")
    assert caught.value.row == 1


@pytest.mark.parametrize("kind", NONFINITE)
def test_rows_with_nan_and_inf_are_dropped_and_counted(kind):
    (ids, cells), changes = clean(NONFINITE[kind], nonfinite="drop")
    assert ids.tolist() == [0, 2, 3, 5]
    assert changes == Changes(2, {"c": 2}, {})
    values = cells.own_values if isinstance(cells, Ragged) else cells
    assert np.isfinite(values).all()


@pytest.mark.parametrize("kind", NONFINITE)
def test_nan_and_inf_are_allowed_or_filled(kind):
    column, array = NONFINITE[kind]
    (_, allowed), changes = clean((column, array), nonfinite="allow")
    assert changes == Changes()
    (_, filled), changes = clean((SourceColumn(**{**vars(column), "fill": 7}), array), nonfinite="fill")
    assert changes == Changes(0, {}, {"c": 2})
    before, after = (c.values if isinstance(c, Ragged) else c for c in (allowed, filled))
    np.testing.assert_array_equal(after, np.where(np.isfinite(before), before, 7))
    assert after.dtype == before.dtype
    with pytest.raises(BadCellsError, match=r"expected a value for them in data.fill.c"):
        clean((column, array), nonfinite="fill")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_found(dtype, bad):
    cells = np.ones((5, 3), dtype)
    assert first_nonfinite_row(cells) is None
    cells[3, 1] = bad
    assert first_nonfinite_row(cells) == 3
    if cells.dtype.kind == "c":
        cells[2, 0] = complex(1.0, bad)
        assert first_nonfinite_row(cells) == 2


def test_one_policy_for_nulls_and_another_for_nan():
    case = (source(fill=7), pa.array([0, None, NAN, 3, INF, None], FLOATS))
    (ids, cells), changes = clean(case, nulls="fill", nonfinite="drop")
    assert (ids.tolist(), cells.tolist()) == ([0, 1, 3, 5], [0, 7, 3, 7])
    assert changes == Changes(2, {"c": 2}, {"c": 2})
    (ids, cells), changes = clean(case, nulls="drop", nonfinite="fill")
    assert (ids.tolist(), cells.tolist()) == ([0, 2, 3, 4], [0, 7, 3, 7])


def test_a_row_counts_in_each_column_and_is_dropped_once():
    columns = [source(name="a"), source(name="b")]
    arrays = [pa.array([1, None, NAN, 4], FLOATS), pa.array([None, None, 3, 4], FLOATS)]
    values, changes = clean_batch(columns, arrays, Data(nulls="drop", nonfinite="drop"))
    assert [v.tolist() for v in values] == [[4], [4]]
    assert changes == Changes(3, {"a": 2, "b": 2}, {})


def test_all_rows_may_be_dropped():
    values, changes = clean_batch(
        [source("array", depth=1)], [pa.array([None, None], pa.list_(FLOATS))], Data(nulls="drop")
    )
    assert len(values[0]) == 0
    assert changes.dropped_rows == 2


def test_the_row_of_another_error_counts_the_dropped_ones():
    array = pa.array([None, [1], None, [1], [1, 2]], pa.list_(FLOATS))
    with pytest.raises(BadCellsError, match="lengths") as caught:
        clean_batch([source("array", depth=1)], [array], Data(nulls="drop"))
    assert caught.value.row == 4


def test_images_of_unequal_shape_and_other_bytes_are_an_error():
    column = source(dtype="uint8", encoding=Encoding("image"))
    for bad, match in (
        (png((3, 2)), r"an image of shape \(3, 2\), expected one shape"),
        (b"GIF89a", "not a PNG or JPEG"),
    ):
        with pytest.raises(BadCellsError, match=match) as caught:
            clean_batch([column], [pa.array([png((2, 3)), png((2, 3)), bad])], Data())
        assert caught.value.row == 2


def test_a_known_shape_of_images_tells_which_one_is_odd():
    column = source(dtype="uint8", encoding=Encoding("image"))
    with pytest.raises(BadCellsError, match=r"image of shape \(3, 2\), .* the other cells have \(2, 3\)") as caught:
        clean_batch([column], [pa.array([png((3, 2)), png((2, 3))])], Data(), shapes=[(2, 3)])
    assert caught.value.row == 0


def test_changes_add_up():
    parts = [Changes(1, {"a": 1}, {"b": 2}), Changes(), Changes(2, {"a": 1, "b": 2}, {})]
    assert add_changes(parts) == Changes(3, {"a": 2, "b": 2}, {"b": 2})


@pytest.mark.parametrize(
    ("cases", "key", "choices"), [(NULLS, "nulls", "fill"), (NONFINITE, "nonfinite", "allow or fill")]
)
@pytest.mark.parametrize("policy", ["error", "drop"])
def test_where_no_row_may_be_dropped_drop_is_an_error_that_does_not_propose_it(cases, key, choices, policy):
    for column, array in cases.values():
        with pytest.raises(BadCellsError, match=rf"in 2 row\(s\).* none; set data.{key} to {choices}, or") as caught:
            clean_batch([column], [array], Data(**{key: policy}), may_drop=False)
        assert caught.value.row == 1
