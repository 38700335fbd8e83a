"""Checks of settings. Each error names the key, the expected value and the value found."""

from __future__ import annotations

import datetime
import difflib
import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_type_hints

from spark_dl._version import __version__

IMAGE_CHOICES = {
    "mode": ("RGB", "L", "unchanged"), "orientation": ("apply", "ignore"), "interpolation": ("bilinear", "nearest"),
    "bad": ("raise", "drop", "null"),
}  # fmt: skip
"""The settings of images that have one of a few values."""
ENCODINGS: Mapping[str, frozenset[str]] = {
    "number": frozenset(),
    "timestamp": frozenset({"unit"}),
    "duration": frozenset({"unit"}),
    "decimal": frozenset(),
    "float": frozenset(),
    "vocabulary": frozenset({"min_count", "max_size", "values", "unknown"}),
    "hash": frozenset({"buckets"}),
    "bytes": frozenset(),
    "image": frozenset({"resize", "formats", *IMAGE_CHOICES}),
}
"""The values of `as` in `data.encode`, and the other settings that each of them takes."""
FILTER_OPS = ("==", "!=", "<", "<=", ">", ">=", "in", "not in")
Conditions = tuple[tuple[tuple[str, str, Any], ...], ...]
"""`data.filters` in disjunctive normal form: a row passes if all (column, op, value) of any inner tuple hold."""


class SettingError(ValueError):
    """A setting that is unknown, has a value that it does not take, or does not go with another one."""

    key: str
    """The setting, such as `train.lr`."""

    def __init__(self, key: str, problem: str):
        """problem: what was expected, what was found, and what to change. A message that says "unknown" has the key."""
        super().__init__(key, problem)
        self.key, self._problem = key, problem

    def __str__(self) -> str:
        return self._problem if self._problem.startswith("unknown ") else f"{self.key}: {self._problem}"


def check(ok: bool, key: str, expected: str, found: Any) -> None:
    if not ok:
        raise SettingError(key, f"expected {expected}, found {found!r}")


def section_name(section: type) -> str:
    """Returns the name of a section in keys: `parallel` for all strategies, else the class name in lower case."""
    return str(getattr(section, "SECTION", section.__name__.lower()))


def check_number(section: Any, name: str, low: float, *, above: bool = False, whole: bool = False) -> None:
    value, key = getattr(section, name), f"{section_name(type(section))}.{name}"
    kind = "an integer" if whole else "a finite number"
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    fits = number and math.isfinite(value) and (value > low if above else value >= low)
    check(fits, key, f"{kind} {'>' if above else '>='} {low:g}", value)


def check_choices(section: Any) -> None:
    """Checks that every field whose type is a `Literal`, or one or None, has one of its values."""
    for name, hint in get_type_hints(type(section)).items():
        if (inner := get_args(hint))[1:] == (type(None),) and getattr(inner[0], "__origin__", None) is Literal:
            if getattr(section, name) is None:
                continue
            hint = inner[0]
        choices = get_args(hint)
        if getattr(hint, "__origin__", None) is Literal:
            key = f"{section_name(type(section))}.{name}"
            check(getattr(section, name) in choices, key, f"one of {list(choices)}", getattr(section, name))


