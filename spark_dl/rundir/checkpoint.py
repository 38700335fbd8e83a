"""Checkpoints: a folder of files, one part per rank, that exists only once its manifest is written.

    <run_dir>/checkpoints/step-00000120.gen-0001/
        model.pt  training.pt                   by rank 0: the same on all ranks
        rank-00000.pt  rank-00001.pt ...        by each rank: its random number generators, and what else it alone has
        MANIFEST.json                           by rank 0, last: sizes, SHA-256, step, generation, settings

Files hold tensors and plain data, and are read with `weights_only=True`. A damaged checkpoint is passed by, and named.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.fields import fixed_on_resume
from spark_dl.data.columns.schema import Column
from spark_dl.gather import gather_json
from spark_dl.rundir import checkpoint_files, rank_state
from spark_dl.rundir.checkpoint_files import MANIFEST, MODEL, TRAINING, DamagedError, parse_name, rank_file
from spark_dl.rundir.generations import start_generation as start_generation
from spark_dl.rundir.generations import superseded

_log = logging.getLogger("spark_dl")
FOLDER = "checkpoints"


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    url: str
    step: int
    generation: int
    manifest: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        """The checksum of the manifest, and so of all that it names."""
        return str(self.manifest["sha256"])

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that the model was trained on."""
        return tuple(Column.from_plain(c) for c in self.manifest["columns"])


