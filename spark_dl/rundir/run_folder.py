"""The run folder: its contents, the mark that a run wrote it, and the files that `overwrite` deletes.

    generations/000001                                  the mark: the first file of a run (generations.py)
    config.yaml  metrics.jsonl  mlflow.json  logs/rank-0.log ...
    environment/000001-driver.json ...                  environment.py
    tensorboard/events.out.tfevents....spark_dl  profile/rank-0.pt.trace.json.gz ...
    checkpoints/step-00000120.gen-0001/...              checkpoint.py
    shards/{train,train-<name>,validation,evaluate-<id>}/...      data/dataset/manifest.py
    trials/0003/...  trials/0003-fold-1/...             of `spark_dl.tune`: a run folder for each training
    study.log                                           of `spark_dl.tune`: Optuna's study, if it is kept here

Only files with these names are deleted, and links are not followed. All functions are called on the driver.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.data.dataset.manifest import delete_dataset, is_dataset_file
from spark_dl.rundir import checkpoint, checkpoint_files, environment, generations, metrics
from spark_dl.spec import Run

_log = logging.getLogger("spark_dl")

CONFIG = "config.yaml"
SHARDS = "shards"
LOGS = "logs"
"""Output of the ranks (`launch.log_dir`), where they cannot send it to the driver."""
TRIALS = "trials"
STUDY = "study.log"
TENSORBOARD = "tensorboard"
EVENT_FILE_END = ".spark_dl"
"""The end of the names of event files, which tells them from those of other programs."""
PICTURE = "loss.png"
MLFLOW = "mlflow.json"
"""The MLflow run of this run."""
PROFILE = "profile"
TRACE = "rank-{}.pt.trace.json.gz"
SUMMARY_END = ".summary.json"
PROFILE_SUMMARY = f"rank-{{}}{SUMMARY_END}"
_NAMES = (checkpoint.FOLDER, SHARDS, metrics.FILE, CONFIG, LOGS, environment.FOLDER, TRIALS, STUDY)
_RUN_FILES = (CONFIG, metrics.FILE, MLFLOW, STUDY, PICTURE)
"""Files of a run that are not in a folder of it."""
_SMALL_FILES = {
    environment.FOLDER: environment.OWN_FILE,
    LOGS: re.compile(r"rank-\d+\.log"),
    TENSORBOARD: re.compile(rf"events\.out\.tfevents\..*{re.escape(EVENT_FILE_END)}"),
    PROFILE: re.compile(r"rank-\d+\.(pt\.trace\.json\.gz|summary\.json)"),
}
"""The names of the files in folders that are not deleted as a whole."""
_TRIAL = re.compile(r"\d{4,}(-fold-\d+)?")
_SHARD_SET = re.compile(r"train|train-.+|validation|evaluate-[0-9a-f]{8}")

READ, WRITE = "cannot read the run_dir", "cannot write to the run_dir"
"""Beginnings of the messages about errors of a run folder's storage."""
_LISTED = 10
"""Checkpoints in an error."""


def trial_dir(run_dir: str, number: int, fold: int | None = None) -> str:
    """Returns the run folder of a trial, or of the training of one of its folds."""
    return storage.within(run_dir, TRIALS, f"{number:04d}" + ("" if fold is None else f"-fold-{fold}"))


def has_trials(run_dir: str) -> bool:
    """Whether a run has trials."""
    return any(storage.exists(storage.join(trial, CONFIG)) for trial in _trials(run_dir))


def _trials(run_dir: str) -> list[str]:
    """Returns the run folders of the trials of a run."""
    folder = storage.within(run_dir, TRIALS)
    named = [storage.join(folder, name) for name in storage.list_names(folder) if _TRIAL.fullmatch(name)]
    return [trial for trial in named if storage.is_link(trial) or is_run(trial)]


def check_folder(run_dir: str, *, overwrite: bool) -> None:
    """Raises ValueError for a folder with files but without the mark of a run, and for links in it.

    Without `overwrite`, a link among the files of a checkpoint is left to who reads it: that checkpoint is damaged.
    """
    _warn_of_others(run_dir)
    _check_links(run_dir, deep=overwrite)
    names = [name for name in _NAMES if _holds(storage.within(run_dir, name))]
    if names and not is_run(run_dir):
        raise ValueError(
            f"{run_dir} contains {', '.join(names)} without the mark of a run ({generations.FOLDER}/000001), so this "
            "version of spark_dl did not write them; nothing was changed: use another run_dir, or move them"
        )


