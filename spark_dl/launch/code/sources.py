"""Modules of the user's project, on their way to the ranks.

A function or class in a module beside the user's program is pickled by its name. Executors do not have such modules, or
have an older text of them: an installed wheel, an image, a Python worker that has imported them before they were
edited. So the source of what is loaded on the driver travels with each call, and is what ranks import.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import sysconfig
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_log = logging.getLogger("spark_dl")

_NEVER_SENT = {"__main__", "spark_dl", "pyspark", "torch"}
_MAX_BYTES = 16 << 20

_PROCESS = uuid.uuid4().hex

_known: dict[str, _Known] = {}
"""The modules of earlier calls, as they were loaded."""


class Source(NamedTuple):
    """The source of a module."""

    path: str
    """Path of the file on the driver, for tracebacks."""
    is_package: bool
    text: str


@dataclass(frozen=True)
class Project:
    """The modules of the user's project that are loaded on the driver."""

    sources: dict[str, Source] = field(default_factory=dict)
    process: str = ""
    """The process that has loaded them, which is not to import them again."""


class _Known(NamedTuple):
    spec: Any
    """Another one after `importlib.reload`."""
    stamp: tuple[int, int]
    source: Source


def project() -> Project:
    """Returns the loaded modules of the user's project, with their sources. Called on the driver.

    The project is the working folder and the folder of the program, without installed packages. Nothing for more than
    16 MiB, which is not a project's code; send it with `--py-files`.
    A module that was edited and not reloaded is sent as it was at the first call, with a warning.
    """
    folders = _project_folders()
    files = {}
    for name, module in list(sys.modules.items()):
        path = _source_path(module, folders)
        if path is not None:
            files[name] = _source_of(name, module, path)
    small = sum(len(source.text) for source in files.values()) <= _MAX_BYTES
    return Project(files if small else {}, _PROCESS)


def _source_of(name: str, module: Any, path: str) -> Source:
    spec, status = getattr(module, "__spec__", None), os.stat(path)
    known, stamp = _known.get(name), (status.st_mtime_ns, status.st_size)
    is_known = known is not None and known.spec is spec and known.source.path == path
    if known is None or not is_known or (known.stamp != stamp and _patched().get(name) == status.st_mtime):
        source = Source(path, hasattr(module, "__path__"), _text_of(name, path))
    else:
        source = known.source
        if known.stamp != stamp and _text_of(name, path) != source.text:
            _log.warning(
                "%s was edited and not loaded again: the ranks run the text that was loaded; importlib.reload(%s), or "
                "a new kernel, takes the new one", path, name,
            )  # fmt: skip
    _known[name] = _Known(spec, stamp, source)
    return source


def _patched() -> Mapping[str, float]:
    """Returns the times of the files that IPython's autoreload has loaded, by module: it patches modules in place."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    registry = getattr(getattr(get_shell and get_shell(), "magics_manager", None), "registry", {})
    return getattr(getattr(registry.get("AutoreloadMagics"), "_reloader", None), "modules_mtimes", {})


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
    """Returns the file of a module of the project; None for any other module."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not _is_in_project(file, folders):
        return None
    is_ours = getattr(module, "__name__", "").partition(".")[0] in _NEVER_SENT
    return None if is_ours or not os.path.isfile(file) else file


@functools.cache
def _is_in_project(file: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is in one of the folders, and not installed. Kept, as each call asks for thousands of modules."""
    if not file.endswith(".py") or not file.startswith(folders):
        return False
    has_part = "site-packages" in file or "dist-packages" in file  # the latter on Debian
    return not has_part and not file.startswith(_installed_folders())


def install(sent: Project) -> None:
    """Makes the modules of a call what this process imports. Called where a call is unpickled.

    If a module has another text than that of an earlier call, or was found elsewhere, all modules of the project are
    forgotten: others may have what they took from it. Spark reuses its Python workers.
    """
    if not sent.sources or sent.process == _PROCESS:
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    loaded = [name for name in sent.sources if name in sys.modules]
    if any(finder.loaded.get(name) != sent.sources[name] or not _is_ours(sys.modules[name]) for name in loaded):
        for name in [name for name, module in sys.modules.items() if _is_ours(module) or name in sent.sources]:
            del sys.modules[name]
        finder.loaded.clear()
    finder.sources = sent.sources


def _is_ours(module: ModuleType) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


def _is_own_folder(folder: str) -> bool:
    """Whether there is such a folder here, of this user or of root: on another host, anybody may have made one."""
    try:
        return os.stat(folder).st_uid in (0, os.getuid())
    except OSError:
        return False


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from a source that was sent. Files beside it are found where the driver's host has them."""

    def __init__(self, fullname: str, source: Source):
        super().__init__(fullname, source.path)
        self._source = source

    def get_source(self, fullname: str) -> str:
        """Returns the source, also for tracebacks and `inspect`."""
        return self._source.text

    def get_code(self, fullname: str) -> Any:
        """Returns the code of the module, compiled with the path of its file on the driver."""
        return self.source_to_code(self._source.text, self._source.path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the project. The first of all finders: what the driver has loaded is what ranks run."""

    def __init__(self) -> None:
        self.sources: dict[str, Source] = {}
        self.loaded: dict[str, Source] = {}
        """The sources from which modules were loaded, by module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module of the project; also of a folder without `__init__.py` above one.

        What the driver has not loaded of a package is looked for where this process would find the package.
        """
        source = self.sources.get(fullname)
        if source is None and not any(name.startswith(f"{fullname}.") for name in self.sources):
            return None
        elsewhere = importlib.machinery.PathFinder.find_spec(fullname, path)
        installed = [*((elsewhere and elsewhere.submodule_search_locations) or [])]
        if source is None:
            namespace = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            namespace.submodule_search_locations = installed
            return namespace
        self.loaded[fullname] = source
        beside = [folder] if _is_own_folder(folder := os.path.dirname(source.path)) else []
        return importlib.util.spec_from_file_location(
            fullname,
            source.path,
            loader=_Loader(fullname, source),
            submodule_search_locations=[*beside, *installed] if source.is_package else None,
        )
