"""Says which values a setting takes, by its type, and explains errors of jsonargparse about values of another type."""

from __future__ import annotations

import ast
import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import yaml

SECTION = "a section with settings"
_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", types.NoneType: "null"}
_MANY = {bool: "true and false", int: "whole numbers", float: "numbers", str: "strings", Any: "values"}
_VALUE = re.compile(r"(?:Given|Got) value: (.*?)(?=\s+- Expected|\s+Given value type|\Z)", re.DOTALL)
"""The value in a message of jsonargparse. A union repeats it after the errors of its options."""


def hints_of(sections: Mapping[str, type]) -> dict[str, Any]:
    """Returns the type of each setting by its key, such as `train.lr`, and of each section by its name."""
    found: dict[str, Any] = dict(sections)
    for name, section in sections.items():
        hints = typing.get_type_hints(section)
        found |= {f"{name}.{f.name}": hints[f.name] for f in dataclasses.fields(section)}
    return found


def describe(hint: Any) -> str:
    """Returns the values of a type in words, such as "a whole number or 'auto'"."""
    if get_origin(hint) is Literal:
        return _any_of([repr(value) for value in get_args(hint)])
    if get_origin(hint) in (Union, types.UnionType):
        options = sorted(get_args(hint), key=lambda option: option is types.NoneType)  # null is last
        return _any_of([describe(option) for option in options])
    if dataclasses.is_dataclass(hint):
        return SECTION
    if hint is Any:
        return "a value"
    return _ONE.get(hint) or f"a {_container(hint)}"


def _any_of(options: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(options[:-1]), options[-1]]))


def _container(hint: Any, plural: str = "") -> str:
    """Returns a list or a mapping in words, without an article. plural: "s" for several of them."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping{plural}" + (f" of names to {_several(args[1])}" if args and args[1] is not Any else "")
    if isinstance(origin, type) and issubclass(origin, Sequence):
        kinds = [kind for kind in dict.fromkeys(args) if kind not in (..., Any)]
        number = f"{len(args)} " if origin is tuple and args and ... not in args else ""
        return f"list{plural}" + (f" of {number}{' and '.join(map(_several, kinds))}" if kinds else "")
    return f"value{plural} of the type {getattr(hint, '__name__', hint)}"


def _several(hint: Any) -> str:
    if get_origin(hint) in (Literal, Union, types.UnionType):
        return f"values that are each {describe(hint)}"
    return _MANY.get(hint) or _container(hint, "s")


def explain_value(message: str, hints: Mapping[str, Any]) -> str | None:
    """Returns an error of jsonargparse about a value as an error of a setting; None for errors of other kinds.

    hints: of `hints_of`, and of the other arguments of the parser. Called by `config.load` on the driver.
    """
    if missing := re.match(r"the following arguments are required: ([\w.]+)\s*$", message):
        return f"{missing[1]}: expected {describe(hints[missing[1]])}, found nothing" if missing[1] in hints else None
    keys = re.findall(r'Parser key "([\w.]+)":', message)
    section = re.search(r"Unable to load config '(.*?)'\s+- ", message, re.DOTALL)
    rest = message[message.rfind('Parser key "') :]
    value = _VALUE.search(rest)
    if not keys or keys[-1] not in hints or not (value or section):
        return None
    text = value[1] if value else section[1] if section else ""
    return f"{keys[-1]}: expected {describe(hints[keys[-1]])}, found {_as_value(text)!r}"


def _as_value(text: str) -> Any:
    """Returns the value that jsonargparse has shown, in the form of Python or of YAML. A string has no quotes there."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    try:
        return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return text
