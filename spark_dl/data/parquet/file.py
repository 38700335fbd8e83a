"""Opens Parquet files with page checksums, which are verified on reading, and reads plain pages without a decoder.

pyarrow 14 has no page checksums, which is logged once. Parquet has no checksum of the footer, and a flipped bit in it
can crash the reader. Therefore the manifest of our datasets has one, which is verified before the footer is parsed.

Our shards are written in this form: PLAIN encoding, no compression, no dictionary, no nulls. The values of such pages
are a view of their bytes. A column chunk is read as a whole. Format: https://github.com/apache/parquet-format
(parquet.thrift, PageHeader; Encodings.md, PLAIN). Footers, page headers and page indexes are in Thrift's compact
protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), of which Parquet uses
neither maps nor sets.

New memory takes about as long as reading into it, so large arrays are used again; and threads take bytes of a budget
before they allocate.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import mmap
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_dl.data.columns.ragged import Array
from spark_dl.data.parquet.calendar import rebased

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12
_MAX_DEPTH = 32


class Field(NamedTuple):
    """A type and a value: `Many` for lists, `Struct` for structs, 8 bytes for doubles."""

    kind: int
    value: Any


class Many(NamedTuple):
    """The type and the items of a list."""

    kind: int
    items: Sequence[Any]


Struct = dict[int, Field]
"""The fields of a struct, by number."""


def value_of(struct: Struct, number: int, default: Any = None) -> Any:
    """Returns the value of a field; for a list its items."""
    if number not in struct:
        return default
    value = struct[number].value
    return value.items if isinstance(value, Many) else value


def read_struct(content: bytes | memoryview, position: int = 0, depth: int = 0) -> tuple[Struct, int]:
    """Parses a struct. Returns it with the position after it. Raises ValueError or IndexError for invalid bytes."""
    fields: Struct = {}
    number = 0
    while (byte := content[position]) != 0:
        kind = byte & 0xF
        number, position = (number + (byte >> 4), position + 1) if byte >> 4 else _zigzag(content, position + 1)
        value, position = (kind == TRUE, position) if kind in (TRUE, FALSE) else _value(content, position, kind, depth)
        fields[number] = Field(kind, value)
    return fields, position + 1


def _value(content: bytes | memoryview, position: int, kind: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"Thrift structs and lists are nested more than {_MAX_DEPTH} deep")
    if kind in (I16, I32, I64):
        return _zigzag(content, position)
    if kind == STRUCT:
        return read_struct(content, position, depth + 1)
    if kind == BINARY:
        length, position = _varint(content, position)
        return _bytes(content, position, length)
    if kind == LIST:
        return _list(content, position, depth + 1)
    if kind in (TRUE, FALSE):  # in a list
        return content[position] == TRUE, position + 1
    if kind in (BYTE, DOUBLE):
        return _bytes(content, position, 1 if kind == BYTE else 8)
    raise ValueError(f"a field of Thrift type {kind}, which Parquet does not use")


def _list(content: bytes | memoryview, position: int, depth: int) -> tuple[Many, int]:
    kind, length = content[position] & 0xF, content[position] >> 4
    position += 1
    if length == 15:
        length, position = _varint(content, position)
    if length > len(content) - position:  # each item has at least a byte
        raise ValueError(f"a list of {length} items in {len(content) - position} bytes")
    items = []
    for _ in range(length):
        item, position = _value(content, position, kind, depth)
        items.append(item)
    return Many(kind, items), position


def _bytes(content: bytes | memoryview, position: int, length: int) -> tuple[bytes, int]:
    found = bytes(content[position : position + length])
    if len(found) != length:
        raise ValueError(f"found {len(found)} bytes, expected {length}")
    return found, position + length


def _varint(content: bytes | memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := content[position]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift, position = shift + 7, position + 1
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
    return value | byte << shift, position + 1


def _zigzag(content: bytes | memoryview, position: int) -> tuple[int, int]:
    value, position = _varint(content, position)
    return (value >> 1) ^ -(value & 1), position


def write_struct(struct: Struct) -> bytes:
    """Serializes a struct."""
    out = bytearray()
    last = 0
    for number, (kind, value) in sorted(struct.items()):
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        step = number - last
        out += bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + _zigzagged(number)
        if kind not in (TRUE, FALSE):
            out += _written(kind, value)
        last = number
    return bytes(out) + b"\0"


def _written(kind: int, value: Any) -> bytes:
    if kind in (I16, I32, I64):
        return _zigzagged(value)
    if kind == STRUCT:
        return write_struct(value)
    if kind == BINARY:
        return _varint_of(len(value)) + bytes(value)
    if kind == LIST:
        length = len(value.items)
        head = bytes([length << 4 | value.kind]) if length < 15 else bytes([0xF0 | value.kind]) + _varint_of(length)
        return head + b"".join(_written(value.kind, item) for item in value.items)
    if kind in (TRUE, FALSE):
        return bytes([TRUE if value else FALSE])
    return bytes(value)


def _varint_of(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _zigzagged(value: int) -> bytes:
    return _varint_of(value << 1 if value >= 0 else (-value << 1) - 1)


class ByteBudget:
    """A limit on the total bytes of several threads."""

    def __init__(self, size: int):
        self.size = size
        self._used = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Waits until `size` bytes are free. If no bytes are taken, any size is granted.

        Raises RuntimeError after `close`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._used or self._used + size <= self.size)
            if self._is_closed:
                raise RuntimeError("the consumer has stopped")
            self._used += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    @contextlib.contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Takes bytes for the block."""
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def close(self) -> None:
        """Raises RuntimeError in all waiting threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class PrefetchBudget(ByteBudget):
    """A limit on the bytes of a queue: one thread takes bytes, another releases them in the same order."""

    def __init__(self, size: int):
        super().__init__(size)
        self._held: deque[int] = deque()

    def take(self, size: int) -> None:
        super().take(size)
        self._held.append(size)

    def release_first(self) -> None:
        """Releases the bytes that were taken first."""
        self.give_back(self._held.popleft())


_KEPT = 8  # maximum number of unused blocks


class BufferPool:
    """Allocates arrays of similar sizes, in the memory of released arrays. Thread-safe.

    Blocks are mapped from the system and returned to it, because the memory that malloc keeps differs from run to run.
    """

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)
        self._lent: dict[int, tuple[weakref.ref[Array], mmap.mmap]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialized array. Its memory is reused after the array and all views of it are released.

        Blocks that are too small are dropped, so that all blocks soon have the requested size.
        """
        size = math.prod(shape) * dtype.itemsize
        try:
            block = self._free.popleft()
        except IndexError:
            block = None
        if block is None or len(block) < size:
            step = max(mmap.PAGESIZE, 1 << size.bit_length() >> 4)  # pages that are not written take no memory
            block = mmap.mmap(-1, (size // step + 1) * step, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Views refer to the first array that owns its memory (PyArray_SetBaseObject), which is this one.
        whole: Array = np.frombuffer(block, np.uint8, count=size)
        lent = weakref.ref(whole, self._give_back)
        self._lent[id(lent)] = lent, block
        array: Array = whole.view(dtype).reshape(shape)
        return array

    def _give_back(self, lent: weakref.ref[Array]) -> None:
        self._free.append(self._lent.pop(id(lent))[1])


_log = logging.getLogger("spark_dl")

_BUFFER_BYTES = 128 << 10  # of each column of a row group
HAS_CHECKSUMS = "page_checksum_verification" in inspect.signature(pq.ParquetFile).parameters


def open_file(
    source: Any,
    *,
    footer_bytes: int = 0,
    footer_crc32: int = 0,
    dictionary_columns: Sequence[str] = (),
    buffered: bool = False,
) -> Any:
    """Opens a local or remote Parquet file. # source: a pyarrow file

    footer_bytes, footer_crc32: size and checksum of the end of the file, from the footer; 0 bytes if unknown.
    dictionary_columns: columns of strings and bytes that are read as Arrow dictionaries, if they are dictionary-encoded
        in the file. Their decoded size (`decoded_bytes`) is not in the footer.
    buffered: whether column chunks are read in small pieces during decoding; for files on a local disk.
    96-bit timestamps, Spark's default, are read as microseconds, as in a DataFrame. Nanoseconds overflow after 2262.
    Dates and times of the old calendar are those that Spark reads (`calendar.py`).
    Raises ValueError for another checksum of the footer. Reading a page with a wrong checksum raises OSError.
    """
    options = _options(buffered)
    if footer_bytes:
        end = source.read_at(footer_bytes, source.size() - footer_bytes)
        if zlib.crc32(end) != footer_crc32:
            raise ValueError(
                "the footer's checksum does not match its bytes; the file was changed after it was written"
            )
        options["metadata"] = pq.read_metadata(pa.BufferReader(end))
    file = pq.ParquetFile(source, **options)
    leaves = _dictionary_leaves(file, dictionary_columns)
    return _with_dictionaries(source, file, leaves, buffered) if leaves else rebased(file)


def reopened(
    source: Any,
    file: pq.ParquetFile,
    *,
    before: Sequence[str],
    dictionary_columns: Sequence[str] = (),
    buffered: bool = False,
) -> Any:
    """Returns an open file with other dictionary columns; the same file if they are the same as `before`."""
    leaves = _dictionary_leaves(file, dictionary_columns)
    if leaves == _dictionary_leaves(file, before):
        return file
    return _with_dictionaries(source, file, leaves, buffered)


def dictionary_bytes(chunk: Any) -> int:
    """Returns the stored bytes of a column chunk's dictionary; 0 without one. # chunk: its metadata"""
    return chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)  # type: ignore[no-any-return]


def leaf_in_column(name: str, path: str) -> bool:
    """Whether a Parquet leaf belongs to the column of this name."""
    return path == name or path.startswith(f"{name}.")


def _with_dictionaries(source: Any, file: pq.ParquetFile, leaves: Sequence[str], buffered: bool) -> Any:
    return rebased(pq.ParquetFile(source, metadata=file.metadata, read_dictionary=leaves, **_options(buffered)))


def _options(buffered: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"coerce_int96_timestamp_unit": "us"}
    if buffered:
        options |= {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
    if _checks_pages():
        options["page_checksum_verification"] = True
    return options


def _dictionary_leaves(file: pq.ParquetFile, names: Sequence[str]) -> list[str]:
    """Returns the leaves of strings and bytes that are dictionary-encoded in any row group."""
    found = []
    for i in range(len(file.schema)) if names else ():
        leaf = file.schema.column(i)
        if leaf.physical_type == "BYTE_ARRAY" and any(leaf_in_column(name, leaf.path) for name in names):
            groups = (file.metadata.row_group(group) for group in range(file.metadata.num_row_groups))
            if any("DICTIONARY" in encoding for group in groups for encoding in group.column(i).encodings):
                found.append(leaf.path)
    return found


def decoded_bytes(stored: pa.ChunkedArray | pa.Array) -> int:
    """Returns the bytes of a dictionary column of strings or bytes after decoding; 0 for other columns."""
    total = 0
    for leaf in chunks_of(stored):
        while pa.types.is_list(leaf.type) or pa.types.is_large_list(leaf.type):
            leaf = leaf.flatten()
        if pa.types.is_dictionary(leaf.type) and is_string_or_binary(leaf.type.value_type):
            total += pc.sum(pc.binary_length(leaf.dictionary).cast(pa.int64()).take(leaf.indices)).as_py() or 0
    return total


def chunks_of(stored: pa.ChunkedArray | pa.Array) -> list[pa.Array]:
    """Returns the chunks of a column, or the array itself."""
    return stored.chunks if isinstance(stored, pa.ChunkedArray) else [stored]


def small_type(arrow: pa.DataType) -> pa.DataType:
    """Returns the type with 32-bit offsets of a string or binary type."""
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(arrow, arrow)


def is_string_or_binary(arrow: pa.DataType) -> bool:
    """Whether this is a type of strings or bytes of variable length."""
    types = pa.types
    return bool(
        types.is_string(arrow) or types.is_large_string(arrow) or types.is_binary(arrow) or types.is_large_binary(arrow)
    )


def open_writer(sink: Any, schema: pa.Schema, **options: Any) -> pq.ParquetWriter:
    """Opens a Parquet file for writing. # sink: a writable file; options: of `pyarrow.parquet.ParquetWriter`"""
    return pq.ParquetWriter(sink, schema, **options, **({"write_page_checksum": True} if _checks_pages() else {}))


@functools.cache
def _checks_pages() -> bool:
    if not HAS_CHECKSUMS:
        _log.warning(
            "pyarrow %s has no page checksums, so flipped bits in shards are not detected; use pyarrow 15 or newer",
            pa.__version__,
        )
    return HAS_CHECKSUMS


def table_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Returns a column, or a field of a struct by its path."""
    if name in table.column_names:
        return table.column(name)
    first, *path = name.split(".")
    return pc.struct_field(table.column(first), path)


try:
    from isal.isal_zlib import crc32  # the same function, six times as fast
except ImportError:  # no wheel for this processor
    crc32 = zlib.crc32

Bytes = npt.NDArray[np.uint8]

_DATA_PAGE, _PLAIN = 0, 0
_WIDTHS = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8}
_LENGTH_BYTES = 4


def read_plain(source: Any, chunk: Any, *, levels: int, cell_bytes: int, rows: int, memory: BufferPool) -> Bytes | None:
    """Returns the stored cells of a column chunk, or None if it has another encoding. # (rows, cell_bytes)

    source: a pyarrow file, not shared between threads. chunk: metadata of the column chunk. levels: its maximum
    definition level (0 for a required column, 1 for an optional one). cell_bytes: the size of every cell; lengths of
    byte arrays are removed. memory: pool of the returned array.
    Raises ValueError if a page's checksum does not match its bytes.
    """
    is_binary = chunk.physical_type == "BYTE_ARRAY"
    is_plain = levels <= 1 and chunk.compression == "UNCOMPRESSED" and chunk.dictionary_page_offset is None
    if not is_plain or not (is_binary or _WIDTHS.get(chunk.physical_type) == cell_bytes):
        return None
    block = memory.take((chunk.total_compressed_size,), np.dtype(np.uint8))
    source.seek(chunk.data_page_offset)
    content = block.data[: source.readinto(block.data)]
    if len(content) != chunk.total_compressed_size:
        raise ValueError(f"the file ends {chunk.total_compressed_size - len(content)} bytes early")
    stored = cell_bytes + (_LENGTH_BYTES if is_binary else 0)
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(content):
        header, body_start = read_struct(content, start)
        page = value_of(header, 5)  # data page of version 1; field 1 is the number of values, 2 the encoding
        if value_of(header, 1) != _DATA_PAGE or not isinstance(page, dict) or value_of(page, 2) != _PLAIN:
            return None
        size, count, crc = value_of(header, 3), value_of(page, 1), value_of(header, 4, 0)
        if not (isinstance(size, int) and isinstance(count, int) and isinstance(crc, int)):
            return None
        start = body_start + size
        body = content[body_start:start]
        if len(body) != size:
            return None
        if 4 in header and crc32(body) != crc & 0xFFFFFFFF:
            raise ValueError("a page's checksum does not match its bytes; the file was changed after it was written")
        if levels:  # nulls have a level but no value, so the size of values shows that there are none
            body_start += _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        if count < 0 or start - body_start != count * stored:
            return None
        spans.append((body_start, start))
    if sum(stop - first for first, stop in spans) != rows * stored:
        return None
    first, end = spans[0] if spans else (0, 0)
    for start, stop in spans[1:]:  # concatenates the values of pages
        content[end : end + stop - start] = content[start:stop]
        end += stop - start
    cells = block[first:end].reshape(rows, stored)
    if not is_binary:
        return cells
    lengths = np.ndarray((rows,), "<u4", cells, 0, (stored,))
    return cells[:, _LENGTH_BYTES:] if (lengths == cell_bytes).all() else None
