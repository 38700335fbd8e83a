"""Checksums of the functions of a `ModelSpec`, by which a resumed run notices that their code has changed."""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from spark_dl.spec import FUNCTIONS, ModelSpec

_log = logging.getLogger("spark_dl")
_PYTHON = "python"
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def code_of(spec: ModelSpec) -> dict[str, str]:
    """Returns a checksum of each function of a spec, by its name, and the version of Python. Called on the driver.

    A checksum is of the function itself, its plain default arguments and variables, and the methods of its class. The
    functions that it calls, and the modules of other files, are not looked at. Comments and positions do not count.
    """
    parts = {name: getattr(spec, name) for name in (*FUNCTIONS, "loss")}
    parts |= {f"metrics.{name}": metric for name, metric in spec.metrics.items()}
    found = {f"spec.{name}": _checksum(part) for name, part in parts.items() if part is not None}
    return {**found, _PYTHON: ".".join(map(str, sys.version_info[:2]))}


def warn_of_changes(before: Mapping[str, str] | None, now: Mapping[str, str], url: str) -> None:
    """Logs a warning with the functions that have changed since a checkpoint was saved. Called on the driver.

    before: None for a checkpoint that has none. Another version of Python compiles to other code.
    """
    if before is None or before.get(_PYTHON) != now[_PYTHON]:
        return
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        _log.warning(
            "the code or the variables of %s have changed since the checkpoint %s was saved; the run goes on with the "
            "new ones, so its weights are not those of one run with either", ", ".join(changed), url,
        )  # fmt: skip


def _checksum(part: Any) -> str:
    return hashlib.sha256("\n".join(_lines(part, 0, set())).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _lines(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Yields texts that are the same in each process for the same code and plain data. # seen: objects so far"""
    if not isinstance(value, _PLAIN):
        if id(value) in seen:
            return
        seen.add(id(value))
    if depth > 8 or isinstance(value, _PLAIN):
        yield repr(value) if isinstance(value, _PLAIN) else type(value).__name__
    elif isinstance(value, functools.partial):
        parts: tuple[Any, ...] = (value.func, value.args, value.keywords)
        for part in parts:
            yield from _lines(part, depth + 1, seen)
    elif isinstance(value, types.MethodType):
        yield from _lines(value.__func__, depth + 1, seen)
        yield from _lines(vars(value.__self__) if hasattr(value.__self__, "__dict__") else None, depth + 1, seen)
    elif isinstance(value, types.FunctionType):
        yield from _lines_of_code(value.__code__, depth)
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell is not None and _is_set(cell)]
        parts = (value.__defaults__, value.__kwdefaults__, cells)
        for part in parts:
            yield from _lines(part, depth + 1, seen)
    elif isinstance(value, (list, tuple)):
        yield type(value).__name__
        for part in value:
            yield from _lines(part, depth + 1, seen)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key) if isinstance(key, _PLAIN) else type(key).__name__
            yield from _lines(value[key], depth + 1, seen)
    elif isinstance(value, nn.Module):
        yield from _lines_of_class(type(value), depth)
        yield repr(value)  # the settings of its layers, without weights
    elif isinstance(value, type):
        yield from _lines_of_class(value, depth)
    else:
        yield from _lines_of_class(type(value), depth)
        yield from _lines(getattr(value, "__dict__", None), depth + 1, seen)


def _lines_of_class(cls: type, depth: int) -> Iterator[str]:
    yield f"{cls.__module__}.{cls.__qualname__}"
    for name, member in sorted(vars(cls).items()):
        function = getattr(member, "__func__", member)
        if isinstance(function, types.FunctionType):
            yield name
            yield from _lines_of_code(function.__code__, depth + 1)


def _lines_of_code(code: types.CodeType, depth: int) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _lines_of_code(constant, depth + 1)
        elif isinstance(constant, frozenset):  # its order differs between processes
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False
