"""The columns of a dataset: names, dtypes, shapes and encodings.

A column of arrays or vectors of one shape is stored as binary cells in NumPy's `.npy` format, as Petastorm's
`NdarrayCodec` does: every cell has the same header, and a whole column is decoded as one strided view of the Arrow
buffer, without a copy per row. Scalars are stored as their own Parquet type, ragged columns as lists.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spark_dl.data.columns import images
from spark_dl.data.columns.encoding import Encoding, Settings
from spark_dl.data.columns.ragged import MAX_AXES, Array, Ragged
from spark_dl.data.columns.source import SourceColumn

MAX_GROUP_BYTES = 2**31 - 1

OWN_CODECS = ("scalar", "ndarray", "list", "binary", "image")
"""Codecs of our own shards."""
CHARACTER_BYTES = 4
"""Bytes of a character in a NumPy array of strings. An empty string takes the same."""

_ADDED = ("mode", "orientation", "interpolation", "formats", "source_type", "tokenizer")


@dataclass(frozen=True)
class Column:
    """One column of a dataset: name, NumPy dtype of its elements, and shape of a cell."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    """The first axis is None if its length varies from row to row: a ragged column."""
    codec: str = "scalar"
    """How cells are stored: `scalar`, a Parquet type; `ndarray`, `.npy` bytes of one dtype and shape; `list`, Parquet
    lists; `binary`, bytes; `image`, a PNG or JPEG file. External datasets also have `converted`, a Parquet type that
    is converted to numbers on reading; `vector`, a Spark ML vector; `partition`, a hive partition value; and
    `petastorm.*`."""
    encoding: Encoding = field(default_factory=Encoding)
    """What the numbers stand for."""
    mean_size: float | None = None
    """Mean number of elements per cell, over all axes, where it varies; for images, mean bytes of the file."""
    fill: Any = None
    """Value that replaces nulls on reading, in external datasets, in the source type; None if nulls are not filled."""

    @property
    def is_ragged(self) -> bool:
        """Whether the column is decoded as `Ragged`."""
        return self.shape[:1] == (None,)

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of a cell without the axis of varying length."""
        return tuple(n for n in self.shape if n is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes of a cell as stored in our own shards; the mean if they vary."""
        if self.codec == "image":
            return math.ceil(self.mean_size or 0) + 4
        return self.value_bytes + (len(npy_header(self)) if self.codec == "ndarray" else 0)

    @property
    def value_bytes(self) -> int:
        """Bytes of a decoded cell in memory; the mean if they vary."""
        if self.is_ragged:
            size: float = self.group_bytes(1, self.mean_size or 0)
            return math.ceil(size)
        return np.dtype(self.dtype).itemsize * math.prod(self.inner)

    @property
    def has_stored_strings(self) -> bool:
        """Whether looked-up strings are stored as Parquet strings, which may be dictionary-encoded."""
        return self.encoding.is_lookup and not self.codec.startswith("petastorm.")

    @property
    def is_encoded(self) -> bool:
        """Whether encoded cells (image files, compressed arrays, external strings) take memory beside decoded ones."""
        is_string_or_binary = self.encoding.is_lookup and (
            self.codec == "converted" or self.codec.startswith("petastorm.")
        )
        return (
            is_string_or_binary
            or self.codec == "image"
            or self.codec.startswith(("petastorm.image", "petastorm.compressed"))
        )

    def stored_bytes(self, rows: Any, size: Any = None) -> Any:
        """Bytes of the encoded cells of some rows: `size` if known, else the mean; 0 if cells are not encoded.

        Works elementwise on arrays.
        """
        if not self.is_encoded:
            return 0
        return rows * (self.mean_size or 0) if size is None else size

    def group_bytes(self, rows: Any, elements: Any = None) -> Any:
        """Bytes of decoded rows in memory. # elements: of ragged rows, None to use the mean

        Works elementwise on arrays.
        """
        if not self.is_ragged or elements is None:
            return rows * self.value_bytes
        return np.dtype(self.dtype).itemsize * elements + 8 * rows

    def to_plain(self) -> dict[str, Any]:
        """Returns what `from_plain` restores.

        Settings that were added later are left out where they are not set, so that digests of older datasets stay the
        same, and earlier versions read what does not need them.
        """
        plain = dataclasses.asdict(self)
        encoding, usual = plain["encoding"], Encoding(self.encoding.kind)
        plain["encoding"] = {k: v for k, v in encoding.items() if k not in _ADDED or v != getattr(usual, k)}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Column:
        """Restores a column from `to_plain` after a JSON round trip.

        Raises ValueError for invalid values, TypeError or LookupError for unknown or missing keys.
        """
        encoding = Encoding.from_plain(plain.get("encoding", {}))
        column = cls(**{**plain, "shape": tuple(plain["shape"]), "encoding": encoding})
        for key, is_value in _IS_VALUE.items():
            if not is_value(value := getattr(column, key)):
                raise ValueError(f"column {column.name!r:.200}: found the invalid {key} {value!r:.200}")
        return column


def _is_dtype(value: Any) -> bool:
    try:
        return type(value) is str and np.dtype(value).kind in "biufc"
    except (TypeError, ValueError):
        return False


def _is_shape(value: tuple[Any, ...]) -> bool:
    inner = value[1:] if value[:1] == (None,) else value
    is_short = len(value) <= MAX_AXES
    return is_short and all(type(n) is int and n >= 0 for n in inner) and math.prod(inner) <= MAX_GROUP_BYTES


_IS_VALUE: Mapping[str, Callable[[Any], bool]] = {
    "name": lambda v: type(v) is str and v != "",
    "dtype": _is_dtype,
    "shape": _is_shape,
    "codec": lambda v: v in (*OWN_CODECS, "converted", "vector", "partition") or str(v).startswith("petastorm."),
    "mean_size": lambda v: v is None or (type(v) in (int, float) and 0 <= v < math.inf),
    "fill": lambda v: v is None or type(v) in (str, bool, int, float),
}
"""Checks of the fields of a column that was read from a manifest."""


def codec_of(source: SourceColumn) -> str:
    """The codec of a column in our own shards."""
    if source.encoding.kind in ("bytes", "image"):
        return "image" if source.encoding.kind == "image" else "binary"
    return "list" if source.ragged else "scalar" if source.kind == "scalar" else "ndarray"


def stored_column(source: SourceColumn, shape: tuple[int | None, ...]) -> Column:
    """The column in our own shards, for cells of this shape."""
    return Column(source.name, source.dtype, shape, codec_of(source), source.encoding, source.mean_size)


def check_reference_columns(columns: Sequence[Column], others: Sequence[Column]) -> None:
    """Raises ValueError if two columns of the same name differ in dtype, shape or encoding."""
    by_name = {c.name: c for c in others}
    for column in columns:
        other = by_name.get(column.name, column)
        for what in ("dtype", "shape", "encoding"):
            found, expected = getattr(column, what), getattr(other, what)
            if not (column.encoding.fits(other.encoding) if what == "encoding" else found == expected):
                raise ValueError(
                    f"column {column.name!r}: found the {what} {found!s:.200}, expected {expected!s:.200} as in the "
                    "training dataset"
                )


def vocabularies_of(columns: Sequence[Column]) -> dict[str, tuple[str, ...]]:
    """The vocabularies of some columns, by name."""
    return {c.name: c.encoding.vocabulary for c in columns if c.encoding.vocabulary is not None}


def check_settings(columns: Sequence[Column], encode: Settings) -> None:
    """Raises ValueError for settings of `data.encode` that differ from those a dataset was written with."""
    for column in columns:
        encoding = column.encoding
        found = {"as": encoding.kind, "ragged": column.is_ragged, "unit": encoding.unit, "buckets": encoding.buckets,
                 "values": list(encoding.vocabulary or ()), "unknown": encoding.unknown,
                 "resize": list(encoding.resize or ()), "mode": encoding.mode, "orientation": encoding.orientation,
                 "interpolation": encoding.interpolation, "formats": list(encoding.formats or ())}  # fmt: skip
        for key, asked in encode.get(column.name, {}).items():
            if found.get(key, asked) != (list(asked) if isinstance(asked, tuple) else asked):
                raise ValueError(
                    f"data.encode.{column.name}.{key}: found {asked!r:.200}, but the dataset was written with "
                    f"{found[key]!r:.200}; write it again, or change the setting"
                )


def cell_shape(codec: str, cells: Array | Ragged, encoding: Encoding) -> tuple[int | None, ...]:
    """The shape of the cells before they are stored; for images, the decoded shape of the first one."""
    if not isinstance(cells, Ragged):
        return cells.shape[1:]
    is_image = codec == "image"
    return images.image_shape(cells[0:1].own_values, encoding) if is_image else (None, *cells.inner)


def empty_first_cell(name: str, where: str) -> str:
    """The error message for a column whose first cell is empty."""
    return (
        f"column {name!r}: the first cell of {where} is empty, and the first cell gives the shape of all; if lengths "
        f"vary, set data.encode.{name}: {{ragged: true}}; otherwise remove the column"
    )


def npy_header(column: Column) -> bytes:
    """The `.npy` header that every cell of an `ndarray` column starts with."""
    buffer = io.BytesIO()
    dtype = np.dtype(column.dtype).newbyteorder("<")
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": column.shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def unit_of(column: Column) -> int | None:
    """Bytes of an element, if the number of elements follows from the bytes of a cell; otherwise None."""
    if column.codec.startswith("petastorm.") and column.encoding.is_lookup:
        return CHARACTER_BYTES
    in_bytes = column.codec.startswith("petastorm.") or column.encoding.kind == "bytes"
    return np.dtype(column.dtype).itemsize if in_bytes else None
