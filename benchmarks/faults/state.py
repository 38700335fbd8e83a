"""The state of a run in one checksum: weights, optimizer and random number generators of its last checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import Saved, load_weights
from spark_dl.rundir.checkpoint_files import TRAINING, TensorFiles, rank_file


def state_of(saved: Saved) -> dict[str, Any]:
    """Returns the whole state that a run would continue from: of all ranks, and of any strategy.

    Names are those of what differs: `weights`, `optimizer`, `training` (scheduler, progress and history), `generators`
    and `ranks` (what a strategy keeps on each rank). Raises DamagedError for a damaged file.
    """
    training = dict(checkpoint.load(saved, TRAINING))
    ranks = [checkpoint.load(saved, rank_file(rank)) for rank in range(saved.manifest["world_size"])]
    optimizer: dict[str, Any] = {"settings": training.pop("settings"), "state": training.pop("optimizer", None)}
    if "tensors" in saved.manifest:  # ranks have different parts of it
        optimizer["tensors"] = TensorFiles(saved.url, saved.manifest, "optimizer").read_whole()
        optimizer["of ranks"] = [rank["settings"] for rank in ranks]
    return {
        "weights": load_weights(saved),
        "optimizer": optimizer,
        "training": training,
        "generators": [rank["random"] for rank in ranks],
        "ranks": [rank["state"] for rank in ranks],
    }


def checksums(state: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of each part of a state. Equal sums mean equal bits, dtypes, shapes and names."""
    found = {}
    for name, part in state.items():
        total = hashlib.sha256()
        for piece in _pieces(part):
            total.update(piece)
        found[name] = total.hexdigest()
    return found


def _pieces(value: Any) -> Iterator[bytes]:
    """Yields a value as bytes. What is nested has its length before it, so that no two values have the same bytes."""
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)} ".encode()
        for key in sorted(value, key=repr):
            yield f"{key!r}: ".encode()
            yield from _pieces(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"sequence {len(value)} ".encode()
        for element in value:
            yield from _pieces(element)
    else:
        yield f"{type(value).__name__} {value!r}, ".encode()
