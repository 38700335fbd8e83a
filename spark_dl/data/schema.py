"""Columns of a DataFrame as tensors: which types are accepted, and how cells become bytes and arrays.

A scalar column is stored as its own Parquet type. A column of arrays or vectors of one shape is stored as binary cells
in NumPy's `.npy` format, as Petastorm's `NdarrayCodec` writes them: every cell then has the same header, and a whole
column is decoded as one strided view of the Arrow buffer, without a copy per row.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.config import suggestion

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Array = npt.NDArray[Any]

_SCALARS = {
    "boolean": "bool",
    "byte": "int8",
    "short": "int16",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
}
_SUPPORTED = "boolean, tinyint, smallint, int, bigint, float, double, arrays of these, and Spark ML vectors"


@dataclass(frozen=True)
class Column:
    """One column of a dataset: the name, the dtype of its elements (NumPy's name) and the shape of a cell."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    codec: str = "scalar"
    """How cells are stored: `scalar`, a Parquet type; `ndarray`, `.npy` bytes of one dtype and shape; in datasets of
    others also `list`, Parquet lists of one length, `partition`, a value in the names of folders, and `petastorm.*`."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a cell as it is stored in our own shards."""
        return self.value_bytes + (len(npy_header(self)) if self.codec == "ndarray" else 0)

    @property
    def value_bytes(self) -> int:
        """Bytes of a cell in memory."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Column:
        """A column from the dict that `dataclasses.asdict` made of it, after a way through JSON."""
        return cls(**{**plain, "shape": tuple(plain["shape"])})


@dataclass(frozen=True)
class SourceColumn:
    """A column of the DataFrame before its shape is known."""

    name: str
    dtype: str
    kind: str
    """`scalar`, `array` or `vector`."""
    depth: int = 0
    """Nesting of the arrays."""


def source_columns(schema: StructType, names: Sequence[str]) -> tuple[SourceColumn, ...]:
    """The asked columns of a DataFrame. Called on the driver.

    Raises ValueError for a column that is missing, naming the nearest one, or of a type that no model can read.
    """
    known = {f.name: f.dataType for f in schema.fields}
    columns = []
    for name in names:
        if name not in known:
            raise ValueError(
                f"no column {name!r} in the DataFrame{suggestion(name, list(known))}; its columns are {list(known)} "
                "(data.features and data.label say which are read)"
            )
        columns.append(_source_column(name, known[name]))
    return tuple(columns)


def _source_column(name: str, data_type: DataType) -> SourceColumn:
    if data_type.typeName() in _SCALARS:
        return SourceColumn(name, _SCALARS[data_type.typeName()], "scalar")
    if type(data_type).__name__ == "VectorUDT":
        return SourceColumn(name, "float64", "vector", 1)
    inner: Any = data_type
    depth = 0
    while inner.typeName() == "array":
        inner, depth = inner.elementType, depth + 1
    if depth and inner.typeName() in _SCALARS:
        return SourceColumn(name, _SCALARS[inner.typeName()], "array", depth)
    raise ValueError(
        f"column {name!r} has type {data_type.simpleString()}, which cannot become a tensor; supported are "
        f"{_SUPPORTED}; convert it in the DataFrame, for example CAST({name} AS DOUBLE)"
    )


def cells(column: SourceColumn, array: pa.Array) -> Array:
    """The cells of a column as one array. # (rows, *shape)

    Raises ValueError that names the column and the first bad row of the batch: a null, or cells of unequal shape.
    """
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadCellsError(
            column.name, row, f"{array.null_count} null(s)", "no nulls; fill or drop them in the DataFrame"
        )
    if column.kind == "scalar":
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=column.dtype)
    if column.kind == "vector":
        return _vectors(column, array)
    shape: list[int] = []
    values = array
    for _ in range(column.depth):
        shape.append(_fixed_length(column, values, len(array)))
        values = values.flatten()
    if values.null_count:
        position = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        row = position // max(1, int(np.prod(shape)))
        raise BadCellsError(column.name, row, "a null inside an array", "no nulls; fill or drop them in the DataFrame")
    flat = np.asarray(values.to_numpy(zero_copy_only=False), dtype=column.dtype)
    return flat.reshape(len(array), *shape)


def _fixed_length(column: SourceColumn, lists: pa.Array, rows: int) -> int:
    if lists.null_count:
        position = int(np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))[0])
        row = position * rows // len(lists)
        raise BadCellsError(column.name, row, "a null inside an array", "no nulls; fill or drop them in the DataFrame")
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    if len(lengths) == 0:
        return 0
    if (bad := np.flatnonzero(lengths != lengths[0])).size:
        row = int(bad[0]) * rows // len(lengths)
        found = f"arrays of lengths {sorted({int(n) for n in np.unique(lengths)})[:8]}"
        raise BadCellsError(column.name, row, found, f"one length; the first has {int(lengths[0])}")
    return int(lengths[0])


def _vectors(column: SourceColumn, array: pa.Array) -> Array:
    """Spark ML vectors, dense and sparse in any mixture. # (rows, size)

    Their Arrow form is a struct of type (1 dense, 0 sparse), size and indices (sparse only), and values.
    """
    dense = array.field("type").to_numpy(zero_copy_only=False) == 1
    counts = array.field("values").value_lengths().to_numpy(zero_copy_only=False)
    sizes = np.where(dense, counts, array.field("size").fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int64)
    if (bad := np.flatnonzero(sizes != sizes[0])).size if len(sizes) else 0:
        found = f"vectors of sizes {sorted({int(n) for n in np.unique(sizes)})[:8]}"
        raise BadCellsError(column.name, int(bad[0]), found, f"one size; the first has {int(sizes[0])}")
    size = int(sizes[0]) if len(sizes) else 0
    values = array.field("values").flatten().to_numpy(zero_copy_only=False)
    if dense.all():
        return np.asarray(values, dtype=np.float64).reshape(len(array), size)
    out = np.zeros((len(array), size))
    row_of_value = np.repeat(np.arange(len(array)), counts)
    is_dense = dense[row_of_value]
    starts = np.cumsum(counts) - counts
    column_of_value = np.arange(len(values)) - starts[row_of_value]
    column_of_value[~is_dense] = array.field("indices").flatten().to_numpy(zero_copy_only=False)
    if (bad := np.flatnonzero((column_of_value < 0) | (column_of_value >= size))).size:
        found = f"the index {int(column_of_value[bad[0]])} in a sparse vector"
        raise BadCellsError(column.name, int(row_of_value[bad[0]]), found, f"indices from 0 to {size - 1}")
    out[row_of_value, column_of_value] = values
    return out


class BadCellsError(ValueError):
    """Cells that cannot be stored; the writer adds where in the DataFrame they are."""

    def __init__(self, column: str, row: int, found: str, expected: str):
        super().__init__(f"column {column!r}: found {found}, expected {expected}")
        self.row = row


def npy_header(column: Column) -> bytes:
    """The header that every cell of a tensor column starts with."""
    buffer = io.BytesIO()
    dtype = np.dtype(column.dtype).newbyteorder("<")
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": column.shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def arrow_type(column: Column) -> pa.DataType:
    """The type of the stored column."""
    return pa.binary() if column.codec == "ndarray" else pa.from_numpy_dtype(np.dtype(column.dtype))


def encode(column: Column, values: Array) -> pa.Array:
    """Stored cells from an array. # values: (rows, *shape)"""
    if column.codec == "scalar":
        return pa.array(values, type=arrow_type(column))
    header = np.frombuffer(npy_header(column), dtype=np.uint8)
    rows = len(values)
    data = np.ascontiguousarray(values, dtype=np.dtype(column.dtype).newbyteorder("<")).reshape(
        rows, math.prod(column.shape)
    )
    cell_bytes = column.row_bytes
    if rows * cell_bytes > 2**31 - 1:
        raise ValueError(
            f"column {column.name!r}: {rows} rows of {cell_bytes} bytes do not fit into one row group of 2 GiB; "
            f"set data.rows_per_row_group to at most {(2**31 - 1) // cell_bytes}"
        )
    out = np.empty((rows, cell_bytes), dtype=np.uint8)
    out[:, : len(header)] = header
    if data.size:
        out[:, len(header) :] = data.view(np.uint8)
    offsets = np.arange(rows + 1, dtype=np.int32) * cell_bytes
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(out)])


