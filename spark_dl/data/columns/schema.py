"""The columns of a dataset: how cells are stored in Parquet, and how stored columns become arrays again.

A column of arrays or vectors of one shape is stored as binary cells in NumPy's `.npy` format, as Petastorm's
`NdarrayCodec` writes them: every cell then has the same header, and a whole column is decoded as one strided view of
the Arrow buffer, without a copy per row. Scalars are stored as their own Parquet type, ragged columns as lists.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from spark_dl.data.columns import images
from spark_dl.data.columns.encoding import Encoding, Settings
from spark_dl.data.columns.ragged import MAX_AXES, Ragged
from spark_dl.data.columns.ragged import Array as Array
from spark_dl.data.columns.source import SourceColumn

MAX_GROUP_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Column:
    """One column of a dataset: the name, the dtype of its elements (NumPy's name) and the shape of a cell."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()
    """None as the first axis where its length varies from row to row: a ragged column."""
    codec: str = "scalar"
    """How cells are stored: `scalar`, a Parquet type; `ndarray`, `.npy` bytes of one dtype and shape; `list`, Parquet
    lists; `binary`, bytes; `image`, a PNG or JPEG file; in datasets of others also `converted`, a Parquet type that
    becomes numbers when it is read, `vector`, Spark ML's, `partition`, a value in the names of folders, and
    `petastorm.*`."""
    encoding: Encoding = field(default_factory=Encoding)
    """What the numbers mean."""
    mean_size: float | None = None
    """Elements of a cell on average, over all axes, where that varies; of images the bytes of the file."""
    fill: Any = None
    """What stands for nulls where they are filled when they are read, in datasets of others; in terms of the source."""

    @property
    def is_ragged(self) -> bool:
        """Whether it is decoded as `Ragged`."""
        return self.shape[:1] == (None,)

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of a cell without an axis of varying length."""
        return tuple(n for n in self.shape if n is not None)

    @property
    def row_bytes(self) -> int:
        """Bytes of a cell as it is stored in our own shards; on average, where they vary."""
        if self.codec == "image":
            return math.ceil(self.mean_size or 0) + 4
        return self.value_bytes + (len(npy_header(self)) if self.codec == "ndarray" else 0)

    @property
    def value_bytes(self) -> int:
        """Bytes of a cell in memory once it is decoded; on average, where they vary."""
        if self.is_ragged:
            size: float = self.group_bytes(1, self.mean_size or 0)
            return math.ceil(size)
        return np.dtype(self.dtype).itemsize * math.prod(self.inner)

    @property
    def has_stored_words(self) -> bool:
        """Whether the file holds its words as strings of Parquet, of which a dictionary tells each one once."""
        return self.encoding.has_words and not self.codec.startswith("petastorm.")

    @property
    def is_encoded(self) -> bool:
        """Whether cells are files, compressed, or texts of others, which are in memory beside what becomes of them."""
        is_text = self.encoding.has_words and (self.codec == "converted" or self.codec.startswith("petastorm."))
        return is_text or self.codec == "image" or self.codec.startswith(("petastorm.image", "petastorm.compressed"))

    def stored_bytes(self, rows: Any, size: Any = None) -> Any:
        """Bytes of encoded cells of some rows, by the mean where their `size` is not known; 0 where they are not.

        Of arrays, elementwise.
        """
        if not self.is_encoded:
            return 0
        return rows * (self.mean_size or 0) if size is None else size

    def group_bytes(self, rows: Any, elements: Any = None) -> Any:
        """Bytes in memory of decoded rows, that have so many elements if it is ragged; else by the mean.

        Of arrays, elementwise.
        """
        if not self.is_ragged or elements is None:
            return rows * self.value_bytes
        return np.dtype(self.dtype).itemsize * elements + 8 * rows

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Column:
        """A column from the dict that `dataclasses.asdict` made of it, after a way through JSON.

        Raises ValueError for values that no column has, TypeError or LookupError for other keys.
        """
        encoding = Encoding.from_plain(plain.get("encoding", {}))
        column = cls(**{**plain, "shape": tuple(plain["shape"]), "encoding": encoding})
        for key, is_value in _IS_VALUE.items():
            if not is_value(value := getattr(column, key)):
                raise ValueError(f"column {column.name!r:.200}: found the {key} {value!r:.200}")
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


OWN_CODECS = ("scalar", "ndarray", "list", "binary", "image")
"""How our own shards store cells."""
_IS_VALUE: Mapping[str, Callable[[Any], bool]] = {
    "name": lambda v: type(v) is str and v != "",
    "dtype": _is_dtype,
    "shape": _is_shape,
    "codec": lambda v: v in (*OWN_CODECS, "converted", "vector", "partition") or str(v).startswith("petastorm."),
    "mean_size": lambda v: v is None or (type(v) in (int, float) and 0 <= v < math.inf),
    "fill": lambda v: v is None or type(v) in (str, bool, int, float),
}
"""What the values of a column may be, whoever wrote them."""


def codec_of(source: SourceColumn) -> str:
    """How we store a column."""
    if source.encoding.kind in ("bytes", "image"):
        return "image" if source.encoding.kind == "image" else "binary"
    return "list" if source.ragged else "scalar" if source.kind == "scalar" else "ndarray"


def stored_column(source: SourceColumn, shape: tuple[int | None, ...]) -> Column:
    """The column of cells of this shape, in our own shards."""
    return Column(source.name, source.dtype, shape, codec_of(source), source.encoding, source.mean_size)


def check_like(columns: Sequence[Column], others: Sequence[Column]) -> None:
    """Raises ValueError if columns of the same name have another dtype, shape or encoding."""
    by_name = {c.name: c for c in others}
    for column in columns:
        other = by_name.get(column.name, column)
        for what in ("dtype", "shape", "encoding"):
            found, expected = getattr(column, what), getattr(other, what)
            if found != expected:
                raise ValueError(
                    f"column {column.name!r}: found the {what} {found!s:.200}, expected {expected!s:.200} as in the "
                    "training dataset"
                )


def words_of(columns: Sequence[Column]) -> dict[str, tuple[str, ...]]:
    """The vocabularies among some columns, by their names."""
    return {c.name: c.encoding.vocabulary for c in columns if c.encoding.vocabulary is not None}


def check_settings(columns: Sequence[Column], encode: Settings) -> None:
    """Raises ValueError for settings of `data.encode` with which a dataset was not written."""
    for column in columns:
        encoding = column.encoding
        found = {"as": encoding.kind, "ragged": column.is_ragged, "unit": encoding.unit, "buckets": encoding.buckets,
                 "values": list(encoding.vocabulary or ()), "unknown": encoding.unknown,
                 "resize": list(encoding.resize or ())}  # fmt: skip
        for key, asked in encode.get(column.name, {}).items():
            if found.get(key, asked) != (list(asked) if isinstance(asked, tuple) else asked):
                raise ValueError(
                    f"data.encode.{column.name}.{key}: found {asked!r:.200}, but the dataset was written with "
                    f"{found[key]!r:.200}; write it again, or change the setting"
                )


def cell_shape(codec: str, cells: Array | Ragged, encoding: Encoding) -> tuple[int | None, ...]:
    """The shape of the cells before they are stored; of images that of the first one once it is decoded."""
    if not isinstance(cells, Ragged):
        return cells.shape[1:]
    is_image = codec == "image"
    return images.image_shape(cells[0:1].own_values, encoding.resize) if is_image else (None, *cells.inner)


def empty_first(name: str, where: str) -> str:
    """For an error: a column whose first cell has no values, so that all would be empty."""
    return (
        f"column {name!r}: the first cell of {where} is empty; it gives the shape of all; where lengths vary, set "
        f"data.encode.{name}: {{ragged: true}}; else leave the column out"
    )


def npy_header(column: Column) -> bytes:
    """The header that every cell of a tensor column starts with."""
    buffer = io.BytesIO()
    dtype = np.dtype(column.dtype).newbyteorder("<")
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": column.shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def arrow_type(column: Column) -> pa.DataType:
    """The type of the stored column."""
    if column.codec in ("ndarray", "binary", "image"):
        return pa.binary()
    arrow = pa.from_numpy_dtype(np.dtype(column.dtype))
    for _ in column.shape:
        arrow = pa.list_(pa.field("element", arrow, nullable=False))
    return arrow


def arrow_field(column: Column) -> pa.Field:
    """The stored column, which has no nulls."""
    return pa.field(column.name, arrow_type(column), nullable=False)
