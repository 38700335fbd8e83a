"""The types of settings: which values each takes, in words, and whether a value of YAML or JSON is one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

SECTION = "a section with settings"
_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", types.NoneType: "null"}
_MANY = {bool: "true and false", int: "whole numbers", float: "numbers", str: "strings", Any: "values"}


def hints_of(sections: Mapping[str, type]) -> dict[str, Any]:
    """Returns the type of each setting by its key, such as `train.lr`, and of each section by its name."""
    by_path: dict[str, Any] = dict(sections)
    for name, section in sections.items():
        hints = typing.get_type_hints(section)
        by_path |= {f"{name}.{f.name}": hints[f.name] for f in dataclasses.fields(section)}
    return by_path


def options_of(hint: Any) -> tuple[Any, ...]:
    """Returns the types of which a value has one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def fitted(hint: Any, value: Any) -> Any:
    """Returns a value of YAML or JSON as one of a type: lists become tuples, whole numbers numbers, if they must.

    Raises ValueError if the type does not take it.
    """
    if len(options := options_of(hint)) > 1:
        # float is tried last, so that a whole number stays one where the type takes both.
        for option in sorted(options, key=lambda option: option is float):
            with contextlib.suppress(ValueError):
                return fitted(option, value)
        raise ValueError
    if hint is Any:
        return value
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return _checked(value, any(type(value) is type(choice) and value == choice for choice in args))
    if origin is float and type(value) is int:
        return float(value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _fitted_mapping(args, value)
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return _fitted_list(origin, args, value)
    return _checked(value, type(value) is origin)


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError
    return value


def _fitted_mapping(args: tuple[Any, ...], value: Any) -> Any:
    """args: the types of keys and values, or none."""
    _checked(value, isinstance(value, Mapping))
    if not args:
        return value
    return {_checked(key, type(key) is args[0]): fitted(args[1], part) for key, part in value.items()}


def _fitted_list(origin: type, args: tuple[Any, ...], value: Any) -> Any:
    """args: the type of each item, one type for all of them, or none."""
    _checked(value, isinstance(value, (list, tuple)))
    if args:
        kinds = args if origin is tuple and ... not in args else [args[0]] * len(value)
        _checked(value, len(kinds) == len(value))
        value = [fitted(kind, part) for kind, part in zip(kinds, value, strict=True)]
    return tuple(value) if origin is tuple else list(value)


def describe(hint: Any) -> str:
    """Returns the values of a type in words, such as "a whole number or 'auto'"."""
    if get_origin(hint) is Literal:
        return _any_of([repr(value) for value in get_args(hint)])
    if len(options_of(hint)) > 1:
        options = sorted(options_of(hint), key=lambda option: option is types.NoneType)  # null is last
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
    if get_origin(hint) is Literal or len(options_of(hint)) > 1:
        return f"values that are each {describe(hint)}"
    return _MANY.get(hint) or _container(hint, "s")