def decode(column: Column, stored: pa.ChunkedArray | pa.Array) -> Array:
    """An array from stored cells; of a tensor column a view of the Arrow buffer. # (rows, *shape)

    Raises ValueError if a cell is not of the column's dtype and shape.
    """
    array = stored.combine_chunks() if isinstance(stored, pa.ChunkedArray) else stored
    if isinstance(array, pa.ChunkedArray):  # combine_chunks keeps chunks that together pass 2 GiB
        raise ValueError(f"column {column.name!r}: a row group of more than 2 GiB")
    if column.codec == "list":
        found = cells(SourceColumn(column.name, column.dtype, "array", len(column.shape)), array)
        if found.shape[1:] != column.shape and len(found):
            raise ValueError(
                f"column {column.name!r}: lists of shape {found.shape[1:]}, after {column.shape} elsewhere"
            )
        return found
    if column.codec == "scalar":
        if array.null_count:
            raise ValueError(f"column {column.name!r}: {array.null_count} null(s); fill or drop them")
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=column.dtype)
    rows, cell_bytes = len(array), column.row_bytes
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=rows + 1, offset=4 * array.offset)
    if array.null_count or not (np.diff(offsets) == cell_bytes).all():
        raise _other_cells(column)
    raw = np.frombuffer(data_buffer, dtype=np.uint8, count=rows * cell_bytes, offset=int(offsets[0]))
    return view(column, raw.reshape(rows, cell_bytes))


def view(column: Column, cells: npt.NDArray[np.uint8]) -> Array:
    """Stored cells as values, without a copy. # cells: (rows, column.row_bytes) -> (rows, *shape)

    Raises ValueError if a cell is not of the column's dtype and shape.
    """
    header = npy_header(column) if column.codec == "ndarray" else b""
    if not _all_start_with(cells, header):
        raise _other_cells(column)
    rows, dtype = len(cells), np.dtype(column.dtype)
    if rows == 0 or math.prod(column.shape) == 0:
        return np.zeros((rows, *column.shape), dtype=dtype)
    body = cells[:, len(header) :]
    strides = (cells.strides[0], *_strides(column.shape, dtype.itemsize))
    first = body[:1].view(dtype)
    values: Array = np.lib.stride_tricks.as_strided(first, (rows, *column.shape), strides, writeable=False)
    return values


def _other_cells(column: Column) -> ValueError:
    expected = f"dtype {column.dtype} and shape {column.shape}, which the manifest gives"
    return ValueError(f"column {column.name!r}: stored cells do not all have {expected}")


def _all_start_with(cells: npt.NDArray[np.uint8], header: bytes) -> bool:
    """Whether every cell has this header, compared eight bytes at a time. # cells: (rows, bytes of a cell)"""
    words = cells[:, : len(header)].view(np.uint64)  # a header's length is a multiple of 64
    return bool((words == np.frombuffer(header, dtype=np.uint64)).all())


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides[-len(shape) :]) if shape else ()
