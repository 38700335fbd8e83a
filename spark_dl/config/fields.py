"""Fields of sections, and whether they can change between a run and its resume."""

import dataclasses
from dataclasses import field
from typing import Any

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
