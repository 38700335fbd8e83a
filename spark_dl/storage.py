"""Files of a run by path or URL: local disks, S3, GCS, Azure, HDFS through pyarrow's filesystems, all else by fsspec.

A URL is `scheme://host/path?options`. Its path may be percent-encoded or written as it is; `?` begins the options, as
the filesystem knows them (`s3://bucket/key?endpoint_override=host:9000&scheme=http`). All functions here keep them,
and no other module takes a URL apart. Credentials do not belong in URLs, which are logged and stored: they come from
the environment (`AWS_ACCESS_KEY_ID` ...), profiles or roles.

Writes are atomic: a file is there whole, or not at all. On local disks (and NFS) that is a temporary file in the same
folder, fsync, rename, fsync of the folder; on object stores a put is atomic by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import posixpath
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from pyarrow import ArrowInvalid, ArrowNotImplementedError, fs

_BY_PYARROW = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_SECRET = re.compile(r"secret|password|token|signature|credential$|(^|_|-)(key|sig|sas|pwd)$", re.IGNORECASE)


@dataclass(frozen=True)
class _Location:
    """A URL in parts; a path on a local disk has no scheme."""

    scheme: str
    host: str
    path: str
    """As it is, without percent-encoding; absolute, save for a URL that ends with its host."""
    options: str = ""

    def __str__(self) -> str:
        if not self.scheme:
            return self.path
        return f"{self.scheme}://{self.host}{quote(self.path)}" + (f"?{self.options}" if self.options else "")


def _parse(url: str) -> _Location:
    match = re.match(r"(?i)([a-z][a-z0-9+.-]*)://([^/?]*)([^?]*)\??(.*)\Z", url, re.DOTALL)
    if match is None and url.startswith("file:/"):  # as Hadoop writes them
        match = re.match(r"(file):()([^?]*)\??(.*)\Z", url, re.DOTALL)
    if match is None:
        return _Location("", "", url)
    scheme, host, path, options = match.groups()
    return _Location({"s3a": "s3", "s3n": "s3"}.get(scheme.lower(), scheme.lower()), host, unquote(path), options)


def resolve(url: str) -> tuple[Any, str]:
    """The filesystem of a URL and the path on it. Called on the driver and on workers; no file is touched.

    Raises ValueError for a scheme that nothing installed can open, for wrong options, and for a password in the URL.
    """
    at = _parse(url)
    if not at.scheme:
        return fs.LocalFileSystem(), os.path.abspath(at.path)
    _check_no_secrets(at)
    if at.scheme == "file":
        if at.options or at.host not in ("", "localhost"):
            raise ValueError(f"cannot open {url!r}: file:// URLs have neither a host nor options; write ? as %3F")
        return fs.LocalFileSystem(), at.path
    try:
        filesystem, root = _filesystem(at.scheme, at.host, at.options, os.getpid())
    except ImportError as error:
        raise ValueError(f"cannot open {url!r}: a package is missing that {at.scheme}:// needs: {error}") from error
    except (ArrowInvalid, ArrowNotImplementedError, OSError, ValueError, TypeError) as error:
        raise ValueError(f"cannot open {url!r}: {error}") from error
    return filesystem, f"{root.rstrip('/')}{at.path}" if at.path.strip("/") else root


@lru_cache(maxsize=16)
def _filesystem(scheme: str, host: str, options: str, pid: int) -> tuple[Any, str]:
    """The filesystem of a host or bucket, and its root.

    Connections and the search for a bucket's region make one expensive, so it is kept; `pid` gives a forked worker one
    of its own, for it has none of the threads of its parent.
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


