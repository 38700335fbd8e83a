"""Checkpoints of a training loop of the user's own in `launch`: where they are, and how a rank reads and writes them.

They are committed as those of `train` are, so each attempt goes on from a whole one, whatever was killed.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from spark_dl import storage
from spark_dl.config import Checkpoint, Config
from spark_dl.gather import gather_json
from spark_dl.launch.rank.environment import find_place, find_run, run_env
from spark_dl.rundir import checkpoint, generations, run_folder, saving
from spark_dl.rundir.checkpoint_files import MODEL, parse_name, plain_state, rank_file
from spark_dl.rundir.run_folder import delete_checkpoints


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that a rank has read."""

    step: int
    state: dict[str, Any]
    """The state that rank 0 has saved."""
    of_rank: dict[str, Any] | None
    """The state that this rank has saved for itself; None if another number of ranks has saved the checkpoint."""


class Checkpoints:
    """The checkpoints of a run, on a rank of `launch`."""

    def __init__(self, run_dir: str, generation: int, url: str, keep: int):
        """url: the checkpoint that this attempt goes on from; empty without one."""
        self.run_dir, self._generation, self._url = run_dir, generation, url
        self._config = Config(checkpoint=Checkpoint(keep=keep))
        name = parse_name(posixpath.basename(url))
        self._last_step: int | None = name[1] if name else None

    def load(self) -> LoadedCheckpoint | None:
        """Returns the checkpoint that this attempt goes on from; None if it begins from the start. Not collective.

        It stays the same in an attempt, whatever is saved meanwhile, and is not deleted until the next attempt.
        Restores the random number generators of the rank (Python, NumPy, torch), if the number of ranks is the same.
        Raises ValueError for a damaged checkpoint.
        """
        if not self._url:
            return None
        saved, (rank, num_ranks) = checkpoint.open_checkpoint(self._url), find_place()
        of_rank = None
        if saved.manifest["world_size"] == num_ranks:
            rank_state = checkpoint.load(saved, rank_file(rank))
            saving.set_random_state(rank_state["random"])
            of_rank = rank_state["state"]
        return LoadedCheckpoint(saved.step, checkpoint.load(saved, MODEL), of_rank)

    def save(self, state: Mapping[str, Any], *, step: int, of_rank: Mapping[str, Any] | None = None) -> str:
        """Writes and commits a checkpoint, and deletes those before the last `keep`. Collective. Returns its URL.

        The checkpoint that this attempt goes on from is not deleted.

        Raises ValueError for other objects; ValueError on all ranks for another step; RuntimeError on all ranks if one
        of them cannot write its file, or if a newer attempt of the run has started.

        Args:
            state: tensors, numbers and strings, in dicts, lists and tuples, such as state dicts; that of rank 0 is
                written. They are written as they are, NaN and Inf too.
            step: number of steps done, the same on all ranks, and above that of the checkpoint before.
            of_rank: what this rank alone needs.
        """
        rank, num_ranks = find_place()
        if num_ranks > 1 and not dist.is_initialized():
            raise RuntimeError(
                f"a checkpoint of {num_ranks} ranks is committed by all of them together; call "
                "torch.distributed.init_process_group() before the first one is saved"
            )
        self._check_step(step)
        contents = saving.contents(
            rank, training={}, model=plain_state(dict(state), "save: state") if rank == 0 else {},
            of_rank=plain_state(dict(of_rank or {}), "save: of_rank"),
        )  # fmt: skip
        about = saving.About(
            world_size=num_ranks, generation=self._generation, step=step, config=self._config, columns=()
        )
        saved = saving.save(self.run_dir, contents, about, in_use=self._url)
        self._last_step = step
        return saved.url

    def _check_step(self, step: int) -> None:
        """Raises ValueError on all ranks if a step has no checkpoint. Collective."""
        steps = gather_json(step)
        if len(set(steps)) > 1:
            told = ", ".join(f"{found} on rank {rank}" for rank, found in enumerate(steps))
            raise ValueError(f"save: step: expected the same on all ranks, found {told}")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"save: step: expected more than that of the checkpoint before, {self._last_step}, found {step}; count "
                "the steps from the first attempt on: saved = checkpoints.load() has saved.step"
            )


def open_checkpoints(*, keep: int = 2) -> Checkpoints:
    """Opens the checkpoints of this run. Called on a rank of `launch` with a `run_dir`.

    Raises RuntimeError elsewhere, and ValueError for an invalid `keep`.

    Args:
        keep: number of the last checkpoints that are kept, beside the one that this attempt goes on from.

    Example:
        >>> def train_fn():
        ...     torch.distributed.init_process_group("gloo")
        ...     model, checkpoints = torch.nn.Linear(2, 2), spark_dl.open_checkpoints()
        ...     loaded = checkpoints.load()  # None in the first attempt
        ...     for step in range(loaded.step if loaded else 0, 3):
        ...         checkpoints.save({"model": model.state_dict()}, step=step + 1)
        >>> spark_dl.launch(train_fn, num_ranks=2, run_dir="runs/own", overwrite=True)
    """
    run = find_run()
    if run is None:
        raise RuntimeError("open_checkpoints: found no run folder; pass run_dir to spark_dl.launch")
    return Checkpoints(*run, keep)


class OwnRun:
    """The run folder of a function of the user's own, on the driver."""

    def __init__(self, run_dir: str | os.PathLike[str], *, resume: bool, overwrite: bool):
        """Starts the run, and deletes nothing yet. Raises as `begin_attempt` does."""
        self._run_dir = storage.absolute(run_dir)
        self._found = run_folder.begin_attempt(self._run_dir, Config(), resume=resume, overwrite=overwrite)
        self._overwrite, self._is_started = overwrite, False

    def begin(self) -> dict[str, str]:
        """Begins the next attempt, which can start now. Returns the environment of its ranks, with the last checkpoint.

        With `overwrite`, the first one deletes the checkpoints of earlier runs, and nothing else: it is not known which
        other files the function reads. Raises RuntimeError if another driver has started an attempt since.
        """
        with run_folder.explained(run_folder.READ, self._run_dir):
            generations.check_newest(self._run_dir, self._found[0])
        if self._is_started:
            self._found = run_folder.begin_attempt(self._run_dir, Config(), resume=True, overwrite=False)
        elif self._overwrite:
            with run_folder.explained(run_folder.WRITE, self._run_dir):
                delete_checkpoints(self._run_dir)
        self._is_started = True
        generation, saved = self._found
        return run_env(self._run_dir, generation, saved.url if saved else "")

    def how_to_resume(self) -> str:
        """Returns how to go on after a failure."""
        return checkpoint.how_to_resume(self._run_dir)


def start_own_run(run_dir: str | os.PathLike[str] | None, *, resume: bool, overwrite: bool) -> OwnRun | None:
    """Starts the run of a function of the user's own; None without a run folder. Raises as `OwnRun` does."""
    if run_dir is not None:
        return OwnRun(run_dir, resume=resume, overwrite=overwrite)
    if resume or overwrite:
        raise ValueError(f"{'resume' if resume else 'overwrite'}: expected a run_dir with it, found none")
    return None
