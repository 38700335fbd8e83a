"""Deletes what is old and was written by spark_dl: runs, checkpoints, the rows of runs, and datasets of a store.

All functions are called on the driver, and need no Spark session. Only files with the names that spark_dl writes are
deleted, links are not followed, and a run that goes on is left alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl.data.dataset.manifest import delete_dataset
from spark_dl.data.store import store
from spark_dl.rundir import checkpoint, checkpoint_files, environment, run_folder
from spark_dl.track import report
from spark_dl.track.run_log import PREPARING, read_run

_log = logging.getLogger("spark_dl")
_GOES_ON_S = 86400.0
"""How long after its last file a run may still go on whose end was not recorded, and whose driver is elsewhere."""
_DAY_S = 86400.0

Kind = Literal["run", "checkpoint", "rows", "dataset"]


@dataclass(frozen=True)
class Removed:
    """Something that `clean` deletes, or would delete."""

    kind: Kind
    url: str
    bytes: int
    """Size of the files that are deleted."""
    changed: float
    """Time of the last change, in seconds since 1970."""
    left: tuple[str, ...] = ()
    """Names of files and folders in it that spark_dl did not write, and that stay."""


def clean(
    url: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    older_than_days: float | None = None,
    only_rows: bool = False,
    delete: bool = False,
) -> list[Removed]:
    """Finds what is old in a folder, and deletes it. Called on the driver.

    In a folder of run folders, these are runs; in a run folder, its checkpoints; in a store (`shards.store`), datasets.
    A run folder's last and best checkpoint are always kept, and so is a run that goes on.

    Args:
        url: folder or URL.
        keep_last: how many of the newest are kept.
        older_than_days: only what was not changed for so long is deleted; of a store, what was not used for so long.
            With `keep_last`, both must hold.
        only_rows: of a run folder or a folder of them, deletes only the copies of the rows of runs that have ended
            (`shards`). Their models, metrics and reports stay, and a resume writes the rows again.
        delete: deletes what was found; without it, nothing is changed.

    Returns:
        What was deleted, or would be, oldest first.

    Raises:
        ValueError: Without a rule, for a rule that does not fit the folder, and for a folder with nothing to clean.

    Example:
        >>> spark_dl.clean("runs", keep_last=7, older_than_days=30)  # what would be deleted
        >>> spark_dl.clean("runs", keep_last=7, older_than_days=30, delete=True)
    """
    folder = storage.absolute(url)
    if keep_last is None and older_than_days is None and not only_rows:
        raise ValueError("keep_last: expected a number, older_than_days or only_rows, found none of them")
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last: expected a whole number of at least 1, found {keep_last}")
    if older_than_days is not None and not older_than_days >= 0:
        raise ValueError(f"older_than_days: expected a number of at least 0, found {older_than_days}")
    if store.is_store(folder):
        if older_than_days is None or keep_last is not None or only_rows:
            raise ValueError(f"{folder} is a store of datasets; expected older_than_days, without another rule")
        expired = store.expired(folder, ttl_days=older_than_days)
        found = [Removed("dataset", at, size, used) for at, size, used in expired]
        if delete:
            store.clean_store(folder, ttl_days=older_than_days)
            found = [each for each in found if not storage.exists(each.url)]  # others are of other users, or in use now
        return sorted(found, key=lambda each: each.changed)
    runs = [folder] if run_folder.is_run(folder) else _runs_in(folder)
    if not runs:
        raise ValueError(f"found no run folder at {folder} or in it, and no store; expected one of them")
    if runs == [folder] and not only_rows:
        found = _old_checkpoints(folder, keep_last, older_than_days)
    else:
        old = _old([_of_run(run) for run in runs], keep_last, older_than_days)
        ended = [run for run in old if not _goes_on(run)]
        found = [each for run in ended for each in _rows(run.url)] if only_rows else ended
    return [_delete(each) for each in found] if delete else found


def _runs_in(folder: str) -> list[str]:
    inner = [storage.join(folder, info.base_name) for info in storage.list_infos(folder)
             if info.type == FileType.Directory]  # fmt: skip
    return [each for each in inner if not storage.is_link(each) and run_folder.is_run(each)]


def _old(found: Sequence[Removed], keep_last: int | None, older_than_days: float | None) -> list[Removed]:
    """Returns what may be deleted, oldest first."""
    in_order = sorted(found, key=lambda each: each.changed)
    if keep_last is not None:
        in_order = in_order[:-keep_last]
    limit = None if older_than_days is None else time.time() - older_than_days * _DAY_S
    return [each for each in in_order if limit is None or each.changed < limit]


def _of_run(run_dir: str) -> Removed:
    files = list(run_folder.own_files(run_dir))
    others = [name for name in run_folder.other_names(run_dir) if name != report.FILE or not report.is_report(run_dir)]
    changed = max([0.0, *(at for _, _, at in files)])
    return Removed("run", run_dir, sum(size for _, size, _ in files), changed, tuple(others))


def _rows(run_dir: str) -> list[Removed]:
    """Returns the copies of rows of a run."""
    return [_of_files("rows", url) for url in run_folder.shard_sets(run_dir) if storage.list_names(url)]


def _of_files(kind: Kind, url: str) -> Removed:
    """Returns a folder with its files."""
    infos = storage.list_infos(url)
    changed = max([0.0, *((info.mtime_ns or 0) / 1e9 for info in infos)])
    return Removed(kind, url, sum(info.size or 0 for info in infos), changed)


def _old_checkpoints(run_dir: str, keep_last: int | None, older_than_days: float | None) -> list[Removed]:
    if _goes_on(_of_run(run_dir)):
        raise ValueError(f"{run_dir}: the run goes on, and deletes its old checkpoints itself (checkpoint.keep)")
    saved = checkpoint.list_checkpoints(run_dir)
    kept = {each.url for each in saved[-1:]} | {
        ranked[0].url for mode in ("min", "max") for metric in _metrics_of(saved)
        if (ranked := checkpoint.by_score(saved, mode, metric))
    }  # fmt: skip
    found = [_of_files("checkpoint", each.url) for each in saved]
    return [each for each in _old(found, keep_last, older_than_days) if each.url not in kept]


def _metrics_of(saved: Sequence[checkpoint.Saved]) -> set[str]:
    named = [each.manifest.get("score_of") for each in saved]
    return {str(of["metric"]) for of in named if isinstance(of, dict) and "metric" in of} | {"loss"}


def _goes_on(run: Removed) -> bool:
    """Whether a run goes on, as far as its files tell."""
    try:
        last = read_run(run.url).last
    except ValueError:  # of `tune`, or damaged
        return time.time() - run.changed < _GOES_ON_S
    if last.outcome not in (environment.RUNNING, PREPARING):
        return False
    return last.is_alive or time.time() - run.changed < _GOES_ON_S


def _delete(found: Removed) -> Removed:
    _log.info("deleting the %s %s", found.kind, found.url)
    if found.kind == "run":
        if report.is_report(found.url):
            storage.delete_file(storage.within(found.url, report.FILE))
        run_folder.remove(found.url)
    elif found.kind == "checkpoint":
        checkpoint_files.delete(found.url)
    else:
        delete_dataset(found.url)
    return found
