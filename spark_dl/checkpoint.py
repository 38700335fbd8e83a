"""Checkpoints: a folder of files, one part per rank, that exists only once its manifest is written.

    <run_dir>/checkpoints/step-00000120.gen-0001/
        model.pt  training.pt                   by rank 0: the same on all ranks
        rank-00000.pt  rank-00001.pt ...        by each rank: its random number generators, and what else it alone has
        MANIFEST.json                           by rank 0, last: sizes, SHA-256, step, generation, settings

Files hold tensors and plain data, and are read with `weights_only=True`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.fields import fixed_on_resume
from spark_dl.data.columns.schema import Column
from spark_dl.gather import gather_json
from spark_dl.generations import start_generation as start_generation
from spark_dl.generations import superseded

_log = logging.getLogger("spark_dl")
FOLDER = "checkpoints"
MANIFEST = "MANIFEST.json"
_NAME = r"step-\d+\.gen-(\d+)"
_OWN_FILE = re.compile(r"(MANIFEST\.json|model\.pt|training\.pt|rank-\d{5,}\.pt)(\.tmp-[0-9a-f]*)?")
FORMAT = "spark_dl.checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    url: str
    step: int
    generation: int
    manifest: Mapping[str, Any]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the model was trained on."""
        return tuple(Column.from_plain(c) for c in self.manifest["columns"])


def folder(run_dir: str) -> str:
    """Where the checkpoints of a run are."""
    return storage.join(run_dir, FOLDER)


def is_checkpoint_name(name: str) -> bool:
    """Whether the name of a folder is one that this package gives to checkpoints."""
    return re.fullmatch(_NAME, name) is not None


def is_own_file(name: str) -> bool:
    """Whether the name of a file is one that this package gives to the files of a checkpoint."""
    return _OWN_FILE.fullmatch(name) is not None


def delete(url: str) -> None:
    """Deletes the files of a checkpoint by their names, the manifest first, and the folder if it is empty then.

    What is half deleted does not count. Raises OSError if the folder is a symbolic link, which is not followed.
    """
    storage.delete_known(url, is_own_file, first=MANIFEST)


def save(
    run_dir: str,
    *,
    rank: int,
    world_size: int,
    generation: int,
    step: int,
    config: Config,
    columns: Sequence[Column],
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    rows: Mapping[str, Any] | None = None,
    of_rank: Mapping[str, Any] | None = None,
    problem: str = "",
) -> str:
    """Writes a checkpoint; collective. Returns its URL once it is committed. Older ones go, save `checkpoint.keep`.

    `rows` says which rows were trained on (`data/same_rows.py`); `of_rank` is what this rank alone has; `problem` is
    why this rank has nothing that may be saved.

    Raises RuntimeError on every rank if any rank has a problem or could not write its part, and on a rank of an older
    attempt.
    """
    url = storage.join(folder(run_dir), f"step-{step:08d}.gen-{generation:04d}")
    parts: dict[str, Any] = {_rank_file(rank): {"random": _random_state(), "state": of_rank or {}}}
    if rank == 0:
        parts |= {"model.pt": model, "training.pt": training}
    written: list[dict[str, Any]] = []
    try:
        if not problem:
            written = [_write(url, name, content) for name, content in parts.items()]
    except OSError as error:
        problem = f"rank {rank} cannot write to {url}: {error}"
    # Every rank must have written its part before the manifest says that the checkpoint is whole.
    reports: list[Any] = gather_json({"files": written, "problem": problem})
    problems = [r["problem"] for r in reports if r["problem"]]
    if rank == 0 and not problems:
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "generation": generation,
            "world_size": world_size,
            "files": {f["name"]: f for r in reports for f in r["files"]},
            "columns": [dataclasses.asdict(c) for c in columns],
            "config": config.to_dict(),
            "rows": rows,
        }
        problems = [_commit(run_dir, url, manifest)]
        if not problems[0]:
            _delete_old(run_dir, config.checkpoint.keep, generation)
    outcome = gather_json({"problem": problems[0] if problems else ""})
    if outcome[0]["problem"]:
        raise RuntimeError(f"checkpoint at step {step} not saved: {outcome[0]['problem']}")
    return url


