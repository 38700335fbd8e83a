"""A cache of remote shards on the local disk, shared by the ranks of a host and by later runs.

Entries are whole files, because the manifest has checksums of files, and a rank reads most of the files that its
streams open. An entry is written under a temporary name, checked, and renamed. It is evicted by unlinking, which does
not affect readers that have it open. Processes coordinate with flock. The kernel releases the lock of a killed process,
so its incomplete download can be distinguished from a running one.

The folder belongs to one user (mode 0700, files 0600). Entries are named by a hash, never by a name in a manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import pyarrow as pa

from spark_dl import storage
from spark_dl.config import Shards

_log = logging.getLogger("spark_dl")

_CHUNK_BYTES = 4 << 20
_LOCK_FILES = 1024
"""Files that share one are downloaded one after the other: few of them, and no file of a lock for each cached one."""
_LOCK_WAIT_S = 300.0
_LOCK_POLL_S = 0.02
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class DiskCache:
    """A folder of cached files, and the maximum of their total size."""

    folder: str
    limit_bytes: int

    def open_input(self, url: str, *, sha256: str = "", size: int = 0) -> Any:
        """Opens a file for random access, as pyarrow's NativeFile. Called on workers.

        Remote files are cached if they fit.

        Args:
            sha256, size: checksum and size in bytes, from the manifest. Without a checksum, versions of the file are
                distinguished by its current size and modification time.

        Raises:
            OSError: If the file does not exist or has another size or checksum.
            ValueError: For a cache folder that other users have access to.
        """
        if storage.is_local(url):
            return storage.open_input(url)
        version = sha256
        if not sha256:
            info = storage.info(url)
            size, version = info.size or 0, f"{info.size}-{info.mtime_ns}"
        if not 0 < size <= self.limit_bytes:
            return storage.open_input(url)
        _check_folder(self.folder)
        name = hashlib.sha256(f"{storage.absolute(url)}\n{version}".encode()).hexdigest()
        path = os.path.join(self.folder, name)
        entry = _open_entry(path, sha256, size)
        if entry is None:
            with _locked(os.path.join(self.folder, f"{_lock_of(name)}")) as is_mine:
                # Another process may have downloaded it in the meantime.
                entry = _open_entry(path, sha256, size)
                if entry is None and is_mine:
                    entry = _fetch(url, self, path, sha256, size)
        return entry or storage.open_input(url)


def build_cache(shards: Shards) -> DiskCache | None:
    """Returns the cache of the settings, or None."""
    return DiskCache(shards.cache_dir, shards.cache_mib << 20) if shards.cache_dir and shards.cache_mib else None


def _lock_of(name: str) -> str:
    return f"lock-{int(name, 16) % _LOCK_FILES:04d}"


def _check_folder(folder: str) -> None:
    _make_folder(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(
            f"shards.cache_dir {folder}: expected a folder of this user with mode 0700 that is not a link, found owner "
            f"{status.st_uid} and mode {stat.filemode(status.st_mode)}; use a new folder"
        )


def _make_folder(path: str, mode: int) -> None:
    """Creates a folder and its parents, which no other user can write to, whatever the umask."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path), 0o755)
        with contextlib.suppress(FileExistsError):  # created by another process, or not a folder, which is checked
            os.mkdir(path, mode)


def _open_entry(path: str, sha256: str, size: int) -> Any:
    """Opens an entry of the cache. Returns None if it does not exist. Deletes a damaged entry."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        is_whole = stat.S_ISREG(status.st_mode) and status.st_size == size
        if is_whole and (not sha256 or _digest(path, status.st_ino, status.st_mtime_ns) == sha256):
            os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
            # The open file, even if it was renamed or unlinked.
            return pa.OSFile(f"/dev/fd/{descriptor}")
        _log.warning("the cached file %s is damaged and will be downloaded again", path)
        os.unlink(path)
        return None
    except FileNotFoundError:  # deleted by another process
        return None
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def _digest(path: str, inode: int, mtime_ns: int) -> str:
    """Returns the checksum of an entry. Cached by inode and time, so that a process computes it once."""
    hashed = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Holds a lock among the processes of the host. Yields False if it was not acquired in time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    try:
        end = time.monotonic() + _LOCK_WAIT_S
        while not (is_mine := _try_lock(descriptor)) and time.monotonic() < end:
            time.sleep(_LOCK_POLL_S)
        yield is_mine
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fetch(url: str, cache: DiskCache, path: str, sha256: str, size: int) -> Any:
    """Downloads a file to the cache and opens it. Returns None if other downloads have taken the space."""
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        descriptor = _reserve(cache, temporary, size)
        if descriptor is None:
            return None
        with open(descriptor, "wb") as file:
            _download(url, file, sha256, size)
            # Locked, because a concurrent scan could miss the file under both names.
            with _locked(os.path.join(cache.folder, "lock-space")):
                os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return _open_entry(path, sha256, size)


def _reserve(cache: DiskCache, temporary: str, size: int) -> int | None:
    """Evicts least recently used entries, and creates a file of `size` bytes. Returns its locked descriptor.

    Returns None if other downloads have taken the space.
    """
    with _locked(os.path.join(cache.folder, "lock-space")) as is_mine:
        entries, total = _scan(cache.folder, temporary) if is_mine else ([], cache.limit_bytes)
        for _, entry_bytes, path in sorted(entries):
            if total + size <= cache.limit_bytes:
                break
            with contextlib.suppress(FileNotFoundError):  # a reader deleted it as damaged
                os.unlink(path)
            total -= entry_bytes
        if total + size > cache.limit_bytes:
            return None
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        is_marked = _try_lock(descriptor)  # held until the file is closed: the download is running
        assert is_marked
        os.ftruncate(descriptor, size)
        return descriptor


def _scan(folder: str, temporary: str) -> tuple[list[tuple[int, int, str]], int]:
    """Returns (time of the last use, bytes, path) of all entries, and the total size including running downloads.

    Deletes files of killed downloads. The caller holds the lock of the folder, so no file is being created, and the
    lock of the file of `temporary`, so no other download of this file is running. (A killed process releases that
    lock, and shortly after it the locks of files that it wrote.)
    """
    prefix = f"{os.path.basename(temporary).partition('.tmp-')[0]}.tmp-"
    entries, total = [], 0
    for entry in os.scandir(folder):
        if entry.name.startswith("lock-"):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if ".tmp-" not in entry.name:
                entries.append((status.st_atime_ns, status.st_size, entry.path))
            elif entry.name.startswith(prefix) or _is_abandoned(entry.path):
                os.unlink(entry.path)
                continue
        except FileNotFoundError:  # renamed or deleted by another process
            continue
        total += status.st_size
    return entries, total


def _is_abandoned(path: str) -> bool:
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _download(url: str, file: IO[bytes], sha256: str, size: int) -> None:
    hashed, done = hashlib.sha256(), 0
    with storage.open_input(url) as source:
        while chunk := source.read(_CHUNK_BYTES):
            hashed.update(chunk)
            done += len(chunk)
            if done <= size:
                _write(file, chunk)
    if done != size or (sha256 and hashed.hexdigest() != sha256):
        raise OSError(f"{url} is damaged: found {done} bytes or another SHA-256, expected {size} bytes")


def _write(file: IO[bytes], chunk: bytes) -> None:
    try:
        file.write(chunk)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, f"cannot write to shards.cache_dir: {error}; see shards.cache_mib") from error
