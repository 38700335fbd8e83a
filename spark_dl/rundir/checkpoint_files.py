"""The files of one checkpoint: written, checked, read and deleted; what they can hold; and the tensors of meshes.

The manifest has the size and the SHA-256 of every file, and a SHA-256 of its own values. Files hold tensors and plain
data (`plain_state`), which `torch.load(weights_only=True)` reads back.

Where ranks have different parts of tensors, each rank writes what it has to files of its own, `model-00000.pt` and
`optimizer-00000.pt`. The manifest has the shape of each tensor and the pieces in each file, so that a run on any other
mesh, or one process, reads what it needs.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
from pyarrow.fs import FileType
from torch import Tensor, nn

from spark_dl import storage
from spark_dl.parallel.pieces import Layout, Piece, may_overlap, missing_elements, whole
from spark_dl.rundir import signing
from spark_dl.rundir.generations import create_exclusively

if TYPE_CHECKING:
    from spark_dl.parallel.mesh.state import Held, MeshState

MANIFEST = "MANIFEST.json"
FORMAT = "spark_dl.checkpoint"
VERSION = 2
MODEL, TRAINING = "model.pt", "training.pt"
AVERAGE = "average"
"""In `model.pt`, beside the state dicts of the modules by number: the average of the parameters (`train.ema_decay`)."""
UNFINISHED = "UNFINISHED"
"""Empty file in the folder of a checkpoint until its manifest is written."""
_NAME = re.compile(r"step-(\d+)\.gen-(\d+)")
_OWN_FILE = re.compile(
    r"(MANIFEST\.json|UNFINISHED|model\.pt|training\.pt|(rank|model|optimizer)-\d{5,}\.pt)(\.tmp-[0-9a-f]*)?"
)
_CHUNK_BYTES = 16 * 2**20
_NO_WEIGHTS = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError)
"""What `torch.load` raises for files that are none of its own, or that have other objects than tensors."""

_SMALL = 1 << 20

_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray)
_OF_TORCH = (torch.Size, torch.dtype, torch.device, torch.layout)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)

KINDS = ("model", "optimizer")


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
        match = re.search(r"GLOBAL (\S+)", str(error))
        what = f"the object {match[1]}" if match else str(error).partition("\n")[0]
        if "weights_only" in what:  # torch advises to set it to False, which would run the file's code
            what = "a pickle or a program"
        raise NotLoadedError(path, f"expected tensors and plain data, found {what}") from None


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

    On local disks it is renamed to its name, on object stores it is put if there is none, so that it is always whole.

    Args:
        key: signs it.
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
        path, size, hashed = storage.join(url, name), 0, hashlib.sha256()
        try:
            with storage.open_input(path) as file, storage.explained(path):
                while chunk := file.read_buffer(_CHUNK_BYTES):
                    hashed.update(chunk)
                    size += len(chunk)
        except FileNotFoundError:
            raise DamagedError(path, f"it is missing, expected {entry['bytes']} bytes") from None
        _compare(path, entry, size, hashed.hexdigest())


def plain_state(
    value: Any, owner: str, *, of_scheduler: bool = False, on_tensor: Callable[[str, Tensor], Tensor] | None = None
) -> Any:
    """Returns a state that can be saved, with new containers and the same tensors. NumPy scalars become numbers.

    Types are compared exactly: a subclass, such as an IntEnum or a namedtuple, would not be read back as what it is.

    Raises ValueError, with owner, key and type, for anything else, unless it is of a type that
    `torch.serialization.add_safe_globals` allows.

    Args:
        owner: names the state in errors, and in the paths of `on_tensor`.
        of_scheduler: leaves out functions and makes dicts of counters, as torch's schedulers make them again.
        on_tensor: (path, tensor) -> the tensor in its place.
    """
    return _Conversion(of_scheduler, on_tensor).of(value, owner)


class _Conversion:
    def __init__(self, of_scheduler: bool, on_tensor: Callable[[str, Tensor], Tensor] | None):
        self._of_scheduler, self._on_tensor = of_scheduler, on_tensor
        self._around: set[int] = set()
        """Containers that the value is in."""
        self._safe = {kind for kind in torch.serialization.get_safe_globals() if isinstance(kind, type)}

    def of(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _TENSORS or (isinstance(value, Tensor) and kind in self._safe):
            return self._on_tensor(path, value) if self._on_tensor is not None else value
        if isinstance(value, np.generic) and type(number := value.item()) in _SCALARS:
            return number
        if kind in _SCALARS or kind in _OF_TORCH or kind in self._safe:
            return value
        if self._of_scheduler and kind in (Counter, defaultdict):
            kind = dict
        if kind in (dict, OrderedDict, Counter, list, tuple, set):
            return self._of_container(kind, value, path)
        raise ValueError(
            f"{path}: found a {type(value).__module__}.{type(value).__qualname__} in its state, which cannot be saved "
            "in a checkpoint; expected tensors, numbers and strings, in dicts, lists and tuples"
        )

    def _of_container(self, kind: type, value: Any, path: str) -> Any:
        if id(value) in self._around:
            raise ValueError(f"{path}: found a {kind.__name__} that contains itself, which cannot be saved")
        self._around.add(id(value))
        converted: Any
        if kind in (list, tuple):
            converted = kind(self.of(part, f"{path}[{i}]") for i, part in enumerate(value))
        elif kind is set:
            converted = {self.of(part, path) for part in value}
        else:
            items = value.items()
            if self._of_scheduler:
                items = [(key, part) for key, part in items if not callable(part)]
            converted = kind()
            for key, part in items:
                converted[self.of(key, path)] = self.of(part, f"{path}[{key!r}]")
            if kind is OrderedDict and (about := getattr(value, "_metadata", None)) is not None:
                converted._metadata = self.of(about, f"{path}._metadata")  # versions of modules, which loading needs
        self._around.remove(id(value))
        return converted


def file_name(kind: str, rank: int) -> str:
    """Returns the name of the file with a rank's tensors of a kind."""
    return f"{kind}-{rank:05d}.pt"


