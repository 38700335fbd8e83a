"""Checks the call of a user's function on ranks, on the driver."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from spark_dl.config import Launch


def launch_settings(settings: Launch | None, num_ranks: int | None) -> Launch:
    """Returns the settings with the number of ranks of the call.

    Raises ValueError if both give one, and differ, and for a range of ranks.
    """
    if settings is None:
        return Launch(num_ranks=1 if num_ranks is None else num_ranks)
    if not isinstance(settings, Launch):
        raise ValueError(f"settings: expected a spark_dl.Launch, found {type(settings).__name__}")
    if settings.min_ranks is not None:
        raise ValueError(
            f"launch.min_ranks: expected null for a function of your own, which knows no other number of ranks, found "
            f"{settings.min_ranks}; train and evaluate have a range of ranks"
        )
    if num_ranks is None:
        return settings
    if settings.num_ranks not in (num_ranks, Launch().num_ranks):
        raise ValueError(f"num_ranks: found {num_ranks}, and {settings.num_ranks} in settings; set one of them")
    return dataclasses.replace(settings, num_ranks=num_ranks)


def check_call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for what is not a function, and for arguments that its signature does not take."""
    if not callable(fn):
        raise ValueError(f"expected a function that runs on the ranks, found a {type(fn).__name__}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a function without a signature, such as one written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise ValueError(f"the call of {name}{signature} on the ranks: {error}") from None
