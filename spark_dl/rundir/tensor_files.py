"""Tensors that ranks have different parts of, in the files of a checkpoint.

Each rank writes what it has to files of its own, `model-00000.pt` and `optimizer-00000.pt`. The manifest has the shape
of each tensor and the pieces in each file, so that a run on any other mesh, or one process, reads what it needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spark_dl import storage
from spark_dl.parallel.mesh.pieces import Layout, Piece, may_overlap, missing_elements, whole
from spark_dl.rundir import checkpoint_files
from spark_dl.rundir.checkpoint_files import DamagedError

if TYPE_CHECKING:
    from spark_dl.parallel.mesh.state import Held, MeshState

KINDS = ("model", "optimizer")


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
        own = {name: value for name, value in held.items() if value.writes}
        about[kind] = {name: _entry(value) for name, value in own.items()}
        if own:  # copies, as torch saves the whole memory that a view is of
            files[file_name(kind, rank)] = {name: value.tensor.detach().clone() for name, value in own.items()}
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
        found: dict[str, Any] = dict(self.manifest["tensors"][self.kind])
        for name, other in self.manifest["tensors"]["tied"].items():
            for own, entry in list(found.items()):
                if own == other or own.startswith(f"{other}/"):
                    found.setdefault(name + own[len(other) :], {**entry, "name": own})
        return found

    def read(self, wanted: Sequence[tuple[str, Layout]]) -> list[Tensor]:
        """Returns the wanted elements of each tensor, flat, on the CPU. Opens each file that has some of them once.

        Raises ValueError for a tensor that the checkpoint does not have, or that has another shape there, and
        DamagedError for a damaged file, and for elements that no file has.
        """
        found: list[Tensor] = []
        by_file: dict[str, list[tuple[int, str, list[Piece]]]] = {}
        for i, (name, layout) in enumerate(wanted):
            entry = self._entry(name, layout.shape)
            found.append(torch.empty(layout.length, dtype=getattr(torch, entry["dtype"])))
            for file, plain in entry["files"].items():
                pieces = self._pieces(name, plain)
                if any(may_overlap(own, other) for own in layout.pieces for other in pieces):
                    by_file.setdefault(file, []).append((i, entry.get("name", name), pieces))
        missing = [layout.length for _, layout in wanted]
        for file, needed in sorted(by_file.items()):
            content = checkpoint_files.read(self.url, self.manifest, file)
            for i, name, pieces in needed:
                missing[i] -= _copy(found[i], wanted[i][1], content[name], pieces)
        for (name, _), count in zip(wanted, missing, strict=True):
            if count:
                raise DamagedError(self.url, f"its files lack {count} elements of {name!r}")
        return found

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
            manifest = storage.join(self.url, checkpoint_files.MANIFEST)
            raise DamagedError(manifest, f"{name!r} has the dtype {entry['dtype']!r:.80}, expected one of torch")
        return entry

    def _pieces(self, name: str, plain: Iterable[Any]) -> list[Piece]:
        try:
            return [Piece.from_plain(piece) for piece in plain]
        except ValueError as error:
            raise DamagedError(storage.join(self.url, checkpoint_files.MANIFEST), f"{name!r}: {error}") from error

    def read_whole(self) -> dict[str, Tensor]:
        """Returns all tensors, whole, by name. Raises DamagedError as `read` does."""
        shapes = self.shapes
        values = self.read([(name, whole(shape)) for name, shape in shapes.items()])
        return {name: value.view(shape) for value, (name, shape) in zip(values, shapes.items(), strict=True)}


def _copy(target: Tensor, layout: Layout, source: Tensor, pieces: Sequence[Piece]) -> int:
    """Copies the elements that two layouts of a tensor have in common. Returns how many these are."""
    count = 0
    at = 0
    for own in layout.pieces:
        from_at = 0
        for other in pieces:
            if may_overlap(own, other):
                part, of_source = target[at : at + own.length], source[from_at : from_at + other.length]
                count += _copy_piece(part, own, of_source, other, layout.shape)
            from_at += other.length
        at += own.length
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
    found = torch.zeros((), dtype=torch.int64)
    for offset, size, axis in zip(piece.offsets, piece.sizes, shape, strict=True):
        found = found.unsqueeze(-1) * axis + torch.arange(offset, offset + size)
    return found.reshape(-1)[piece.start : piece.stop]


def _copy_by_index(target: Tensor, own: Tensor, source: Tensor, other: Tensor) -> int:
    at = torch.searchsorted(other, own).clamp(max=len(other) - 1)
    both = other[at] == own
    target[both] = source[at[both]]
    return int(both.sum())
