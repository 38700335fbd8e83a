"""Starts an attempt of a run on the driver: its generation, the checkpoint to resume from, and the run folder.

All functions are called on the driver.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.rundir import checkpoint, generations, metrics
from spark_dl.rundir.folder import CONFIG, check_folder, delete_run, has_trials
from spark_dl.spec import Run

_log = logging.getLogger("spark_dl")
READ, WRITE = "cannot read the run_dir", "cannot write to the run_dir"
"""Beginnings of the messages about errors of a run folder's storage."""
_LISTED = 10
"""Checkpoints in an error."""


def begin_attempt(
    run_dir: str, config: Config, *, resume: bool | str, overwrite: bool
) -> tuple[int, checkpoint.Saved | None]:
    """Returns the generation of this attempt, and the checkpoint to resume from, or None.

    resume: whether to continue from the last checkpoint, or the URL of the checkpoint of this run to continue from.
    Raises ValueError if the run folder cannot be used, or a resume is not possible; RuntimeError for an error of the
    storage that time can mend.
    """
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    with explained(READ, run_dir):
        check_folder(run_dir, overwrite=overwrite)
        step = checkpoint.last_step(run_dir)
        has_others = not resume and not overwrite and has_trials(run_dir)
    if step is not None and not resume and not overwrite:
        raise ValueError(
            f"{run_dir} already has checkpoints (the last one of step {step}); set resume to continue from "
            "it, overwrite to delete them, or use another run_dir"
        )
    if has_others:
        raise ValueError(
            f"{run_dir} already has trials of spark_dl.tune; set resume to continue its study, overwrite to delete "
            "them, or use another run_dir"
        )
    with explained(READ, run_dir):
        found = _check_resume(run_dir, config, resume) if resume else None
    with explained(WRITE, run_dir):
        generation = checkpoint.start_generation(
            run_dir, after=checkpoint.newest_attempt(run_dir), run_id=found.manifest.get("run") if found else None
        )
    # Ranks of an older attempt could save until now. The new generation fences them.
    saved = found
    if resume is True:
        with explained(READ, run_dir):
            saved = checkpoint.last_valid(
                run_dir, strict=config.checkpoint.strict, trusted=found, key_file=config.checkpoint.signing_key_file
            )
    if saved is not None:
        checkpoint.check_same_settings(saved, config)
    elif resume is True:
        _warn_of_nothing(run_dir)
    return generation, saved


def _warn_of_nothing(run_dir: str) -> None:
    """Logs that there is nothing to resume; a warning if a run beside it has a name that is nearly the same."""
    parent, name = storage.dirname(run_dir), storage.name(run_dir)
    with contextlib.suppress(OSError):  # another folder than that of the run, which need not be readable
        for near in difflib.get_close_matches(name, [n for n in storage.list_names(parent) if n != name], n=3):
            if checkpoint.folders(storage.join(parent, near)):
                _log.warning(
                    "resume: %s has no checkpoint, so the run begins from the start; %s has some, if you mean that",
                    run_dir, storage.join(parent, near),
                )  # fmt: skip
                return
    _log.info("resume: %s has no checkpoint, so the run begins from the start", run_dir)


@contextlib.contextmanager
def explained(what: str, run_dir: str) -> Iterator[None]:
    """Adds the run folder to errors of its storage: RuntimeError if time can mend it, otherwise ValueError.

    what: READ or WRITE.
    """
    try:
        yield
    except OSError as error:
        advice = "; check the path, its permissions and its links, or use another run_dir"
        is_told = what != READ or not storage.is_local(run_dir)  # errors of remote storage say what to do
        raise storage.error_class(error)(f"{what} {run_dir}: {error}{'' if is_told else advice}") from error


def _to_resume(run_dir: str, config: Config, resume: bool | str) -> checkpoint.Saved | None:
    """Returns the checkpoint to resume from, or None."""
    strict, key_file = config.checkpoint.strict, config.checkpoint.signing_key_file
    if isinstance(resume, bool):
        return checkpoint.last_valid(run_dir, strict=strict, key_file=key_file)
    try:
        found = checkpoint.find(resume, key_file=key_file)
    except checkpoint.NoCheckpointError as error:
        raise ValueError(
            f"resume: {error}; expected the path or URL of a checkpoint, and {_listed(run_dir)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"resume: {error}") from error
    if checkpoint.run_dir_of(found) != run_dir:
        raise ValueError(
            f"resume: expected a checkpoint of the run_dir {run_dir}, found {found.url}; to start another run with "
            "its weights, set train.init_from"
        )
    return found


def _listed(run_dir: str) -> str:
    """Returns the checkpoints of a run in words, the newest first."""
    urls = [saved.url for saved in reversed(checkpoint.list_checkpoints(run_dir))]
    more = f" and {len(urls) - _LISTED} more" if len(urls) > _LISTED else ""
    return f"{run_dir} has {', '.join(urls[:_LISTED]) or 'none'}{more}"


def _check_resume(run_dir: str, config: Config, resume: bool | str) -> checkpoint.Saved | None:
    """Returns the checkpoint to resume from, or None. Raises ValueError for a run that cannot be resumed."""
    strict = config.checkpoint.strict
    found = _to_resume(run_dir, config, resume)
    damage = generations.damage(run_dir, at_least=checkpoint.newest_attempt(run_dir))
    if damage and strict:
        raise ValueError(f"checkpoint.strict: {damage}; resume once with checkpoint.strict set to false")
    if damage:
        used = found.url if found else "the start"
        _log.warning("%s; using a generation above all saved ones, and resuming from %s", damage, used)
    if found is not None:
        checkpoint.check_same_settings(found, config)
        metrics.read_metrics(run_dir)
    return found


def take_over(run: Run, *, overwrite: bool, keep: Sequence[str], restart: Mapping[str, Any] | None = None) -> None:
    """Prepares the run folder for the run, which starts now.

    keep: URLs of datasets that must not be deleted. restart: the line of `metrics.jsonl` about the attempt that has
    failed before this one.
    Raises as `begin_attempt` does, and RuntimeError if a newer attempt of the run has started.
    """
    with explained(WRITE, run.run_dir):
        generations.check_newest(run.run_dir, run.generation)
        if overwrite:
            delete_run(run.run_dir, keep)
        if restart is not None:
            metrics.add_restart(run.run_dir, restart, from_start=run.checkpoint is None)
        elif run.checkpoint is None:  # of an attempt without a checkpoint
            storage.delete_file(storage.within(run.run_dir, metrics.FILE))
        content = yaml.safe_dump(run.config.to_dict(), sort_keys=False)
        storage.write_bytes(storage.within(run.run_dir, CONFIG), content.encode())
