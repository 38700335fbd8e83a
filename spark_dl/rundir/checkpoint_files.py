"""Writes, checks, reads and deletes the files of one checkpoint.

The manifest has the size and the SHA-256 of every file, and a SHA-256 of its own values.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import torch
from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl.rundir import signing
from spark_dl.rundir.exclusive import create_exclusively

MANIFEST = "MANIFEST.json"
FORMAT = "spark_dl.checkpoint"
VERSION = 2
MODEL, TRAINING = "model.pt", "training.pt"
UNFINISHED = "UNFINISHED"
"""Empty file in the folder of a checkpoint until its manifest is written."""
_NAME = re.compile(r"step-(\d+)\.gen-(\d+)")
_OWN_FILE = re.compile(
    r"(MANIFEST\.json|UNFINISHED|model\.pt|training\.pt|(rank|model|optimizer)-\d{5,}\.pt)(\.tmp-[0-9a-f]*)?"
)
_CHUNK_BYTES = 16 * 2**20
_NO_WEIGHTS = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError)
"""What `torch.load` raises for files that are none of its own, or that have other objects than tensors."""


class DamagedError(ValueError):
    """A checkpoint is damaged. The message names the file and the cause."""

    def __init__(self, path: str, cause: str):
        super().__init__(f"{path} is damaged: {cause}")


def rank_file(rank: int) -> str:
    """Returns the name of the file of one rank."""
    return f"rank-{rank:05d}.pt"


def folder_name(step: int, generation: int) -> str:
    """Returns the name of a checkpoint's folder."""
    return f"step-{step:08d}.gen-{generation:04d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Returns (generation, step) of the name of a checkpoint's folder; None for other names."""
    match = _NAME.fullmatch(name)
    return (int(match.group(2)), int(match.group(1))) if match else None


def is_weights(name: str) -> bool:
    """Whether a file of a checkpoint has weights: `model.pt`, or `model-00000.pt` by each rank."""
    return name.startswith("model")


def is_own_file(name: str) -> bool:
    """Whether this is the name of a file of a checkpoint."""
    return _OWN_FILE.fullmatch(name) is not None


def delete(url: str) -> None:
    """Deletes the files of a checkpoint by their names, and then the folder if it is empty.

    The manifest is first, so that a partly deleted checkpoint is not committed. Raises OSError if the folder is a
    symbolic link.
    """
    storage.delete_known(url, is_own_file, first=MANIFEST)


class NotLoadedError(ValueError):
    """A file of a checkpoint is as it was written, and has other objects than tensors and plain data."""

    def __init__(self, path: str, cause: str):
        super().__init__(
            f"{path} was not loaded: {cause}. Its checksum is right, so it was written like this: by an earlier "
            "spark_dl, which did not check what it saved, or by another program. Resume from another checkpoint, or "
            "train again"
        )


class _Hashed:
    """A file that is hashed while it is written, without a copy in memory."""

    def __init__(self, file: Any):
        self._file, self._hash, self.bytes = file, hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        self._hash.update(content)
        self._file.write(content)
        self.bytes += size
        return size

    def flush(self) -> None:
        """Required by torch. The file is flushed when it is closed."""

    def sha256(self) -> str:
        return self._hash.hexdigest()


def begin(url: str, files: Mapping[str, Any]) -> None:
    """Writes the mark of a checkpoint that is not committed. files: what this rank writes. Raises as `write` does."""
    with _space_told(storage.join(url, UNFINISHED), files) as path:
        storage.write_bytes(path, b"")


@contextlib.contextmanager
def _space_told(path: str, content: Any) -> Iterator[str]:
    """Adds the bytes of what is written to the error of a full disk, and those that are free."""
    try:
        yield path
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not storage.is_local(path):
            raise
        folder = os.path.dirname(storage.resolve(path)[1])
        while not os.path.exists(folder):  # the disk was full before it could be created
            folder = os.path.dirname(folder)
        free = shutil.disk_usage(folder).free  # the temporary file has been deleted
        raise OSError(
            error.errno,
            f"{error.strerror}: it needs about {_tensor_bytes(content):,} bytes, and {free:,} bytes are free; free "
            "space, or lower checkpoint.keep", path,
        ) from error  # fmt: skip


