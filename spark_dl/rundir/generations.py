"""Attempts of a run. Each attempt takes the next generation, a number that is used once, and fences older attempts.

    <run_dir>/generations/000003      created exclusively: the driver that took it, with a checksum

The file name is the number, so a damaged file does not lose it. A rank commits a checkpoint only if its generation is
the newest one. The first file is also the mark of a run folder. All files have the id of the run, which its signed
checkpoints have, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from spark_dl import storage
from spark_dl.rundir.exclusive import create_exclusively

FOLDER = "generations"
FORMAT = "spark_dl.generation"
_MAX_TRIES = 1000


def start_generation(run_dir: str, *, after: int = 0, run_id: str | None = None) -> int:
    """Starts a new attempt of a run, and fences the ranks of older attempts. Called on the driver.

    run_id: id of the run if the folder does not have it, as when only its checkpoints were copied; else a new one.
    Returns its generation, which is above all existing ones and above `after`. Raises OSError if the run folder is not
    writable.
    """
    first = max(read_generation(run_dir), after) + 1
    run_id = read_run_id(run_dir) or run_id or uuid.uuid4().hex
    for generation in range(first, first + _MAX_TRIES):
        if create_exclusively(record_url(run_dir, generation), _record(generation, run_id)):
            return generation
    raise RuntimeError(
        f"other drivers took the generations {first} to {first + _MAX_TRIES - 1} of {run_dir}; stop them"
    )


def read_generation(run_dir: str) -> int:
    """Returns the newest generation of a run; 0 before the first attempt."""
    names = storage.list_names(storage.within(run_dir, FOLDER))
    return max((int(name) for name in names if re.fullmatch(r"\d{6,}", name)), default=0)


def read_run_id(run_dir: str) -> str | None:
    """Returns the id of a run, from its oldest attempt that can be read; None without any."""
    for name in storage.list_names(storage.within(run_dir, FOLDER)):
        with contextlib.suppress(ValueError):
            record = read_record(storage.within(run_dir, FOLDER, name))
            return str(record.get("run", record.get("id")))
    return None


def superseded(run_dir: str, generation: int) -> str:
    """Returns a message if a newer attempt has started, with its host and process; otherwise an empty string."""
    newest = read_generation(run_dir)
    if newest <= generation:
        return ""
    try:
        found = read_record(record_url(run_dir, newest))
        who = f", on host {found.get('host')} by process {found.get('pid')} at {found.get('started')}"
    except ValueError:
        who = ""
    return f"this is attempt {generation} of the run {run_dir}, and attempt {newest} has started since{who}"


def advice(run_dir: str, generation: int) -> str:
    """Returns what to do after a failure of an attempt that is not the newest; otherwise an empty string."""
    with contextlib.suppress(OSError):  # the failure says more
        if why := superseded(run_dir, generation):
            return f"{why[0].upper()}{why[1:]}. The newer attempt continues; a resume would end it."
    return ""


def check_newest(run_dir: str, generation: int) -> None:
    """Raises RuntimeError if a newer attempt has started."""
    if why := superseded(run_dir, generation):
        raise RuntimeError(f"{why}; the newer attempt continues, and this one stops")


@contextlib.contextmanager
def explained(run_dir: str, generation: int) -> Iterator[None]:
    """Adds a newer attempt, if any, as the cause to errors in the block: it may have replaced the shards."""
    try:
        yield
    except Exception as error:
        why = ""
        with contextlib.suppress(OSError):  # the original error is more helpful
            why = superseded(run_dir, generation)
        if not why or "has started since" in str(error):
            raise
        raise RuntimeError(f"{why}; the newer attempt continues, and this one stopped: {error}") from error


def damage(run_dir: str, *, at_least: int = 0) -> str:
    """Returns the damage of the file of the newest generation, at least `at_least`; empty if it is valid."""
    newest = max(read_generation(run_dir), at_least)
    try:
        if newest:
            read_record(record_url(run_dir, newest))
    except ValueError as error:
        return str(error)
    return ""


def record_url(run_dir: str, generation: int) -> str:
    """Returns the URL of a generation's file."""
    return storage.within(run_dir, FOLDER, f"{generation:06d}")


def read_record(url: str) -> dict[str, Any]:
    """Reads the driver of a generation: `generation`, `host`, `pid`, `started`, and the id of the `run`.

    Raises ValueError if it is damaged.
    """
    if storage.is_link(url):
        raise ValueError(f"{url} is damaged: it is a symbolic link")
    try:
        record = json.loads(storage.read_bytes(url))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT}")
        if (found := record.pop("crc32", None)) != _crc32(record):
            raise ValueError(f"found the crc32 {found!r:.40}, expected {_crc32(record)}")
    except FileNotFoundError:
        raise ValueError(f"{url} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{url} is damaged: {error}") from error
    return record


def _record(generation: int, run_id: str) -> bytes:
    record = {
        "format": FORMAT,
        "generation": generation,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": run_id,
        "id": uuid.uuid4().hex,
    }
    return json.dumps({**record, "crc32": _crc32(record)}).encode()


def _crc32(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
