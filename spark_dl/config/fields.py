"""Fields of sections, with what resume must know of them."""

import dataclasses
from dataclasses import field
from typing import Any

_MAY_CHANGE = {"may_change": True}


def may_change(default: Any) -> Any:
    """A field that a resumed run may set differently: it does not change what was trained so far.

    default: the value, or for a dict a function that makes it (`dict`).
    """
    if callable(default):
        return field(default_factory=default, metadata=_MAY_CHANGE)
    return field(default=default, metadata=_MAY_CHANGE)


def fixed_on_resume(section: type) -> list[str]:
    """Names of the fields of a section that a resumed run must set as before; none where `MAY_CHANGE` is true of it."""
    if getattr(section, "MAY_CHANGE", False):
        return []
    return [f.name for f in dataclasses.fields(section) if not f.metadata.get("may_change")]
