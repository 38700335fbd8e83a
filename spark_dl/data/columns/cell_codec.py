"""Encodes arrays as the Arrow cells of our shards, and decodes stored cells as arrays."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_dl.data.columns import images
from spark_dl.data.columns.cells import read_cells
from spark_dl.data.columns.ragged import Array, Ragged
from spark_dl.data.columns.schema import MAX_GROUP_BYTES, Column, npy_header
from spark_dl.data.columns.source import BadCellsError, SourceColumn
from spark_dl.data.columns.types import Lookup


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of the stored column."""
    if column.codec in ("ndarray", "binary", "image"):
        return pa.binary()
    arrow = pa.from_numpy_dtype(np.dtype(column.dtype))
    for _ in column.shape:
        arrow = pa.list_(pa.field("element", arrow, nullable=False))
    return arrow


def arrow_field(column: Column) -> pa.Field:
    """The Arrow field of the stored column, which is not nullable."""
    return pa.field(column.name, arrow_type(column), nullable=False)


def encode(column: Column, values: Array | Ragged) -> pa.Array:
    """Encodes an array # (rows, *shape), or ragged rows of numbers or of the bytes of each cell.

    Raises ValueError if the cells do not fit into one row group.
    """
    if isinstance(values, Ragged):
        return _encode_ragged(column, values)
    if column.codec == "scalar":
        return pa.array(values, type=arrow_type(column))
    header = np.frombuffer(npy_header(column), dtype=np.uint8)
    rows = len(values)
    data = np.ascontiguousarray(values, dtype=np.dtype(column.dtype).newbyteorder("<")).reshape(
        rows, math.prod(column.inner)
    )
    cell_bytes = column.row_bytes
    _check_group_bytes(column, rows, rows * cell_bytes)
    out = np.empty((rows, cell_bytes), dtype=np.uint8)
    out[:, : len(header)] = header
    if data.size:
        out[:, len(header) :] = data.view(np.uint8)
    offsets = np.arange(rows + 1, dtype=np.int32) * cell_bytes
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(out)])


def _encode_ragged(column: Column, values: Ragged) -> pa.Array:
    flat = np.ascontiguousarray(values.own_values, dtype=column.dtype)
    _check_group_bytes(column, len(values), max(flat.nbytes, flat.size))
    offsets = (values.offsets - values.offsets[0]).astype(np.int32)
    if column.codec in ("binary", "image"):
        return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(flat)])
    array = pa.array(flat.reshape(-1))
    arrow = array.type
    for axis in range(flat.ndim - 1, 0, -1):
        arrow = pa.list_(pa.field("element", arrow, nullable=False))
        count = math.prod(flat.shape[:axis])
        array = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * flat.shape[axis], array, type=arrow)
    return pa.ListArray.from_arrays(offsets, array, type=arrow_type(column))


def _check_group_bytes(column: Column, rows: int, size: int) -> None:
    if size > MAX_GROUP_BYTES:
        most = MAX_GROUP_BYTES * rows // size
        change = (
            f"set shards.rows_per_row_group to at most {most}"
            if most
            else "a single row is larger: store smaller cells"
        )
        raise ValueError(
            f"column {column.name!r}: {rows} row(s) of {-(-size // rows)} bytes do not fit into one row group of "
            f"2 GiB; {change}"
        )


