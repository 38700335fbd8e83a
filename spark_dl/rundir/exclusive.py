"""Exclusive creation of files: of several writers exactly one succeeds.

pyarrow has no exclusive writes: on S3 it silently ignores `If-None-Match`, and on HDFS it overwrites. Therefore local
files are opened with O_EXCL, S3 objects are written with boto3, and files of fsspec are opened with mode "xb".
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pyarrow import fs

from spark_dl import storage
from spark_dl.storage import local_files

_log = logging.getLogger("spark_dl")
_CONFLICT_TRIES = 5
_CONFLICT_WAIT_S = 0.2


def create_exclusively(url: str, content: bytes) -> bool:
    """Writes a file if it does not exist. Returns whether this call wrote it.

    Exclusive on local disks and NFS (O_EXCL), on S3 (a conditional put, with boto3), and with fsspec if it has "xb".
    On other storage (GCS, Azure, HDFS with pyarrow, S3 without boto3) it checks for the file, writes it, and reads it
    back: simultaneous writers can all get True. This is logged once per scheme.
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
