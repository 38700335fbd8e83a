"""Checks the call of a user's function on ranks, on the driver."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

from spark_dl.config import Launch
from spark_dl.launch.rank.script import read_script, run_script
from spark_dl.spark_job import refuse_stream


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


def as_call(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], env: Mapping[str, str] | None
) -> tuple[Any, tuple[Any, ...], Mapping[str, str] | None, str | None]:
    """Returns function, arguments and environment of a call of `launch`, and the name of its program; None without one.

    Raises ValueError as `read_script` and `check_call` do.
    """
    if not isinstance(fn, (str, os.PathLike)):
        check_call(fn, args, kwargs)
        return fn, args, env, None
    if kwargs:
        raise ValueError(f"launch: a script takes arguments as strings, found {', '.join(kwargs)}=...")
    script = read_script(fn, args, env or {})
    return run_script, (script,), None, str(args[0] if fn == "-m" else fn)


def check_dataframe(df: Any) -> None:
    """Raises ValueError for what is not a DataFrame of Spark."""
    if not hasattr(df, "sparkSession"):
        raise ValueError(
            f"run_on_dataframe: expected a function and a DataFrame of Spark, found a {type(df).__name__}; for a "
            "dataset by its URL, use spark_dl.open_dataset in spark_dl.launch"
        )
    refuse_stream(df, "run_on_dataframe")


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
