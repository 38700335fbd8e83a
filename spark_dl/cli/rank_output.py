"""The output of the ranks on the driver: each line with the rank that wrote it."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spark_dl import storage
from spark_dl.config import Launch
from spark_dl.rundir.folder import LOGS

Event = Mapping[str, Any]


def lines_of(event: Event) -> list[str]:
    """Returns the lines of an `output` event, each with the prefix `[rank 0]`, or `[task 0]` before there are ranks."""
    who = f"rank {event['rank']}" if "rank" in event else f"task {event['task']}"
    return [f"[{who}] {line}" for line in event["lines"]]


def show_output(event: Event, write: Callable[[str, Any], None] | None = None) -> None:
    """Shows an `output` event, on the stream of the driver that the rank has written to. Ignores other events.

    write: called with each line and the stream; writes and ends the line. The default is `print`.
    """
    if event["kind"] != "output":
        return
    stream = sys.stdout if event["stream"] == "stdout" else sys.stderr
    for line in lines_of(event):
        if write is None:
            print(line, file=stream, flush=True)
        else:
            write(line, stream)


def follow_logs(launch: Launch) -> Callable[[], list[dict[str, Any]]]:
    """Returns a function that returns what was added to the files of `launch.log_dir` since its last call, as events.

    For drivers without a listener (Spark Connect). Returns no events for ranks that `launch.output` leaves out.
    """
    read = {path: path.stat().st_size for path in _logs(launch)}

    def poll() -> list[dict[str, Any]]:
        events = []
        for path in _logs(launch):
            with open(path, "rb") as file:
                file.seek(read.get(path, 0))
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            read[path] = read.get(path, 0) + len(whole)
            rank = int(path.stem.removeprefix("rank-"))
            for line in whole.decode(errors="replace").split("\n")[:-1]:
                stream, _, text = line.partition(": ")
                events.append({"kind": "output", "rank": rank, "stream": stream, "lines": [text]})
        return events

    return poll


def _logs(launch: Launch) -> list[Path]:
    if not launch.log_dir or launch.output == "none":
        return []
    names = r"rank-\d+" if launch.output == "all" else "rank-0"
    return sorted(path for path in Path(launch.log_dir).glob("rank-*.log") if re.fullmatch(names, path.stem))


def with_log_dir(launch: Launch, run_dir: str) -> Launch:
    """Returns settings with a folder for the output of the ranks, which cannot reach the driver."""
    if launch.log_dir or launch.output == "none" or not run_dir or not storage.is_local(run_dir):
        return launch
    return dataclasses.replace(launch, log_dir=storage.resolve(storage.within(run_dir, LOGS))[1])
