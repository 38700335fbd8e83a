"""A peer of a benchmark: a process that is started once and measures itself whenever it is asked to.

So peers with environments of their own take turns in one run, and none has a quieter machine than another. A peer in
another environment runs this file by its path: it needs nothing but NumPy.
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
"""From the number of an epoch to the labels of each of its batches, in the order of use."""
_EPOCH_LIMIT_S = 10.0
_ANSWER_S = 900.0
"""How long a peer may take for one answer: its start and the writing of its dataset are in the first."""
_LEAVE_S = 10.0
_TRIES = 5
"""On a busy machine Petastorm's reader now and then ends an epoch at once, without a row; that is no rate."""


class Peer:
    """The asking side. A peer that cannot run here is left out, and a line on standard error says why."""

    def __init__(self, name: str, command: Sequence[str], *, absent: str | None = None):
        """`absent` is why it cannot even be started, if that is known."""
        self._name = name
        self.reason: str | None = None
        """Why it is left out, if it is."""
        self._process: subprocess.Popen[str] | None = None
        if absent:
            self._leave_out(absent)
            return
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            self._leave_out(f"{error}")

    def ask(self, what: str) -> dict[str, Any] | None:
        """Its answer to a line of text; None if it does not run here."""
        if self._process is None or self._process.stdin is None or self._process.stdout is None:
            return None
        late = threading.Timer(_ANSWER_S, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:  # a peer's library may print, too
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
        """Ends the process: by the end of its input, so that its library tidies up, or else by SIGKILL."""
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
    """Why a peer's environment is not there, naming the target of `make` that makes it; None if it is."""
    return None if Path(python).is_file() else f"there is no {python}; `make {target}` makes it"


def dataset_command(python: str, name: str, folder: str, columns: Iterable[str]) -> list[str]:
    """That of a loader with the other loaders' environment. Its home is `folder`, and it reports to nobody."""
    script = str(Path(__file__).with_name("dataset_peers.py"))
    variables = [f"HOME={folder}", "RAY_USAGE_STATS_ENABLED=0"]
    return ["env", *variables, python, "-W", "ignore", script, name, folder, *columns]


def petastorm_command(python: str, *arguments: str) -> list[str]:
    """That of a peer in Petastorm's environment, which has a Spark of its own, whatever these variables say."""
    of_another = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED")
    without = [word for name in of_another for word in ("-u", name)]
    script = str(Path(__file__).with_name("petastorm_peer.py"))
    return ["env", *without, python, "-W", "ignore", script, *arguments]


def serve(answer: Callable[[str], dict[str, Any]]) -> None:
    """The peer's side: answers each line of standard input, until it ends."""
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


def answers(epoch: Epoch, *, limit_s: float = _EPOCH_LIMIT_S) -> Callable[[str], dict[str, Any]]:
    """A loader's answers: to `epoch`, its rows and seconds; to `labels PATH`, the order of an epoch, there.

    Of an epoch that takes longer than `limit_s` the first rows count. That is no rate of a loader that fills a buffer
    first: it has none.
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
                elif time.perf_counter() - start > limit_s:  # the rate of a slow peer is clear by then
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
