"""Files by path or URL: local disks, S3, GCS, Azure and HDFS with pyarrow, all other file systems with fsspec.

A URL is `scheme://host/path?options`. The path can be percent-encoded or not. The options are those of the file system
(`s3://bucket/key?endpoint_override=host:9000&scheme=http`). All functions of this module keep them, and no other module
parses URLs. URLs must not have credentials, because they are logged and stored. Credentials are taken from the
environment (`AWS_ACCESS_KEY_ID` ...), profiles or roles.

On local disks (and NFS) writes are atomic: a temporary file in the same folder, fsync, rename, and fsync of the folder.
On other storage a file appears when it is closed, also an incomplete one after an error, as pyarrow cannot abort a
write: so manifests are written last, with the checksums of the other files. Local files are private (`local_files.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from pyarrow import ArrowInvalid, ArrowNotImplementedError, fs

from spark_dl.storage import local_files
from spark_dl.storage.credentials import BUCKETS, check_no_credentials
from spark_dl.storage.local_files import error_class as error_class

_BY_LIBHDFS = ("hdfs", "viewfs")
_first_failures: dict[str, str] = {}
_BY_PYARROW = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")


@dataclass(frozen=True)
class _Location:
    """A parsed URL; a local path has no scheme."""

    scheme: str
    host: str
    path: str
    """The path without percent-encoding; absolute, or empty for a URL that ends with its host."""
    options: str = ""

    def __str__(self) -> str:
        if not self.scheme:
            return self.path
        return f"{self.scheme}://{self.host}{quote(self.path)}" + (f"?{self.options}" if self.options else "")


def _parse(url: str) -> _Location:
    match = re.match(r"(?i)([a-z][a-z0-9+.-]*)://([^/?]*)([^?]*)\??(.*)\Z", url, re.DOTALL)
    if match is None:
        match = re.match(r"(?i)(file|hdfs|viewfs):()(/[^?]*)\??(.*)\Z", url, re.DOTALL)  # the form of Hadoop
    if match is None and (match_without_slashes := re.match(r"(?i)([a-z][a-z0-9+.-]+):/", url)):
        rest = url[match_without_slashes.end() :]
        way = (
            f"the path /dbfs/{rest}"
            if match_without_slashes[1].lower() == "dbfs"
            else f"{match_without_slashes[1]}://{rest}"
        )
        raise ValueError(f"cannot open {url!r}: expected {way}; a folder of this name here is ./{url}")
    if match is None:
        return _Location("", "", url)
    scheme, host, path, options = match.groups()
    return _Location({"s3a": "s3", "s3n": "s3"}.get(scheme.lower(), scheme.lower()), host, unquote(path), options)


def resolve(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it, without access to files. Called on the driver and workers.

    Raises ValueError for an unsupported scheme, for invalid options, and for a password in the URL; RuntimeError if the
    server, to which some file systems connect here, does not answer.
    """
    at = _parse(url)
    if not at.scheme:
        return fs.LocalFileSystem(), os.path.abspath(at.path)
    check_no_credentials(at.scheme, at.host, at.path, at.options)
    if at.scheme == "file":
        if at.options or at.host not in ("", "localhost"):
            raise ValueError(f"cannot open {url!r}: file:// URLs have neither a host nor options; write ? as %3F")
        return fs.LocalFileSystem(), at.path
    try:
        filesystem, root = _filesystem(at.scheme, at.host, at.options, os.getpid())
    except ImportError as error:
        raise ValueError(f"cannot open {url!r}: {at.scheme}:// needs a package that is missing: {error}") from error
    except (ArrowInvalid, ArrowNotImplementedError, OSError, ValueError, TypeError) as error:
        why = str(error)
        if at.scheme in _BY_LIBHDFS and ("libhdfs" in why or "libjvm" in why):
            # The second time, libhdfs only says that it has failed before.
            why = _first_failures.setdefault(at.scheme, why.partition("\n")[0])
        raise error_class(error)(f"cannot open {url!r}: {why}") from error
    return filesystem, f"{root.rstrip('/')}{at.path}" if at.path.strip("/") else root


@lru_cache(maxsize=16)
def _filesystem(scheme: str, host: str, options: str, pid: int) -> tuple[Any, str]:
    """Returns the file system of a host or bucket, and its root.

    Cached, because connections and the lookup of a bucket's region are slow. `pid` is part of the key, as a forked
    worker does not have the threads of its parent.
    """
    url = str(_Location(scheme, host, "/" if scheme in ("hdfs", "viewfs") else "", options))
    if scheme in _BY_PYARROW:
        filesystem, root = fs.FileSystem.from_uri(url)
        return filesystem, root
    import fsspec

    inner, root = fsspec.core.url_to_fs(f"{scheme}://{host}/", **dict(parse_qsl(options)))
    return fs.PyFileSystem(fs.FSSpecHandler(inner)), root