def write(url: str, name: str, content: Any) -> dict[str, Any]:
    """Writes tensors and plain data as a file of a checkpoint. Returns its entry in the manifest.

    Raises OSError. If the disk is full, the error has the bytes that the file needs, and those that are free.
    """
    with _space_told(storage.join(url, name), content) as path, storage.writing(path) as file:
        hashed = _Hashed(file)
        try:
            torch.save(content, cast("IO[bytes]", hashed))
        except RuntimeError as error:
            # After a failed write torch closes its archive, and that error would hide the error of the storage.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    return {"name": name, "bytes": hashed.bytes, "sha256": hashed.sha256()}


def _tensor_bytes(content: Any) -> int:
    """Returns the bytes of the tensors in nested plain data."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, (list, tuple)) else ()
    return sum(_tensor_bytes(part) for part in parts)


def read(url: str, manifest: Mapping[str, Any], name: str) -> Any:
    """Loads a file to the CPU, and checks it against the manifest. Raises DamagedError, NotLoadedError and OSError."""
    entry, path = manifest["files"].get(name), storage.join(url, name)
    if entry is None:
        raise DamagedError(path, "it is not in the manifest")
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        raise DamagedError(path, f"it is missing, expected {entry['bytes']} bytes") from None
    _compare(path, entry, len(data), hashlib.sha256(data).hexdigest())
    _check_stored(path, data)
    return _load(path, io.BytesIO(data))


def read_back(url: str, entry: Mapping[str, Any]) -> None:
    """Raises as `read` does for a file that was just written, if it could not be loaded. No copy if it is local."""
    path = storage.join(url, entry["name"])
    if storage.is_local(path):
        _load(path, storage.resolve(path)[1], mmap=True)
    else:
        read(url, {"files": {entry["name"]: entry}}, entry["name"])


def _load(path: str, file: Any, *, mmap: bool = False) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except _NO_WEIGHTS as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"the object {found[1]}" if found else str(error).partition("\n")[0]
        if "weights_only" in what:  # torch advises to set it to False, which would run the file's code
            what = "a pickle or a program"
        raise NotLoadedError(path, f"expected tensors and plain data, found {what}") from None


_SMALL = 1 << 20


def _check_stored(path: str, data: bytes) -> None:
    """Raises NotLoadedError for an archive that takes much more memory than it has bytes: up to a thousand times.

    torch does not compress weights. What is no archive, or a program, it says itself.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return
    if sum(f.file_size for f in files) > 2 * len(data) + _SMALL:
        raise NotLoadedError(path, "it is compressed, which torch's files are not")


def _compare(path: str, entry: Mapping[str, Any], size: int | None, sha256: str | None = None) -> None:
    if size != entry["bytes"]:
        found = "a folder" if size is None else f"{size} bytes"
        raise DamagedError(path, f"found {found}, expected {entry['bytes']} bytes")
    if sha256 is not None and sha256 != entry["sha256"]:
        raise DamagedError(path, f"found the SHA-256 {sha256}, expected {entry['sha256']}")


def write_manifest(url: str, manifest: Mapping[str, Any], key: bytes | None = None) -> str:
    """Writes the manifest, which commits the checkpoint. Returns its checksum. Raises OSError, also if there is one.

    key: signs it.
    On local disks it is renamed to its name, on object stores it is put if there is none, so that it is always whole.
    """
    plain = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **manifest}))
    if key is not None:
        plain[signing.FIELD] = signing.signature(plain, key)
    sha256 = digest(plain)
    content = json.dumps({**plain, "sha256": sha256}, indent=1).encode()
    path = storage.join(url, MANIFEST)
    if storage.is_local(url):
        storage.write_bytes(path, content)
    elif not create_exclusively(path, content):
        raise FileExistsError(f"{path} exists; another job writes to this folder")
    return sha256


