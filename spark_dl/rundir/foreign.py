"""Weights in formats of other programs, as the start of a run: safetensors, folders of Hugging Face, torch's DCP.

`spark_dl.export` writes them, too. Nothing is unpickled but the metadata of DCP (`.metadata`), and of that nothing but
its own classes. Every file is read with its checksum, so that all ranks begin with what the driver has checked.
"""

from __future__ import annotations

import enum
import hashlib
import io
import json
import math
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from pyarrow.fs import FileType
from torch import Tensor, nn

from spark_dl import storage
from spark_dl.storage.owner import temporary_prefix

MODEL = "model"
"""The key of the state dict in a distributed checkpoint."""
HF_SINGLE, HF_INDEX, DCP_INDEX = "model.safetensors", "model.safetensors.index.json", ".metadata"
INDEXES = (HF_SINGLE, HF_INDEX, DCP_INDEX)
_SUFFIX = ".safetensors"
_STATE_DICTS = (MODEL, "state_dict")
_FILE = re.compile(r"\w[\w.-]*", re.ASCII)
_OF_DCP = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
    "_codecs": {"encode"},
}  # fmt: skip
"""The classes in the metadata of DCP, beside the dtypes of torch."""


@dataclass(frozen=True)
class ForeignWeights:
    """Weights that another program, or `spark_dl.export`, has written. Found on the driver, read on ranks."""

    url: str
    files: tuple[str, ...]
    """Their URLs. The first one says where the tensors are."""
    sha256: str
    """Checksum of the files."""

    def read(self) -> dict[str, Tensor]:
        """Returns the weights and buffers by name, on the CPU. Called on any side.

        Raises ValueError if the files have changed since they were found, or are no weights.
        """
        contents = {storage.name(url): _read(url) for url in self.files}
        if (found := _digest(contents.items())) != self.sha256:
            raise ValueError(
                f"{self.url} has changed since the driver read it (found the SHA-256 {found}, expected {self.sha256})"
            )
        if DCP_INDEX in contents:
            return _read_dcp(self.url, contents)
        tensors: dict[str, Tensor] = {}
        for url, data in zip(self.files, contents.values(), strict=True):
            if storage.name(url) != HF_INDEX:
                tensors |= _read_safetensors(url, data)
        return tensors


def find(url: str | os.PathLike[str]) -> ForeignWeights | None:
    """Returns the weights at a URL: a file, or a folder; None if there are none that this module reads.

    Raises ValueError if a part is missing or damaged.
    """
    url = storage.absolute(url)
    if storage.name(url).endswith(_SUFFIX) and storage.info(url).type == FileType.File:
        return _found(url, [url])
    names = {*storage.list_names(url)}
    for index, parts in ((HF_INDEX, _files_of_index), (HF_SINGLE, _no_more), (DCP_INDEX, _files_of_dcp)):
        if index in names:
            path = storage.join(url, index)
            others = parts(path, _read(path))
            if wrong := [name for name in others if not _FILE.fullmatch(name)]:  # it could lead out of the folder
                raise ValueError(f"{path} names the file {wrong[0]!r:.80}, expected the names of files beside it")
            if missing := [name for name in others if name not in names]:
                raise ValueError(f"{url}: {missing[0]} is missing, which {index} names; copy the whole folder")
            return _found(url, [path, *(storage.join(url, name) for name in others)])
    return None


