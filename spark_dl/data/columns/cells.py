"""From Arrow columns, as Spark and Parquet files give them, to arrays of numbers."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.nested import decoded, leaf_type, levels, null_rows, plain_type, rows_of_level
from spark_dl.data.columns.ragged import Array, Ragged, from_lengths
from spark_dl.data.columns.source import BadCellsError, SourceColumn, fill_scalar

NO_NULLS = "no nulls; set data.nulls to drop or fill"
_NS = {"D": 86_400_000_000_000, "s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_LARGEST = np.iinfo(np.int64).max
Shape = tuple[int | None, ...]
_A_CELL = {"array": "an array", "vector": "a vector"}


class Lookup:
    """The numbers of words. Of a column that comes in pieces each word is looked up once. For one thread."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._words: pa.Array | None = None
        self._index: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self, words: pa.Array) -> npt.NDArray[np.int64]:
        """By their vocabulary, where others have -1 or, if they are to be 0, the known ones one more; or by their hash.

        The words of the piece before, if they are the first ones, are not looked up again. # (len(words),)
        """
        known = len(self._index)
        if self._words is None or not self._words.equals(words[:known]):
            known = 0
        if known and known == len(words):
            return self._index
        self._index = np.concatenate([self._index[:known], self._numbers(words[known:])])
        self._words = words
        return self._index

    def _numbers(self, words: pa.Array) -> npt.NDArray[np.int64]:
        encoding = self._encoding
        if encoding.kind == "hash":
            assert encoding.buckets is not None
            return np.array([zlib.crc32(w.encode()) % encoding.buckets for w in words.to_pylist()], dtype=np.int64)
        assert encoding.vocabulary is not None
        known = pa.array(encoding.vocabulary, words.type)
        index = pc.index_in(words, value_set=known).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return index + (encoding.unknown == "zero")  # type: ignore[no-any-return]


def read_cells(
    column: SourceColumn, array: pa.Array, shape: Shape | None = None, lookup: Lookup | None = None
) -> Array | Ragged:
    """The cells of a column as one array # (rows, *shape), or as the rows of a ragged column.

    `shape` is that of the cells of arrays and vectors, where it is known; else the first row gives it. `lookup` is that
    of the column where this is a piece of it.
    Bytes and images are ragged: the bytes of each cell. Where the column has a fill, nulls become it: of an array its
    elements, and a null array one of that value alone, or an empty one in a ragged column.
    Raises BadCellsError, with the column and the first bad row: a null, cells of unequal shape, a number that does not
    fit.
    """
    if not _is_looked_up(column, array):
        array = decoded(array)
    if array.null_count == 0:
        return _read_present(column, array, shape, lookup)
    if column.fill is None or column.encoding.kind in ("bytes", "image"):
        raise BadCellsError(column.name, _first(array.is_null()), f"{array.null_count} null(s)", NO_NULLS)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    if not present.any() and column.kind != "scalar" and not column.ragged and shape is None:
        expected = "an array that gives the length of the filled ones; drop them instead (data.nulls)"
        raise BadCellsError(column.name, 0, f"only nulls in {len(array)} rows", expected)
    try:
        cells = _read_present(column, array.drop_null(), shape, lookup)
    except BadCellsError as error:
        error.row = int(np.flatnonzero(present)[error.row])
        raise
    return _spread(column, cells, present, plain_type(leaf_type(array.type)))


def looks_up_words(encoding: Encoding, arrow: pa.DataType) -> bool:
    """Whether texts that come as a dictionary stay one, as only its words become numbers."""
    return encoding.has_words and pa.types.is_dictionary(leaf_type(arrow))


def _is_looked_up(column: SourceColumn, array: pa.Array) -> bool:
    is_dictionary = pa.types.is_dictionary(array.type) and not array.dictionary.null_count
    return is_dictionary and looks_up_words(column.encoding, array.type)


def _first(mask: pa.Array) -> int:
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])


def _spread(column: SourceColumn, values: Array | Ragged, present: Array, leaf: pa.DataType) -> Array | Ragged:
    """Cells for all rows, from those that are present. # present: (rows,) bool"""
    if isinstance(values, Ragged):
        lengths = np.zeros(len(present), dtype=np.int64)
        lengths[present] = values.lengths
        return from_lengths(values.own_values, lengths)
    fill = _numbers(column, pa.array([fill_scalar(column, column.fill, leaf).as_py()], leaf))[0]
    out = np.full((len(present), *values.shape[1:]), fill, dtype=column.dtype)
    out[present] = values
    return out


def _read_present(column: SourceColumn, array: pa.Array, known: Shape | None, lookup: Lookup | None) -> Array | Ragged:
    if column.kind == "vector":
        return _vectors(column, array, known)
    if column.encoding.kind in ("bytes", "image"):
        return _bytes(array)
    if column.kind == "scalar":
        return _numbers(column, array, lookup)
    found = levels(array)
    _check_inner_nulls(column, found)
    first = 1 if column.ragged else 0
    shape = [_fixed_length(column, found, level, known) for level in range(first, len(found) - 1)]
    flat = _elements(column, found, lookup)
    if not column.ragged:
        return flat.reshape(len(array), *shape)
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    return from_lengths(flat.reshape(int(lengths.sum()), *shape), lengths)