def _warn_of_others(run_dir: str) -> None:
    if storage.is_local(run_dir) and storage.exists(run_dir):
        mode = os.stat(storage.absolute(run_dir)).st_mode
        if mode & stat.S_IWOTH:
            _log.warning(
                "every user of this host can write to the run_dir %s (mode %s), also a checkpoint that the run would "
                "be resumed from; remove that permission (chmod o-w)", run_dir, stat.filemode(mode),
            )  # fmt: skip


def delete_checkpoints(run_dir: str) -> None:
    """Deletes the checkpoints of earlier runs. Raises ValueError for links, before anything is deleted."""
    _check_links(run_dir, deep=True)
    for url in _checkpoints(run_dir):
        checkpoint_files.delete(url)


def delete_run(run_dir: str, keep: Collection[str]) -> None:
    """Deletes the checkpoints, metrics, shards and trials of earlier runs, except the datasets at the URLs `keep`.

    Generations are not deleted, as they fence ranks of earlier attempts. Raises ValueError for links, before anything
    is deleted.
    """
    delete_checkpoints(run_dir)
    used = [storage.identity(url) for url in keep]
    for url in shard_sets(run_dir):
        folder = storage.identity(url)
        if not any(at == folder or at.startswith(f"{folder}/") for at in used):
            delete_dataset(url)
    files = (storage.within(run_dir, name) for name in (metrics.FILE, MLFLOW, STUDY))
    for url in (*files, *_small_files(run_dir)):
        storage.delete_file(url)
    for trial in _trials(run_dir):
        delete_run(trial, keep)
        storage.delete_file(storage.join(trial, CONFIG))


def own_files(run_dir: str) -> Iterator[tuple[str, int, float]]:
    """Yields the URL, the size in bytes and the time of the last change of each file of a run."""
    folders: list[tuple[str, Callable[[str], Any]]] = [
        *((url, checkpoint_files.is_own_file) for url in _checkpoints(run_dir)),
        *((url, is_dataset_file) for url in shard_sets(run_dir)),
        *((storage.within(run_dir, name), is_own.fullmatch) for name, is_own in _SMALL_FILES.items()),
        (storage.within(run_dir, generations.FOLDER), str.isdecimal),
        (run_dir, _RUN_FILES.__contains__),
    ]
    for folder, is_ours in folders:
        for info in storage.list_infos(folder):
            if info.type == FileType.File and is_ours(info.base_name):
                yield storage.join(folder, info.base_name), info.size or 0, (info.mtime_ns or 0) / 1e9
    for trial in _trials(run_dir):
        yield from own_files(trial)


def other_names(run_dir: str) -> list[str]:
    """Returns the names in a run folder that are not among those of a run, such as `predictions`."""
    known = {*_NAMES, *_SMALL_FILES, *_RUN_FILES, generations.FOLDER}
    return [name for name in storage.list_names(run_dir) if name not in known]


def remove(run_dir: str) -> None:
    """Deletes a run: all that `delete_run` deletes, what records its attempts, and its pictures. The folder goes if
    nothing else is in it. Raises ValueError for links, before anything is deleted.
    """
    for trial in _trials(run_dir):
        remove(trial)
    delete_run(run_dir, keep=())
    attempts = storage.within(run_dir, generations.FOLDER)
    names = [name for name in storage.list_names(attempts) if name.isdecimal()]
    for url in [*(storage.within(run_dir, name) for name in _RUN_FILES), *(storage.join(attempts, n) for n in names)]:
        storage.delete_file(url)
    folders = (checkpoint.FOLDER, SHARDS, TRIALS, generations.FOLDER, *_SMALL_FILES)
    for folder in (*(storage.within(run_dir, name) for name in folders), run_dir):
        if storage.is_local(folder) and storage.exists(folder) and not storage.list_names(folder):
            with contextlib.suppress(OSError):  # another process has written to it
                os.rmdir(storage.absolute(folder))


def _holds(url: str) -> bool:
    """Whether this is a file, a link, or a folder that is not empty."""
    kind = storage.info(url).type
    return storage.is_link(url) or (kind == FileType.File) or bool(storage.list_infos(url))


def is_run(run_dir: str) -> bool:
    """Whether a folder has the mark of a run."""
    folder = storage.within(run_dir, generations.FOLDER)
    for name in storage.list_names(folder):
        try:
            generations.read_record(storage.join(folder, name))
            return True
        except ValueError:
            continue
    return bool(checkpoint.list_checkpoints(run_dir))


def _checkpoints(run_dir: str) -> list[str]:
    folder = checkpoint.folder(run_dir)
    return [storage.join(folder, name) for name in storage.list_names(folder) if checkpoint_files.parse_name(name)]


