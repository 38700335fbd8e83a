"""The cells of Petastorm's codecs as arrays: scalars, `.npy` and compressed `.npz` bytes, PNG and JPEG images."""

from __future__ import annotations

import decimal
import functools
import io
import math
import struct
import threading
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_dl.data.columns.encoding import Encoding
from spark_dl.data.columns.images import OtherSizeError, read_image
from spark_dl.data.columns.ragged import Array
from spark_dl.data.columns.source import NO_NULLS
from spark_dl.data.parquet.file import chunks_of
from spark_dl.data.petastorm.unischema import TIMES, Field

_MAX_CELL_BYTES = 1 << 31
"""Largest uncompressed size of a compressed cell."""
_ZIP_END, _ZIP_ENTRY = struct.Struct("<4s6xHI4xH"), struct.Struct("<4s20xI")
"""End record of a zip archive (signature, entries, bytes of the directory before it, bytes of the comment), and a
directory entry's signature and uncompressed size."""
_MAX_HEADER_BYTES = 10_000
"""Largest header of a `.npy` cell. NumPy has the same limit."""
_ONE_HEADER_AT_A_TIME = threading.Lock()
"""NumPy reads `.npy` headers with `ast.literal_eval`, which can raise SystemError when several threads call it
(python/cpython#106905; Python 3.11.7 has the bug)."""


def unpacked_bytes(stored: pa.ChunkedArray | pa.Array) -> int:
    """Returns the uncompressed bytes of compressed cells, from their headers. # stored: binary, or a dictionary"""
    total = 0
    for chunk in chunks_of(stored):
        is_dictionary = pa.types.is_dictionary(chunk.type)
        cells = chunk.dictionary if is_dictionary else chunk
        sizes = pa.array([_unpacked_bytes(cell.as_buffer()) if cell.is_valid else 0 for cell in cells], pa.int64())
        total += pc.sum(sizes.take(chunk.indices) if is_dictionary else sizes).as_py() or 0
    return total


def _unpacked_bytes(cell: Any) -> int:
    """Returns the uncompressed size of a zip archive, from its directory; 0 for invalid bytes, a later error."""
    content = memoryview(cell)
    end = len(content) - _ZIP_END.size
    if end >= 0:  # fast path: one file, no comment, no 64-bit end record
        magic, count, directory_bytes, comment_bytes = _ZIP_END.unpack_from(content, end)
        at = end - directory_bytes
        is_simple = magic == b"PK\5\6" and comment_bytes == 0 and bytes(content[max(0, end - 20) :][:4]) != b"PK\6\7"
        if is_simple and count == 1 and 0 <= at <= end - _ZIP_ENTRY.size:
            magic, size = _ZIP_ENTRY.unpack_from(content, at)
            if magic == b"PK\1\2" and size < 0xFFFFFFFF:
                return int(size)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except Exception:  # `zipfile` may raise any exception for invalid bytes
        return 0


def read_npy(cell: memoryview) -> Array:
    """Returns a view of the cell."""
    if bytes(cell[6:7]) == b"\3":  # version 3, for field names outside Latin-1; its parser is not public
        with _ONE_HEADER_AT_A_TIME:
            return np.lib.format.read_array(io.BytesIO(cell), allow_pickle=False)  # type: ignore[no-any-return]
    start, shape, is_fortran, dtype = header_of(cell)
    if dtype.hasobject:
        raise ValueError("Python objects, which are a pickle")
    value: Array = np.ndarray(shape, dtype, cell, start, order="F" if is_fortran else "C")
    return value


def read_npz(cell: memoryview) -> Array:
    with zipfile.ZipFile(io.BytesIO(cell)) as archive:
        entry = archive.getinfo("arr.npy")
        if entry.file_size > _MAX_CELL_BYTES:
            raise ValueError(f"an array of {entry.file_size} bytes; at most {_MAX_CELL_BYTES} are unpacked")
        with archive.open(entry) as file:  # `archive.read` may return more than the directory's size
            return read_npy(memoryview(file.read(entry.file_size)))