def _check_inner_nulls(column: SourceColumn, found: list[pa.Array]) -> None:
    """Raises BadCellsError for a null inside an array or vector; the elements themselves may be null if filled."""
    for level, values in enumerate(found if column.fill is None else found[:-1]):
        if values.null_count:
            row = int(rows_of_level(found, level)[_first(values.is_null())])
            raise BadCellsError(column.name, row, f"a null inside {_A_CELL[column.kind]}", NO_NULLS)


def _elements(column: SourceColumn, found: list[pa.Array], lookup: Lookup | None = None) -> Array:
    """The elements of arrays or vectors, end to end; an error in one of them has its row."""
    try:
        return _numbers(column, found[-1], lookup)
    except BadCellsError as error:
        row = int(rows_of_level(found, len(found) - 1)[error.row])
        inside = f"{error.found} inside {_A_CELL[column.kind]}"
        raise BadCellsError(column.name, row, inside, error.expected) from None


def _fixed_length(column: SourceColumn, found: list[pa.Array], level: int, known: Shape | None) -> int:
    lengths = pc.list_value_length(found[level]).to_numpy(zero_copy_only=False)
    length, bad = _one_length(lengths, known[level] if known else None)
    if bad is not None:
        unequal = f"arrays of lengths {sorted({int(n) for n in np.unique(lengths)})[:8]}"
        ask = "" if level else f", or set data.encode.{column.name}: {{ragged: true}}"
        expected = f"one length; {whose(known)} {length}{ask}"
        raise BadCellsError(column.name, int(rows_of_level(found, level)[bad]), unequal, expected)
    return length


def _one_length(lengths: Array, known: int | None) -> tuple[int, int | None]:
    """The length that all should have, by default that of the first, and the first that has another."""
    length = known if known is not None else int(lengths[0]) if len(lengths) else 0
    others = np.flatnonzero(lengths != length)
    return length, int(others[0]) if others.size else None


def whose(known: Shape | None) -> str:
    """For an error: whose cells have the expected shape."""
    return "the first has" if known is None else "those elsewhere have"


def _numbers(column: SourceColumn, values: pa.Array, lookup: Lookup | None = None) -> Array:
    """The elements as they are stored; stored ones, of our own shards, are what they are. # (len(values),)"""
    if _is_looked_up(column, values) and not values.null_count:
        return word_indices(column, values, lookup or Lookup(column.encoding))
    values = decoded(values)
    if values.null_count and column.fill is not None:
        values = values.fill_null(fill_scalar(column, column.fill, values.type))
    if values.null_count:
        raise BadCellsError(column.name, _first(values.is_null()), f"{values.null_count} null(s)", NO_NULLS)
    types = pa.types
    if types.is_temporal(values.type):
        return _ticks(column, values)
    if types.is_decimal(values.type):
        return _decimals(column, values)
    if types.is_string(values.type) or types.is_large_string(values.type):
        return word_indices(column, values, lookup or Lookup(column.encoding))
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=column.dtype)