def decode(
    column: Column,
    stored: pa.ChunkedArray | pa.Array,
    *,
    rows: npt.NDArray[np.int64] | None = None,
    lookup: Lookup | None = None,
) -> Array | Ragged:
    """Decodes stored cells as an array # (rows, *shape), or as ragged rows. Tensors are views of the Arrow buffer.

    Timestamps, decimals, strings and other columns of external datasets are converted to numbers by their encoding.

    Args:
        rows: row numbers in the row group, for error messages; by default the cells are the whole row group.
        lookup: keeps looked-up strings between the batches of one column.

    Raises:
        ValueError: For a null, and for a cell that does not have the column's dtype and shape.
    """
    array = stored.combine_chunks() if isinstance(stored, pa.ChunkedArray) else stored
    if isinstance(array, pa.ChunkedArray):  # combine_chunks keeps chunks that together pass 2 GiB
        raise ValueError(
            f"column {column.name!r}: found a row group of more than 2 GiB; lower shards.rows_per_row_group"
        )
    if column.codec == "ndarray":
        return _decode_npy(column, array)
    kind = {"list": "array", "vector": "vector"}.get(column.codec, "scalar")
    depth = len(column.shape) if column.codec == "list" else 0
    source = SourceColumn(column.name, column.dtype, kind, depth, column.is_ragged, column.encoding, fill=column.fill)
    try:
        cells = read_cells(source, array, column.shape, lookup)
    except BadCellsError as error:
        row = error.row if rows is None else int(rows[error.row])
        raise ValueError(f"{error}; first in row {row} of the row group") from None
    if column.codec == "image":
        return _decode_images(column, cells, rows)
    return cells


def _decode_images(column: Column, files: Array | Ragged, rows: npt.NDArray[np.int64] | None) -> Array:
    assert isinstance(files, Ragged)
    out = np.empty((len(files), *column.inner), dtype=column.dtype)
    for i in range(len(files)):  # Pillow opens one at a time
        row = i if rows is None else rows[i]
        try:
            image = images.read_image(files[i : i + 1].own_values, column.inner, column.encoding)
        except images.OtherSizeError as error:
            raise ValueError(
                f"column {column.name!r}, row {row}: found {error}, expected the shape {column.shape}; "
                f"data.encode.{column.name}.resize: [height, width] scales images"
            ) from None
        except Exception as error:  # Pillow defines no errors for bad bytes
            raise ValueError(f"column {column.name!r}, row {row}: found a cell that cannot be read: {error}") from error
        if image.shape != column.shape or image.dtype != out.dtype:
            raise ValueError(
                f"column {column.name!r}, row {row}: found an image of shape {image.shape} and {image.dtype}, expected "
                f"{column.shape} and {column.dtype}"
            )
        out[i] = image
    return out


def _decode_npy(column: Column, array: pa.Array) -> Array:
    rows, cell_bytes = len(array), column.row_bytes
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=rows + 1, offset=4 * array.offset)
    if array.null_count or not (np.diff(offsets) == cell_bytes).all():
        raise _other_cells(column)
    raw = np.frombuffer(data_buffer, dtype=np.uint8, count=rows * cell_bytes, offset=int(offsets[0]))
    return view(column, raw.reshape(rows, cell_bytes))


def view(column: Column, cells: npt.NDArray[np.uint8]) -> Array:
    """Views stored cells as values, without a copy. # cells: (rows, column.row_bytes) -> (rows, *shape)

    Raises ValueError if a cell does not have the column's dtype and shape.
    """
    header = npy_header(column) if column.codec == "ndarray" else b""
    if not _all_start_with(cells, header):
        raise _other_cells(column)
    rows, dtype = len(cells), np.dtype(column.dtype)
    if rows == 0 or math.prod(column.inner) == 0:
        return np.zeros((rows, *column.inner), dtype=dtype)
    body = cells[:, len(header) :]
    strides = (cells.strides[0], *_strides(column.inner, dtype.itemsize))
    first = body[:1].view(dtype)
    values: Array = np.lib.stride_tricks.as_strided(first, (rows, *column.inner), strides, writeable=False)
    return values


def _other_cells(column: Column) -> ValueError:
    expected = f"dtype {column.dtype} and shape {column.shape} as in the manifest"
    return ValueError(f"column {column.name!r}: stored cells do not all have {expected}; write the dataset again")


def _all_start_with(cells: npt.NDArray[np.uint8], header: bytes) -> bool:
    """Whether every cell starts with this header, eight bytes at a time. # cells: (rows, bytes of a cell)"""
    words = cells[:, : len(header)].view(np.uint64)  # a header's length is a multiple of 64
    return bool((words == np.frombuffer(header, dtype=np.uint64)).all())


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides[-len(shape) :]) if shape else ()
