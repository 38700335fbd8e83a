"""Fields of sections: unknown names, and whether they can change between a run and its resume."""

import dataclasses
import functools
from dataclasses import field
from typing import Any, TypeVar

import numpy as np

from spark_dl.config.checks import SettingError, section_name, suggestion

Section = TypeVar("Section")
_MAY_CHANGE, _OF_CALLER = "may_change", "of_caller"


def may_change(default: Any) -> Any:
    """Declares a field that can change on resume, because it does not affect the steps trained so far.

    Args:
        default: the default value, or a factory such as `dict`.
    """
    return _marked(default, _MAY_CHANGE)


def of_caller(default: Any, *, fixed: bool = False) -> Any:
    """Declares a field that says where to write or to connect, what proves who somebody is, or what may be sent.

    The caller alone says so: the values of settings that were read from a checkpoint are not used (`as_read`).

    Args:
        fixed: whether it must not change on resume.
    """
    return _marked(default, _OF_CALLER, *([] if fixed else [_MAY_CHANGE]))


def _marked(default: Any, *marks: str) -> Any:
    metadata = dict.fromkeys(marks, True)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def fields_of_caller(section: type) -> list[str]:
    """Returns the names of the fields of a section that only the caller sets; all of them if it is `OF_CALLER`."""
    is_whole = getattr(section, "OF_CALLER", False)
    return [f.name for f in dataclasses.fields(section) if is_whole or f.metadata.get(_OF_CALLER)]


def fixed_on_resume(section: type) -> list[str]:
    """Returns the names of the fields of a section that must not change on resume; none if it is `MAY_CHANGE`."""
    if getattr(section, "MAY_CHANGE", False):
        return []
    return [f.name for f in dataclasses.fields(section) if not f.metadata.get(_MAY_CHANGE)]


def as_numbers(value: Any) -> Any:
    """Returns a value with the numbers of NumPy scalars in it, such as those of `np.logspace`, also in dicts and lists.

    YAML, JSON and checkpoints hold numbers.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {as_numbers(key): as_numbers(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_numbers(part) for part in value)
    return value


def named_settings(section: type[Section]) -> type[Section]:
    """Makes a dataclass of settings raise ValueError for an unknown name, with the closest known name, as YAML does.

    NumPy scalars among the values become numbers. A class decorator, above `@dataclass`.
    """
    init: Any = section.__init__
    name = section_name(section)
    prefix = "" if name == "config" else f"{name}."  # its fields are the sections

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        known = [f"{prefix}{f.name}" for f in dataclasses.fields(section)]  # type: ignore[arg-type]
        for key in (f"{prefix}{name}" for name in settings):
            if key not in known:
                nearest = suggestion(key, known) if known else "; there are none"
                raise SettingError(key, f"unknown config key {key!r}{nearest}")
        init(self, *map(as_numbers, args), **{key: as_numbers(value) for key, value in settings.items()})

    changed: Any = section
    changed.__init__ = checked
    return section
