"""A run's folder: what is written there, the mark by which it is known as ours, and what `overwrite` may delete.

    generations/000001                                  the mark: the first thing that a run writes (generations.py)
    config.yaml  metrics.jsonl
    checkpoints/step-00000120.gen-0001/...              checkpoint.py
    shards/{train,train-<name>,validation,evaluate-<id>}/...      data/dataset/folder.py

Files are deleted by these names alone, and nothing through a symbolic link. All functions are called on the driver.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl.data.dataset.folder import delete_dataset, is_dataset_file
from spark_dl.rundir import checkpoint, checkpoint_files, generations
from spark_dl.training import metrics

CONFIG = "config.yaml"
SHARDS = "shards"
_NAMES = (checkpoint.FOLDER, SHARDS, metrics.FILE, CONFIG)
_SHARD_SET = re.compile(r"train|train-.+|validation|evaluate-[0-9a-f]{8}")


def check_folder(run_dir: str, *, overwrite: bool) -> None:
    """Raises ValueError for a folder in use that no run of ours has marked, and with `overwrite` for links in it."""
    found = [name for name in _NAMES if _holds(storage.join(run_dir, name))]
    if found and not _is_marked(run_dir):
        raise ValueError(
            f"{run_dir} holds {', '.join(found)} without the mark of a run ({generations.FOLDER}/000001), so this "
            "version of spark_dl did not write them; nothing was changed: name another run_dir, or move them away"
        )
    if overwrite:
        _check_links(run_dir)


def delete_run(run_dir: str, keep: Collection[str]) -> None:
    """Deletes what earlier runs have left: checkpoints, metrics, and shards but for the datasets of these URLs.

    The generations stay, which fence ranks of earlier attempts. Raises ValueError for links, before anything is gone.
    """
    _check_links(run_dir)
    used = [storage.identity(url) for url in keep]
    for url in _checkpoints(run_dir):
        checkpoint_files.delete(url)
    for url in _shard_sets(run_dir):
        own = storage.identity(url)
        if not any(at == own or at.startswith(f"{own}/") for at in used):
            delete_dataset(url)
    storage.delete_file(storage.join(run_dir, metrics.FILE))


def _holds(url: str) -> bool:
    """Whether there is a file, a link, or a folder that is not empty."""
    found = storage.info(url).type
    return storage.is_link(url) or (found == FileType.File) or bool(storage.list_infos(url))


def _is_marked(run_dir: str) -> bool:
    folder = storage.join(run_dir, generations.FOLDER)
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
    folder = storage.join(run_dir, SHARDS)
    return [storage.join(folder, name) for name in storage.list_names(folder) if _SHARD_SET.fullmatch(name)]


def _check_links(run_dir: str) -> None:
    """Raises ValueError that names the first link in the way of `overwrite`. The run_dir itself may be one."""
    if not storage.is_local(run_dir):
        return
    top = [storage.join(run_dir, name) for name in (generations.FOLDER, *_NAMES)]
    folders = [*_checkpoints(run_dir), *_shard_sets(run_dir)]
    files = [(storage.join(folder, name), name) for folder in folders for name in storage.list_names(folder)]
    ours = [url for url, name in files if is_dataset_file(name) or checkpoint_files.is_own_file(name)]
    for url in (*top, *folders, *ours):
        if storage.is_link(url):
            raise ValueError(
                f"{url} is a symbolic link to {os.readlink(storage.absolute(url))}: overwrite deletes nothing through "
                "links, and nothing was changed; remove the link, or name another run_dir"
            )