def digest(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's values, without its field `sha256`."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(url: str) -> dict[str, Any]:
    """Reads and checks the manifest of a checkpoint.

    Raises DamagedError, FileNotFoundError and other OSError, and ValueError for another version of the format.
    """
    path = storage.join(url, MANIFEST)
    for part in (url, path) if parse_name(storage.name(url)) else (path,):  # `latest` may be a link to a checkpoint
        if storage.is_link(part):
            raise DamagedError(part, "it is a symbolic link")
    try:
        manifest = json.loads(storage.read_bytes(path))
    except OSError:
        if storage.info(path).type == FileType.Directory:
            raise DamagedError(path, "it is a folder") from None
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, f"it is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DamagedError(path, f"expected the format {FORMAT}")
    if manifest.get("version") == 1 and "sha256" not in manifest:
        raise ValueError(
            f"{path} was written by an earlier spark_dl (version 1, without its own checksum), and this one reads "
            f"version {VERSION}; load it with the spark_dl that wrote it"
        )
    if (found := manifest.get("sha256")) != digest(manifest):
        raise DamagedError(path, f"found its own SHA-256 as {found!r:.80}, expected {digest(manifest)}")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} has version {manifest.get('version')!r:.80}; this spark_dl reads version {VERSION}")
    _check_fields(path, manifest, parse_name(storage.name(url)))
    return manifest


def _check_fields(path: str, manifest: Mapping[str, Any], named: tuple[int, int] | None) -> None:
    kinds = {"step": int, "generation": int, "world_size": int, "files": dict, "columns": list, "config": dict}
    for key, kind in kinds.items():
        if type(manifest.get(key)) is not kind:
            raise DamagedError(path, f"found {key}={manifest.get(key)!r:.80}, expected a {kind.__name__}")
    for name, entry in manifest["files"].items():
        is_entry = isinstance(entry, dict) and type(entry.get("bytes")) is int and type(entry.get("sha256")) is str
        if not is_own_file(name) or not is_entry:
            raise DamagedError(path, f"found the file {name!r:.80} with {entry!r:.80}, expected its bytes and SHA-256")
    found = manifest["generation"], manifest["step"]
    if named is not None and named != found:
        raise DamagedError(
            path, f"found generation {found[0]} and step {found[1]}, expected those in the name of its folder"
        )


def check_sizes(url: str, manifest: Mapping[str, Any]) -> None:
    """Raises DamagedError unless every file exists with the size in the manifest and is not a link. One listing."""
    sizes = {i.base_name: i.size if i.type == FileType.File else None for i in storage.list_infos(url)}
    for name, entry in manifest["files"].items():
        path = storage.join(url, name)
        if storage.is_link(path):
            raise DamagedError(path, "it is a symbolic link")
        if name not in sizes:
            raise DamagedError(path, f"it is missing, expected {entry['bytes']} bytes")
        _compare(path, entry, sizes[name])


def check_contents(url: str, manifest: Mapping[str, Any], *, only_weights: bool = False) -> None:
    """Raises DamagedError unless all files, or those of the weights, have the right checksums. Bounded memory."""
    for name, entry in manifest["files"].items():
        if only_weights and not is_weights(name):
            continue
        path, size, found = storage.join(url, name), 0, hashlib.sha256()
        try:
            with storage.open_input(path) as file, storage.explained(path):
                while chunk := file.read_buffer(_CHUNK_BYTES):
                    found.update(chunk)
                    size += len(chunk)
        except FileNotFoundError:
            raise DamagedError(path, f"it is missing, expected {entry['bytes']} bytes") from None
        _compare(path, entry, size, found.hexdigest())
