"""What a run shows on the driver: its progress, its events, the output of its ranks, and tables.

Progress is a bar in a terminal, a bar and the loss in a notebook, and a line every few seconds elsewhere. Each line
of output has the rank that wrote it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm import tqdm

from spark_dl import storage
from spark_dl.config import Launch
from spark_dl.rundir.run_folder import LOGS
from spark_dl.track.events import name_of
from spark_dl.track.notebook import LiveCurve, build_bar, is_notebook
from spark_dl.track.time_split import SlowRanks

if TYPE_CHECKING:
    from spark_dl.launch.failures.errors import RankError

Event = Mapping[str, Any]

OnEvent: TypeAlias = Callable[[Mapping[str, Any]], None]
EVENTS = (
    "joined", "restart", "step", "validation", "epoch", "checkpoint", "checkpoint_failed", "skip", "rollback",
    "straggler",
)  # fmt: skip
"""Values of `kind` in the events for `on_event`, which are dicts. `joined`: a rank has joined, with `rank`, `host`,
`executor`, `pid` and `device`; not over Spark Connect. `restart`: the ranks are started again, with `restarts`, the
number of the `attempt` that has failed, and the `reason` (in one line), `error`, `rank` and `step` of the failure.
`straggler`: the other ranks wait for `rank`, with its times and those of the others. All but `joined` and
`straggler` are lines of `metrics.jsonl`, that of `restart` without `error`. `skip` and `rollback` say which
`bad_step` was left out, and `what` was not finite on which `bad_rank`, with its `bad_rows` in that step
(`train.on_nonfinite`). `checkpoint_failed` has the `reason` (`checkpoint.on_error`)."""

_log = logging.getLogger("spark_dl")
_LONG_CALL_S = 10.0
"""A call of a function of the user that takes longer is said in the log."""

_WARNINGS = {
    "checkpoint_failed": "checkpoint.on_error: the checkpoint of step {step} was not written, and training goes on: "
    "{reason}",
    "skip": "train.on_nonfinite: step {bad_step} is left out, because {what} is not finite (NaN or Inf) on rank "
    "{bad_rank}; its rows in that step: {bad_rows}; steps in a row: {in_a_row}",
    "rollback": "train.on_nonfinite: the run goes back to step {step} ({url}), and leaves out step {bad_step}, because "
    "{what} is not finite (NaN or Inf) on rank {bad_rank}; its rows in that step: {bad_rows}",
}

LINE_S = 5.0
"""Seconds between two lines, where there is no bar."""
_SILENT_S = 60.0
"""Seconds after which a line is repeated, as a sign of life."""
_REFRESH_S = 1.0


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table. Columns whose cells are numbers are aligned to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    is_number = [all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    ]


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or (cell[0] in "+-." and cell[1:2].isdigit())


def lines_of(event: Event) -> list[str]:
    """Returns the lines of an `output` event, each with the prefix `[rank 0]`, or `[task 0]` before there are ranks."""
    who = f"rank {event['rank']}" if "rank" in event else f"task {event['task']}"
    return [f"[{who}] {line}" for line in event["lines"]]


def show_output(event: Event, write: Callable[[str, Any], None] | None = None) -> None:
    """Shows an `output` event, on the stream of the driver that the rank has written to. Ignores other events.

    Args:
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


def restart_event(error: RankError, restarts: int, generation: int) -> dict[str, Any]:
    """Returns the event of a restart after the failure of the attempt `generation`. restarts: number of them so far."""
    return {
        "kind": "restart", "restarts": restarts, "attempt": generation, "reason": " ".join(error.reason.split()),
        "error": error.reason, "rank": error.rank, "step": error.step, "time": time.time(),
    }  # fmt: skip


def as_functions(on_event: Any) -> list[OnEvent]:
    """Returns the functions of `on_event`, which say once if they take long. Raises ValueError for anything else."""
    functions = list(on_event) if isinstance(on_event, Sequence) else [on_event]
    for function in functions:
        if not callable(function):
            raise ValueError(f"on_event: expected a function or a list of functions, found {function!r}")
    return [_timed(function) for function in functions]


def _timed(function: OnEvent) -> OnEvent:
    """Returns a function that logs one warning if a call takes long: until it returns, the driver sees no failure."""
    is_said = False

    def call(event: Mapping[str, Any]) -> None:
        nonlocal is_said
        start = time.monotonic()
        function(event)
        seconds = time.monotonic() - start
        if seconds > _LONG_CALL_S and not is_said:
            is_said = True
            _log.warning(
                "on_event: a call of %s took %.0f s for an event %r; until it returns, the driver does not see the "
                "failures of ranks and shows no progress; do long work in a thread",
                name_of(function), seconds, event.get("kind"),
            )  # fmt: skip

    return call