def _commit(run_dir: str, url: str, manifest: Mapping[str, Any]) -> str:
    """Writes the manifest, unless another attempt of the run has begun since. Returns what went wrong, or nothing."""
    try:
        if why := superseded(run_dir, manifest["generation"]):
            return why
        storage.write_bytes(storage.join(url, MANIFEST), json.dumps(manifest, indent=1).encode())
    except OSError as error:
        return f"cannot commit it: {error}"
    return ""


def _write(url: str, name: str, content: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    storage.write_bytes(storage.join(url, name), data)
    return {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _delete_old(run_dir: str, keep: int, generation: int) -> None:
    """Deletes all but the newest `keep` checkpoints, and what older attempts have not committed, and never will.

    Only warns of what cannot be deleted, as the new
    checkpoint is there, and training goes well.
    """
    try:
        committed, others = _folders(run_dir)
        for saved in committed[:-keep]:
            delete(saved.url)
        for url, attempt in others.items():
            if attempt < generation:
                delete(url)
    except OSError as error:
        _log.warning("cannot delete the checkpoints before the last %d of %s: %s", keep, run_dir, error)


def list_checkpoints(run_dir: str) -> list[Saved]:
    """The committed checkpoints of a run, oldest first: by step, then by attempt."""
    return _folders(run_dir)[0]


def _folders(run_dir: str) -> tuple[list[Saved], dict[str, int]]:
    """The committed checkpoints of a run, oldest first, and the attempts of those that are not committed, by URL."""
    committed, others = [], {}
    for name in storage.list_names(folder(run_dir)):
        url = storage.join(folder(run_dir), name)
        if not (match := re.fullmatch(_NAME, name)):
            continue
        if (saved := _read_manifest(url)) is not None:
            committed.append(saved)
        else:
            others[url] = int(match.group(1))
    return sorted(committed, key=lambda s: (s.step, s.generation)), others


def latest(run_dir: str) -> Saved | None:
    """The newest committed checkpoint of a run, or None."""
    found = list_checkpoints(run_dir)
    return found[-1] if found else None


def open_checkpoint(url: str) -> Saved:
    """Opens a checkpoint by its manifest. Raises ValueError if there is none, or a newer version's."""
    saved = _read_manifest(url)
    if saved is None:
        raise ValueError(f"no checkpoint at {url}: it has no {MANIFEST}")
    return saved


def _read_manifest(url: str) -> Saved | None:
    """What a checkpoint's manifest says; None without one, as of a checkpoint that is being deleted right now."""
    path = storage.join(url, MANIFEST)
    try:
        manifest = json.loads(storage.read_bytes(path))
    except FileNotFoundError:
        return None
    if manifest.get("format") != FORMAT or manifest["version"] > VERSION:
        raise ValueError(f"{path} is not a checkpoint that this spark_dl can read (format {manifest.get('format')!r})")
    return Saved(url, manifest["step"], manifest["generation"], manifest)


def find(url: str | os.PathLike[str]) -> Saved:
    """A checkpoint by its own URL, or the newest one of a run by its folder. Raises ValueError if there is none."""
    url = storage.absolute(url)
    if storage.exists(storage.join(url, MANIFEST)):
        return open_checkpoint(url)
    saved = latest(url)
    if saved is None:
        raise ValueError(f"no checkpoint at {url}: expected a checkpoint, or a run's folder that holds one")
    return saved


def run_dir_of(saved: Saved) -> str:
    """The folder of the run that a checkpoint belongs to; the checkpoint's own where it was copied out of its run."""
    parent = storage.dirname(saved.url)
    run_dir = storage.dirname(parent)
    return run_dir if parent == folder(run_dir) else saved.url


def load(saved: Saved, name: str) -> Any:
    """The content of one file of a checkpoint, on the CPU. Raises RuntimeError if the file is not as it was written."""
    path = storage.join(saved.url, name)
    entry = saved.manifest["files"].get(name)
    if entry is None:
        raise RuntimeError(f"the checkpoint {saved.url} has no {name}")
    try:
        data = storage.read_bytes(path)
    except OSError as error:
        raise RuntimeError(f"cannot read {path}: {error}") from error
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise RuntimeError(
            f"{path} is damaged: {len(data)} bytes, where the manifest has {entry['bytes']}, or another SHA-256; "
            "delete this checkpoint to go on from the one before it"
        )
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def check_same_settings(saved: Saved, config: Config) -> None:
    """Raises ValueError that lists the settings in which a run to be resumed differs from the one that was saved.

    Fields that `config.fields.may_change` marks may differ: they do not change what was trained so far.
    """
    before, now = saved.manifest["config"], config.to_dict()
    if unknown := sorted(before.keys() ^ now.keys()):
        raise ValueError(
            f"cannot resume from {saved.url}, which another version of spark_dl has written (sections of its settings "
            f"that differ: {', '.join(unknown)}); train again in another run_dir"
        )
    differ: list[str] = []
    for name in now:
        old, new = before[name] or {}, now[name] or {}
        section = type(getattr(config, name))
        free = (old.keys() | new.keys()) - {*fixed_on_resume(section)} if dataclasses.is_dataclass(section) else set()
        free -= {"strategy"}
        differ += [
            f"{name}.{key}: was {old.get(key)!r}, now {new.get(key)!r}"
            for key in sorted((old.keys() | new.keys()) - free)
            if old.get(key) != new.get(key)
        ]
    if differ:
        raise ValueError(
            f"cannot resume from {saved.url} with other settings ({'; '.join(differ)}); set them back, or train in "
            "another run_dir"
        )


def load_rank_state(saved: Saved, rank: int, world_size: int) -> dict[str, Any]:
    """What this rank alone had, by name; with another number of ranks than then the mean of all of theirs.

    The mean is that of floating point tensors, each over the ranks that had it; all else is that of the first of them.
    """
    ranks: int = saved.manifest["world_size"]
    if ranks == world_size:
        return state_of_rank(saved, rank)
    total: Any = {}
    for other in range(ranks):
        total = _added(total, state_of_rank(saved, other))
    mean: dict[str, Any] = _means(total)
    return mean


def state_of_rank(saved: Saved, rank: int) -> dict[str, Any]:
    """What a rank of the run that was saved alone had, by name."""
    state: dict[str, Any] = load(saved, _rank_file(rank))["state"]
    return state


@dataclass(frozen=True)
class _Sum:
    tensor: torch.Tensor
    count: int


def _added(total: Any, state: Any) -> Any:
    """A state added to the sum of those before; None where there was none."""
    if isinstance(state, Mapping):
        before = total or {}
        return {**before, **{key: _added(before.get(key), value) for key, value in state.items()}}
    if isinstance(state, torch.Tensor) and state.is_floating_point():
        return _Sum(state, 1) if total is None else _Sum(total.tensor + state, total.count + 1)
    return state if total is None else total


def _means(total: Any) -> Any:
    if isinstance(total, Mapping):
        return {key: _means(value) for key, value in total.items()}
    return total.tensor / total.count if isinstance(total, _Sum) else total


def restore_random_state(saved: Saved, rank: int, world_size: int) -> bool:
    """Puts the random number generators of a rank back; False if the checkpoint was of another number of ranks."""
    if saved.manifest["world_size"] != world_size:
        return False
    state = load(saved, _rank_file(rank))["random"]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": (version, list(internal), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }
