"""Cells: from Arrow columns to arrays."""

import datetime
import zlib
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from spark_dl.data.columns.cells import read_cells
from spark_dl.data.columns.elements import nonfinite_rows
from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.columns.types import check_fill
from tests.builders.cells import vectors

DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64"]


def values_of(dtype, shape, rows=6):
    return (np.random.default_rng(1).normal(size=(rows, *shape)) * 50).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalar_cells(dtype):
    values = values_of(dtype, ())
    found = read_cells(SourceColumn("c", dtype, "scalar"), pa.array(values))
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


def nested(values, depth, inner):
    kind = inner
    for _ in range(depth):
        kind = pa.list_(kind)
    return pa.array(values, kind)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_array_cells(dtype, shape):
    values = values_of(dtype, shape)
    stored = nested(values.tolist(), len(shape), pa.from_numpy_dtype(np.dtype(dtype)))
    column = SourceColumn("c", dtype, "array", len(shape))
    for start, stop in [(0, 6), (2, 5), (5, 6)]:
        found = read_cells(column, stored[start:stop])
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values[start:stop])


VECTOR = SourceColumn("c", "float64", "vector", 1)
MIXED = [[1.0, 2.0, 3.0], (3, {0: 7.0, 2: 9.0}), (3, {}), [4.0, 5.0, 6.0], (3, {1: -1.0})]
AS_ARRAY = np.array([[1, 2, 3], [7, 0, 9], [0, 0, 0], [4, 5, 6], [0, -1, 0]], dtype=np.float64)


@pytest.mark.parametrize("kind", [pa.uint8(), pa.int64()])
def test_types_of_vectors_may_have_any_width(kind):
    fields = [pa.field(f.name, kind if f.name == "type" else f.type) for f in vectors().type]
    stored = pa.array(vectors(*MIXED).to_pylist(), pa.struct(fields))
    assert np.array_equal(read_cells(VECTOR, stored), AS_ARRAY)


def test_a_bad_row_after_nulls_that_are_filled_is_named_by_its_own_number():
    column = SourceColumn("c", "int64", "array", 1, fill=0)
    with pytest.raises(BadCellsError) as error:
        read_cells(column, pa.array([None, [1, 2], None, [1]]), (2,))
    assert error.value.row == 3


def malformed(field, row, value):
    """Vectors, of which one has another value in one of its fields."""
    plain = vectors(*MIXED).to_pylist()
    plain[row] = {**plain[row], field: value}
    return pa.array(plain, vectors().type)


@pytest.mark.parametrize(("field", "row", "value", "found"), [
    ("type", 0, None, "a vector of unknown type"),
    ("type", 3, 2, "a vector of unknown type"),
    ("size", 1, None, "a sparse vector without a size"),
    ("indices", 1, [0], "a vector with another number of indices than of values"),
    ("indices", 4, None, "a vector with another number of indices than of values"),
    ("indices", 3, [0, 1, 2], "a vector with another number of indices than of values"),
    ("values", 1, [7.0], "a vector with another number of indices than of values"),
    ("indices", 1, [0, None], "a null among the indices of a vector"),
])  # fmt: skip
def test_vectors_that_spark_does_not_make_are_an_error(field, row, value, found):
    with pytest.raises(BadCellsError, match=f"column 'c': found {found}, expected Spark ML vectors") as error:
        read_cells(VECTOR, malformed(field, row, value))
    assert error.value.row == row


@pytest.mark.parametrize("kept", [slice(0, 5), slice(0, 1), slice(1, 3), slice(1, 5), slice(3, 4), slice(4, 5)])
def test_dense_and_sparse_vectors_in_any_mixture(kept):
    found = read_cells(VECTOR, vectors(*MIXED)[kept])
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, AS_ARRAY[kept])


def array_column(depth=1):
    return SourceColumn("c", "int32", "array", depth)