class RunEvents:
    """Shows the events of one attempt, logs the unusual ones, and passes them on to the user's functions."""

    def __init__(self, show: OnEvent, functions: Sequence[OnEvent]):
        self._show, self._functions = show, functions
        self._slow_ranks, self._hosts = SlowRanks(), dict[int, str]()

    def put(self, event: Mapping[str, Any]) -> None:
        """Takes an event of the ranks."""
        kind = event["kind"]
        self._show(event)
        if kind not in EVENTS:
            return
        if kind == "joined":
            self._hosts[event["rank"]] = str(event["host"])
        if kind in _WARNINGS:
            _log.warning(_WARNINGS[kind].format(**event))
        self._pass_on(event)
        for slow in self._slow_ranks.put(event) if kind == "step" else []:
            host = self._hosts.get(slow.straggler.rank, "")
            _log.warning("%s", slow.describe(host))
            self._pass_on({**slow.to_event(host), "time": time.time()})

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        for function in self._functions:
            function(event)


class ProgressDisplay:
    """Shows what a call does: its stages, and in training the steps, loss, rows per second and validation metrics.

    A context manager. Everything is written to standard error. In a notebook, the loss is a picture, too.
    """

    def __init__(self, name: str, *, enabled: bool = True):
        self._name, self._start = name, time.monotonic()
        self._shown: dict[str, str] = {}
        self._place = ""
        self._stage = "starting"
        self._stages: list[tuple[str, float]] = []
        self._last_line, self._last_line_at = "", -LINE_S
        self._bar = _build_bar(name) if enabled else None
        self._curve = LiveCurve() if enabled and is_notebook() else None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if enabled:
            self._thread = threading.Thread(target=self._tick, name="spark_dl progress", daemon=True)
            self._thread.start()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed.set()
        if self._thread is None:
            return
        self._thread.join()
        if self._curve is not None:
            self._curve.close()
        if self._bar is not None:
            if kind is None:
                self._describe("" if self._bar.n else "done")
                self._bar.total = self._bar.n or None  # less than planned, if the run stopped early
            self._bar.close()
        else:
            self._stage = "done" if kind is None else "failed"
            self._write_line()

    def stage(self, text: str) -> None:
        """Shows what the call does now, such as `writing shards`."""
        self._stages.append((text, time.monotonic()))
        self._describe(text)
        if self._bar is not None:
            self._bar.refresh()
        elif self._thread is not None:
            self._write_line()

    def stage_seconds(self) -> dict[str, float]:
        """Returns how long each stage has taken until now, by its text."""
        seconds: dict[str, float] = {}
        ends = [*(start for _, start in self._stages[1:]), time.monotonic()]
        for (text, start), end in zip(self._stages, ends, strict=False):  # without a stage, there is an end alone
            seconds[text] = seconds.get(text, 0.0) + end - start
        return seconds

    def show(self, event: Mapping[str, Any]) -> None:
        """Shows one event of a run."""
        kind = event["kind"]
        if kind == "output":
            show_output(event, None if self._bar is None else self._write_above)
        elif kind == "step":
            self._shown |= {"loss": f"{event['loss']:.4g}", "rows/s": f"{event['rows_per_s']:,.0f}"}
        elif kind in ("validation", "epoch"):
            numbers = {k: v for k, v in event["metrics"].items() if isinstance(v, (int, float))}
            self._shown |= {f"val {name}": f"{value:.4g}" for name, value in numbers.items()}
        elif kind == "trial":
            self._describe("")
            self._place = f"trial {event['done']}/{event['trials']}"
            if event["best"] is not None:
                self._shown["best"] = f"{event['best']:.6g}"
            if self._bar is not None:
                self._bar.unit, self._bar.total, self._bar.n = "trial", event["trials"], event["done"]
                self._bar.set_postfix(self._shown)
        elif kind == "evaluation":
            self._describe(f"evaluating {event['step']}/{event['steps']}")
        if kind in ("step", "validation", "epoch"):
            self._describe("")
            self._place = f"step {event['step']}/{event['steps']}"
            if self._bar is not None:
                self._bar.total, self._bar.n = event["steps"], event["step"]
                self._bar.set_postfix(self._shown)
        if self._curve is not None:
            self._curve.show(event)

    def _write_above(self, line: str, stream: Any) -> None:
        """Writes a line above the bar."""
        assert self._bar is not None
        self._bar.write(line, file=stream)

    def _describe(self, stage: str) -> None:
        self._stage = stage
        if self._bar is not None:
            self._bar.set_description_str(": ".join(filter(None, (self._name, stage))), refresh=False)

    def _tick(self) -> None:
        while not self._closed.wait(_REFRESH_S):
            if self._bar is not None:
                self._bar.refresh()  # the time goes on where no step ends
            elif time.monotonic() - self._last_line_at >= LINE_S:
                self._write_line()

    def _write_line(self) -> None:
        now = time.monotonic()
        words = [self._stage, self._place, *(f"{name} {value}" for name, value in self._shown.items())]
        line = ", ".join(text for text in words if text)
        if line == self._last_line and now - self._last_line_at < _SILENT_S:
            return
        self._last_line, self._last_line_at = line, now
        seconds = int(now - self._start)
        print(f"{self._name}: {line} [{seconds // 60}:{seconds % 60:02}]", file=sys.stderr, flush=True)


def _build_bar(name: str) -> Any:
    """Returns a bar of tqdm for the terminal or the notebook; None if standard error is neither."""
    options: dict[str, Any] = {"desc": name, "unit": "step"}
    if not is_notebook():
        return tqdm(file=sys.stderr, **options) if sys.stderr.isatty() else None
    return build_bar(**options)
