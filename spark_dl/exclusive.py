"""Files that exactly one of several writers creates.

pyarrow has no exclusive write: on S3 it silently ignores `If-None-Match`, and on HDFS it overwrites. So local files are
opened with O_EXCL, objects on S3 are put by boto3, and fsspec's files are opened with mode "xb".
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

_log = logging.getLogger("spark_dl")
_CONFLICT_TRIES = 5
_CONFLICT_WAIT_S = 0.2


def create_exclusively(url: str, content: bytes) -> bool:
    """Writes a file unless there is one, and returns whether it wrote it: of several writers exactly one gets True.

    Holds on local disks and NFS (O_EXCL), on S3 (a conditional put, which needs boto3) and where fsspec opens files
    with mode "xb". Elsewhere (GCS, Azure and HDFS through pyarrow, S3 without boto3) the file is looked for, written
    and read back: writers at the same instant may all get True, which is logged once for each kind of store. `content`
    must differ between writers.
    """
    filesystem, path = storage.resolve(url)
    storage.make_folder(storage.dirname(storage.absolute(url)))
    if isinstance(filesystem, fs.LocalFileSystem):
        return _create_local(path, content)
    try:
        with storage.explained(url):
            create = _exclusive_put(url, filesystem, path, content)
            if not create():
                return False
            is_refused = not create()  # a store that ignores the condition writes again
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
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    storage.sync_folder(os.path.dirname(path))
    return True


def _exclusive_put(url: str, filesystem: Any, path: str, content: bytes) -> Callable[[], bool]:
    """A function that writes the file unless there is one, and returns whether it did."""
    if storage.scheme(url) == "s3":
        return _s3_put(url, path, content, region=filesystem.region)
    if not isinstance(filesystem, fs.PyFileSystem):
        raise NotImplementedError(f"pyarrow has no exclusive write for {storage.scheme(url)}://")

    def create() -> bool:
        try:
            with filesystem.handler.fs.open(path, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        except ValueError as error:  # how some implementations refuse a mode
            raise NotImplementedError(str(error)) from error
        return True

    return create


def _s3_put(url: str, path: str, content: bytes, *, region: str) -> Callable[[], bool]:
    """A conditional put through boto3, with pyarrow's region and endpoint.

    Credentials come from where pyarrow's come from: AWS_* in the environment, profiles, roles.
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
                    raise NotImplementedError(f"the store does not know conditional puts: {error}") from error
                if status != 409:  # one of two puts at the same time may be asked to try again
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
    """Logs it once in a process."""
    install = "; install spark_dl[s3] on the driver" if scheme == "s3" else ""
    _log.warning(
        "%s:// cannot create a file exclusively (%s): two drivers that start on one run_dir at the same instant may "
        "get the same generation; start them one after the other%s", scheme, why, install,
    )  # fmt: skip
