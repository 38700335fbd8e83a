"""Fields of sections: unknown names, and whether they can change between a run and its resume."""

import dataclasses
import functools
from dataclasses import field
from typing import Any, TypeVar

from spark_dl.config.checks import section_name, suggestion

Section = TypeVar("Section")
_MAY_CHANGE = {"may_change": True}


def may_change(default: Any) -> Any:
    """Declares a field that can change on resume, because it does not affect the steps trained so far.

    default: the default value, or a factory such as `dict`.
    """
    if callable(default):
        return field(default_factory=default, metadata=_MAY_CHANGE)
    return field(default=default, metadata=_MAY_CHANGE)


def fixed_on_resume(section: type) -> list[str]:
    """Returns the names of the fields of a section that must not change on resume; none if it is `MAY_CHANGE`."""
    if getattr(section, "MAY_CHANGE", False):
        return []
    return [f.name for f in dataclasses.fields(section) if not f.metadata.get("may_change")]


def named_settings(section: type[Section]) -> type[Section]:
    """Makes a dataclass of settings raise ValueError for an unknown name, with the closest known name, as YAML does.

    A class decorator, above `@dataclass`.
    """
    init: Any = section.__init__
    name = section_name(section)
    prefix = "" if name == "config" else f"{name}."  # its fields are the sections

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        known = [f"{prefix}{f.name}" for f in dataclasses.fields(section)]  # type: ignore[arg-type]
        for key in (f"{prefix}{name}" for name in settings):
            if key not in known:
                raise ValueError(f"unknown config key {key!r}{suggestion(key, known) if known else '; there are none'}")
        init(self, *args, **settings)

    changed: Any = section
    changed.__init__ = checked
    return section
