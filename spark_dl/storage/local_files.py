"""Files on local disks and NFS that other users cannot read, and that no link leads elsewhere.

New files have mode 0600 and new folders 0700, whatever the umask. The exception is a folder with the set-group-ID bit
(`chmod g+rwxs`), by which users of Unix share a folder: there the group gets with each new file and folder what it has
with the folder that contains it, and a new folder gets its sticky bit (`chmod +t`).

Which errors of a storage time can mend, and which need another path, permission or setting.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from typing import Any

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # nor a named pipe, which would block

_OF_PATHS = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_OF_SETTINGS = (errno.ELOOP, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL)
_OF_THE_SETUP = re.compile(r"no_?such_?bucket|bucket \S+ not found|unable to load lib", re.IGNORECASE)


def make_folder(path: str, *, own: bool = False) -> None:
    """Creates a folder and its parents. Existing ones keep their mode. own: whether the group may only read it."""
    path = os.path.abspath(path)
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise  # a file, or a link that leads nowhere; otherwise another process was faster
        return
    if bits := _group_bits(parent):
        sticky = os.stat(parent).st_mode & stat.S_ISVTX
        os.chmod(path, stat.S_ISGID | sticky | 0o700 | (bits & 0o050 if own else bits))
    sync_folder(parent)  # the name of the folder must be as durable as what is written to it


def create(path: str) -> Any:
    """Creates a file, and opens it for writing. Raises FileExistsError if there is anything, also a link."""
    return _open(path, _FLAGS | os.O_EXCL, "wb")


def replace(path: str) -> Any:
    """Creates a file in place of one that may exist, and opens it for writing. A link is replaced, not followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return create(path)


def append(path: str, *, buffering: int = -1) -> Any:
    """Opens a file to add to it. Raises OSError for a link, and for what is not a file."""
    return _open(path, _FLAGS | os.O_APPEND | _NO_LINK, "ab", buffering)


@contextlib.contextmanager
def writing(path: str) -> Iterator[Any]:
    """Opens a file for writing in the block. It appears atomically and durably if the block ends without an error."""
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:12]}"  # random, so that no other process opens it or links to it
    try:
        with create(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # such as a full disk
            error.filename = path
        with contextlib.suppress(OSError):  # it was never created; or the disk is read-only, as the first error says
            os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Syncs a folder to disk, so that the names of new files are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: str, flags: int, mode: str, buffering: int = -1) -> Any:
    descriptor = os.open(path, flags, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a file")
        if status.st_size == 0 and (bits := _group_bits(os.path.dirname(os.path.abspath(path))) & 0o060):
            with contextlib.suppress(PermissionError):  # another user created it
                os.fchmod(descriptor, 0o600 | bits)
        return open(descriptor, mode, buffering=buffering)
    except BaseException:
        os.close(descriptor)
        raise


def _group_bits(folder: str) -> int:
    """Returns what the group may do in a folder that is shared with it; 0 for a folder that is not."""
    mode = os.stat(folder).st_mode
    return mode & 0o070 if mode & stat.S_ISGID else 0


def error_class(error: Exception) -> type[ValueError] | type[RuntimeError]:
    """Returns the class of the error that tells the user of `error`.

    RuntimeError if running again can help, as with a full disk or a server that does not answer; ValueError otherwise.
    """
    can_pass = isinstance(error, OSError) and not isinstance(error, _OF_PATHS) and error.errno not in _OF_SETTINGS
    return RuntimeError if can_pass and not _OF_THE_SETUP.search(str(error)) else ValueError
