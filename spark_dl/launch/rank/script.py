"""A Python program, or a module, as the function of the ranks: one child process per rank, as under torchrun."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_dl.launch.failures.errors import ScriptError
from spark_dl.launch.rank import as_program
from spark_dl.launch.rank.environment import check_env
from spark_dl.storage.owner import temporary_prefix

# Replaces itself with the program. Linux kills the program when the process of the rank ends, as in a cancelled job.
# Isolated (-I): the working folder is the user's, and others may have put modules there.
_START = (
    "import ctypes, os, sys; libc = ctypes.CDLL(None); hasattr(libc, 'prctl') and libc.prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)
_END_WAIT_S = 5.0


@dataclass(frozen=True)
class Script:
    """A program with its arguments."""

    name: str
    """Path of a file on the driver's host, or the name of a module."""
    args: tuple[str, ...]
    folder: str
    """The driver's working folder, also for the program, if it exists on the executor."""
    env: Mapping[str, str]
    """Environment variables beside those of torchrun."""
    source: bytes | None
    """Content of the file; None for a module."""

    def __str__(self) -> str:
        return os.path.basename(self.name) if self.source is not None else f"-m {self.name}"


def read_script(program: str | os.PathLike[str], args: Sequence[Any], env: Mapping[str, str]) -> Script:
    """Returns the program of `launch("train.py", ...)` or `launch("-m", "package.module", ...)`. Called on the driver.

    Raises ValueError for a missing file or module name, for arguments that are no strings or numbers, and as
    `check_env` does.
    """
    check_env(env)
    for arg in args:
        if not isinstance(arg, (str, int, float, os.PathLike)) or isinstance(arg, bool):
            raise ValueError(f"launch: the arguments of a script are strings or numbers, found {arg!r:.200}")
    texts = [str(arg) for arg in args]
    if program == "-m":
        if not texts or texts[0].startswith("-"):
            raise ValueError('launch: expected the name of a module after "-m", such as launch("-m", "package.module")')
        return Script(name=texts[0], args=tuple(texts[1:]), folder=os.getcwd(), env=env, source=None)
    path = Path(program)
    if not path.is_file():
        raise ValueError(
            f"launch: no file {os.fspath(program)!r} on the driver (the working directory is {Path.cwd()}); expected a "
            'function, the path of a Python program, or "-m" and the name of a module'
        )
    content = path.read_bytes()
    return Script(name=str(path.resolve()), args=tuple(texts), folder=os.getcwd(), env=env, source=content)


def run_script(script: Script, *, gpu_env: Mapping[str, str] | None = None) -> None:
    """Runs the program in a child process until it ends. Called on a rank, with torchrun's environment.

    Raises ScriptError with the exit code, or the signal, of a program that fails.

    Args:
        gpu_env: `World.child_env`. The user's variables come first.
    """
    with _on_this_host(script) as command:
        folder = script.folder if os.path.isdir(script.folder) else None
        env = {**os.environ, **(gpu_env or {}), **script.env}
        of_user = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))  # an empty entry is the working folder
        env["PYTHONPATH"] = os.pathsep.join([*of_user, *_added_path()])
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(os.getpid()), "-u", *_as_program(), *command, *script.args],
            env=env, cwd=folder, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
    if code < 0:
        raise ScriptError(f"{script} was killed by {_signal_name(-code)}")
    if code > 0:
        raise ScriptError(f"{script} ended with exit code {code}")


@contextlib.contextmanager
def _on_this_host(script: Script) -> Iterator[list[str]]:
    """Yields the arguments of `as_program` for the program: in its place if it is there, else of a copy."""
    if script.source is None:
        yield ["module", script.name]
        return
    with contextlib.suppress(OSError):
        if Path(script.name).read_bytes() == script.source:
            yield ["file", script.name]
            return
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        copy = Path(folder, os.path.basename(script.name))
        copy.write_bytes(script.source)
        yield ["file", str(copy)]


def _as_program() -> list[str]:
    """Returns the arguments of Python for the module that runs the program."""
    path = as_program.__file__
    return [path] if os.path.isfile(path) else ["-c", inspect.getsource(as_program)]  # in an archive (--py-files)


def _added_path() -> list[str]:
    """Returns the entries of the import path that Python does not have by itself, such as the files of --py-files.

    Python's `-m`, by which Spark starts its workers, puts the working folder on the path. On an executor it belongs to
    Spark, and has the files of `addPyFile`. In a local session it is the driver's, where `python train.py` finds
    nothing.
    """
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    kept = {str(Path(__file__).absolute().parents[3])}  # spark_dl itself
    if (files := sys.modules.get("pyspark.core.files") or sys.modules.get("pyspark.files")) is not None:
        kept.add(os.path.abspath(files.SparkFiles._root_directory or "/"))
    paths = dict.fromkeys(os.path.abspath(p) for p in sys.path if p)
    # A standalone worker of a PySpark that pip has installed has the executor's folder below site-packages.
    return [
        p for p in paths
        if p in kept or (p != os.getcwd() and not any(p == o or p.startswith(f"{o}{os.sep}") for o in standard))
    ]  # fmt: skip


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_END_WAIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} ({number})"
    return f"signal {number}"