# NOTE: a client of S3 that outlives the interpreter can hang its exit: https://github.com/apache/arrow/issues/50188
atexit.register(_filesystem.cache_clear)


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Adds the URL to errors of a remote file system. An unreachable server is an error after 6 s of retries."""
    try:
        yield
    except OSError as error:
        if is_local(url) or isinstance(error, FileNotFoundError):
            raise
        denied = any(sign in str(error) for sign in ("ACCESS_DENIED", "INVALID_ACCESS_KEY", "SIGNATURE", "HTTP 403"))
        if denied:
            raise PermissionError(
                f"no access to {url}: {error}; check the credentials in the environment of driver and executors (for "
                "S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
            ) from error
        raise type(error)(f"{url}: {error}") from error


def is_local(url: str) -> bool:
    """Whether the URL is a local path or a file URL."""
    return _parse(url).scheme in ("", "file")


def scheme(url: str) -> str:
    """Returns the scheme of a URL; empty for a local path."""
    return _parse(url).scheme


def options(url: str) -> dict[str, str]:
    """Returns the options in a URL."""
    return dict(parse_qsl(_parse(url).options))


def is_link(url: str) -> bool:
    """Whether the file or folder is a symbolic link. False on object stores."""
    return is_local(url) and os.path.islink(resolve(url)[1])


def text_of(url: str | os.PathLike[str]) -> str:
    """Returns a URL or path as a string. Raises ValueError for a URL as a `pathlib.Path`, which loses a slash."""
    text = os.fspath(url)
    if not isinstance(url, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", text):
        raise ValueError(f"{text!r}: pathlib.Path removes a slash of the URL; pass the URL as a string")
    return text


def absolute(url: str | os.PathLike[str]) -> str:
    """Returns the URL, or the absolute path of a local one, without a trailing slash.

    Tasks do not have the working directory of the driver.
    """
    url = text_of(url)
    if url.startswith("~/"):  # as a shell has it; settings and notebooks have no shell
        url = os.path.expanduser(url)
    resolved, at = resolve(url)[1], _parse(url)
    return (resolved.rstrip("/") or "/") if is_local(url) else str(replace(at, path=at.path.rstrip("/")))


def identity(url: str) -> str:
    """Returns a string that is equal for all URLs of a file or folder: without options, and with links resolved."""
    if is_local(url):
        return os.path.realpath(resolve(url)[1])
    at = _parse(url)
    return str(replace(at, path=at.path.rstrip("/"), options=""))


def join(url: str, *names: str) -> str:
    """Returns the URL of a file or folder in a folder. names: without percent-encoding."""
    at = _parse(url)
    return str(replace(at, path=posixpath.join(at.path or ("/" if at.scheme else ""), *names)))


def within(folder: str, *names: str) -> str:
    """Returns the URL of what is in a folder of ours, as `join` does, by a way that leads nowhere else.

    All paths below a run folder are made here. The folder itself may be a link, as its user named it; below it, another
    user may have planted one, and what is written, deleted or read through it is not the run's. Raises ValueError for a
    symbolic link among the names; it takes one `lstat` for each.
    """
    url = folder
    for name in names:
        url = join(url, name)
        if is_link(url):
            raise ValueError(
                f"{url} is a symbolic link to {os.readlink(resolve(url)[1])}, expected a file or folder of the run "
                "itself; nothing was changed: remove the link, or use another run_dir"
            )
    return url


def dirname(url: str) -> str:
    """Returns the URL of the parent folder."""
    at = _parse(url)
    return str(replace(at, path=posixpath.dirname(at.path)))


def name(url: str) -> str:
    """Returns the name of a file or folder, without percent-encoding."""
    return posixpath.basename(_parse(url).path)


def exists(url: str) -> bool:
    """Whether the file or folder exists."""
    return bool(info(url).type != fs.FileType.NotFound)


def info(url: str) -> Any:
    """Returns pyarrow's FileInfo (type, size in bytes, mtime_ns) of a file or folder, even if it does not exist."""
    filesystem, path = resolve(url)
    with explained(url):
        return filesystem.get_file_info(path)


def open_input(url: str) -> Any:
    """Opens a file for random access, as pyarrow's NativeFile. Raises OSError (FileNotFoundError, PermissionError)."""
    filesystem, path = resolve(url)
    with explained(url):
        return filesystem.open_input_file(path)


def open_output(url: str) -> Any:
    """Opens a file for writing. On object stores the file exists after it is closed."""
    filesystem, path = resolve(url)
    if isinstance(filesystem, fs.LocalFileSystem):
        return local_files.replace(path)
    with explained(url):
        return filesystem.open_output_stream(path)