def shard_sets(run_dir: str) -> list[str]:
    """Returns the datasets in a run folder: the copies of its rows."""
    folder = storage.within(run_dir, SHARDS)
    return [storage.join(folder, name) for name in storage.list_names(folder) if _SHARD_SET.fullmatch(name)]


def _small_files(run_dir: str) -> list[str]:
    """The output of ranks, event files and profiles."""
    files = []
    for folder, is_own in _SMALL_FILES.items():
        url = storage.within(run_dir, folder)
        files += [storage.join(url, name) for name in storage.list_names(url) if is_own.fullmatch(name)]
    return files


def _check_links(run_dir: str, *, deep: bool) -> None:
    """Raises ValueError for the first link below a run folder in the place of a file or folder of a run.

    The run folder itself can be a link. deep: whether to look into checkpoints, shards and trials, too, which is for
    those who delete them.
    """
    if not storage.is_local(run_dir):
        return
    for name in (generations.FOLDER, *_NAMES, MLFLOW, TENSORBOARD, PROFILE, PICTURE):
        storage.within(run_dir, name)
    folders = [*_checkpoints(run_dir), *shard_sets(run_dir)]
    for url in (*folders, *_small_files(run_dir), *(trials := _trials(run_dir))):
        storage.within(storage.dirname(url), storage.name(url))
    for folder in folders if deep else ():
        for name in storage.list_names(folder):
            if is_dataset_file(name) or checkpoint_files.is_own_file(name):
                storage.within(folder, name)
    for trial in trials if deep else ():
        _check_links(trial, deep=True)


def begin_attempt(
    run_dir: str, config: Config, *, resume: bool | str, overwrite: bool
) -> tuple[int, checkpoint.Saved | None]:
    """Returns the generation of this attempt, and the checkpoint to resume from, or None.

    Args:
        resume: whether to continue from the last checkpoint, or the URL of the checkpoint of this run to continue from.

    Raises:
        ValueError: If the run folder cannot be used, or a resume is not possible.
        RuntimeError: For an error of the storage that time can mend.
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
        resumed = _check_resume(run_dir, config, resume) if resume else None
    with explained(WRITE, run_dir):
        generation = checkpoint.start_generation(
            run_dir, after=checkpoint.newest_attempt(run_dir), run_id=resumed.manifest.get("run") if resumed else None
        )
    # Ranks of an older attempt could save until now. The new generation fences them.
    saved = resumed
    if resume is True:
        with explained(READ, run_dir):
            saved = checkpoint.last_valid(
                run_dir, strict=config.checkpoint.strict, trusted=resumed, key_file=config.checkpoint.signing_key_file
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

    Args:
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
        saved = checkpoint.find(resume, key_file=key_file)
    except checkpoint.NoCheckpointError as error:
        raise ValueError(
            f"resume: {error}; expected the path or URL of a checkpoint, and {_listed(run_dir)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"resume: {error}") from error
    if checkpoint.run_dir_of(saved) != run_dir:
        raise ValueError(
            f"resume: expected a checkpoint of the run_dir {run_dir}, found {saved.url}; to start another run with "
            "its weights, set train.init_from"
        )
    return saved


def _listed(run_dir: str) -> str:
    """Returns the checkpoints of a run in words, the newest first."""
    urls = [saved.url for saved in reversed(checkpoint.list_checkpoints(run_dir))]
    more = f" and {len(urls) - _LISTED} more" if len(urls) > _LISTED else ""
    return f"{run_dir} has {', '.join(urls[:_LISTED]) or 'none'}{more}"


def _check_resume(run_dir: str, config: Config, resume: bool | str) -> checkpoint.Saved | None:
    """Returns the checkpoint to resume from, or None. Raises ValueError for a run that cannot be resumed."""
    strict = config.checkpoint.strict
    saved = _to_resume(run_dir, config, resume)
    damage = generations.damage(run_dir, at_least=checkpoint.newest_attempt(run_dir))
    if damage and strict:
        raise ValueError(f"checkpoint.strict: {damage}; resume once with checkpoint.strict set to false")
    if damage:
        used = saved.url if saved else "the start"
        _log.warning("%s; using a generation above all saved ones, and resuming from %s", damage, used)
    if saved is not None:
        checkpoint.check_same_settings(saved, config)
        metrics.read_metrics(run_dir)
    return saved


def take_over(run: Run, *, overwrite: bool, keep: Sequence[str], restart: Mapping[str, Any] | None = None) -> None:
    """Prepares the run folder for the run, which starts now.

    Raises as `begin_attempt` does, and RuntimeError if a newer attempt of the run has started.

    Args:
        keep: URLs of datasets that must not be deleted.
        restart: the line of `metrics.jsonl` about the attempt that has failed before this one.
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
