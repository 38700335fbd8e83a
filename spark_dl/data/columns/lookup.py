"""Strings as integers: positions in a vocabulary, or hash buckets, looked up once for each distinct string."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.nesting import leaf_type
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import BadCellsError, SourceColumn


class Lookup:
    """Looks up the strings of one column as integers, those of the previous batch once only. Not thread-safe."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._strings: pa.Array | None = None
        self._index: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self, strings: pa.Array) -> npt.NDArray[np.int64]:
        """Vocabulary index of each string (unknown: -1, or 0 with known strings shifted by one), or its hash bucket.

        If the strings begin with those of the previous call, only the others are looked up.
        # distinct strings -> (len(strings),)
        """
        known = len(self._index)
        if self._strings is None or not self._strings.equals(strings[:known]):
            known = 0
        if known and known == len(strings):
            return self._index
        self._index = np.concatenate([self._index[:known], self._look_up(strings[known:])])
        self._strings = strings
        return self._index

    def _look_up(self, strings: pa.Array) -> npt.NDArray[np.int64]:
        encoding = self._encoding
        if encoding.kind == "hash":
            assert encoding.buckets is not None
            words = strings.cast(pa.large_binary()).to_pylist()  # Spark's strings can be other bytes than UTF-8
            return np.array([zlib.crc32(word) % encoding.buckets for word in words], dtype=np.int64)
        assert encoding.vocabulary is not None
        known = pa.array(encoding.vocabulary, strings.type)
        index = pc.index_in(strings, value_set=known).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        return index + (encoding.unknown == "zero")  # type: ignore[no-any-return]


def keeps_dictionary(encoding: Encoding, arrow: pa.DataType) -> bool:
    """Whether a dictionary-encoded column is looked up through its dictionary, without decoding it."""
    return encoding.is_lookup and pa.types.is_dictionary(leaf_type(arrow))


def is_looked_up(column: SourceColumn, array: pa.Array) -> bool:
    """Whether this array is looked up through its dictionary."""
    is_dictionary = pa.types.is_dictionary(array.type) and not array.dictionary.null_count
    return is_dictionary and keeps_dictionary(column.encoding, array.type)


def string_indices(column: SourceColumn, strings: pa.Array, lookup: Lookup) -> Array:
    """Vocabulary index or hash bucket of each string; each distinct string is looked up once.

    # strings: without nulls, or dictionary-encoded; the dictionary may hold strings that no row has
    Raises BadCellsError for an unknown string if the encoding does not map unknown strings to 0.
    """
    unique = strings if pa.types.is_dictionary(strings.type) else strings.dictionary_encode()
    rows = unique.indices.to_numpy(zero_copy_only=False)
    distinct: pa.Array = unique.dictionary
    indices: Array = lookup(distinct)[rows]
    if column.encoding.kind == "vocabulary" and (is_bad := indices < 0).any():
        row = int(np.argmax(is_bad))
        expected = (
            f"one of {len(column.encoding.vocabulary or ())} known strings; data.encode.{column.name}.unknown: zero "
            "maps all others to 0"
        )
        word = distinct.cast(pa.large_binary())[int(rows[row])].as_py().decode(errors="backslashreplace")
        raise BadCellsError(column.name, row, f"{word!r:.80}", expected)
    return indices
