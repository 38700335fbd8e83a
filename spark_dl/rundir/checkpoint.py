"""Checkpoints: folders with one file per rank. A checkpoint is committed by its manifest, which is written last.

    <run_dir>/checkpoints/step-00000120.gen-0001/
        model.pt  training.pt                   by rank 0: state that is the same on all ranks
        rank-00000.pt  rank-00001.pt ...        by each rank: its random number generators and other state of the rank
        MANIFEST.json                           by rank 0, last: sizes, SHA-256, step, generation, settings

Files contain tensors and plain data, and are read with `weights_only=True`. Damaged checkpoints are skipped and logged.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.fields import fixed_on_resume
from spark_dl.data.columns.schema import Column
from spark_dl.gather import gather_json
from spark_dl.rundir import checkpoint_files, rank_state, tensor_files
from spark_dl.rundir.checkpoint_files import MANIFEST, MODEL, TRAINING, DamagedError, is_weights, parse_name, rank_file
from spark_dl.rundir.generations import start_generation as start_generation
from spark_dl.rundir.generations import superseded

if TYPE_CHECKING:
    from spark_dl.parallel.mesh.state import MeshState

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
        """Checksum of the manifest, which has the checksums of all files."""
        return str(self.manifest["sha256"])

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the training dataset."""
        return tuple(Column.from_plain(c) for c in self.manifest["columns"])


def folder(run_dir: str) -> str:
    """Returns the folder of a run's checkpoints."""
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
    training: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    tensors: MeshState | None = None,
    rows: Mapping[str, Any] | None = None,
    of_rank: Mapping[str, Any] | None = None,
    problem: str = "",
) -> str:
    """Writes and commits a checkpoint, and deletes all but the newest `checkpoint.keep`. Collective. Returns its URL.

    model: weights that are the same on all ranks. tensors: in its place, weights and optimizer of which ranks have
        different parts.
    rows: digest of the training rows (`data/load/resume_check.py`). of_rank: state of this rank only.
    problem: the reason why the state of this rank must not be saved, or empty.

    Raises RuntimeError on every rank if any rank has a problem or cannot write its file, or if a newer attempt of the
    run has started.
    """
    url = storage.join(folder(run_dir), checkpoint_files.folder_name(step, generation))
    parts: dict[str, Any] = {rank_file(rank): {"random": rank_state.random_state(), "state": of_rank or {}}}
    files, about = tensor_files.of_rank(tensors, rank)
    parts |= files
    if rank == 0:
        parts |= {TRAINING: training} if model is None else {MODEL: model, TRAINING: training}
    written: list[dict[str, Any]] = []
    try:
        if not problem:
            written = [checkpoint_files.write(url, name, content) for name, content in parts.items()]
    except OSError as error:
        problem = f"rank {rank} cannot write to {url}: {error}"
    # The manifest is written only after every rank has written its file.
    reports: list[Any] = gather_json({"files": written, "problem": problem, "tensors": about})
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
            **tensor_files.merge([r["tensors"] for r in reports]),
        }
        problems = [_commit(run_dir, url, manifest)]
        if not problems[0]:
            _delete_old(run_dir, config.checkpoint.keep, generation)
    outcome = gather_json({"problem": problems[0] if problems else ""})
    if outcome[0]["problem"]:
        raise RuntimeError(f"checkpoint at step {step} not saved: {outcome[0]['problem']}")
    return url


def _commit(run_dir: str, url: str, manifest: Mapping[str, Any]) -> str:
    """Writes the manifest, unless a newer attempt of the run has started. Returns the problem, or an empty string."""
    try:
        if why := superseded(run_dir, manifest["generation"]):
            checkpoint_files.delete(url)
            return why
        checkpoint_files.write_manifest(url, manifest)
    except OSError as error:
        return f"cannot commit it: {error}"
    return ""


def _delete_old(run_dir: str, keep: int, generation: int) -> None:
    """Deletes all but the newest `keep` checkpoints, and damaged or uncommitted checkpoints of older attempts.

    Logs a warning if it cannot, because the new checkpoint is committed and training can continue.
    """
    try:
        whole = [saved.url for saved in list_checkpoints(run_dir)]
        others = [url for (attempt, _), url in _folders(run_dir) if url not in whole and attempt < generation]
        for url in (*whole[:-keep], *others):
            checkpoint_files.delete(url)
    except OSError as error:
        _log.warning("cannot delete the checkpoints before the last %d of %s: %s", keep, run_dir, error)


def _folders(run_dir: str) -> list[tuple[tuple[int, int], str]]:
    """Returns ((generation, step), URL) of each folder with the name of a checkpoint, oldest first.

    Checkpoints of a later attempt are newer at any step, because it may have resumed from an earlier step.
    """
    named = [(parse_name(name), storage.join(folder(run_dir), name)) for name in storage.list_names(folder(run_dir))]
    return sorted((at, url) for at, url in named if at is not None)


def newest_attempt(run_dir: str) -> int:
    """Returns the newest generation among the names of checkpoint folders; 0 without any."""
    return max((attempt for (attempt, _), _ in _folders(run_dir)), default=0)


def last_step(run_dir: str) -> int | None:
    """Returns the step of the newest committed checkpoint, even if it is damaged; None without any."""
    steps = [step for (_, step), url in _folders(run_dir) if _was_committed(url)]
    return steps[-1] if steps else None


