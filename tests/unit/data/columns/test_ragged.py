"""Ragged rows: taken, padded and joined as a loop over lists would."""

import numpy as np
import pytest

from spark_dl.data.columns.ragged import Ragged, Stacked, concatenate, from_lengths, pad, padded_bytes, take

INNER = [(), (3,), (2, 1), (0,)]
LENGTHS = [[], [0], [4], [0, 0, 0], [2, 0, 5, 1], [0, 3, 0], [1] * 7]


def make(lengths, inner=(), dtype="int32"):
    values = np.arange(sum(lengths) * int(np.prod(inner)), dtype=dtype).reshape(sum(lengths), *inner)
    return from_lengths(values, np.array(lengths, dtype=np.int64))


def rows_of(ragged):
    return [ragged.values[a:b] for a, b in zip(ragged.offsets[:-1], ragged.offsets[1:], strict=True)]


def assert_rows(ragged, expected):
    assert len(ragged) == len(expected)
    assert ragged.offsets.dtype == np.int64
    for found, row in zip(rows_of(ragged), expected, strict=True):
        np.testing.assert_array_equal(found, row)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_take(lengths, inner):
    ragged = make(lengths, inner)
    rng = np.random.default_rng(0)
    n = len(lengths)
    for rows in (np.arange(n), np.arange(n)[::-1], rng.integers(0, max(n, 1), 20 if n else 0), np.arange(0)):
        found = take(ragged, rows)
        assert found.values.dtype == ragged.values.dtype
        assert found.inner == inner
        assert_rows(found, [rows_of(ragged)[r] for r in rows])


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("more", [None, 0, 2])
@pytest.mark.parametrize("fill", [0, -1])
def test_pad(lengths, inner, more, fill):
    ragged = make(lengths, inner)
    longest = max(lengths, default=0)
    array, mask = pad(ragged, None if more is None else longest + more, fill)
    width = longest + (more or 0)
    assert array.shape == (len(lengths), width, *inner)
    assert (mask.shape, mask.dtype, array.dtype) == ((len(lengths), width), bool, ragged.values.dtype)
    for i, row in enumerate(rows_of(ragged)):
        np.testing.assert_array_equal(mask[i], np.arange(width) < len(row))
        np.testing.assert_array_equal(array[i, : len(row)], row)
        assert (array[i, len(row) :] == fill).all()


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_the_bytes_of_padding_are_those_of_the_array_and_its_mask(dtype):
    padded, mask = pad(from_lengths(np.ones(6, dtype), np.array([1, 2, 3])), 4)
    assert padded_bytes(3, 4, np.dtype(dtype).itemsize) == padded.nbytes + mask.nbytes


def test_a_row_that_is_too_long_is_an_error():
    with pytest.raises(ValueError, match="found 5 values in row 2, expected at most 3"):
        pad(make([2, 0, 5, 1]), 3)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 4), (2, 2), (3, 1), (0, 99), (-2, None), (None, None)])
def test_slices_take_and_pad_as_the_rows_that_they_are(lengths, start, stop):
    ragged = make(lengths, (2,))
    part = ragged[start:stop]
    expected = rows_of(ragged)[start:stop]
    assert_rows(part, expected)
    assert len(part.own_values) == sum(map(len, expected))
    assert_rows(take(part, np.arange(len(part))[::-1]), expected[::-1])
    array, mask = pad(part)
    np.testing.assert_array_equal(array[mask], part.own_values)
    assert_rows(concatenate([part, part[:0], ragged]), [*expected, *rows_of(ragged)])


def test_empty_rows_take_the_inner_shape_of_others():
    empty = Ragged(np.empty((0, 0), np.int32), np.zeros(3, np.int64))
    other = make([2, 1], (3,))
    assert_rows(concatenate([empty, other]), [np.empty((0, 3)), np.empty((0, 3)), *rows_of(other)])


@pytest.mark.parametrize(("first", "second", "is_ragged"), [
    (np.ones(2), np.ones(2), False),
    (from_lengths(np.ones(3), np.array([1, 2])), from_lengths(np.ones(1), np.array([1])), True),
])  # fmt: skip
def test_more_values_than_there_is_room_for_are_an_error(first, second, is_ragged):
    stacked = Stacked(np.zeros(3), is_ragged=is_ragged)
    stacked.add(first)
    with pytest.raises(ValueError, match="found 4 values or more, expected 3"):
        stacked.add(second)


def test_arrays_are_joined_as_arrays():
    np.testing.assert_array_equal(concatenate([np.arange(2), np.arange(3)]), [0, 1, 0, 1, 2])
