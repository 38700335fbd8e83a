"""What a run measures: a JSON line per logged step and per epoch in `<run_dir>/metrics.jsonl`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_dl import storage

_log = logging.getLogger("spark_dl")
FILE = "metrics.jsonl"


class MetricsLog:
    """The lines of a run, written by one of its ranks and reported to the driver as they come.

    On a local disk each line is there at once; elsewhere the file is written at the end of every epoch.
    """

    def __init__(self, run_dir: str, *, writes: bool, first_step: int, report: Callable[[Mapping[str, Any]], None]):
        self._url = storage.join(run_dir, FILE)
        self._report, self._writes = report, writes
        self._lines: list[str] = []
        self._is_local = storage.is_local(run_dir)
        if self._writes:
            before = read_metrics(run_dir) if first_step else []
            self._lines = [json.dumps(line) for line in before if line["step"] <= first_step]
            self.flush()

    def write(self, kind: str, **values: Any) -> None:
        """Adds a line; on the ranks that do not write nothing happens."""
        if not self._writes:
            return
        line = {"kind": kind, **values, "time": time.time()}
        self._lines.append(json.dumps(line))
        if self._is_local:
            with open(storage.absolute(self._url), "a") as file:
                file.write(self._lines[-1] + "\n")
        self._report({**line, "kind": f"metrics {kind}"})

    def flush(self) -> None:
        """Writes the whole file anew, which drops the lines of steps that a resumed run does again."""
        if self._writes:
            storage.write_bytes(self._url, "".join(line + "\n" for line in self._lines).encode())


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The lines of a run so far, as dicts; a line that is being written is left out.

    Raises ValueError for a file that is a symbolic link, or that holds anything else.
    """
    url = storage.join(run_dir, FILE)
    if storage.is_link(url):
        raise ValueError(f"{url} is a symbolic link, expected the run's own file; remove the link")
    if not storage.exists(url):
        return []
    lines = storage.read_bytes(url).splitlines(keepends=True)
    return [_parse(url, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


def _parse(url: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict) and {"kind", "step", "time"} <= found.keys():
        return found
    raise ValueError(
        f"{url} is damaged: found {line[:80]!r} in line {number}, expected a JSON object with kind, step and time; "
        "move the file away to go on without the metrics so far"
    )


def follow(run_dir: str) -> Callable[[], list[dict[str, Any]]]:
    """A function that returns the lines that have come since it was last called, as events.

    For drivers without a listener (Spark Connect), which see the run's folder only.
    """
    seen = 0.0

    def poll() -> list[dict[str, Any]]:
        nonlocal seen
        try:
            new = [line for line in read_metrics(run_dir) if line["time"] > seen]
        except OSError as error:  # the ranks may reach it all the same, and train on
            _log.warning("cannot read the metrics of %s, which come later: %s", run_dir, error)
            return []
        seen = max([seen, *(line["time"] for line in new)])
        return [{**line, "kind": f"metrics {line['kind']}"} for line in new]

    poll()  # what an earlier attempt wrote is not news
    return poll


class StepTimer:
    """Seconds of the steps since the last reset, and how many of them went by waiting for data."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self.data_s = 0.0
        self.rows = 0

    def timed(self, batches: Any) -> Any:
        """Yields from an iterator and counts the time spent waiting for it."""
        iterator = iter(batches)
        try:
            while True:
                start = time.perf_counter()
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                self.data_s += time.perf_counter() - start
                yield item
        finally:
            iterator.close()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start
