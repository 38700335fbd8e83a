"""Attempts of a run: every driver that begins takes the next generation, which is given once, and fences older ones.

    <run_dir>/generations/000003      created exclusively: who took it, with a checksum

The name alone is the number, so a damaged file loses nothing. A rank commits a checkpoint only while no newer one is
there. The first of these files is also the mark by which a folder is known to be a run's.
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
from spark_dl.exclusive import create_exclusively

FOLDER = "generations"
FORMAT = "spark_dl.generation"
_MAX_TRIES = 1000


def start_generation(run_dir: str, *, after: int = 0) -> int:
    """Begins a new attempt of a run: from now on no rank of an older one can commit. Called on the driver.

    Its number is above all that were given, and above `after`. Raises OSError where the run_dir cannot be written to.
    """
    first = max(read_generation(run_dir), after) + 1
    for generation in range(first, first + _MAX_TRIES):
        if create_exclusively(record_url(run_dir, generation), _record(generation)):
            return generation
    raise RuntimeError(
        f"other drivers took the generations {first} to {first + _MAX_TRIES - 1} of {run_dir} meanwhile; stop them"
    )


def read_generation(run_dir: str) -> int:
    """The number of the newest attempt of a run; 0 before the first."""
    names = storage.list_names(storage.join(run_dir, FOLDER))
    return max((int(name) for name in names if re.fullmatch(r"\d{6,}", name)), default=0)


def superseded(run_dir: str, generation: int) -> str:
    """Why an attempt may not write any more: who began a newer one. Empty while it is the newest."""
    newest = read_generation(run_dir)
    if newest <= generation:
        return ""
    try:
        found = read_record(record_url(run_dir, newest))
        who = f", on host {found.get('host')} by process {found.get('pid')} at {found.get('started')}"
    except ValueError:
        who = ""
    return f"this is attempt {generation} of the run {run_dir}, and attempt {newest} has begun since{who}"


def check_newest(run_dir: str, generation: int) -> None:
    """Raises RuntimeError if a newer attempt has begun."""
    if why := superseded(run_dir, generation):
        raise RuntimeError(f"{why}; it goes on, and this one stops")


@contextlib.contextmanager
def explained(run_dir: str, generation: int) -> Iterator[None]:
    """Names a newer attempt as the cause of what goes wrong in an older one, whose shards it may have replaced."""
    try:
        yield
    except Exception as error:
        why = ""
        with contextlib.suppress(OSError):  # the error itself says more
            why = superseded(run_dir, generation)
        if not why or "has begun since" in str(error):
            raise
        raise RuntimeError(f"{why}; it goes on, and this one stopped: {error}") from error


def damage(run_dir: str, *, at_least: int = 0) -> str:
    """What is wrong with the file of the newest attempt, which is `at_least` that; empty where nothing is."""
    newest = max(read_generation(run_dir), at_least)
    try:
        if newest:
            read_record(record_url(run_dir, newest))
    except ValueError as error:
        return str(error)
    return ""


def record_url(run_dir: str, generation: int) -> str:
    """The file of an attempt."""
    return storage.join(run_dir, FOLDER, f"{generation:06d}")


def read_record(url: str) -> dict[str, Any]:
    """Who took a generation: `generation`, `host`, `pid`, `started`. Raises ValueError with the file and the cause."""
    if storage.is_link(url):
        raise ValueError(f"{url} is damaged: it is a symbolic link")
    try:
        record = json.loads(storage.read_bytes(url))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"found no record of the format {FORMAT}")
        if (found := record.pop("crc32", None)) != _crc32(record):
            raise ValueError(f"found the crc32 {found!r:.40}, expected {_crc32(record)}")
    except FileNotFoundError:
        raise ValueError(f"{url} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{url} is damaged: {error}") from error
    return record


def _record(generation: int) -> bytes:
    record = {
        "format": FORMAT,
        "generation": generation,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": uuid.uuid4().hex,
    }
    return json.dumps({**record, "crc32": _crc32(record)}).encode()


def _crc32(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
