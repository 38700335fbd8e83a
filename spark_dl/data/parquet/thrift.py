"""Thrift's compact protocol, the format of Parquet's footers, page headers and page indexes.

Source: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Parquet uses
neither maps nor sets, which are not supported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12
_MAX_DEPTH = 32


class TField(NamedTuple):
    """A type and a value: `Many` for lists, `Struct` for structs, 8 bytes for doubles."""

    kind: int
    value: Any


class Many(NamedTuple):
    """The type and the items of a list."""

    kind: int
    items: Sequence[Any]


Struct = dict[int, TField]
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
        fields[number] = TField(kind, value)
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
    value = bytes(content[position : position + length])
    if len(value) != length:
        raise ValueError(f"found {len(value)} bytes, expected {length}")
    return value, position + length


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
