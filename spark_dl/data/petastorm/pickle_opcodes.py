"""Checks the opcodes of a pickled Unischema before it is read: kinds, count and depth."""

from __future__ import annotations

import pickletools
from collections.abc import Mapping, Sequence

_MAX_PICKLE_BYTES = 16 << 20
_MAX_OPCODES = 1_000_000


class UnsafeMetadataError(ValueError):
    """Metadata that is not a plain Unischema. Raised before any code that it names can run."""


_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
_ATOMS = {
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_OPCODES = _ATOMS | _PUTS | _GETS | {
    "PROTO", "FRAME", "STOP", "MARK", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ",
    "BUILD",
}  # fmt: skip


def check_opcodes(pickled: bytes) -> None:
    """Raises UnsafeMetadataError for a pickle that could take much time or memory, or run code.

    The stack is followed only to check the keys of dicts. A key of nested tuples, each twice in the next, would be
    hashed for a very long time, and deep nesting overflows the C stack.
    """
    if len(pickled) > _MAX_PICKLE_BYTES:
        raise UnsafeMetadataError(f"a pickled Unischema of {len(pickled)} bytes; expected at most {_MAX_PICKLE_BYTES}")
    stack: list[bool | None] = []  # True for a string or a number, False for another object, None for a mark
    memo: dict[int, bool] = {}
    for count, (op, arg, _) in enumerate(pickletools.genops(pickled), 1):
        if op.name not in _OPCODES:
            named = f" {arg!r:.100}" if isinstance(arg, str) else ""
            raise UnsafeMetadataError(
                f"the pickled Unischema has the opcode {op.name}{named}, which a Unischema does not need"
            )
        if count > _MAX_OPCODES:
            raise UnsafeMetadataError(f"the pickled Unischema has more than {_MAX_OPCODES} opcodes")
        if op.name == "FRAME" and int(arg or 0) > len(pickled):
            raise UnsafeMetadataError(f"the pickled Unischema has a frame of {arg} bytes, and {len(pickled)} in all")
        if op.name in _PUTS:
            index = len(memo) if op.name == "MEMOIZE" else int(arg or 0)
            if not 0 <= index <= count:  # the unpickler's memo is an array up to the largest index
                raise UnsafeMetadataError(f"the pickled Unischema has the memo index {index} after {count} opcodes")
            memo[index] = bool(stack[-1])
        elif op.name in _GETS:
            stack.append(memo[int(arg or 0)])
        else:
            _follow(op, stack)


def _follow(op: pickletools.OpcodeInfo, stack: list[bool | None]) -> None:
    """Applies an opcode to the stack."""
    fixed, items = len(op.stack_before), list[bool]()
    if pickletools.markobject in op.stack_before:
        fixed = op.stack_before.index(pickletools.markobject)
        while (item := stack.pop()) is not None:
            items.append(item)
    operands: list[bool | None] = [stack.pop() for _ in range(fixed)]  # the last item first
    if None in operands:
        raise UnsafeMetadataError(f"the pickled Unischema has the opcode {op.name} without its operands")
    keys: Mapping[str, Sequence[bool | None]] = {
        "SETITEM": operands[1::2],
        "SETITEMS": items[1::2],
        "DICT": items[1::2],
    }
    if not all(keys.get(op.name, ())):
        raise UnsafeMetadataError("the pickled Unischema has a dict whose keys are not strings")
    stack.extend(None if o is pickletools.markobject else op.name in _ATOMS for o in op.stack_after)