def header_of(cell: memoryview) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """Returns a `.npy` cell's start of the values, shape, whether it is in Fortran order, and dtype.

    Raises ValueError for bytes that are not `.npy` of version 1 or 2 (`numpy.lib.format`).
    """
    length_bytes = 2 if bytes(cell[6:7]) == b"\1" else 4  # in version 1, and in later versions
    start = 8 + length_bytes + int.from_bytes(cell[8 : 8 + length_bytes], "little")
    if start > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {start} bytes; at most {_MAX_HEADER_BYTES} are read")
    try:
        return start, *_parsed_header(bytes(cell[:start]))
    except Exception as error:  # Python's parser may raise any exception for invalid text
        raise ValueError(f"an invalid header ({type(error).__name__}: {error!s:.200})") from None


@functools.lru_cache(maxsize=4096)
def _parsed_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Cached, as parsing a header takes longer than reading a small cell, and a column has few different headers."""
    file, formats = io.BytesIO(header), np.lib.format
    version = formats.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
    with _ONE_HEADER_AT_A_TIME:
        shape, is_fortran, dtype = read(file)
    if any(n < 0 for n in shape):  # np.ndarray accepts -1
        raise ValueError(f"the shape {shape}")
    return shape, is_fortran, dtype


class CellError(ValueError):
    """A cell that does not fit its field."""

    def __init__(self, field: str, row: int, found: str, expected: str):
        super().__init__(f"field {field!r}, row {row}: found {found}, expected {expected}")
        self.field, self.row, self.found, self.expected = field, row, found, expected

    def in_row(self, row: int) -> CellError:
        """Returns the same error for another row."""
        return type(self)(self.field, row, self.found, self.expected)


class OtherShapeError(CellError):
    """A cell whose shape is not the field's."""


def decode(
    field: Field, array: pa.Array | pa.ChunkedArray, encoding: Encoding | None = None
) -> Array | list[Array | None]:
    """Decodes the cells of a stored column, to an array [rows, *shape] or a list of arrays.

    An array has the field's dtype. Strings, bytes and decimals of scalar fields become an object array of Python's
    `str`, `bytes` and `Decimal`, with None for null. If the field's shape varies, or the column has nulls, a list with
    one array [*shape] per row, or None for null, is returned. `.npy` cells with the same header become one read-only
    view of the Arrow buffer. Values of a hive partition may be passed as an array of strings. Images are read as
    their `encoding` says.

    Raises ValueError, with the field and the row, for a cell that does not have the field's dtype and shape
    (OtherShapeError), for a null in a field without nulls, and for a number outside the dtype's range.
    """
    stored = _one_array(field, array)
    if stored.null_count and not field.nullable:
        row = int(np.flatnonzero(stored.is_null().to_numpy(zero_copy_only=False))[0])
        raise _bad_cell(field, row, "null", NO_NULLS)
    kind = "scalar" if field.codec is None else field.codec.kind
    if kind == "scalar" and field.shape:
        return _together(field, _list_cells(field, stored))
    if kind == "scalar":
        return _scalars(field, stored)
    cells = _binary(field, stored)
    if kind == "ndarray" and field.fixed_shape is not None and not cells.null_count:
        view = _one_view(field, cells)
        if view is not None:
            return view
    readers: dict[str, Callable[[memoryview], Array]] = {
        "ndarray": read_npy,
        "compressed_ndarray": read_npz,
        "image": lambda cell: read_image(cell, field.shape, encoding),
    }
    return _together(field, [_read_cell(field, i, cell, readers[kind]) for i, cell in enumerate(cells)])


def _bad_cell(field: Field, row: int, found: str, expected: str) -> CellError:
    return CellError(field.name, row, found, expected)


def _one_array(field: Field, array: pa.Array | pa.ChunkedArray) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_binary(array.type):  # with 64-bit offsets, any number of chunks becomes one array
        array = array.cast(pa.large_binary())
    elif pa.types.is_string(array.type):
        array = array.cast(pa.large_string())
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        raise ValueError(f"field {field.name!r}: {array.num_chunks} chunks that do not fit into one Arrow array")
    return array


