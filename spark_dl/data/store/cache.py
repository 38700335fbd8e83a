"""A cache of remote shards on the local disk, shared by the ranks of a host and by later runs.

Whole files are kept, not row groups: a file is what the manifest has a checksum of, and a rank reads most of the files
that its streams open. An entry is written under a temporary name, checked, and renamed; to drop it is to unlink it,
which takes nothing from a reader that has it open. Processes need no server to agree: they use flock, which the kernel
lets go when its holder dies, so that what a killed process left is told from a download that goes on.

The folder belongs to one user (mode 0700, files 0600). Entries are named by a hash, never by what a manifest says.
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
_LOCK_FILES = 64
_LOCK_WAIT_S = 300.0
_LOCK_POLL_S = 0.02
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class DiskCache:
    """A folder of cached files and the bytes that they may take up together."""

    folder: str
    limit_bytes: int


def build_cache(shards: Shards) -> DiskCache | None:
    """The cache that the settings ask for, if any."""
    return DiskCache(shards.cache_dir, shards.cache_mib << 20) if shards.cache_dir and shards.cache_mib else None


def open_input(url: str, *, cache: DiskCache | None = None, sha256: str = "", size: int = 0) -> Any:
    """A file to read at random, as pyarrow's NativeFile: from the cache where it is remote and fits. On workers.

    sha256, size: of the file, in bytes, as the manifest has them; without a checksum the file's own size and time of
    change, as the storage has them now, tell one version from another.
    Raises OSError if the file is not there, not as long as it should be or has another checksum; ValueError for a
    folder that is not this user's alone.
    """
    if cache is None or storage.is_local(url):
        return storage.open_input(url)
    version = sha256
    if not sha256:
        found = storage.info(url)
        size, version = found.size or 0, f"{found.size}-{found.mtime_ns}"
    if not 0 < size <= cache.limit_bytes:
        return storage.open_input(url)
    _check_folder(cache.folder)
    name = hashlib.sha256(f"{storage.absolute(url)}\n{version}".encode()).hexdigest()
    path = os.path.join(cache.folder, name)
    entry = _open_entry(path, sha256, size)
    if entry is None:
        with _locked(os.path.join(cache.folder, f"lock-{int(name, 16) % _LOCK_FILES:02d}")) as is_mine:
            # Another process may have fetched it while this one waited.
            entry = _open_entry(path, sha256, size)
            if entry is None and is_mine:
                entry = _fetch(url, cache, path, sha256, size)
    return entry or storage.open_input(url)


def _check_folder(folder: str) -> None:
    _make_folder(folder, 0o700)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(
            f"shards.cache_dir {folder}: expected a folder of this user alone (mode 0700) that is no link, found owner "
            f"{found.st_uid} and mode {stat.filemode(found.st_mode)}; name a new folder"
        )


def _make_folder(path: str, mode: int) -> None:
    """Makes a folder, and its parents so that no other user may write there, whatever the umask."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path), 0o755)
        with contextlib.suppress(FileExistsError):  # another process was faster, or it is no folder, which is checked
            os.mkdir(path, mode)


def _open_entry(path: str, sha256: str, size: int) -> Any:
    """An entry of the cache, or None; a damaged one is dropped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        is_whole = stat.S_ISREG(found.st_mode) and found.st_size == size
        if is_whole and (not sha256 or _digest(path, found.st_ino, found.st_mtime_ns) == sha256):
            os.utime(descriptor, ns=(time.time_ns(), found.st_mtime_ns))
            # The same file, whatever has become of its name.
            return pa.OSFile(f"/dev/fd/{descriptor}")
        _log.warning("the cached file %s is damaged and is fetched again", path)
        os.unlink(path)
        return None
    except FileNotFoundError:  # dropped meanwhile
        return None
    finally:
        os.close(descriptor)


@lru_cache(maxsize=4096)
def _digest(path: str, inode: int, mtime_ns: int) -> str:
    """The checksum of an entry, which a process computes once; the inode and time tell it from a later one."""
    found = hashlib.sha256()
    with open(os.open(path, os.O_RDONLY | _FLAGS), "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Holds a lock among the processes of the host; gives False if another one has not let it go in time."""
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
    """Downloads a file into the cache and opens it; None if there is no room, as other downloads take it up."""
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        descriptor = _reserve(cache, temporary, size)
        if descriptor is None:
            return None
        with open(descriptor, "wb") as file:
            _download(url, file, sha256, size)
            # Not while another process counts what there is: it could miss the file by both names.
            with _locked(os.path.join(cache.folder, "lock-space")):
                os.rename(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return _open_entry(path, sha256, size)


def _reserve(cache: DiskCache, temporary: str, size: int) -> int | None:
    """Makes room, dropping what was not used for longest, and an empty file of `size` bytes, locked and open to write.

    None where other downloads have taken the room.
    """
    with _locked(os.path.join(cache.folder, "lock-space")) as is_mine:
        entries, total = _scan(cache.folder, temporary) if is_mine else ([], cache.limit_bytes)
        for _, entry_bytes, path in sorted(entries):
            if total + size <= cache.limit_bytes:
                break
            with contextlib.suppress(FileNotFoundError):  # a reader that found it damaged was faster
                os.unlink(path)
            total -= entry_bytes
        if total + size > cache.limit_bytes:
            return None
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        is_marked = _try_lock(descriptor)  # until the file is closed: it says that the download is going on
        assert is_marked
        os.ftruncate(descriptor, size)
        return descriptor


def _scan(folder: str, temporary: str) -> tuple[list[tuple[int, int, str]], int]:
    """(Time of the last use, bytes, path) of the entries, and the bytes of these and of downloads that are going on.

    Removes what killed downloads have left. Called by the holder of the lock, so no file is just being made, and before
    a download to `temporary`, so no other one of the same file goes on: a killed process lets its lock on that go, and
    a moment later those on what it wrote.
    """
    own = f"{os.path.basename(temporary).partition('.tmp-')[0]}.tmp-"
    entries, total = [], 0
    for found in os.scandir(folder):
        if found.name.startswith("lock-"):
            continue
        try:
            status = found.stat(follow_symlinks=False)
            if ".tmp-" not in found.name:
                entries.append((status.st_atime_ns, status.st_size, found.path))
            elif found.name.startswith(own) or _is_abandoned(found.path):
                os.unlink(found.path)
                continue
        except FileNotFoundError:  # renamed, or dropped as damaged, meanwhile
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
    found, done = hashlib.sha256(), 0
    with storage.open_input(url) as source:
        while chunk := source.read(_CHUNK_BYTES):
            found.update(chunk)
            done += len(chunk)
            if done <= size:
                _write(file, chunk)
    if done != size or (sha256 and found.hexdigest() != sha256):
        raise OSError(f"{url} is damaged: {done} bytes, where {size} are expected, or another SHA-256 than it had")


def _write(file: IO[bytes], chunk: bytes) -> None:
    try:
        file.write(chunk)
        file.flush()
    except OSError as error:
        raise OSError(error.errno, f"cannot write to shards.cache_dir: {error}; see shards.cache_mib") from error
