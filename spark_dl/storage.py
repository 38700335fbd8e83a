"""Files of a run by path or URL, through pyarrow's filesystems: a plain path, `file://`, `s3://`, `hdfs://` ...

Writes are atomic: a file is there whole, or not at all. On local disks (and NFS) that is a temporary file in the same
folder, fsync, rename, fsync of the folder; on object stores a put is atomic by itself.
"""

import os
import posixpath
from typing import Any
from urllib.parse import unquote, urlparse

from pyarrow import fs


def resolve(url: str) -> tuple[Any, str]:
    """The filesystem of a URL and the path on it. Raises ValueError for a scheme that pyarrow does not know."""
    parsed = urlparse(url)
    if parsed.scheme == "" or (len(parsed.scheme) == 1 and os.name == "nt"):
        return fs.LocalFileSystem(), os.path.abspath(url)
    if parsed.scheme == "file":
        return fs.LocalFileSystem(), unquote(parsed.path)
    try:
        filesystem, path = fs.FileSystem.from_uri(url)
    except Exception as error:
        raise ValueError(f"cannot open {url!r}: {error}") from error
    return filesystem, path


def is_local(url: str) -> bool:
    """Whether the URL is on a mounted filesystem."""
    return isinstance(resolve(url)[0], fs.LocalFileSystem)


def absolute(url: str) -> str:
    """The URL, or the absolute path of a local one: a task has another working directory than the driver."""
    return resolve(url)[1] if is_local(url) else url


def join(url: str, *names: str) -> str:
    """`url/name/...`."""
    return posixpath.join(url, *names)


def exists(url: str) -> bool:
    """Whether there is a file or folder."""
    filesystem, path = resolve(url)
    return bool(filesystem.get_file_info(path).type != fs.FileType.NotFound)


def read_bytes(url: str) -> bytes:
    """The content of a file. Raises OSError (FileNotFoundError, PermissionError) with its path."""
    filesystem, path = resolve(url)
    with filesystem.open_input_stream(path) as stream:
        return bytes(stream.read())


def write_bytes(url: str, content: bytes) -> None:
    """Writes a file, atomically and durably; its folder is made if need be."""
    filesystem, path = resolve(url)
    make_folder(posixpath.dirname(path) if is_local(url) else posixpath.dirname(url))
    if not isinstance(filesystem, fs.LocalFileSystem):
        with filesystem.open_output_stream(path) as stream:
            stream.write(content)
        return
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
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
    """Makes a folder and its parents; where there are no folders (object stores) nothing is made."""
    filesystem, path = resolve(url)
    if isinstance(filesystem, fs.LocalFileSystem):
        os.makedirs(path, exist_ok=True)


def list_names(url: str) -> list[str]:
    """Names of the files and folders in a folder, sorted; none if it does not exist."""
    filesystem, path = resolve(url)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(info.base_name for info in found)


def delete(url: str) -> None:
    """Deletes a file, or a folder with all in it; nothing if it does not exist."""
    filesystem, path = resolve(url)
    kind = filesystem.get_file_info(path).type
    if kind == fs.FileType.Directory:
        filesystem.delete_dir(path)
    elif kind != fs.FileType.NotFound:
        filesystem.delete_file(path)
