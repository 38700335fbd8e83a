"""Metrics of a run: one JSON line per logged step and per epoch in `<run_dir>/metrics.jsonl`.

Rank 0 writes the file while the ranks run. Between two attempts the driver adds a line about the restart.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_dl import storage
from spark_dl.rundir.generations import check_newest

_log = logging.getLogger("spark_dl")
FILE = "metrics.jsonl"
_RESTART = "restart"
"""Kind of the lines of the driver. They stay when steps are repeated; their `step` is None if it is not known."""


class MetricsLog:
    """Writes the lines of a run on one rank, and reports them to the driver.

    On a local disk each line is written at once; on other storage the file is written at the end of every epoch.
    """

    def __init__(
        self,
        run_dir: str,
        *,
        writes: bool,
        first_step: int,
        report: Callable[[Mapping[str, Any]], None],
        generation: int,
        goes_on: bool = False,
    ):
        """goes_on: whether lines that cannot be written are kept, and written when this is possible again."""
        self._goes_on, self._is_behind = goes_on, False
        self._url, self._run_dir, self._generation = storage.within(run_dir, FILE), run_dir, generation
        self.writes, self._report = writes, report
        self._lines: list[str] = []
        self._is_local = storage.is_local(run_dir)
        if self.writes:
            before = read_metrics(run_dir) if first_step else read_valid_lines(run_dir)[0] if generation else []
            self._lines = [json.dumps(line) for line in before if _is_kept(line, first_step)]
            self.flush()

    def write(self, kind: str, **values: Any) -> None:
        """Adds a line. Does nothing on ranks that do not write.

        Raises RuntimeError if a newer attempt of the run has started, which writes the file now.
        """
        if not self.writes:
            return
        line = {"kind": kind, **values, "time": time.time()}
        self._lines.append(json.dumps(line))
        if self._is_local:
            self._change_file(lambda: storage.append(self._url, (self._lines[-1] + "\n").encode()))
        self._report(line)

    def go_back(self, step: int) -> None:
        """Forgets the lines of later steps, which are repeated."""
        if self.writes:
            self._lines = [line for line in self._lines if _is_kept(json.loads(line), step)]
            self.flush()

    def flush(self) -> None:
        """Writes the whole file, without the lines of steps that a resumed run repeats."""
        if self.writes:
            self._change_file(self._write_all)

    def _write_all(self) -> None:
        storage.write_bytes(self._url, "".join(line + "\n" for line in self._lines).encode())

    def _change_file(self, change: Callable[[], None]) -> None:
        """Changes the file, which after an error is written as a whole.

        Raises OSError unless the run goes on, and RuntimeError if a newer attempt of the run has started.
        """
        try:
            check_newest(self._run_dir, self._generation)
            self._write_all() if self._is_behind else change()
        except OSError as error:
            if not self._goes_on:
                raise
            if not self._is_behind:
                _log.warning("cannot write to %s: %s; its lines are written when this is possible", self._url, error)
            self._is_behind = True
        else:
            self._is_behind = False


def _is_kept(line: Mapping[str, Any], step: int) -> bool:
    """Whether a line stays when the run goes on from a step; from 0 only those of restarts do."""
    return bool(line["kind"] == _RESTART or 0 < line["step"] <= step)


def add_restart(run_dir: str, line: Mapping[str, Any], *, from_start: bool) -> None:
    """Adds the line of a restart. Called on the driver, when a new generation fences the ranks of older attempts.

    Args:
        from_start: whether the run has no checkpoint, so that of the other lines only those of restarts are kept.

    Raises:
        OSError: If the file cannot be written.
    """
    if from_start:
        kept = [old for old in read_valid_lines(run_dir)[0] if old["kind"] == _RESTART]
        lines = "".join(json.dumps(each) + "\n" for each in (*kept, line))
        storage.write_bytes(storage.within(run_dir, FILE), lines.encode())
    else:
        add_line(run_dir, line)


def add_line(run_dir: str, line: Mapping[str, Any]) -> None:
    """Adds a line of the driver, while no rank writes the file. Raises OSError if it cannot be written."""
    url, before = storage.within(run_dir, FILE), b""
    if storage.exists(url):
        before = storage.read_bytes(url)
        before = before[: before.rfind(b"\n") + 1]  # a rank can be killed in the middle of a line
    storage.write_bytes(url, before + json.dumps(line).encode() + b"\n")


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """Returns the complete lines of a run as dicts.

    Raises ValueError if the file is a symbolic link or is damaged.
    """
    url = storage.within(run_dir, FILE)
    lines, damaged = read_valid_lines(run_dir)
    if damaged:
        number, line = damaged[0]
        raise ValueError(
            f"{url} is damaged: found {line[:80]!r} in line {number}, expected a JSON object with kind, step and time; "
            "move the file to continue without earlier metrics"
        )
    return lines


def read_valid_lines(run_dir: str) -> tuple[list[dict[str, Any]], list[tuple[int, bytes]]]:
    """Returns the complete lines of a run as dicts, and the damaged lines with their numbers."""
    url = storage.within(run_dir, FILE)
    if not storage.exists(url):
        return [], []
    valid, damaged = [], []
    for number, line in enumerate(storage.read_bytes(url).splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):  # it is being written
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and {"kind", "step", "time"} <= value.keys():
            valid.append(value)
        else:
            damaged.append((number, line))
    return valid, damaged


def follow(run_dir: str) -> Callable[[], list[dict[str, Any]]]:
    """Returns a function that returns the lines since its last call, as events.

    For drivers without a listener (Spark Connect), which can only read the run folder.
    """
    seen = 0.0

    def poll() -> list[dict[str, Any]]:
        nonlocal seen
        try:
            # Lines of restarts have the time of another host, and the driver knows them.
            new = [line for line in read_metrics(run_dir) if line["time"] > seen and line["kind"] != _RESTART]
        except OSError as error:  # ranks may have access to it and continue
            _log.warning("cannot read the metrics of %s; trying again: %s", run_dir, error)
            return []
        seen = max([seen, *(line["time"] for line in new)])
        return new

    poll()  # skips the lines of earlier attempts
    return poll
