"""Modules of the user's project, on their way to processes that cannot import them.

A function or class in a module beside the user's program is pickled by its name. Executors do not have such modules,
even in local mode, unless they were sent with `--py-files`. So their source travels with the call, and is used by a
process that finds the module nowhere else.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_NEVER_SENT = {"__main__", "spark_dl", "pyspark", "torch"}
_MAX_BYTES = 16 << 20


class Source(NamedTuple):
    """The source of a module."""

    path: str
    """Path of the file on the driver, for tracebacks."""
    is_package: bool
    text: str


def sources_of(names: Collection[str]) -> dict[str, Source]:
    """Returns the sources of all loaded modules of the user's project, if one of `names` is such a module.

    The user's project is the working folder and the folder of the program, without installed packages. Called on the
    driver. Returns nothing for more than 16 MiB, which is not a project's code; send it with `--py-files`.
    """
    folders = _project_folders()
    if not any(_source_path(sys.modules.get(name), folders) for name in names):
        return {}
    found = {}
    for name, module in list(sys.modules.items()):
        path = _source_path(module, folders)
        if path is not None:
            found[name] = Source(path, hasattr(module, "__path__"), _text_of(name, path))
    return found if sum(len(source.text) for source in found.values()) <= _MAX_BYTES else {}


def _text_of(name: str, path: str) -> str:
    """Returns the source of a module, in the encoding that it names. Raises ValueError for a file that is no text."""
    try:
        return importlib.util.decode_source(Path(path).read_bytes())
    except (UnicodeDecodeError, SyntaxError, OSError) as error:
        raise ValueError(
            f"cannot send the module {name!r} to the ranks: {path}: {error}; save it in the encoding that it names"
        ) from error


def _project_folders() -> tuple[str, ...]:
    """Returns the folders, each with a separator at its end, as modules name them and without links."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [os.getcwd(), *([os.path.dirname(os.path.abspath(program))] if program else [])]
    return tuple({os.path.join(path, "") for folder in folders for path in (folder, os.path.realpath(folder))})


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")]
    return tuple({os.path.join(path, "") for folder in folders for path in (folder, os.path.realpath(folder))})


def _source_path(module: Any, folders: tuple[str, ...]) -> str | None:
    """Returns the file of a module of the project; None for any other module. Called for thousands of modules."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py") or not file.startswith(folders):
        return None
    is_installed = "site-packages" in file or file.startswith(_installed_folders())
    if is_installed or getattr(module, "__name__", "").partition(".")[0] in _NEVER_SENT:
        return None
    return file if os.path.isfile(file) else None


def install(sources: dict[str, Source]) -> None:
    """Makes modules importable that this process does not find elsewhere. Called where a call is unpickled.

    Replaces the sources of an earlier call, and forgets modules that were imported from them: the project can have
    changed, and Spark reuses its Python workers.
    """
    if not sources:  # of a call that needs no module: those of an earlier call can be in use
        return
    for finder in [f for f in sys.meta_path if isinstance(f, _Finder)]:
        if finder.sources == sources:
            return
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if _is_of(module, finder)]:
            del sys.modules[name]
    sys.meta_path.append(_Finder(sources))  # the last one: what is installed comes first


def _is_of(module: ModuleType, finder: _Finder) -> bool:
    return getattr(getattr(module, "__spec__", None), "loader", None) is finder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads modules by their sources."""

    def __init__(self, sources: dict[str, Source]):
        self.sources = sources

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module of the project; also of a folder without `__init__.py` above one."""
        source = self.sources.get(fullname)
        if source is not None:
            spec = importlib.util.spec_from_loader(fullname, self, origin=source.path, is_package=source.is_package)
            assert spec is not None
            spec.has_location = True  # `__file__`, for tracebacks
            return spec
        if any(name.startswith(f"{fullname}.") for name in self.sources):
            namespace = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            namespace.submodule_search_locations = []
            return namespace
        return None

    def is_package(self, fullname: str) -> bool:
        """Whether a module is a package."""
        return self.sources[fullname].is_package

    def get_source(self, fullname: str) -> str:
        """Returns the source, also for tracebacks and `inspect`."""
        return self.sources[fullname].text

    def get_code(self, fullname: str) -> Any:
        """Returns the code of a module, compiled with the path of its file on the driver."""
        source = self.sources[fullname]
        return self.source_to_code(source.text, source.path)
