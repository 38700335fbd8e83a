"""Functions and classes by importable name, for files that must not contain code."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

_LOCAL = ("<lambda>", "<locals>")


def name_of(function: Any, key: str) -> Any:
    """Returns the JSON form of a function or class: `package.module:name`, or a mapping for a `functools.partial`.

    Args:
        key: names the function in errors.

    Raises:
        ValueError: For a function that other processes cannot import.
    """
    if isinstance(function, functools.partial):
        try:
            arguments = json.loads(json.dumps({"args": list(function.args), "kwargs": function.keywords}))
        except TypeError as error:
            raise ValueError(f"{key}: the arguments of functools.partial must be numbers, strings and lists: {error}"
                             ) from error  # fmt: skip
        return {"partial": name_of(function.func, key), **arguments}
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or not name or any(part in name for part in _LOCAL):
        raise ValueError(
            f"{key}: {function!r} has no name that another process can import; define it at the top of a module (with "
            "functools.partial for arguments), or save with format='export'"
        )
    if module == "__main__" or module.startswith("_spark_dl_file_"):
        raise ValueError(
            f"{key}: {name!r} is defined in a notebook or a script, which other processes cannot import; move it to a "
            "module, or save with format='export'"
        )
    if _find(module, name, key) is not function:
        raise ValueError(f"{key}: {module}:{name} is another object than {function!r}")
    return f"{module}:{name}"


def object_of(found: Any, key: str) -> Any:
    """Returns the function or class of a JSON form. Raises ValueError if it cannot be imported.

    Who writes the form chooses what runs: any importable function, with any arguments. No list of names changes that,
    as most packages have a function that runs text as code. So it is called for files that the caller trusts.
    """
    if isinstance(found, Mapping) and found.keys() == {"partial", "args", "kwargs"}:
        return functools.partial(object_of(found["partial"], key), *found["args"], **found["kwargs"])
    if not isinstance(found, str) or found.count(":") != 1:
        raise ValueError(f"{key}: expected 'package.module:name', found {found!r:.200}")
    module, name = found.split(":")
    result = _find(module, name, key)
    if not callable(result):
        raise ValueError(f"{key}: expected a function, found {result!r:.200}")
    return result


def _find(module: str, name: str, key: str) -> Any:
    try:
        value: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{key}: cannot import the module {module!r}: {error}; install it here") from error
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        raise ValueError(
            f"{key}: the module {module!r} has no {name!r}; install the version that the model was saved with"
        )
    return value