def folder(run_dir: str) -> str:
    """Where the checkpoints of a run are."""
    return storage.join(run_dir, FOLDER)


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
    url = storage.join(folder(run_dir), checkpoint_files.folder_name(step, generation))
    parts: dict[str, Any] = {rank_file(rank): {"random": rank_state.random_state(), "state": of_rank or {}}}
    if rank == 0:
        parts |= {MODEL: model, TRAINING: training}
    written: list[dict[str, Any]] = []
    try:
        if not problem:
            written = [checkpoint_files.write(url, name, content) for name, content in parts.items()]
    except OSError as error:
        problem = f"rank {rank} cannot write to {url}: {error}"
    # Every rank must have written its part before the manifest says that the checkpoint is whole.
    reports: list[Any] = gather_json({"files": written, "problem": problem})
    problems = [r["problem"] for r in reports if r["problem"]]
    if rank == 0 and not problems:
        manifest = {
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
            checkpoint_files.delete(url)
            return why
        checkpoint_files.write_manifest(url, manifest)
    except OSError as error:
        return f"cannot commit it: {error}"
    return ""


def _delete_old(run_dir: str, keep: int, generation: int) -> None:
    """Deletes all but the newest `keep` whole checkpoints, and of older attempts what is damaged or never committed.

    Only warns of what cannot be deleted, as the new checkpoint is there, and training goes well.
    """
    try:
        whole = [saved.url for saved in list_checkpoints(run_dir)]
        others = [url for (attempt, _), url in _folders(run_dir) if url not in whole and attempt < generation]
        for url in (*whole[:-keep], *others):
            checkpoint_files.delete(url)
    except OSError as error:
        _log.warning("cannot delete the checkpoints before the last %d of %s: %s", keep, run_dir, error)


def _folders(run_dir: str) -> list[tuple[tuple[int, int], str]]:
    """((generation, step), URL) of each folder that has the name of a checkpoint, oldest first.

    A later attempt is newer at any step: it may have begun before the last step of the one before it.
    """
    named = [(parse_name(name), storage.join(folder(run_dir), name)) for name in storage.list_names(folder(run_dir))]
    return sorted((at, url) for at, url in named if at is not None)


def newest_attempt(run_dir: str) -> int:
    """The newest attempt that has saved anything, by the names of the folders; 0 without any."""
    return max((attempt for (attempt, _), _ in _folders(run_dir)), default=0)


def last_step(run_dir: str) -> int | None:
    """The step of the newest checkpoint that was committed, whole or damaged; None without any."""
    steps = [step for (_, step), url in _folders(run_dir) if _was_committed(url)]
    return steps[-1] if steps else None


def _was_committed(url: str) -> bool:
    """Whether there is a manifest or, where it was lost, all that rank 0 writes before it."""
    names = storage.list_names(url)
    return MANIFEST in names or {MODEL, TRAINING, rank_file(0)} <= {*names}


def list_checkpoints(run_dir: str) -> list[Saved]:
    """The committed checkpoints of a run, oldest first, but for those that their manifest or sizes show as damaged."""
    found = []
    for _, url in _folders(run_dir):
        try:
            saved = _open(url)
        except ValueError:
            continue
        if saved is not None:
            found.append(saved)
    return found


def latest(run_dir: str) -> Saved | None:
    """The newest of `list_checkpoints`, or None."""
    found = list_checkpoints(run_dir)
    return found[-1] if found else None


def last_valid(
    run_dir: str, *, strict: bool = False, names: Collection[str] | None = None, trusted: Saved | None = None
) -> Saved | None:
    """The newest checkpoint of a run with all its checksums (or those of the files `names`); None before the first.

    Called on the driver. Newer ones that are damaged are logged with their causes; `trusted` was checked before.
    Raises ValueError if none is valid, naming each with its cause, and with `strict` if the newest one is not.
    """
    damaged: list[str] = []
    for _, url in reversed(_folders(run_dir)):
        try:
            saved = _open(url)
            if saved is None:
                continue
            if saved != trusted:
                checkpoint_files.check_contents(url, saved.manifest, names)
        except DamagedError as error:
            if not storage.exists(storage.join(url, MANIFEST)) and not _was_committed(url):
                continue  # it is being deleted right now
            if strict:
                raise ValueError(
                    f"checkpoint.strict: {error}; bring the file back, or set checkpoint.strict to false to go on from "
                    "the last valid checkpoint"
                ) from error
            damaged.append(str(error))
            continue
        if damaged and saved != trusted:
            _log.warning("using the checkpoint %s, as newer ones are damaged: %s", saved.url, "; ".join(damaged))
        return saved
    if damaged:
        raise ValueError(
            f"{run_dir} has no valid checkpoint: {'; '.join(damaged)}; bring the files back, or start again with "
            "overwrite, or in another run_dir"
        )
    return None


def _open(url: str) -> Saved | None:
    """A checkpoint by its manifest, with its sizes checked; None if it was never committed, or is just being deleted.

    Raises DamagedError, and ValueError for another version.
    """
    try:
        saved = open_checkpoint(url)
    except FileNotFoundError:
        if _was_committed(url):
            raise DamagedError(storage.join(url, MANIFEST), "it is missing") from None
        return None
    checkpoint_files.check_sizes(url, saved.manifest)
    return saved


def open_checkpoint(url: str, *, sha256: str | None = None) -> Saved:
    """Opens a checkpoint by its manifest. Called on the driver and on workers; `load` checks the files.

    `sha256` is that of the manifest that the driver has checked. Raises FileNotFoundError if there is none,
    DamagedError for a damaged one, ValueError for another version, RuntimeError for another manifest than that.
    """
    manifest = checkpoint_files.read_manifest(url)
    if sha256 is not None and manifest["sha256"] != sha256:
        raise RuntimeError(
            f"{storage.join(url, MANIFEST)} is not the one that the driver has checked (SHA-256 {manifest['sha256']}, "
            f"expected {sha256}); another job writes to this folder"
        )
    return Saved(url, manifest["step"], manifest["generation"], manifest)


def find(url: str | os.PathLike[str], *, names: Collection[str] | None = None) -> Saved:
    """A checkpoint by its own URL, or the last valid one of a run by its folder, with the checksums of its files.

    `names` are the files that are read, by default all. Called on the driver. Raises ValueError if there is none, or if
    it is damaged, naming file and cause.
    """
    url = storage.absolute(url)
    if parse_name(storage.name(url)) is not None or storage.exists(storage.join(url, MANIFEST)):
        saved = _open(url)
        if saved is None:
            raise ValueError(f"no checkpoint at {url}: it has no {MANIFEST}")
        checkpoint_files.check_contents(url, saved.manifest, names)
        return saved
    saved = last_valid(url, names=names)
    if saved is None:
        raise ValueError(f"no checkpoint at {url}: expected a checkpoint, or a run's folder that holds one")
    return saved


def run_dir_of(saved: Saved) -> str:
    """The folder of the run that a checkpoint belongs to; the checkpoint's own where it was copied out of its run."""
    parent = storage.dirname(saved.url)
    run_dir = storage.dirname(parent)
    return run_dir if parent == folder(run_dir) else saved.url


def load(saved: Saved, name: str) -> Any:
    """The content of one file of a checkpoint, on the CPU. Raises DamagedError if it is not as it was written."""
    return checkpoint_files.read(saved.url, saved.manifest, name)


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
        section = getattr(config, name)
        keys = {*fixed_on_resume(type(section))} if section is not None else old.keys()
        if old.get("strategy") != new.get("strategy"):  # the others are settings of another strategy
            keys = {"strategy"}
        differ += [
            f"{name}.{key}: was {old.get(key)!r}, now {new.get(key)!r}"
            for key in sorted(keys)
            if old.get(key) != new.get(key)
        ]
    if differ:
        raise ValueError(
            f"cannot resume from {saved.url} with other settings ({'; '.join(differ)}); set them back, or train in "
            "another run_dir"
        )


def load_rank_state(
    saved: Saved, rank: int, world_size: int, saved_rank: Callable[[int], int] | None = None
) -> dict[str, Any]:
    """What this rank alone had, by name; with another number of ranks than then the mean of all of theirs.

    The mean is that of floating point tensors, each over the ranks that had it; all else is that of the first of them.
    `saved_rank` says otherwise which rank of the checkpoint's this one follows, from their number.
    """
    ranks: int = saved.manifest["world_size"]
    if saved_rank is not None:
        return _state_of_rank(saved, saved_rank(ranks))
    if ranks == world_size:
        return _state_of_rank(saved, rank)
    return rank_state.mean_of(_state_of_rank(saved, other) for other in range(ranks))


def _state_of_rank(saved: Saved, rank: int) -> dict[str, Any]:
    """What a rank of the run that was saved alone had, by name."""
    state: dict[str, Any] = load(saved, rank_file(rank))["state"]
    return state


def restore_random_state(saved: Saved, rank: int, world_size: int) -> bool:
    """Puts the random number generators of a rank back; False if the checkpoint was of another number of ranks."""
    if saved.manifest["world_size"] != world_size:
        return False
    rank_state.set_random_state(load(saved, rank_file(rank))["random"])
    return True