def _was_committed(url: str) -> bool:
    """Whether the manifest exists or, if it was lost, all files that rank 0 writes before it."""
    names = storage.list_names(url)
    return MANIFEST in names or ({TRAINING, rank_file(0)} <= {*names} and any(is_weights(name) for name in names))


def list_checkpoints(run_dir: str) -> list[Saved]:
    """Returns the committed checkpoints of a run, oldest first, without those whose manifest or sizes are damaged."""
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
    """Returns the newest of `list_checkpoints`, or None."""
    found = list_checkpoints(run_dir)
    return found[-1] if found else None


def last_valid(
    run_dir: str, *, strict: bool = False, only_weights: bool = False, trusted: Saved | None = None
) -> Saved | None:
    """Returns the newest checkpoint of a run whose files have the right checksums; None if there are no checkpoints.

    Called on the driver. Damaged newer checkpoints are logged with their causes.
    only_weights: whether only the files of the weights are checked. trusted: a checkpoint that was checked before.
    Raises ValueError if no checkpoint is valid, and with `strict` if the newest one is damaged.
    """
    damaged: list[str] = []
    for _, url in reversed(_folders(run_dir)):
        try:
            saved = _open(url)
            if saved is None:
                continue
            if saved != trusted:
                checkpoint_files.check_contents(url, saved.manifest, only_weights=only_weights)
        except DamagedError as error:
            if not storage.exists(storage.join(url, MANIFEST)) and not _was_committed(url):
                continue  # another process is deleting it
            if strict:
                raise ValueError(
                    f"checkpoint.strict: {error}; restore the file, or set checkpoint.strict to false to resume from "
                    "the last valid checkpoint"
                ) from error
            damaged.append(str(error))
            continue
        if damaged and saved != trusted:
            _log.warning("using the checkpoint %s, as newer ones are damaged: %s", saved.url, "; ".join(damaged))
        return saved
    if damaged:
        raise ValueError(
            f"{run_dir} has no valid checkpoint: {'; '.join(damaged)}; restore the files, or start again with "
            "overwrite or another run_dir"
        )
    return None


def _open(url: str) -> Saved | None:
    """Opens a checkpoint and checks the sizes of its files. Returns None if it is not committed or is being deleted.

    Raises DamagedError, and ValueError for another version of the format.
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

    sha256: checksum of the manifest that the driver has checked. Raises FileNotFoundError without a manifest,
    DamagedError for a damaged one, ValueError for another version, RuntimeError for another checksum.
    """
    manifest = checkpoint_files.read_manifest(url)
    if sha256 is not None and manifest["sha256"] != sha256:
        raise RuntimeError(
            f"{storage.join(url, MANIFEST)} has changed since the driver checked it (found the SHA-256 "
            f"{manifest['sha256']}, expected {sha256}); another job writes to this folder"
        )
    return Saved(url, manifest["step"], manifest["generation"], manifest)


def find(url: str | os.PathLike[str], *, only_weights: bool = False) -> Saved:
    """Opens a checkpoint by its URL, or the last valid checkpoint by the run folder, and checks its files.

    Called on the driver. only_weights: whether only the files of the weights are checked. Raises ValueError if there is
    no checkpoint, or if it is damaged, with the file and the cause.
    """
    url = storage.absolute(url)
    if parse_name(storage.name(url)) is not None or storage.exists(storage.join(url, MANIFEST)):
        saved = _open(url)
        if saved is None:
            raise ValueError(f"no checkpoint at {url}: it has no {MANIFEST}")
        checkpoint_files.check_contents(url, saved.manifest, only_weights=only_weights)
        return saved
    saved = last_valid(url, only_weights=only_weights)
    if saved is None:
        raise ValueError(f"no checkpoint at {url}: expected a checkpoint, or a run folder with checkpoints")
    return saved


def run_dir_of(saved: Saved) -> str:
    """Returns the run folder of a checkpoint; the checkpoint's own folder if it was copied from its run."""
    parent = storage.dirname(saved.url)
    run_dir = storage.dirname(parent)
    return run_dir if parent == folder(run_dir) else saved.url


def load(saved: Saved, name: str) -> Any:
    """Loads one file of a checkpoint to the CPU. Raises DamagedError if it is damaged."""
    return checkpoint_files.read(saved.url, saved.manifest, name)


def check_same_settings(saved: Saved, config: Config) -> None:
    """Raises ValueError that lists the settings in which a run to be resumed differs from the one that was saved.

    Fields that `config.fields.may_change` marks may differ: they do not change what was trained so far.
    """
    before, now = saved.manifest["config"], config.to_dict()
    if config.parallel.planned and before.get("parallel", {}).get("strategy") == "mesh":
        # An earlier attempt has planned these; a plan does not change the weights.
        now["parallel"] = before["parallel"]
        now["train"]["accumulation_steps"] = before["train"]["accumulation_steps"]
    optional = {name for name in now if getattr(type(getattr(config, name)), "MAY_CHANGE", False)}
    if unknown := sorted((before.keys() ^ now.keys()) - optional):
        raise ValueError(
            f"cannot resume from {saved.url}, which another version of spark_dl has written (sections of its settings "
            f"that differ: {', '.join(unknown)}); train again in another run_dir"
        )
    differ: list[str] = []
    for name in now:
        old, new = before.get(name) or {}, now[name] or {}
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
            f"cannot resume from {saved.url} with other settings ({'; '.join(differ)}); restore them, or use "
            "another run_dir"
        )