def _binary(field: Field, stored: pa.Array) -> pa.Array:
    if not pa.types.is_large_binary(stored.type):
        raise ValueError(f"field {field.name!r}: found a column of {stored.type}, expected binary cells of its codec")
    return stored


def _together(field: Field, cells: list[Array | None]) -> Array | list[Array | None]:
    """Returns one array if the field's shape is fixed and no cell is null; otherwise a list."""
    present = [c for c in cells if c is not None]
    if field.fixed_shape is None or len(present) < len(cells):
        return cells
    if not present:
        return np.zeros((0, *field.fixed_shape), dtype=_numpy_dtype(field))
    return np.stack(present)


def _numpy_dtype(field: Field) -> np.dtype[Any]:
    return np.dtype({"str": "U", "bytes": "S", "decimal": "object"}.get(field.dtype, field.dtype))


def _scalars(field: Field, stored: pa.Array) -> Array | list[Array | None]:
    if field.dtype in ("str", "bytes", "decimal", "object"):
        return _objects(field, stored)
    if not stored.null_count:
        return _numbers(field, stored, np.arange(len(stored)))
    rows = np.flatnonzero(stored.is_valid().to_numpy(zero_copy_only=False))
    cells: list[Array | None] = [None] * len(stored)
    for row, value in zip(rows, _numbers(field, stored.drop_null(), rows), strict=True):
        cells[row] = np.asarray(value)
    return cells


def _numbers(field: Field, stored: pa.Array, rows: Array) -> Array:
    """Casts numbers to the field's dtype. Integers must fit. # rows: [len(stored)], row numbers for messages"""
    if field.dtype in TIMES:
        values: Array = stored.to_numpy(zero_copy_only=False)
        if values.dtype.kind != np.dtype(field.dtype).kind:
            raise ValueError(f"field {field.name!r}: found a column of {stored.type}, expected {field.dtype}")
        return values
    dtype = np.dtype(field.dtype)
    if dtype.kind == "c":
        raise ValueError(f"field {field.name!r}: scalars of dtype {field.dtype} have no type in Parquet")
    target = pa.from_numpy_dtype(dtype)
    if pa.types.is_floating(target) and pa.types.is_floating(stored.type):  # rounds, as Petastorm does
        return np.asarray(stored.to_numpy(zero_copy_only=False), dtype=dtype)
    try:
        return np.asarray(stored.cast(target).to_numpy(zero_copy_only=False), dtype=dtype)
    except pa.ArrowException as error:
        for i in range(len(stored)):
            try:
                stored[i : i + 1].cast(target)
            except pa.ArrowException:
                raise _bad_cell(field, int(rows[i]), f"{stored[i].as_py()!r:.80}", f"a {field.dtype}") from error
        raise ValueError(f"field {field.name!r}: a column of {stored.type} cannot become {field.dtype}") from error


def _objects(field: Field, stored: pa.Array) -> Array:
    """Returns Python's `str`, `bytes` or `Decimal` for each row, and None for null. # [rows], object"""
    convert: dict[str, Callable[[Any], Any]] = {
        "str": lambda v: bytes(v).decode() if isinstance(v, bytes) else str(v),
        "bytes": lambda v: v.encode() if isinstance(v, str) else bytes(v),
        "decimal": lambda v: v if isinstance(v, decimal.Decimal) else decimal.Decimal(v),
    }
    if field.dtype not in convert:
        raise ValueError(f"field {field.name!r}: values of dtype {field.dtype} are pickles, which are not loaded")
    out: Array = np.empty(len(stored), dtype=object)
    for row, value in enumerate(stored.to_pylist()):
        if field.dtype == "bytes" and not isinstance(value, bytes | str | None):  # bytes(5) would be five zeros
            raise _bad_cell(field, row, f"{value!r:.80}", "bytes")
        try:
            out[row] = None if value is None else convert[field.dtype](value)
        except (ValueError, TypeError, decimal.InvalidOperation) as error:
            raise _bad_cell(field, row, f"{value!r:.80}", f"a {field.dtype}") from error
    return out