def fill_tied(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with those that the model shares with others, which Hugging Face stores once."""
    names: dict[Any, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(id(value), []).append(name)
    filled = dict(weights)
    for same in names.values():
        stored = [name for name in same if name in weights]
        filled |= {name: weights[stored[0]] for name in same if stored and name not in weights}
    return filled


def _found(url: str, files: list[str]) -> ForeignWeights:
    return ForeignWeights(url, tuple(files), _digest((storage.name(file), _read(file)) for file in files))


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Returns the checksum of files. # files: the name and the content of each, one at a time"""
    each = {name: hashlib.sha256(content).hexdigest() for name, content in files}
    return hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()


def _read(path: str) -> bytes:
    try:
        return storage.read_bytes(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; copy the whole folder") from None


def _no_more(path: str, content: bytes) -> list[str]:
    return []


def _files_of_index(path: str, content: bytes) -> list[str]:
    try:
        return sorted({str(name) for name in json.loads(content)["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of safetensors: {type(error).__name__}: {error}") from None


def _files_of_dcp(path: str, content: bytes) -> list[str]:
    return sorted({str(stored.relative_path) for stored in _metadata(path, content).storage_data.values()})


def _read_safetensors(path: str, data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _member(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"found an attribute {name!r}, which is no member of an enumeration")


class _OnlyMetadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # of members of enumerations, from Python 3.11.0 to 3.11.3
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _OF_DCP.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"found {module}.{name}, which is no class of a checkpoint's metadata")


def _metadata(path: str, content: bytes) -> Any:
    try:
        metadata = _OnlyMetadata(io.BytesIO(content)).load()
        if not metadata.storage_data or not metadata.state_dict_metadata:
            raise ValueError("it lists no tensors")
    except Exception as error:  # of a damaged pickle: any
        raise ValueError(
            f"{path} is no metadata of a distributed checkpoint: {type(error).__name__}: {error}"
        ) from None
    return metadata


def _read_dcp(url: str, contents: Mapping[str, bytes]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = _metadata(storage.join(url, DCP_INDEX), contents[DCP_INDEX])
    paths = _paths_of_model(url, metadata)
    stored = {key: metadata.state_dict_metadata[key] for key in paths}
    if other := [paths[key] for key, kind in stored.items() if not isinstance(kind, TensorStorageMetadata)]:
        raise ValueError(f"{url}: {other[0]!r} is no tensor, and not read, as it would have to be unpickled")
    size = sum(math.prod(kind.size) * kind.properties.dtype.itemsize for kind in stored.values())
    if size > (found := sum(map(len, contents.values()))):  # before the memory is taken
        raise ValueError(f"{url} is damaged: its tensors have {size:,} bytes, and its files {found:,}")
    tensors = {key: torch.empty(kind.size, dtype=kind.properties.dtype) for key, kind in stored.items()}

    class Reader(FileSystemReader):
        """Reads the metadata that was checked."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which no_dist asks for
        for name, data in contents.items():
            (Path(folder) / name).write_bytes(data)
        try:
            load(tensors, storage_reader=Reader(folder), no_dist=True)
        except (Exception, CheckpointException) as error:  # torch raises many types, the second is no Exception
            cause = str(error).strip().rpartition("\n")[2]
            raise ValueError(f"{url} is damaged, or torch {torch.__version__} cannot read it: {cause}") from error
    return {paths[key]: value for key, value in tensors.items()}


def _paths_of_model(url: str, metadata: Any) -> dict[str, str]:
    """Returns the names of the model's tensors, by the keys of the checkpoint.

    The state dict of the model is the one under a key "model" or "state_dict"; without such a key it is the whole.
    """
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {
        key: (key,) for key in metadata.state_dict_metadata
    }
    parents = {path[:i] for path in paths.values() for i in range(1, len(path)) if path[i - 1] in _STATE_DICTS}
    outermost = {parent for parent in parents if not any(parent[:i] in parents for i in range(1, len(parent)))}
    if len(outermost) > 1:
        shown = ", ".join(sorted("/".join(map(str, parent)) for parent in outermost))
        raise ValueError(f"{url} has several models ({shown}), expected one")
    start = next(iter(outermost), ())
    found = {key: path[len(start) :] for key, path in paths.items() if path[: len(start)] == start}
    if nested := [path for path in found.values() if len(path) != 1]:
        raise ValueError(
            f"{url} has the key {'/'.join(map(str, nested[0]))}, and no state dict under a key 'model' or "
            "'state_dict'; save {'model': model.state_dict()}"
        )
    return {key: str(path[0]) for key, path in found.items()}
