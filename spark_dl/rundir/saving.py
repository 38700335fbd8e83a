"""Writes a checkpoint: each rank its files, and then rank 0 the manifest, which commits it.

A checkpoint that is not committed does not exist: a process can be killed at any write, and the one before it is still
there. Old checkpoints are deleted only after the new one is committed.

Each rank also has a state of its own: its random number generators, and what a strategy keeps on each rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.data.columns.schema import Column
from spark_dl.gather import gather_json
from spark_dl.rundir import checkpoint, checkpoint_files
from spark_dl.rundir.checkpoint_files import MANIFEST, MODEL, TRAINING, UNFINISHED, rank_file
from spark_dl.rundir.generations import read_run_id, superseded

if TYPE_CHECKING:
    from spark_dl.parallel.mesh.state import MeshState

_log = logging.getLogger("spark_dl")

_PLACES = ("pipeline", "tensor")
"""Settings that say which place in a mesh a rank has."""


def mean_of(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the means of floating point tensors over the states that have them; other values of the first state."""
    total: Any = {}
    for state in states:
        total = _added(total, state)
    mean: dict[str, Any] = _means(total)
    return mean


@dataclass(frozen=True)
class _Sum:
    tensor: torch.Tensor
    count: int


def _added(total: Any, state: Any) -> Any:
    """Adds a state to a sum of states, which is None at first."""
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


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the generators of this process from `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def random_state() -> dict[str, Any]:
    """Returns the state of the generators of this process, as plain data and tensors."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": (version, list(internal), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }


class NotWrittenError(RuntimeError):
    """The storage has refused a checkpoint. All ranks raise it, and the checkpoint before is still there."""

    def __init__(self, step: int, url: str, reason: str):
        """reason: with the path, the error of the storage and, on a full disk, the bytes needed and free."""
        super().__init__(f"checkpoint at step {step} not saved: {reason}")
        self.url, self.reason = url, reason


class BadStateError(RuntimeError):
    """The state of a rank must not be saved: it has NaN or Inf, or could not be loaded again. All ranks raise it."""

    is_retryable = False
    """The same rows and weights give it again."""


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Why a checkpoint is not saved. An empty text if it is."""

    text: str = ""
    of_storage: bool = False
    """Whether the storage has refused it, so that a later one may be written."""
    of_state: bool = False
    """Whether it is the state, so that another attempt has it again."""


@dataclasses.dataclass(frozen=True)
class Commit:
    """A checkpoint that was committed, as all ranks know it."""

    url: str
    sha256: str
    """Checksum of its manifest, as it was written."""


@dataclasses.dataclass
class Contents:
    """What one rank writes of a checkpoint."""

    rank: int
    files: dict[str, Any]
    """Tensors and plain data, by the name of the file."""
    tensors: Any
    """Manifest entries of sharded tensors; None if all ranks have the same ones."""


def contents(
    rank: int,
    *,
    training: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    tensors: MeshState | None = None,
    of_rank: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Contents:
    """Returns what a rank writes. The tensors are those of the run: they change with the next step.

    Args:
        model: weights that are the same on all ranks.
        tensors: in its place, weights and optimizer of which ranks have different parts.
        training: other state that is the same on all ranks.
        of_rank: state of this rank only.
        settings: of this rank's optimizer, which has other groups than that of other ranks.
    """
    files: dict[str, Any] = {rank_file(rank): {"random": random_state(), "state": of_rank or {}}}
    if settings is not None:
        files[rank_file(rank)]["settings"] = settings
    own, about = checkpoint_files.of_rank(tensors, rank)
    files |= own
    if rank == 0:
        files |= {TRAINING: training} if model is None else {MODEL: model, TRAINING: training}
    return Contents(rank, files, about)


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The content of a checkpoint's manifest, except its files. The same on all ranks."""

    world_size: int
    generation: int
    step: int
    config: Config
    columns: Sequence[Column]
    rows: Mapping[str, Any] | None = None
    """Digest of the training rows (`data/load/resume_check.py`)."""
    shapes: Mapping[str, Sequence[int]] | None = None
    """Shapes of the weights, by name."""
    classes: Mapping[str, str] | None = None
    """Classes of the optimizer and its scheduler."""
    code: Mapping[str, str] | None = None
    """Checksums of the user's functions (`training/initial.py`)."""
    score: checkpoint.Score | None = None
    """The value for `keep_best`."""
    branch: Sequence[Sequence[int]] = ()
    """`Saved.branch`."""
    frozen: Mapping[str, str] | None = None
    """`Saved.frozen`. On rank 0 only."""

    def to_manifest(self, files: Mapping[str, Any], tensors: Sequence[Any]) -> dict[str, Any]:
        """Returns the manifest.

        Args:
            files: sizes and checksums, by name.
            tensors: `Contents.tensors` of each rank.
        """
        score = self.score
        is_whole = all(of_rank is None for of_rank in tensors)
        return {
            "step": self.step,
            "generation": self.generation,
            "world_size": self.world_size,
            "files": dict(files),
            "columns": [column.to_plain() for column in self.columns],
            "config": self.config.to_dict(),
            "rows": self.rows,
            "score": None if score is None else score.value,
            **({} if score is None else {"score_of": {"metric": score.metric, "mode": score.mode, "rows": score.rows}}),
            "branch": [list(pair) for pair in self.branch],
            **({"shapes": dict(self.shapes)} if self.shapes and is_whole else {}),
            **({"frozen": dict(self.frozen)} if self.frozen else {}),
            **({"optimizer": dict(self.classes)} if self.classes else {}),
            **({"code": dict(self.code)} if self.code else {}),
            **checkpoint_files.merge(tensors),
        }


def save(
    run_dir: str,
    contents: Contents,
    about: About,
    *,
    problem: str = "",
    in_use: str = "",
    key: bytes | None = None,
    read_back: bool = False,
    gather: Callable[[Any], list[Any]] = gather_json,
) -> Commit:
    """Writes and commits a checkpoint, and deletes those that `checkpoint.keep` and `keep_best` do not keep.

    Collective. The manifest is written only after every rank has written its files.

    Args:
        problem: the reason why the state of this rank must not be saved, or empty.
        in_use: URL of a checkpoint to keep.
        key: signs the manifest; of rank 0.
        read_back: whether each rank loads its files again before the commit.
        gather: returns the JSON values of all ranks, by rank.

    Raises:
        BadStateError: On every rank, if any rank has a problem.
        NotWrittenError: On every rank, if any rank cannot write its files.
        RuntimeError: On every rank, if a newer attempt of the run has started.
    """
    url = storage.within(checkpoint.folder(run_dir), checkpoint_files.folder_name(about.step, about.generation))
    rank, config, generation = contents.rank, about.config, about.generation
    written: list[dict[str, Any]] = []
    problem_here, sha256 = _Problem(problem, of_state=bool(problem)), ""
    try:
        if not problem:
            if rank == 0 and read_back:  # those of an earlier attempt that kept more can fill the disk
                _delete_old(run_dir, config, generation, in_use)
            if rank == 0:  # so that an attempt that ends here is not taken for one whose manifest was lost
                checkpoint_files.begin(url, contents.files)
            written = [checkpoint_files.write(url, name, content) for name, content in contents.files.items()]
            for entry in written if read_back else ():
                checkpoint_files.read_back(url, entry)
    except ValueError as error:
        problem_here = _Problem(f"rank {rank} cannot load what it has written: {error}", of_state=True)
    except OSError as error:
        problem_here = _Problem(f"rank {rank} cannot write to {url}: {error}", of_storage=True)
    reports: list[Any] = gather(
        {"files": written, "problem": dataclasses.asdict(problem_here), "tensors": contents.tensors}
    )
    problems = [_Problem(**r["problem"]) for r in reports]
    # A state that must not be saved is no better in the next checkpoint.
    first = min((p for p in problems if p.text), key=lambda p: p.of_storage, default=_Problem())
    if rank == 0 and not first.text:
        files = {file["name"]: file for report in reports for file in report["files"]}
        manifest = about.to_manifest(files, [report["tensors"] for report in reports])
        first, sha256 = _commit(run_dir, url, manifest, key)
        if not first.text:
            _delete_old(run_dir, config, generation, in_use)
    if rank == 0 and first.text:
        _delete_uncommitted(url)
    plain, sha256 = gather((dataclasses.asdict(first), sha256))[0]
    first = _Problem(**plain)
    if first.of_storage:
        raise NotWrittenError(about.step, url, first.text)
    if first.text:
        kind = BadStateError if first.of_state else RuntimeError
        raise kind(f"checkpoint at step {about.step} not saved: {first.text}")
    return Commit(url, sha256)


def _commit(run_dir: str, url: str, manifest: Mapping[str, Any], key: bytes | None) -> tuple[_Problem, str]:
    """Writes the manifest, unless a newer attempt of the run has started. Returns the problem, and its checksum."""
    try:
        if why := superseded(run_dir, manifest["generation"]):
            checkpoint_files.delete(url)
            return _Problem(why), ""
        sha256 = checkpoint_files.write_manifest(url, {**manifest, "run": read_run_id(run_dir)}, key)
    except OSError as error:
        # A manifest that exists is that of another job.
        return _Problem(f"cannot commit it: {error}", of_storage=not isinstance(error, FileExistsError)), ""
    with contextlib.suppress(OSError):  # it is committed, whether or not the mark is still there
        storage.delete_file(storage.join(url, UNFINISHED))
    return _Problem(), sha256


def _delete_uncommitted(url: str) -> None:
    """Deletes the files of a checkpoint that could not be committed, which may fill the disk. Logs a warning."""
    try:
        if not storage.exists(storage.join(url, MANIFEST)):
            checkpoint_files.delete(url)
    except OSError as error:
        _log.warning("cannot delete the incomplete checkpoint %s: %s", url, error)


def _delete_old(run_dir: str, config: Config, generation: int, in_use: str) -> None:
    """Deletes all but the newest and the best checkpoints, and damaged or uncommitted ones of older attempts.

    Logs a warning if it cannot, because the new checkpoint is committed and training can continue.

    Args:
        in_use: URL of another one that is kept.
    """
    keep, keep_best = config.checkpoint.keep, config.checkpoint.keep_best
    keep_best = 1 if keep_best is None else keep_best
    mode, metric = config.train.early_stop_mode or "min", config.train.early_stop_metric or "loss"
    try:
        whole = checkpoint.list_checkpoints(run_dir)
        urls = [saved.url for saved in whole]
        best = checkpoint.by_score(whole, mode, metric)[:keep_best]
        kept = {*urls[-keep:], *(saved.url for saved in best), in_use}
        others = [url for (attempt, _), url in checkpoint.folders(run_dir) if url not in urls and attempt < generation]
        for url in (*urls, *others):
            if url not in kept:
                checkpoint_files.delete(url)
    except OSError as error:
        _log.warning("cannot delete the checkpoints before the last %d of %s: %s", keep, run_dir, error)


def load_rank_state(
    saved: checkpoint.Saved, rank: int, world_size: int, saved_rank: Callable[[int], int] | None = None
) -> dict[str, Any]:
    """Returns the state of this rank, by name; if the number of ranks has changed, the mean state of all saved ranks.

    The mean is taken of floating point tensors, each over the ranks that have it; other values are of the first rank.

    Args:
        saved_rank: maps the number of saved ranks to the saved rank that this rank takes its state from.
    """
    ranks: int = saved.manifest["world_size"]
    if saved_rank is not None:
        return _state_of_rank(saved, saved_rank(ranks))
    if ranks == world_size:
        return _state_of_rank(saved, rank)
    return mean_of(_state_of_rank(saved, other) for other in range(ranks))


def _state_of_rank(saved: checkpoint.Saved, rank: int) -> dict[str, Any]:
    """Returns the state of one rank of the checkpoint, by name."""
    state: dict[str, Any] = checkpoint.load(saved, rank_file(rank))["state"]
    return state


def settings_of_ranks(saved: checkpoint.Saved, rank: int) -> Iterator[dict[str, Any]]:
    """Yields the settings of the ranks' optimizers (`saving.contents`), first of this rank, if it was one."""
    ranks: int = saved.manifest["world_size"]
    for other in sorted(range(ranks), key=lambda other: other != rank):
        yield checkpoint.load(saved, rank_file(other))["settings"]


def restore_random_state(saved: checkpoint.Saved, rank: int, world_size: int, config: Config) -> bool:
    """Puts the random number generators of a rank back; False if the checkpoint was of other ranks, or another mesh."""
    before, now = saved.manifest["config"]["parallel"], config.to_dict()["parallel"]
    if saved.manifest["world_size"] != world_size or any(before.get(key) != now.get(key) for key in _PLACES):
        return False
    set_random_state(checkpoint.load(saved, rank_file(rank))["random"])
    return True
