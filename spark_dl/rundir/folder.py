"""The run folder: its contents, the mark that a run wrote it, and the files that `overwrite` deletes.

    generations/000001                                  the mark: the first file of a run (generations.py)
    config.yaml  metrics.jsonl  mlflow.json  logs/rank-0.log ...
    environment/000001-driver.json ...                  environment.py
    tensorboard/events.out.tfevents....spark_dl  profile/rank-0.pt.trace.json.gz ...
    checkpoints/step-00000120.gen-0001/...              checkpoint.py
    shards/{train,train-<name>,validation,evaluate-<id>}/...      data/dataset/folder.py
    trials/0003/...  trials/0003-fold-1/...             of `spark_dl.tune`: a run folder for each training
    study.log                                           of `spark_dl.tune`: Optuna's study, if it is kept here

Only files with these names are deleted, and links are not followed. All functions are called on the driver.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection

from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl.data.dataset.folder import delete_dataset, is_dataset_file
from spark_dl.rundir import checkpoint, checkpoint_files, environment, generations, metrics

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
_NAMES = (checkpoint.FOLDER, SHARDS, metrics.FILE, CONFIG, LOGS, environment.FOLDER, TRIALS, STUDY)
_SMALL_FILES = {
    environment.FOLDER: environment.OWN_FILE,
    LOGS: re.compile(r"rank-\d+\.log"),
    TENSORBOARD: re.compile(rf"events\.out\.tfevents\..*{re.escape(EVENT_FILE_END)}"),
    PROFILE: re.compile(re.escape(TRACE).replace(r"\{\}", r"\d+")),
}
"""The names of the files in folders that are not deleted as a whole."""
_TRIAL = re.compile(r"\d{4,}(-fold-\d+)?")
_SHARD_SET = re.compile(r"train|train-.+|validation|evaluate-[0-9a-f]{8}")


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
    return [trial for trial in named if storage.is_link(trial) or _is_marked(trial)]


def check_folder(run_dir: str, *, overwrite: bool) -> None:
    """Raises ValueError for a folder with files but without the mark of a run, and for links in it.

    Without `overwrite`, a link among the files of a checkpoint is left to who reads it: that checkpoint is damaged.
    """
    _warn_of_others(run_dir)
    _check_links(run_dir, deep=overwrite)
    found = [name for name in _NAMES if _holds(storage.within(run_dir, name))]
    if found and not _is_marked(run_dir):
        raise ValueError(
            f"{run_dir} contains {', '.join(found)} without the mark of a run ({generations.FOLDER}/000001), so this "
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
    for url in _shard_sets(run_dir):
        own = storage.identity(url)
        if not any(at == own or at.startswith(f"{own}/") for at in used):
            delete_dataset(url)
    files = (storage.within(run_dir, name) for name in (metrics.FILE, MLFLOW, STUDY))
    for url in (*files, *_small_files(run_dir)):
        storage.delete_file(url)
    for trial in _trials(run_dir):
        delete_run(trial, keep)
        storage.delete_file(storage.join(trial, CONFIG))


def _holds(url: str) -> bool:
    """Whether this is a file, a link, or a folder that is not empty."""
    found = storage.info(url).type
    return storage.is_link(url) or (found == FileType.File) or bool(storage.list_infos(url))


def _is_marked(run_dir: str) -> bool:
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


def _shard_sets(run_dir: str) -> list[str]:
    folder = storage.within(run_dir, SHARDS)
    return [storage.join(folder, name) for name in storage.list_names(folder) if _SHARD_SET.fullmatch(name)]


def _small_files(run_dir: str) -> list[str]:
    """The output of ranks, event files and profiles."""
    found = []
    for folder, is_own in _SMALL_FILES.items():
        url = storage.within(run_dir, folder)
        found += [storage.join(url, name) for name in storage.list_names(url) if is_own.fullmatch(name)]
    return found


def _check_links(run_dir: str, *, deep: bool) -> None:
    """Raises ValueError for the first link below a run folder in the place of a file or folder of a run.

    The run folder itself can be a link. deep: whether to look into checkpoints, shards and trials, too, which is for
    those who delete them.
    """
    if not storage.is_local(run_dir):
        return
    for name in (generations.FOLDER, *_NAMES, MLFLOW, TENSORBOARD, PROFILE, PICTURE):
        storage.within(run_dir, name)
    folders = [*_checkpoints(run_dir), *_shard_sets(run_dir)]
    for url in (*folders, *_small_files(run_dir), *(trials := _trials(run_dir))):
        storage.within(storage.dirname(url), storage.name(url))
    for folder in folders if deep else ():
        for name in storage.list_names(folder):
            if is_dataset_file(name) or checkpoint_files.is_own_file(name):
                storage.within(folder, name)
    for trial in trials if deep else ():
        _check_links(trial, deep=True)
