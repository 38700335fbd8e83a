"""A peer of a benchmark: a process that is started once and runs a measurement for each request.

Peers with different environments take turns in one run, so that all see the same machine load. A peer in another
environment runs this file by its path. It needs only NumPy.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Epoch = Callable[[int], Iterable[Any]]
"""Maps an epoch number to the labels of each batch, in order."""
_EPOCH_LIMIT_S = 10.0
_ANSWER_S = 900.0
"""Longest time for one response. The first response includes the start and the writing of the dataset."""
_LEAVE_S = 10.0
_ROOT = Path(__file__).parents[2]
_TRIES = 5
"""Attempts for an epoch. On a busy machine, Petastorm's reader sometimes ends an epoch without a row."""


class Peer:
    """The requesting side. A peer that cannot run is left out, with the reason on standard error."""

    def __init__(self, name: str, command: Sequence[str], *, absent: str | None = None):
        """# absent: why the peer cannot be started, if known"""
        self._name = name
        self.reason: str | None = None
        """Reason for leaving the peer out, or None."""
        self._process: subprocess.Popen[str] | None = None
        if absent:
            self._leave_out(absent)
            return
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
            )
        except OSError as error:
            self._leave_out(f"{error}")

    def ask(self, what: str) -> dict[str, Any] | None:
        """Returns the response to a request line; None if the peer does not run."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            return None
        late = threading.Timer(_ANSWER_S, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:  # libraries may also print
                if line.startswith("{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        except OSError:
            pass
        finally:
            late.cancel()
        self._leave_out(f"ended with exit code {self._process.wait()}")
        self.close()
        return None

    def close(self) -> None:
        """Ends the process by closing its input, so that its library cleans up, or by SIGKILL."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
            self._process = None

    def _leave_out(self, reason: str) -> None:
        self.reason = reason
        print(f"{self._name} is left out: {reason}", file=sys.stderr)


def absent(python: str, target: str) -> str | None:
    """Returns why a peer's environment does not exist, with the `make` target; None if it exists."""
    return None if Path(python).is_file() else f"there is no {python}; `make {target}` makes it"


def dataset_command(python: str, name: str, folder: str, columns: Iterable[str]) -> list[str]:
    """Returns environment variables for peers in the loaders' environment: home is `folder`, no telemetry."""
    script = str(Path(__file__).with_name("dataset_peers.py"))
    variables = [f"HOME={folder}", "RAY_USAGE_STATS_ENABLED=0"]
    return ["env", *variables, python, "-W", "ignore", script, name, folder, *columns]


def petastorm_command(python: str, *arguments: str) -> list[str]:
    """Returns environment variables for Petastorm's environment, which has its own Spark."""
    of_another = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
    without = [word for name in of_another for word in ("-u", name)]
    script = str(Path(__file__).with_name("petastorm_peer.py"))
    return ["env", *without, python, "-W", "ignore", script, *arguments]


def serve(answer: Callable[[str], dict[str, Any]]) -> None:
    """Runs the peer's side: responds to each line of standard input, until its end."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


def answers(epoch: Epoch, *, limit_s: float = _EPOCH_LIMIT_S) -> Callable[[str], dict[str, Any]]:
    """Responds for a loader: to `epoch` with rows and seconds, to `labels PATH` with the order of an epoch in that
    file.

    If an epoch takes longer than `limit_s`, its first rows count. Use no limit for a loader that fills a buffer first.
    """
    numbers = itertools.count()

    def answer(line: str) -> dict[str, Any]:
        what, _, path = line.partition(" ")
        for _ in range(_TRIES):
            kept, rows, start = [], 0, time.perf_counter()
            for labels in epoch(next(numbers)):
                rows += len(labels)
                if what == "labels":
                    kept.append(np.asarray(labels))
                elif time.perf_counter() - start > limit_s:  # the rate of a slow peer is known by now
                    break
            seconds = time.perf_counter() - start
            if rows:
                break
        else:
            raise RuntimeError(f"{_TRIES} epochs without a row")
        if what == "labels":
            np.save(path, np.concatenate(kept))
        return {"rows": rows, "seconds": seconds}

    return answer
