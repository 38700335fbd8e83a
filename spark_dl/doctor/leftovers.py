"""Finds what dead runs have left on this host: processes that ranks have started, and temporary folders.

A process has the mark of its rank in its environment (`launch.rank.children`), a folder has its owner in its name
(`storage.owner`). Both are left if the owner is dead. Only those of the user of this process are looked at, and nothing
else is ended or deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spark_dl.doctor.limited import Calls, within
from spark_dl.launch.failures.errors import harmless
from spark_dl.launch.rank import marked
from spark_dl.launch.rank.task import local_folders
from spark_dl.storage.owner import owner_of, owner_of_folder, this_process

LIMIT_S = 4.0
_POLITE_S, _END_S = 1.0, 2.5
DONE = ("ended", "deleted")
_COMMAND_CHARS = 60
_OF_SPARK = re.compile(r"(application_|spark-|executor-|blockmgr-).+")
"""Folders of applications and executors, within each other, below a folder of `spark.local.dir`."""
_DEEPEST = 4


def place() -> list[Any] | None:
    """Returns what ranks of the same host have in common: processes and folders. None if owners are unknown here."""
    here = this_process()
    return [*here.place, os.stat("/proc/self/ns/mnt").st_ino] if here else None


def look(*, reap: bool, folders: Sequence[str] | None = None, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Returns what is left: `found`, with `name` and `done` of each, and `is_complete`.

    `done` is `found`; with `reap` it is `ended`, `deleted`, or what has prevented it.

    Args:
        folders: below which to look for folders; by default those of Spark and of temporary files.
        limit_s: after which to return, even if a disk does not answer. Then what was begun goes on in a thread.
    """
    leftovers: list[dict[str, str]] = []

    def run() -> bool:
        _look(leftovers, [*local_folders(), tempfile.gettempdir()] if folders is None else folders, reap)
        return True

    with Calls() as calls:
        is_complete = within(calls.start(run), limit_s, late=False)
    return {"is_complete": is_complete, "found": [dict(each) for each in list(leftovers)]}


def _look(leftovers: list[dict[str, str]], folders: Iterable[str], reap: bool) -> None:
    """Adds what is left to `found`."""
    done = f"not ended or deleted within {LIMIT_S:g} s" if reap else "found"
    processes = {pid: {"name": _name_of(pid), "done": done} for pid in _processes()}
    leftovers += processes.values()
    if reap and processes:  # before the folders, in which they can write
        left = marked.end(_processes, polite_s=_POLITE_S, limit_s=_END_S)
        for pid, each in processes.items():
            each["done"] = "still running after SIGKILL" if pid in left else DONE[0]
    left_folders = [{"name": path, "done": done} for path in sorted(_folders(folders))]
    leftovers += left_folders
    for each in left_folders if reap else ():
        each["done"] = _delete(each["name"])


def _processes() -> Iterator[int]:
    """Yields the processes whose ranks are dead."""
    own = marked.mark_of("self")  # as of all of this session, if a rank has started it

    def is_left(mark: str) -> bool:
        owner = owner_of(mark)
        return mark != own and owner is not None and owner.is_dead()

    for pid in marked.marked(is_left):
        if _is_mine(f"/proc/{pid}"):
            yield pid


def _name_of(pid: int) -> str:
    return harmless(f"process {pid} ({marked.command_of(pid)[:_COMMAND_CHARS]})")


def _is_mine(path: str) -> bool:
    """Whether this is a folder, and not a link, of the user of this process. The folder of a process has its user."""
    try:
        about = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()


def _folders(parents: Iterable[str]) -> Iterator[str]:
    """Yields the folders whose owners are dead, also those in the folders of Spark's other executors."""
    roots = set()
    for parent in parents:
        root = Path(os.path.realpath(parent))
        while _OF_SPARK.fullmatch(root.name):
            root = root.parent
        roots.add(str(root))
    for each in roots:
        yield from _folders_in(each, _DEEPEST)


def _folders_in(parent: str, depth: int) -> Iterator[str]:
    try:
        names = os.listdir(parent)
    except OSError:  # it is another user's, or has been deleted
        return
    for name in names:
        path = os.path.join(parent, name)
        owner = owner_of_folder(name)
        if owner is not None:
            if _is_mine(path) and owner.is_dead():
                yield path
        elif depth and _OF_SPARK.fullmatch(name) and _is_mine(path):
            yield from _folders_in(path, depth - 1)


def _delete(path: str) -> str:
    """Returns `deleted`, or why the folder is still there."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        if os.path.lexists(path):  # otherwise another process has deleted it meanwhile
            return harmless(f"not deleted: {error}")
    return DONE[1]
