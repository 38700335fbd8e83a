"""Attempts of a run. Each attempt takes the next generation, a number that is used once, and fences older attempts.

    <run_dir>/generations/000003      created exclusively: the driver that took it, with a checksum

The file name is the number, so a damaged file does not lose it. A rank commits a checkpoint only if its generation is
the newest one. The first file is also the mark of a run folder. All files have the id of the run, which its signed
checkpoints have, too.

Of several writers of a file exactly one succeeds. pyarrow has no exclusive writes: on S3 it silently ignores
`If-None-Match`, and on HDFS it overwrites. Therefore local files are opened with O_EXCL, S3 objects are written with
boto3, and files of fsspec are opened with mode "xb".
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from pyarrow import fs

from spark_dl import storage
from spark_dl.storage import local_files

_log = logging.getLogger("spark_dl")
_CONFLICT_TRIES = 5
_CONFLICT_WAIT_S = 0.2

FOLDER = "generations"
FORMAT = "spark_dl.generation"
_MAX_TRIES = 1000


def create_exclusively(url: str, content: bytes) -> bool:
    """Writes a file if it does not exist. Returns whether this call wrote it.

    Exclusive on local disks and NFS (O_EXCL), on S3 (a conditional put, with boto3), and with fsspec if it has "xb".
    On other storage (GCS, Azure, HDFS with pyarrow, S3 without boto3) it checks for the file, writes it, and reads it
    back: simultaneous writers can all get True. This is logged once per scheme.

    Args:
        content: must differ between writers, as a writer knows by it that a file that is there is its own.
    """
    filesystem, path = storage.resolve(url)
    storage.make_folder(storage.dirname(storage.absolute(url)))
    if isinstance(filesystem, fs.LocalFileSystem):
        return _create_local(path, content)
    try:
        with storage.explained(url):
            create = _exclusive_put(url, filesystem, path, content)
            if not create():
                # A client repeats a write whose answer was lost, and then its own file is in the way.
                return storage.read_bytes(url) == content
            is_refused = not create()  # a store that ignores the condition writes twice
    except (ImportError, NotImplementedError) as error:
        _warn_not_exclusive(storage.scheme(url), str(error))
        if storage.exists(url):
            return False
        storage.write_bytes(url, content)
        return storage.read_bytes(url) == content
    if not is_refused:
        _warn_not_exclusive(storage.scheme(url), "the store ignores the condition")
    return is_refused or storage.read_bytes(url) == content


def _create_local(path: str, content: bytes) -> bool:
    try:
        file = local_files.create(path)
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # a part of the file would be taken for all of it
        os.unlink(path)
        raise
    local_files.sync_folder(os.path.dirname(path))
    return True


def _exclusive_put(url: str, filesystem: Any, path: str, content: bytes) -> Callable[[], bool]:
    """Returns a function that writes the file if it does not exist, and returns whether it did."""
    if storage.scheme(url) == "s3":
        return _s3_put(url, path, content, region=filesystem.region)
    if not isinstance(filesystem, fs.PyFileSystem):
        raise NotImplementedError(f"pyarrow has no exclusive write for {storage.scheme(url)}://")

    def create() -> bool:
        try:
            file = filesystem.handler.fs.open(path, "xb")
            if file is None:  # of the memory of fsspec before 2024
                raise NotImplementedError("no exclusive write")
            with file:
                file.write(content)
        except FileExistsError:
            return False
        except ValueError as error:  # some implementations do not support the mode
            raise NotImplementedError(str(error)) from error
        return True

    return create


def _s3_put(url: str, path: str, content: bytes, *, region: str) -> Callable[[], bool]:
    """Returns a conditional put with boto3, with pyarrow's region and endpoint.

    Credentials have the same sources as pyarrow's: AWS_* in the environment, profiles, roles.
    """
    from boto3.session import Session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

    bucket, _, key = path.partition("/")
    options = storage.options(url)
    endpoint = options.get("endpoint_override")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    settings: dict[str, Any] = {"retries": {"max_attempts": 4, "mode": "standard"}, "connect_timeout": 10}
    if endpoint and options.get("force_virtual_addressing") != "true":
        settings["s3"] = {"addressing_style": "path"}
    if options.get("anonymous") == "true":
        settings["signature_version"] = UNSIGNED
    client = Session().client("s3", region_name=region, endpoint_url=endpoint, config=Config(**settings))

    def put() -> bool:
        for _ in range(_CONFLICT_TRIES):
            try:
                client.put_object(Bucket=bucket, Key=key, Body=content, IfNoneMatch="*")
                return True
            except ClientError as error:
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status == 412:
                    return False
                if status == 501:
                    raise NotImplementedError(f"the store does not support conditional puts: {error}") from error
                if status != 409:  # concurrent puts can get a conflict, to be retried
                    raise OSError(f"{error} (HTTP {status})") from error
            except ParamValidationError as error:
                raise NotImplementedError(f"boto3 is too old for conditional puts: {error}") from error
            except BotoCoreError as error:
                raise OSError(str(error)) from error
            time.sleep(_CONFLICT_WAIT_S)
        raise OSError(f"other writers conflict with each of {_CONFLICT_TRIES} conditional puts")

    return put


@lru_cache(maxsize=16)
def _warn_not_exclusive(scheme: str, why: str) -> None:
    """Logs a warning, once per process and scheme."""
    install = "; install spark_dl[s3] on the driver" if scheme == "s3" else ""
    _log.warning(
        "%s:// cannot create a file exclusively (%s): two drivers that start at the same time on one run_dir can "
        "get the same generation; start them one after the other%s", scheme, why, install,
    )  # fmt: skip


def start_generation(run_dir: str, *, after: int = 0, run_id: str | None = None) -> int:
    """Starts a new attempt of a run, and fences the ranks of older attempts. Called on the driver.

    Returns its generation, which is above all existing ones and above `after`. Raises OSError if the run folder is not
    writable.

    Args:
        run_id: id of the run if the folder does not have it, as when only its checkpoints were copied; else a new one.
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
        record = read_record(record_url(run_dir, newest))
        who = f", on host {record.get('host')} by process {record.get('pid')} at {record.get('started')}"
    except ValueError:
        who = ""
    return f"this is attempt {generation} of the run {run_dir}, and attempt {newest} has started since{who}"


def advice(run_dir: str, generation: int) -> str:
    """Returns what to do after a failure of an attempt that is not the newest; otherwise an empty string."""
    with contextlib.suppress(OSError):  # the failure says more
        if why := superseded(run_dir, generation):
            return f"{why[0].upper()}{why[1:]}. The newer attempt continues; a resume would end it."
    return ""


class SupersededError(RuntimeError):
    """A newer attempt of the run has started, and continues. Running this one again would end the newer one."""

    is_retryable = False


def check_newest(run_dir: str, generation: int) -> None:
    """Raises SupersededError if a newer attempt has started."""
    if why := superseded(run_dir, generation):
        raise SupersededError(f"{why}; the newer attempt continues, and this one stops")


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
        raise SupersededError(f"{why}; the newer attempt continues, and this one stopped: {error}") from error


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