@pytest.mark.parametrize(("column", "stored", "row", "message"), [
    (SourceColumn("c", "int32", "scalar"), pa.array([1, 2, None], pa.int32()), 2, "1 null"),
    (SourceColumn("c", "bool", "scalar"), pa.array([None, True, None]), 0, "2 null"),
    (array_column(), nested([[1], None], 1, pa.int32()), 1, "1 null"),
    (array_column(), nested([[1, 2], [3, 4], [5, None]], 1, pa.int32()), 2, "null inside an array"),
    (array_column(2), nested([[[1], [2]], [[3], [None]]], 2, pa.int32()), 1, "null inside an array"),
    (array_column(), nested([[1, 2], [3, 4], [5]], 1, pa.int32()), 2, r"lengths \[1, 2\].*the first cell has 2"),
    (array_column(2), nested([[[1, 2]], [[3, 4]], [[5]]], 2, pa.int32()), 2, r"lengths \[1, 2\]"),
    (array_column(2), nested([[[1], [2]], [[3], [4, 5]]], 2, pa.int32()), 1, r"lengths \[1, 2\]"),
    (array_column(2), nested([[[1], [2]], [[3]]], 2, pa.int32()), 1, r"lengths \[1, 2\]"),
    (VECTOR, vectors([1.0, 2.0], (2, {}), (3, {})), 2, r"sizes \[2, 3\].*the first cell has 2"),
    (VECTOR, vectors((2, {0: 1.0}), [1.0]), 1, r"sizes \[1, 2\]"),
    (VECTOR, vectors([1.0, 2.0], (2, {}), (2, {1: None})), 2, "a null inside a vector, expected no nulls"),
    (VECTOR, vectors([1.0, 2.0], [3.0, None]), 1, "a null inside a vector"),
    (VECTOR, vectors((2, {0: 1.0}), (2, {2: 1.0})), 1, "the index 2 in a sparse vector, expected indices from 0 to 1"),
    (VECTOR, vectors((2, {0: 1.0}), (2, {-1: 1.0})), 1, "the index -1 in a sparse vector"),
    (SourceColumn("c", "int32", "scalar"), pa.DictionaryArray.from_arrays([0, 1, 0], [1, None]), 1, "1 null"),
])  # fmt: skip
def test_bad_cells_are_an_error_that_names_the_column_and_the_row(column, stored, row, message):
    with pytest.raises(BadCellsError, match=rf"column 'c': found .*{message}") as caught:
        read_cells(column, stored)
    assert caught.value.row == row


def test_the_row_of_a_bad_cell_counts_from_the_start_of_a_slice():
    with pytest.raises(BadCellsError) as caught:
        read_cells(array_column(), nested([[1], [1], [1], [1, 2]], 1, pa.int32())[1:])
    assert caught.value.row == 2


def test_a_null_inner_array_is_reported_with_its_row():
    array = pa.array([[[1], [2]], [[1], None]], pa.list_(pa.list_(pa.int32())))
    with pytest.raises(BadCellsError, match="a null inside an array") as error:
        read_cells(SourceColumn("x", "int32", "array", 2), array)
    assert error.value.row == 1


# Types that become numbers


def column(kind, dtype="int64", depth=0, ragged=False, fill=None, **encoding):
    shape = "array" if depth else "scalar"
    return SourceColumn("c", dtype, shape, depth, ragged, Encoding(kind, **encoding), fill=fill)