def read_bytes(url: str) -> bytes:
    """Reads a file. Raises OSError (FileNotFoundError, PermissionError) with its path."""
    with open_input(url) as stream, explained(url):
        return bytes(stream.read())


def write_bytes(url: str, content: bytes) -> None:
    """Writes a file as `writing` does, and creates its folder."""
    whole = memoryview(content)  # other types are an error before the file is created
    with writing(url) as file:
        file.write(whole)


@contextlib.contextmanager
def writing(url: str) -> Iterator[Any]:
    """Opens a file for writing in the block, and creates its folder.

    On local disks the file appears atomically and durably if the block ends without an error. On other storage
    it exists after it is closed, and an error can leave an incomplete file.
    """
    make_folder(dirname(absolute(url)))
    if not is_local(url):
        with open_output(url) as stream, explained(url):
            yield stream
        return
    with local_files.writing(resolve(url)[1]) as file:
        yield file


def append(url: str, content: bytes) -> None:
    """Adds to a local file, which is created if it does not exist. Raises OSError for a link."""
    with local_files.append(resolve(url)[1]) as file:
        file.write(content)


def make_folder(url: str) -> None:
    """Creates a folder and its parents. Does nothing on object stores, which have no folders."""
    filesystem, path = resolve(url)
    if isinstance(filesystem, fs.LocalFileSystem):
        local_files.make_folder(path)
    elif _parse(url).scheme not in BUCKETS:
        with explained(url):
            filesystem.create_dir(path, recursive=True)


def list_names(url: str) -> list[str]:
    """Returns the sorted names in a folder; empty if it does not exist."""
    return sorted(info.base_name for info in list_infos(url))


def list_infos(url: str) -> list[Any]:
    """Returns pyarrow's FileInfo of each file and folder in a folder; empty if it does not exist."""
    filesystem, path = resolve(url)
    infos: list[Any] = []
    # NOTE: pyarrow checks existence after a failed listing. A folder that is created in between is an error.
    with explained(url), contextlib.suppress(FileNotFoundError):
        infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [f for f in infos if f.path.strip("/") != path.strip("/")]


def delete(url: str) -> None:
    """Deletes a file, or a folder with its contents. Links are not followed. Does nothing if it does not exist.

    Only for files that the caller has created. `delete_known` is for folders that may contain other files.
    """
    filesystem, path = resolve(url)
    _check_no_pattern(url, filesystem, path)
    # Another process may delete it at the same time.
    with explained(url), contextlib.suppress(FileNotFoundError):
        kind = filesystem.get_file_info(path).type
        if kind == fs.FileType.Directory:
            filesystem.delete_dir(path)
        elif kind != fs.FileType.NotFound:
            filesystem.delete_file(path)


def delete_file(url: str) -> None:
    """Deletes a file or a link. Does nothing if it does not exist. Raises OSError for a folder."""
    filesystem, path = resolve(url)
    _check_no_pattern(url, filesystem, path)
    with explained(url), contextlib.suppress(FileNotFoundError):
        if isinstance(filesystem, fs.LocalFileSystem):
            os.unlink(path)
        elif filesystem.get_file_info(path).type != fs.FileType.NotFound:
            filesystem.delete_file(path)


def delete_known(url: str, is_known: Callable[[str], bool], *, first: str) -> list[str]:
    """Deletes the files in a folder with known names, and then the folder if it is empty. Returns the remaining names.

    Args:
        first: name of the file that is deleted first, so that its absence marks a partly deleted folder.

    Raises:
        OSError: If the folder is a symbolic link.
    """
    filesystem, path = resolve(url)
    _check_no_pattern(url, filesystem, path)
    if is_link(url):
        raise OSError(f"{path} is a symbolic link to {os.readlink(path)}, which is not followed")
    delete_file(join(url, first))
    infos = list_infos(url)
    is_file = {i.base_name: i.type != fs.FileType.Directory or is_link(join(url, i.base_name)) for i in infos}
    left = [name for name in is_file if not (is_file[name] and is_known(name))]
    if not left and not is_local(url):
        delete(url)  # one request deletes many files
        return left
    for name in is_file.keys() - left:
        delete_file(join(url, name))
    if not left:
        with contextlib.suppress(OSError):  # deleted by another process, or a new file was created
            os.rmdir(path)
    return left


def _check_no_pattern(url: str, filesystem: Any, path: str) -> None:
    if isinstance(filesystem, fs.PyFileSystem) and glob.has_magic(path):
        raise ValueError(f"cannot delete {url}: fsspec would use * ? [ in a name as a pattern")