def _check_no_secrets(at: _Location) -> None:
    user, has_user, host = at.host.rpartition("@")
    secret = [key for key, _ in parse_qsl(at.options, keep_blank_values=True) if _SECRET.search(key)]
    if (has_user and ":" in user) or secret:
        shown = _Location(at.scheme, f"***@{host}" if has_user else host, at.path, "***" if at.options else "")
        raise ValueError(
            f"the URL {str(shown)!r} holds credentials, which would come into logs and files; remove them and set them "
            "in the environment of driver and executors (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or use a "
            "profile or role"
        )


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """What goes wrong on a remote filesystem, with the URL. Of a server that is gone one hears after 6 s of retries."""
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
    """Whether the URL is on a mounted filesystem."""
    return _parse(url).scheme in ("", "file")


def scheme(url: str) -> str:
    """The scheme of a URL; empty for a local path."""
    return _parse(url).scheme


def options(url: str) -> dict[str, str]:
    """The options of a URL's filesystem."""
    return dict(parse_qsl(_parse(url).options))


def is_link(url: str) -> bool:
    """Whether the file or folder itself is a symbolic link; object stores have none."""
    return is_local(url) and os.path.islink(resolve(url)[1])


def text_of(url: str | os.PathLike[str]) -> str:
    """A URL or path as text. Raises ValueError for a URL as a `pathlib.Path`, which would be another one."""
    text = os.fspath(url)
    if not isinstance(url, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", text):
        raise ValueError(f"{text!r}: pathlib.Path makes one slash of the two of a URL; pass the URL as a string")
    return text


def absolute(url: str | os.PathLike[str]) -> str:
    """The URL, or the absolute path of a local one: a task has another working directory than the driver.

    Without a slash at its end.
    """
    url = text_of(url)
    resolved, at = resolve(url)[1], _parse(url)
    return (resolved.rstrip("/") or "/") if is_local(url) else str(replace(at, path=at.path.rstrip("/")))


def identity(url: str) -> str:
    """What is the same for all URLs of one file or folder: without options, and on local disks without links."""
    if is_local(url):
        return os.path.realpath(resolve(url)[1])
    at = _parse(url)
    return str(replace(at, path=at.path.rstrip("/"), options=""))


def join(url: str, *names: str) -> str:
    """The URL of a file or folder in a folder, by names as they are, without percent-encoding."""
    at = _parse(url)
    return str(replace(at, path=posixpath.join(at.path or ("/" if at.scheme else ""), *names)))


def dirname(url: str) -> str:
    """The URL of the folder that a file or folder is in."""
    at = _parse(url)
    return str(replace(at, path=posixpath.dirname(at.path)))


def name(url: str) -> str:
    """The name of a file or folder in its folder, as it is."""
    return posixpath.basename(_parse(url).path)


def exists(url: str) -> bool:
    """Whether there is a file or folder."""
    return bool(info(url).type != fs.FileType.NotFound)


def info(url: str) -> Any:
    """pyarrow's FileInfo of a file or folder (type, size in bytes, mtime_ns); also where there is none."""
    filesystem, path = resolve(url)
    with explained(url):
        return filesystem.get_file_info(path)


def open_input(url: str) -> Any:
    """A file to read at random, as pyarrow's NativeFile. Raises OSError (FileNotFoundError, PermissionError)."""
    filesystem, path = resolve(url)
    with explained(url):
        return filesystem.open_input_file(path)


def open_output(url: str) -> Any:
    """A file to write, as pyarrow's NativeFile; on an object store it is there once it is closed."""
    filesystem, path = resolve(url)
    with explained(url):
        return filesystem.open_output_stream(path)


def read_bytes(url: str) -> bytes:
    """The content of a file. Raises OSError (FileNotFoundError, PermissionError) with its path."""
    with open_input(url) as stream, explained(url):
        return bytes(stream.read())


def write_bytes(url: str, content: bytes) -> None:
    """Writes a file, atomically and durably; its folder is made if need be."""
    whole = memoryview(content)  # what is not bytes is an error before anything is written
    with writing(url) as file:
        file.write(whole)


@contextlib.contextmanager
def writing(url: str) -> Iterator[Any]:
    """A file to write: on local disks it is there, whole and durable, once the block ends without an error.

    On object stores it is there once it is closed; what was written before an error may be left. Its folder is made.
    """
    make_folder(dirname(absolute(url)))
    if not is_local(url):
        with open_output(url) as stream, explained(url):
            yield stream
        return
    path = resolve(url)[1]
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:12]}"  # unknown to other hosts and users, and never opened by a link
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Makes the names in a local folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(url: str) -> None:
    """Makes a folder and its parents; on object stores, where there are no folders, nothing is made."""
    filesystem, path = resolve(url)
    if isinstance(filesystem, fs.LocalFileSystem):
        os.makedirs(path, exist_ok=True)
    elif _parse(url).scheme not in ("s3", "gs", "gcs"):
        with explained(url):
            filesystem.create_dir(path, recursive=True)