def _ticks(column: SourceColumn, values: pa.Array) -> Array:
    """Dates, timestamps and durations as whole ticks of the column's unit; a coarser one rounds towards the past."""
    types = pa.types
    stored = "D" if types.is_date32(values.type) else "ms" if types.is_date64(values.type) else values.type.unit
    plain = values.cast(pa.int32()) if types.is_date32(values.type) else values.cast(pa.int64())
    ticks = np.asarray(plain.to_numpy(zero_copy_only=False), dtype=np.int64)
    assert column.encoding.unit is not None
    here, there = _NS[stored], _NS[column.encoding.unit]
    if here < there:
        ticks = np.floor_divide(ticks, there // here)
    elif here > there:
        _check_range(column, (ticks > _LARGEST // (here // there)) | (ticks < -(_LARGEST // (here // there))), values)
        ticks = ticks * (here // there)
    bounds = np.iinfo(column.dtype)
    _check_range(column, (ticks < bounds.min) | (ticks > bounds.max), values)
    return ticks.astype(column.dtype, copy=False)


def _check_range(column: SourceColumn, is_bad: Array, values: pa.Array) -> None:
    if is_bad.any():
        row = int(np.argmax(is_bad))
        found = f"{values[row].cast(pa.string()).as_py()}, outside of {column.dtype} in {column.encoding.unit}"
        raise BadCellsError(column.name, row, found, f"a coarser data.encode.{column.name}.unit")


def _decimals(column: SourceColumn, values: pa.Array) -> Array:
    """Unscaled values that fit into int64, or the nearest float64."""
    if column.encoding.kind == "float":
        # By way of texts: Arrow multiplies by a power of ten, which rounds twice and can miss the nearest by one bit.
        return np.asarray(values.cast(pa.string()).cast(pa.float64()).to_numpy(zero_copy_only=False))
    if len(values) == 0:
        return np.empty(0, dtype=np.int64)
    wide = values.cast(pa.decimal256(76, column.encoding.scale or 0))
    # 256 bits, little endian: the lowest 64 hold the value if all higher ones repeat its sign
    words = np.frombuffer(wide.buffers()[1], dtype="<i8").reshape(-1, 4)[wide.offset : wide.offset + len(wide)]
    overflows = (words[:, 1:] != (words[:, :1] >> 63)).any(axis=1)
    if overflows.any():
        row = int(np.argmax(overflows))
        expected = (
            f"unscaled values within 64 bits; set data.encode.{column.name}: {{as: float}}, or CAST to DECIMAL(18, s)"
        )
        raise BadCellsError(column.name, row, str(values[row].as_py()), expected)
    return words[:, 0].astype(np.int64)


def word_indices(column: SourceColumn, strings: pa.Array, lookup: Lookup) -> Array:
    """Strings by their vocabulary or hash, which are looked up once for each distinct one.

    # strings: without nulls; or a dictionary of them, which may have words that no row has
    """
    unique = strings if pa.types.is_dictionary(strings.type) else strings.dictionary_encode()
    rows = unique.indices.to_numpy(zero_copy_only=False)
    words: pa.Array = unique.dictionary
    indices: Array = lookup(words)[rows]
    if column.encoding.kind == "vocabulary" and (is_bad := indices < 0).any():
        row = int(np.argmax(is_bad))
        expected = (
            f"one of {len(column.encoding.vocabulary or ())} words; data.encode.{column.name}.unknown: zero makes "
            "others 0"
        )
        raise BadCellsError(column.name, row, f"{words[int(rows[row])].as_py()!r:.80}", expected)
    return indices


def _bytes(array: pa.Array) -> Ragged:
    """Strings, as UTF-8, and binary cells, as views of the Arrow buffer."""
    types = pa.types
    if types.is_fixed_size_binary(array.type):
        array = array.cast(pa.binary())
    is_large = types.is_large_binary(array.type) or types.is_large_string(array.type)
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return Ragged(np.empty(0, dtype=np.uint8), np.zeros(len(array) + 1, dtype=np.int64))
    kind = np.dtype(np.int64 if is_large else np.int32)
    starts = np.frombuffer(offsets, kind, count=len(array) + 1, offset=kind.itemsize * array.offset).astype(np.int64)
    values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, dtype=np.uint8)
    return Ragged(values[starts[0] : starts[-1]], starts - starts[0])


def _vectors(column: SourceColumn, array: pa.Array, known: Shape | None) -> Array:
    """Spark ML vectors, dense and sparse in any mixture. # (rows, size)

    Their Arrow form is a struct of type (1 dense, 0 sparse), size and indices (sparse only), and values.
    """
    found = levels(array)
    _check_inner_nulls(column, found)
    types = array.field("type").cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    counts = array.field("values").value_lengths().to_numpy(zero_copy_only=False)
    _check_form(column, array, types, counts)
    dense = types == 1
    sizes = np.where(dense, counts, array.field("size").fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int64)
    size, bad = _one_length(sizes, known[0] if known else None)
    if bad is not None:
        unequal = f"vectors of sizes {sorted({int(n) for n in np.unique(sizes)})[:8]}"
        raise BadCellsError(column.name, bad, unequal, f"one size; {whose(known)} {size}")
    values = _elements(column, found)
    if dense.all():
        return values.reshape(len(array), size)
    out = np.zeros((len(array), size))
    row_of_value = np.repeat(np.arange(len(array)), counts)
    is_dense = dense[row_of_value]
    starts = np.cumsum(counts) - counts
    column_of_value = np.arange(len(values)) - starts[row_of_value]
    column_of_value[~is_dense] = array.field("indices").flatten().to_numpy(zero_copy_only=False)
    if (outside := np.flatnonzero((column_of_value < 0) | (column_of_value >= size))).size:
        index = f"the index {int(column_of_value[outside[0]])} in a sparse vector"
        raise BadCellsError(column.name, int(row_of_value[outside[0]]), index, f"indices from 0 to {size - 1}")
    out[row_of_value, column_of_value] = values
    return out


def _check_form(column: SourceColumn, array: pa.Array, types: Array, counts: Array) -> None:
    """Raises BadCellsError for vectors as Spark ML has none. # types, counts of values: (rows,)"""
    is_sparse, has_size = types == 0, array.field("size").is_valid().to_numpy(zero_copy_only=False)
    indices = array.field("indices")
    num_indices = indices.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    nulls, has_indices = null_rows(indices), indices.is_valid().to_numpy(zero_copy_only=False)
    for is_bad, found in (
        ((types != 0) & (types != 1), "a vector of another type"),
        (is_sparse & ~has_size, "a sparse vector without a size"),
        (num_indices != np.where(is_sparse, counts, 0), "a vector with more indices than it should have, or fewer"),
        (has_indices & (nulls if nulls is not None else False), "a null among the indices of a vector"),
    ):
        if is_bad.any():
            expected = "vectors of Spark ML: type 1 (dense), or type 0 with a size and an index for each value"
            raise BadCellsError(column.name, int(np.argmax(is_bad)), found, expected)
