"""Asks the ranks of a diagnosis, within a limit, and names those that do not answer. Used on the driver."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

from spark_dl import storage
from spark_dl.checks.storage import delete_probe
from spark_dl.config import Launch
from spark_dl.doctor import on_rank
from spark_dl.doctor.limited import Calls, within
from spark_dl.launch.barrier import run_barrier
from spark_dl.spark_job import describe

FILES_S = 8.0
"""How long a rank waits for a disk or the run folder: longer than the retries for an object store."""
LIMIT_S, _LIMIT_PER_RANK_S = 40.0, 4.0
"""How long the ranks may take. Only faults take so long: a rank waits up to 3 s for each rank that it cannot reach."""
_MOST_RANKS = 8


def ask_ranks(spark: Any, launch: Launch, folder: str, *, reap: bool) -> list[dict[str, Any]]:
    """Returns what the ranks tell. Called on the driver.

    Raises ValueError and RuntimeError as `run_barrier` does, and RuntimeError if the ranks do not answer in time.

    Args:
        folder: that all ranks must be able to write to; empty to leave this out.
        reap: as of `diagnose`.
    """
    n, mark = launch.num_ranks, uuid.uuid4().hex
    prefix = f"probe-doctor-{mark}-"
    probes = [storage.join(folder, f"{prefix}{task}") for task in range(n)] if folder else []
    limit_s = LIMIT_S + _LIMIT_PER_RANK_S * n
    answers = Answers(n)
    try:
        reports = run_barrier(
            spark,
            functools.partial(
                on_rank.examine, probes, os.urandom(32), launch.start_timeout_s, FILES_S, launch.device, reap=reap
            ),
            launch=launch, description=describe("doctor", n, ""), on_event=answers.take, limit_s=limit_s,
        )  # fmt: skip
    except BaseException as error:
        with Calls() as files:  # ranks that were killed have not deleted theirs
            within(files.start(lambda: delete_probes(folder, prefix)), FILES_S, None)
        if isinstance(error, TimeoutError):
            raise RuntimeError(
                f"no answer within {limit_s:g} s from {answers.missing()}: a process that is stopped, a dead mount, or "
                "a host that is cut off; look at the processes and the mounts of these hosts, and at the logs of their "
                "executors"
            ) from error
        raise
    return [json.loads(each) for each in reports]


def delete_probes(folder: str, prefix: str) -> None:
    """Deletes the probes, whole or half written. A rank that is killed while it writes leaves the temporary file.

    Args:
        folder: that they are in; empty if there are none.
        prefix: of their names.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        for name in storage.list_names(folder) if folder else []:
            if name.startswith(prefix):
                delete_probe(storage.join(folder, name))


class Answers:
    """Knows how far each rank has come, by its events. Over Spark Connect there are none."""

    def __init__(self, num_ranks: int):
        self._hosts: dict[int, str] = {}
        self._parts = dict.fromkeys(range(num_ranks), -1)
        """How many parts each task has done; -1 before it has started."""

    def take(self, event: Mapping[str, Any]) -> None:
        if event["kind"] in ("started", on_rank.WAITS, "done"):
            task = event["task"]
            self._hosts[task] = event.get("host", self._hosts.get(task, ""))
            self._parts[task] += 1

    def missing(self) -> str:
        """Returns the names of the ranks for which the others wait."""
        last = max(self._parts.values())
        late = [task for task, done in self._parts.items() if done < last] or list(self._parts)
        told = [f"rank {task} on {self._hosts.get(task, 'an unknown host')}" for task in late[:_MOST_RANKS]]
        return ", ".join([*told, *([f"and {len(late) - len(told)} more"] if len(late) > len(told) else [])])