def list_names(url: str) -> list[str]:
    """Names of the files and folders in a folder, sorted; none if it does not exist."""
    return sorted(found.base_name for found in list_infos(url))


def list_infos(url: str) -> list[Any]:
    """pyarrow's FileInfo of each file and folder in a folder; none if it does not exist."""
    filesystem, path = resolve(url)
    found: list[Any] = []
    # NOTE: pyarrow looks whether the folder is there after it could not list it; one that is made in between is new.
    with explained(url), contextlib.suppress(FileNotFoundError):
        found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [f for f in found if f.path.strip("/") != path.strip("/")]


def delete(url: str) -> None:
    """Deletes a file, or a folder with all in it; nothing if it does not exist. Of a symbolic link the link alone.

    For what the caller has made itself. `delete_known` is for folders that may hold files of somebody else.
    """
    filesystem, path = resolve(url)
    _check_no_pattern(url, filesystem, path)
    # Another process may delete the same: what is gone is not an error.
    with explained(url), contextlib.suppress(FileNotFoundError):
        kind = filesystem.get_file_info(path).type
        if kind == fs.FileType.Directory:
            filesystem.delete_dir(path)
        elif kind != fs.FileType.NotFound:
            filesystem.delete_file(path)


def delete_file(url: str) -> None:
    """Deletes a file, of a symbolic link the link alone; nothing if it does not exist. Raises OSError for a folder."""
    filesystem, path = resolve(url)
    _check_no_pattern(url, filesystem, path)
    with explained(url), contextlib.suppress(FileNotFoundError):
        if isinstance(filesystem, fs.LocalFileSystem):
            os.unlink(path)
        elif filesystem.get_file_info(path).type != fs.FileType.NotFound:
            filesystem.delete_file(path)


def delete_known(url: str, is_known: Callable[[str], bool], *, first: str) -> list[str]:
    """Deletes the files of a folder whose names are known, and the folder if it is empty then. Returns what is left.

    The file `first` goes before the others: what is half deleted is known by its absence.
    Raises OSError if the folder itself is a symbolic link, which is not followed.
    """
    filesystem, path = resolve(url)
    _check_no_pattern(url, filesystem, path)
    if is_link(url):
        raise OSError(f"{path} is a symbolic link to {os.readlink(path)}, through which nothing is deleted")
    delete_file(join(url, first))
    infos = list_infos(url)
    is_file = {i.base_name: i.type != fs.FileType.Directory or is_link(join(url, i.base_name)) for i in infos}
    left = [name for name in is_file if not (is_file[name] and is_known(name))]
    if not left and not is_local(url):
        delete(url)  # in one request for many files
        return left
    for name in is_file.keys() - left:
        delete_file(join(url, name))
    if not left:
        with contextlib.suppress(OSError):  # it is gone, or somebody has just written a file there
            os.rmdir(path)
    return left


def _check_no_pattern(url: str, filesystem: Any, path: str) -> None:
    if isinstance(filesystem, fs.PyFileSystem) and glob.has_magic(path):
        raise ValueError(f"cannot delete {url}: with * ? [ in a name, fsspec would delete by a pattern")