def of_rank(state: MeshState | None, rank: int) -> tuple[dict[str, Any], Any]:
    """Returns the files that a rank writes of a state, by name, and what the manifest must know of them, as plain data.

    Nothing without a state.
    """
    if state is None:
        return {}, None
    files: dict[str, Any] = {}
    about: dict[str, Any] = {"tied": state.tied()}
    for kind, held in (("model", state.weights()), ("optimizer", state.optimizer_state())):
        written = {name: value for name, value in held.items() if value.writes}
        about[kind] = {name: _entry(value) for name, value in written.items()}
        if written:  # copies, as torch saves the whole memory that a view is of
            files[file_name(kind, rank)] = {name: value.tensor.detach().clone() for name, value in written.items()}
    return files, about


def _entry(held: Held) -> dict[str, Any]:
    return {
        "shape": list(held.layout.shape),
        "dtype": str(held.tensor.dtype).removeprefix("torch."),
        "pieces": [piece.to_plain() for piece in held.layout.pieces],
    }


def merge(by_rank: Sequence[Any]) -> dict[str, Any]:
    """Returns the field `tensors` of the manifest, from what `of_rank` returned on each rank; no field without any."""
    if by_rank[0] is None:
        return {}
    merged: dict[str, Any] = {"tied": {}, **{kind: {} for kind in KINDS}}
    for rank, about in enumerate(by_rank):
        merged["tied"] |= about["tied"]
        for kind in KINDS:
            for name, entry in about[kind].items():
                tensor = merged[kind].setdefault(name, {**entry, "files": {}})
                tensor.pop("pieces", None)
                tensor["files"][file_name(kind, rank)] = entry["pieces"]
    for kind in KINDS:
        for name, tensor in merged[kind].items():
            pieces = [Piece.from_plain(plain) for part in tensor["files"].values() for plain in part]
            assert not missing_elements(tensor["shape"], pieces), f"no rank writes some elements of {kind} {name!r}"
    return {"tensors": merged}


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of one kind in a committed checkpoint."""

    url: str
    manifest: Mapping[str, Any]
    kind: str

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors, by name."""
        return {name: tuple(entry["shape"]) for name, entry in self._entries.items()}

    @functools.cached_property
    def _entries(self) -> dict[str, Any]:
        """What the manifest says of each tensor. Tied parameters have an entry under each of their names."""
        entries: dict[str, Any] = dict(self.manifest["tensors"][self.kind])
        for name, other in self.manifest["tensors"]["tied"].items():
            for own, entry in list(entries.items()):
                if own == other or own.startswith(f"{other}/"):
                    entries.setdefault(name + own[len(other) :], {**entry, "name": own})
        return entries

    def read(self, wanted: Sequence[tuple[str, Layout]]) -> list[Tensor]:
        """Returns the wanted elements of each tensor, flat, on the CPU. Opens each file that has some of them once.

        Raises ValueError for a tensor that the checkpoint does not have, or that has another shape there, and
        DamagedError for a damaged file, and for elements that no file has.
        """
        tensors: list[Tensor] = []
        by_file: dict[str, list[tuple[int, str, list[Piece]]]] = {}
        for i, (name, layout) in enumerate(wanted):
            entry = self._entry(name, layout.shape)
            tensors.append(torch.empty(layout.length, dtype=getattr(torch, entry["dtype"])))
            for file, plain in entry["files"].items():
                pieces = self._pieces(name, plain)
                if any(may_overlap(own, other) for own in layout.pieces for other in pieces):
                    by_file.setdefault(file, []).append((i, entry.get("name", name), pieces))
        missing = [layout.length for _, layout in wanted]
        for file, needed in sorted(by_file.items()):
            content = read(self.url, self.manifest, file)
            for i, name, pieces in needed:
                missing[i] -= _copy(tensors[i], wanted[i][1], content[name], pieces)
        for (name, _), count in zip(wanted, missing, strict=True):
            if count:
                raise DamagedError(self.url, f"its files lack {count} elements of {name!r}")
        return tensors

    def _entry(self, name: str, shape: tuple[int, ...]) -> Any:
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"{self.url} has no tensor {name!r}; it was saved by another model or optimizer")
        if tuple(entry["shape"]) != shape:
            raise ValueError(
                f"{self.url}: {name!r} has the shape {entry['shape']} there, and {list(shape)} in the model; it was "
                "saved by another model"
            )
        if not isinstance(getattr(torch, str(entry["dtype"]), None), torch.dtype):
            manifest = storage.join(self.url, MANIFEST)
            raise DamagedError(manifest, f"{name!r} has the dtype {entry['dtype']!r:.80}, expected one of torch")
        return entry

    def _pieces(self, name: str, plain: Iterable[Any]) -> list[Piece]:
        try:
            return [Piece.from_plain(piece) for piece in plain]
        except ValueError as error:
            raise DamagedError(storage.join(self.url, MANIFEST), f"{name!r}: {error}") from error

    def read_whole(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Returns all tensors, or some, whole, by name. Raises DamagedError as `read` does."""
        shapes = self.shapes if names is None else {name: self.shapes[name] for name in names}
        values = self.read([(name, whole(shape)) for name, shape in shapes.items()])
        return {name: value.view(shape) for value, (name, shape) in zip(values, shapes.items(), strict=True)}


def _copy(target: Tensor, layout: Layout, source: Tensor, pieces: Sequence[Piece]) -> int:
    """Copies the elements that two layouts of a tensor have in common. Returns how many these are."""
    count = 0
    at = 0
    for piece in layout.pieces:
        from_at = 0
        for other in pieces:
            if may_overlap(piece, other):
                part, of_source = target[at : at + piece.length], source[from_at : from_at + other.length]
                count += _copy_piece(part, piece, of_source, other, layout.shape)
            from_at += other.length
        at += piece.length
    return count


def _copy_piece(target: Tensor, own: Piece, source: Tensor, other: Piece, shape: Sequence[int]) -> int:
    if (own.offsets, own.sizes) == (other.offsets, other.sizes):
        start, stop = max(own.start, other.start), min(own.stop, other.stop)
        target[start - own.start : stop - own.start] = source[start - other.start : stop - other.start]
        return stop - start
    if own.length == math.prod(own.sizes) and other.length == math.prod(other.sizes):
        low = [max(a, b) for a, b in zip(own.offsets, other.offsets, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(own.offsets, own.sizes, other.offsets, other.sizes, strict=True)
        ]  # fmt: skip
        into = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, own.offsets, strict=True))
        out_of = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, other.offsets, strict=True))
        target.view(own.sizes)[into] = source.view(other.sizes)[out_of]
        return math.prod(b - a for a, b in zip(low, high, strict=True))
    return _copy_by_index(target, _indices(own, shape), source, _indices(other, shape))


def _indices(piece: Piece, shape: Sequence[int]) -> Tensor:
    """Returns the numbers of a piece's elements in the whole tensor. # [length], ascending"""
    indices = torch.zeros((), dtype=torch.int64)
    for offset, size, axis in zip(piece.offsets, piece.sizes, shape, strict=True):
        indices = indices.unsqueeze(-1) * axis + torch.arange(offset, offset + size)
    return indices.reshape(-1)[piece.start : piece.stop]


def _copy_by_index(target: Tensor, own: Tensor, source: Tensor, other: Tensor) -> int:
    at = torch.searchsorted(other, own).clamp(max=len(other) - 1)
    both = other[at] == own
    target[both] = source[at[both]]
    return int(both.sum())