def check_bool(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        check(isinstance(value, bool), f"{section_name(type(section))}.{name}", "true or false", value)


def check_class(key: str, module: str, base: str, name: Any) -> None:
    """Checks that `name` is a public class of `module` that derives from its class `base`."""
    classes = vars(importlib.import_module(module))
    known = [n for n, c in classes.items() if isinstance(c, type) and issubclass(c, classes[base])]
    known = [n for n in known if n != base and not n.startswith("_")]
    if name not in known:
        raise SettingError(key, f"no class {name!r} in {module}{suggestion(str(name), known)}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Returns the end of an error message for an unknown name: the closest known name, or all known names."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else f"; expected one of {listed(sorted(known), printable)}"


def printable(text: str) -> str:
    """Returns a text for a message: control characters, which could pretend to be other lines of a log, are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def listed(names: Sequence[str], show: Callable[[str], str] = repr, most: int = 20) -> str:
    """Returns names for a message, which stays short however many there are."""
    shown = ", ".join(show(name) if len(name) <= 60 else f"{show(name[:60])}..." for name in names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


class UnfitPythonError(RuntimeError):
    """An executor's Python lacks a module, or has another version of it. Another attempt would find the same."""

    is_retryable = False


def unfit_python(error: str) -> str | None:
    """Returns the message for a Spark job that failed because of the Python of an executor, or None.

    It names the host, what its Python has and what it needs.

    Args:
        error: Spark's message.
    """
    task = re.search(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor", error)
    where = f"host {task[1]}: the executor's Python" if task else "the executors' Python"
    number = r":? \(?(\d+)[., ]+(\d+)\)?"  # 3.12, and (3, 12) of Spark 3.5
    if other := re.search(f"Python in worker has different version{number} than that in driver{number}", error):
        found, expected = f"{other[1]}.{other[2]}", f"{other[3]}.{other[4]}"
        return (
            f"{where} is {found}, expected {expected}, which the driver has; set PYSPARK_PYTHON to an interpreter of "
            f"Python {expected} that all executors have, or start the driver with Python {found}"
        )
    match = re.search(r"No module named '?((?:spark_dl|torch|numpy|pandas|pyarrow)[\w.]*)", error)
    if not match and re.search(r"(?:Can't get attribute .* on <module|cannot import name .* from) 'spark_dl", error):
        return (
            f"{where} has another version of spark_dl than the driver, which has {__version__}; install the same "
            "version, or set PYSPARK_PYTHON to an interpreter that has it"
        )
    if not match:
        return None
    wheel = " (of the files of --py-files, executors take .zip, .egg and .jar, not .whl: rename a copy to .zip)"
    return (
        f"{where} has no {match.group(1)}; set PYSPARK_PYTHON to an interpreter that has spark_dl (of "
        f"this version) and torch, or install them there{wheel * match.group(1).startswith('spark_dl')}"
    )


def check_encoding(key: str, settings: Any) -> None:
    """Checks one entry of `data.encode`. The column's type is checked later, when it is known."""
    check(isinstance(settings, Mapping), key, "a mapping such as {as: hash, buckets: 1000}", settings)
    chosen = settings.get("as")
    check(chosen is None or chosen in list(ENCODINGS), f"{key}.as", f"one of {list(ENCODINGS)}", chosen)
    known = ["as", "ragged", *(ENCODINGS[chosen] if chosen else ())]
    for name in settings:
        near = suggestion(str(name), known)
        check(name in known, f"{key}.{name}", f"settings of as: {chosen}{near}", settings[name])
    check(isinstance(settings.get("ragged", False), bool), f"{key}.ragged", "true or false", settings.get("ragged"))
    units = ["D", "s", "ms", "us", "ns"]
    check(settings.get("unit", "us") in units, f"{key}.unit", f"one of {units}", settings.get("unit"))
    unknown = settings.get("unknown", "zero")
    check(unknown in ("zero", "error"), f"{key}.unknown", "zero or error", unknown)
    check(chosen != "hash" or "buckets" in settings, f"{key}.buckets", "the number of buckets", None)
    for name in ("buckets", "min_count", "max_size"):
        value = settings.get(name, 1)
        check(type(value) is int and 1 <= value < 2**63, f"{key}.{name}", "an integer >= 1", value)
    size = settings.get("resize", [1, 1])
    is_size = _is_list(size) and len(size) == 2 and all(type(n) is int and 1 <= n < 2**16 for n in size)
    check(is_size, f"{key}.resize", "[height, width] in pixels", size)
    for name, choices in IMAGE_CHOICES.items():
        check(settings.get(name, choices[0]) in choices, f"{key}.{name}", f"one of {list(choices)}", settings.get(name))
    formats = settings.get("formats", ["PNG"])
    are_formats = _is_list(formats) and len(formats) > 0 and all(isinstance(name, str) for name in formats)
    check(are_formats, f"{key}.formats", "a list of formats, such as [PNG, JPEG, WEBP]", formats)
    strings = settings.get("values", ["a"])
    is_list = (
        isinstance(strings, Sequence) and not isinstance(strings, str) and all(isinstance(s, str) for s in strings)
    )
    check(is_list and 0 < len(strings) == len({*strings}), f"{key}.values", "a list of distinct strings", strings)


def full_filters(filters: Any) -> Conditions:
    """Returns `data.filters` in disjunctive normal form. A flat list of conditions is one conjunction.

    Dates become ISO 8601 strings.
    """
    form = "[column, op, value] (all must hold), or lists of such lists (any)"
    check(_is_list(filters) and all(_is_list(f) and f for f in filters), "data.filters", f"a list of {form}", filters)
    alternatives = [filters] if filters and isinstance(filters[0][0], str) else filters
    for alternative in alternatives:
        for condition in alternative:
            is_condition = _is_list(condition) and len(condition) == 3 and isinstance(condition[0], str)
            check(is_condition, "data.filters", f"a list of {form}", condition)
    return tuple(tuple(_full_condition(*c) for c in alternative) for alternative in alternatives)


def _full_condition(column: str, op: Any, value: Any) -> tuple[str, str, Any]:
    key = f"data.filters: {column} {op}"
    check(op in FILTER_OPS, f"data.filters: {column}", f"an operator of {list(FILTER_OPS)}", op)
    several = op in ("in", "not in")
    check(not several or (_is_list(value) and bool(value)), key, "a list of values", value)
    values = [v.isoformat() if isinstance(v, datetime.date) else v for v in (value if several else [value])]
    for v in values:
        fits = isinstance(v, str | int) or (isinstance(v, float) and math.isfinite(v))
        check(fits, key, "finite numbers, true, false, strings or dates (a null never passes)", v)
    return column, op, tuple(values) if several else values[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def integers(value: Any) -> tuple[int, ...] | None:
    """Returns a list of integers as a tuple; None for anything else."""
    return tuple(value) if _is_list(value) and all(type(number) is int for number in value) else None