def _list_cells(field: Field, stored: pa.Array) -> list[Array | None]:
    """Decodes a column of Arrow lists, which a field without a codec may have."""
    if len(field.shape) != 1 or not (pa.types.is_list(stored.type) or pa.types.is_large_list(stored.type)):
        raise ValueError(f"field {field.name!r}: found a column of {stored.type} for the shape {field.shape}; "
                         "without a codec, only lists of one axis are read")  # fmt: skip
    element = Field(field.name, field.dtype)
    cells: list[Array | None] = []
    for row, cell in enumerate(stored):
        if not cell.is_valid:
            cells.append(None)
            continue
        values = _one_array(field, cell.values)
        if values.null_count:
            raise _bad_cell(field, row, "a null inside a list", "no nulls there")
        try:
            value = np.asarray(_scalars(element, values))
        except CellError as error:  # its row is the position in the list
            raise error.in_row(row) from None
        cells.append(_checked(field, row, value if value.dtype != object else _fixed_width(value, field)))
    return cells


def _fixed_width(values: Array, field: Field) -> Array:
    return values if field.dtype == "decimal" else values.astype(_numpy_dtype(field))


def _read_cell(field: Field, row: int, cell: Any, read: Callable[[memoryview], Array]) -> Array | None:
    if not cell.is_valid:
        return None
    try:
        value = read(memoryview(cell.as_buffer()))
    except ImportError:
        raise
    except OtherSizeError as error:
        raise OtherShapeError(field.name, row, str(error), f"the shape {field.shape}") from None
    except Exception as error:  # these parsers may raise any exception for invalid bytes
        assert field.codec is not None
        found = f"a cell that cannot be read ({type(error).__name__}: {error!s:.200})"
        raise _bad_cell(field, row, found, f"one of the codec {field.codec.kind}") from error
    return _checked(field, row, value)


def _checked(field: Field, row: int, value: Array) -> Array:
    """Returns the cell in this machine's byte order. Raises for another dtype or shape than the field's."""
    _check_cell(field, row, dtype=value.dtype, shape=value.shape)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _check_cell(field: Field, row: int, *, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not _is_dtype(field, dtype):
        raise _bad_cell(field, row, f"a cell of dtype {dtype}", field.dtype)
    fits = len(shape) == len(field.shape)
    if not fits or any(n is not None and n != m for n, m in zip(field.shape, shape, strict=True)):
        raise OtherShapeError(field.name, row, f"a cell of shape {shape}", f"the shape {field.shape}")


def _is_dtype(field: Field, dtype: np.dtype[Any]) -> bool:
    if field.dtype in ("str", "bytes", *TIMES):  # widths and units vary
        return dtype.kind == _numpy_dtype(field).kind
    return bool(dtype.newbyteorder("=") == _numpy_dtype(field))


def _one_view(field: Field, cells: pa.Array) -> Array | None:
    """Returns all cells as one view of the Arrow buffer, if all headers are equal; otherwise None. # [rows, *shape]"""
    rows = len(cells)
    if rows == 0:
        return None
    _, offset_buffer, data_buffer = cells.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64, count=rows + 1, offset=8 * cells.offset)
    size = int(offsets[1] - offsets[0])
    if size == 0 or not (np.diff(offsets) == size).all():
        return None
    raw = np.frombuffer(data_buffer, dtype=np.uint8, count=rows * size, offset=int(offsets[0])).reshape(rows, size)
    raw.flags.writeable = False
    try:
        start, shape, is_fortran, dtype = header_of(memoryview(raw[0]))
    except ValueError:
        return None  # read again cell by cell, for a message with the row
    fits = not dtype.hasobject and not is_fortran and size == start + math.prod(shape) * dtype.itemsize
    if not fits or (raw[:, :start] != raw[0, :start]).any():
        return None
    _check_cell(field, 0, dtype=dtype, shape=shape)
    if size == start:
        return np.zeros((rows, *shape), dtype.newbyteorder("="))
    strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    view: Array = np.ndarray((rows, *shape), dtype, raw, start, (size, *strides))
    return view if dtype.isnative else view.astype(dtype.newbyteorder("="))