TICKS = [0, 1, -1, 1_600_000_000_123_456_789, -86_400_000_000_001]
NS = {"D": 86_400_000_000_000, "s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}


@pytest.mark.parametrize("stored", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("unit", ["D", "s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
def test_timestamps_are_whole_ticks_and_round_towards_the_past(stored, unit, zone):
    ticks = [t // NS[stored] for t in TICKS]
    array = pa.array(ticks, pa.int64()).cast(pa.timestamp(stored, zone))
    dtype = "int32" if unit == "D" else "int64"
    found = read_cells(column("timestamp", dtype, unit=unit), array)
    assert found.dtype == dtype
    assert found.tolist() == [t * NS[stored] // NS[unit] for t in ticks]


@pytest.mark.parametrize("arrow", [pa.date32(), pa.date64()])
@pytest.mark.parametrize("unit", ["D", "s", "us"])
def test_dates_are_ticks_since_1970(arrow, unit):
    days = [datetime.date(1970, 1, 1), datetime.date(1969, 12, 31), datetime.date(2024, 2, 29), datetime.date(1, 1, 1)]
    found = read_cells(column("timestamp", "int32" if unit == "D" else "int64", unit=unit), pa.array(days, arrow))
    assert found.tolist() == [(d - days[0]).days * NS["D"] // NS[unit] for d in days]


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_durations_are_ticks(unit):
    found = read_cells(column("duration", unit=unit), pa.array([1_500_000, -1, 0], pa.duration("us")))
    assert found.tolist() == [t * 1000 // NS[unit] for t in (1_500_000, -1, 0)]


def test_a_time_that_does_not_fit_is_an_error():
    array = pa.array([0, 10**10], pa.timestamp("s"))
    with pytest.raises(
        BadCellsError, match=r"'c': found 2286-11-20.*outside int64 in ns.*data.encode.c.unit"
    ) as caught:
        read_cells(column("timestamp", unit="ns"), array)
    assert caught.value.row == 1


DECIMALS = ["0", "-0.01", "1.50", "92233720368547758.07", "-92233720368547758.08"]


@pytest.mark.parametrize("arrow", [pa.decimal128(19, 2), pa.decimal128(38, 2), pa.decimal256(60, 2)])
@pytest.mark.parametrize("kept", [slice(0, 5), slice(1, 4), slice(3, 5), slice(0, 0)])
def test_decimals_are_unscaled_and_exact(arrow, kept):
    array = pa.array([Decimal(d) for d in DECIMALS], arrow)[kept]
    found = read_cells(column("decimal", scale=2), array)
    assert found.dtype == np.int64
    assert found.tolist() == [int(Decimal(d).scaleb(2)) for d in DECIMALS[kept]]
    as_float = read_cells(column("float", "float64"), array)
    assert as_float.tolist() == [float(d) for d in DECIMALS[kept]]


@pytest.mark.parametrize("value", ["92233720368547758.08", "-92233720368547758.09", "9" * 30])
def test_a_decimal_that_does_not_fit_is_an_error_and_never_another_number(value):
    array = pa.array([Decimal(1), Decimal(value)], pa.decimal128(38, 2))
    with pytest.raises(BadCellsError, match=r"found -?\d+.*within 64 bits; set data.encode.c: \{as: float\}") as caught:
        read_cells(column("decimal", scale=2), array)
    assert caught.value.row == 1


WORDS = ["b", "", "ß", "b", "unseen", "a"]


@pytest.mark.parametrize("arrow", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_words_by_vocabulary_and_by_hash(arrow):
    array = pa.array(WORDS).cast(arrow) if not pa.types.is_dictionary(arrow) else pa.array(WORDS).dictionary_encode()
    known = ("a", "b", "", "ß")
    assert read_cells(column("vocabulary", vocabulary=known), array).tolist() == [2, 3, 4, 2, 0, 1]
    strict = column("vocabulary", vocabulary=known, unknown="error")
    assert read_cells(strict, array[:4]).tolist() == [1, 2, 3, 1]
    with pytest.raises(
        BadCellsError, match=r"found 'unseen', expected one of 4 known strings; .*unknown: zero"
    ) as caught:
        read_cells(strict, array[2:])
    assert caught.value.row == 2
    found = read_cells(column("hash", buckets=1000), array)
    assert found.tolist() == [zlib.crc32(w.encode()) % 1000 for w in WORDS]
    assert found.dtype == np.int64


def test_the_hash_is_the_crc_32_that_everybody_has():
    words = pa.array(["", "123456789", "Zürich"])
    assert read_cells(column("hash", buckets=2**32), words).tolist() == [0, 0xCBF43926, zlib.crc32("Zürich".encode())]


def rows_of(ragged):
    return [ragged.values[a:b].tolist() for a, b in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


@pytest.mark.parametrize("arrow", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("kept", [slice(0, 6), slice(2, 5), slice(1, 2), slice(3, 3)])
def test_bytes_are_ragged(arrow, kept):
    found = read_cells(column("bytes", "uint8", ragged=True), pa.array(WORDS).cast(arrow)[kept])
    assert found.values.dtype == np.uint8
    assert [bytes(r) for r in rows_of(found)] == [w.encode() for w in WORDS[kept]]


def test_binary_of_a_fixed_size():
    found = read_cells(column("bytes", "uint8", ragged=True), pa.array([b"abc", b"def"], pa.binary(3)))
    assert rows_of(found) == [[*b"abc"], [*b"def"]]


RAGGED = [[1, 2], [], [3], [4, 5, 6], []]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
@pytest.mark.parametrize("kept", [slice(0, 5), slice(1, 4), slice(1, 2), slice(4, 5), slice(0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_arrays(kind, kept, dtype):
    stored = pa.array(
        [[dtype == "bool" or v for v in row] for row in RAGGED], kind(pa.from_numpy_dtype(np.dtype(dtype)))
    )
    found = read_cells(column("number", dtype, 1, ragged=True), stored[kept])
    assert found.values.dtype == dtype
    assert rows_of(found) == stored[kept].to_pylist()


def test_ragged_arrays_of_arrays_of_one_length():
    values = [[[1, 2], [3, 4]], [], [[5, 6]]]
    found = read_cells(column("number", "int32", 2, ragged=True), nested(values, 2, pa.int32()))
    assert found.inner == (2,)
    assert rows_of(found) == values
    with pytest.raises(BadCellsError, match=r"\[1, 2\], expected one length.*; only the first axis of a") as caught:
        read_cells(column("number", "int32", 2, ragged=True), nested([[[1, 2]], [], [[3, 4], [5]]], 2, pa.int32()))
    assert caught.value.row == 2


def test_elements_of_arrays_are_encoded_as_scalars_are():
    words = pa.array([["a", "b"], ["b"], []])
    found = read_cells(column("vocabulary", "int64", 1, ragged=True, vocabulary=("b", "a")), words)
    assert rows_of(found) == [[2, 1], [1], []]
    prices = pa.array([[Decimal("1.5")], [Decimal("-2")]], pa.list_(pa.decimal128(5, 1)))
    assert read_cells(column("decimal", "int64", 1, scale=1), prices).tolist() == [[15], [-20]]
    days = pa.array([[datetime.date(1970, 1, 2)]])
    assert read_cells(column("timestamp", "int32", 1, unit="D"), days).tolist() == [[1]]


def test_an_array_of_unequal_length_says_how_to_allow_it():
    with pytest.raises(BadCellsError, match=r"set data.encode.c: \{ragged: true\}"):
        read_cells(array_column(), nested([[1], [1, 2]], 1, pa.int32()))


@pytest.mark.parametrize(("column", "stored", "shape", "row", "message"), [
    (array_column(), nested([[5] * 5, [3] * 3, [3] * 3], 1, pa.int32()), (3,), 0, r"\[3, 5\].*have 3, or .*ragged"),
    (array_column(), nested([[5] * 5, [5] * 5], 1, pa.int32()), (3,), 0, r"\[5\].*the other cells have 3, or .*ragged"),
    (array_column(2), nested([[[1], [2]], [[3, 4], [5, 6]]], 2, pa.int32()), (2, 2), 0, r"lengths \[1, 2\].*have 2"),
    (VECTOR, vectors([1.0, 2.0], (3, {}), (3, {})), (3,), 0, r"sizes \[2, 3\].*the other cells have 3"),
    (VECTOR, vectors((2, {}), (2, {})), (3,), 0, r"sizes \[2\].*the other cells have 3"),
])  # fmt: skip
def test_a_known_shape_tells_which_row_is_the_odd_one(column, stored, shape, row, message):
    with pytest.raises(BadCellsError, match=message) as caught:
        read_cells(column, stored, shape)
    assert caught.value.row == row


# Nulls that are filled


@pytest.mark.parametrize(("source", "stored", "expected"), [
    (column("number", "int32", fill=7), pa.array([1, None], pa.int32()), [1, 7]),
    (column("number", "int32", fill=7), pa.array([None, None], pa.int32()), [7, 7]),
    (column("number", "bool", fill=True), pa.array([None, False]), [True, False]),
    (column("decimal", scale=2, fill=9.99), pa.array([None, Decimal(1)], pa.decimal128(9, 2)), [999, 100]),
    (column("timestamp", "int32", unit="D", fill="1970-01-03"), pa.array([None, 5], pa.date32()), [2, 5]),
    (column("vocabulary", vocabulary=("a", "b"), fill="b"), pa.array([None, "a", "x"]), [2, 1, 0]),
    (column("number", "int32", 1, fill=7), nested([[1, None], None, [3, 4]], 1, pa.int32()), [[1, 7], [7, 7], [3, 4]]),
    (column("number", "float32", 2, fill=5), nested([None, [[1, None]]], 2, pa.float32()), [[[5, 5]], [[1, 5]]]),
])  # fmt: skip
def test_nulls_are_filled(source, stored, expected):
    found = read_cells(source, stored)
    assert found.dtype == source.dtype
    assert found.tolist() == expected


@pytest.mark.parametrize("stored", [
    pa.timestamp("s"), pa.timestamp("ms", "UTC"), pa.timestamp("us"), pa.timestamp("us", "Europe/Berlin"),
    pa.timestamp("ns", "UTC"), pa.timestamp("ns"),
])  # fmt: skip
@pytest.mark.parametrize(("unit", "fill"), [
    ("s", 1_700_000_000), ("ms", 1_700_000_000_000), ("us", 1_700_000_000_000_000), ("ns", 1_700_000_000_000_000_000),
    ("s", "2023-11-14 22:13:20"), ("us", "2023-11-14T22:13:20"),
])  # fmt: skip
def test_a_time_that_is_filled_is_in_the_column_s_unit_whatever_unit_is_stored(stored, unit, fill):
    """And a text without a zone is in UTC, as in filters."""
    source = column("timestamp", unit=unit, fill=fill)
    ticks = 1_700_000_000 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    assert read_cells(source, pa.array([None, 0], stored)).tolist() == [ticks, 0]
    check_fill(source, fill, stored)


@pytest.mark.parametrize(("unit", "fill", "stored", "expected"), [
    ("D", 19_675, pa.timestamp("us"), 19_675), ("D", 19_675, pa.date32(), 19_675),
    ("D", "2023-11-14", pa.date32(), 19_675), ("s", 86_400, pa.date32(), 86_400),
    ("us", "2023-11-14 22:13:20+01:00", pa.timestamp("us", "UTC"), 1_699_996_400_000_000),
])  # fmt: skip
def test_dates_and_texts_with_a_zone_are_filled(unit, fill, stored, expected):
    assert read_cells(column("timestamp", unit=unit, fill=fill), pa.array([None], stored)).tolist() == [expected]


def test_a_duration_that_is_filled_is_in_the_column_s_unit():
    for stored in (pa.duration("us"), pa.duration("ns"), pa.duration("s")):
        assert read_cells(column("duration", unit="s", fill=90), pa.array([None], stored)).tolist() == [90]


@pytest.mark.parametrize(("unit", "fill", "stored"), [
    ("s", 1.5, pa.timestamp("us")), ("s", True, pa.timestamp("us")), ("s", "soon", pa.timestamp("us", "UTC")),
    ("us", 1_700_000_000_123_456, pa.timestamp("s")), ("s", 2**62, pa.timestamp("ns")), ("s", "1 h", pa.duration("s")),
    ("s", 5, pa.date32()),
])  # fmt: skip
def test_what_is_no_time_of_the_column_is_refused(unit, fill, stored):
    kind = "duration" if pa.types.is_duration(stored) else "timestamp"
    with pytest.raises(ValueError, match="data.fill.c: expected a value of type"):
        check_fill(column(kind, unit=unit, fill=fill), fill, stored)


def test_null_vectors_are_filled():
    stored = pa.concat_arrays([vectors([1.0, 2.0]), pa.nulls(1, vectors([1.0]).type), vectors((2, {1: 3.0}))])
    source = SourceColumn("c", "float64", "vector", 1, fill=-1)
    assert read_cells(source, stored).tolist() == [[1, 2], [-1, -1], [0, 3]]


def test_nulls_inside_vectors_are_filled():
    source = SourceColumn("c", "float64", "vector", 1, fill=-1)
    assert read_cells(source, vectors([1.0, None], (2, {1: None}))).tolist() == [[1, -1], [0, -1]]


def test_a_null_ragged_array_becomes_an_empty_one():
    found = read_cells(column("number", "int32", 1, ragged=True, fill=7), nested([[1, None], None, []], 1, pa.int32()))
    assert rows_of(found) == [[1, 7], [], []]


def test_only_nulls_give_no_length_to_fill():
    with pytest.raises(
        BadCellsError, match=r"only nulls in 2 rows, expected at least one array, which gives the length"
    ):
        read_cells(column("number", "int32", 1, fill=7), nested([None, None], 1, pa.int32()))


def test_a_known_shape_is_that_of_filled_ones():
    assert read_cells(column("number", "int32", 1, fill=7), nested([None, None], 1, pa.int32()), (2,)).tolist() == [
        [7, 7], [7, 7],
    ]  # fmt: skip
    source = SourceColumn("c", "float64", "vector", 1, fill=-1)
    assert read_cells(source, pa.nulls(2, vectors([1.0]).type), (1,)).tolist() == [[-1], [-1]]


@pytest.mark.parametrize("digits", ["53.55", "-53.55", "0.07", "8.41", "999.99"])
def test_a_decimal_becomes_the_nearest_float64(digits):
    array = pa.array([Decimal(digits)], pa.decimal128(9, 2))
    assert read_cells(column("float", "float64"), array)[0] == float(digits)


@pytest.mark.parametrize(("stored", "bad"), [
    (pa.array([1.0, None, np.nan]), [False, False, True]), (pa.array([1.0, 2.0]), None), (pa.array([1, 2]), None),
    (pa.array([[1.0], [2.0, np.inf], []]), [False, True, False]),
    (pa.array([[[1.0], [2.0]], [[3.0], [-np.inf]], [[5.0]]]), [False, True, False]),
    (pa.array([[[1.0, np.nan]], [], [[2.0], [np.nan]]]), [True, False, True]),
])  # fmt: skip
def test_rows_with_nan_or_inf_at_any_depth(stored, bad):
    found = nonfinite_rows(stored)
    assert (None if found is None else found.tolist()) == bad
