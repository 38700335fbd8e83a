"""Reads a run folder for people: also one of a run that goes on, that failed, or that an older version wrote."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from spark_dl import storage
from spark_dl.rundir import checkpoint, environment, generations, metrics
from spark_dl.rundir.run_folder import CONFIG, TRIALS, has_trials
from spark_dl.track.events import is_number

Line = Mapping[str, Any]
PREPARING, NOT_RECORDED = "preparing", "not recorded"
"""Outcomes beside those of `environment`: before the ranks start, and of a run of an older version."""


@dataclass
class AttemptLog:
    """One attempt of a run, with the lines that it wrote."""

    generation: int
    about: Mapping[str, Any]
    """Facts by the driver, and over them those by rank 0."""
    outcome: str
    error: str = ""
    is_alive: bool = False
    """Whether its driver is a process of this host that is there now."""
    started: float | None = None
    """Of the driver, or without one of the ranks."""
    lines_from: float | None = None
    """Start of the ranks, on the clock of the one that writes lines."""
    ended: float | None = None
    steps: list[Line] = field(default_factory=list)
    epochs: list[Line] = field(default_factory=list)
    validations: list[Line] = field(default_factory=list)
    """Validations within an epoch. The lines in `epochs` have the others."""
    checkpoints: list[Line] = field(default_factory=list)
    failed_checkpoints: list[Line] = field(default_factory=list)
    """Checkpoints that could not be written, in a run that went on."""
    left_out: list[Line] = field(default_factory=list)
    """Steps that were left out because of NaN or Inf, of the kinds `skip` and `rollback`."""
    tests: list[Line] = field(default_factory=list)
    """Metrics of test rows."""

    @property
    def ranks(self) -> Sequence[Mapping[str, Any]]:
        """Facts about each rank; empty if they are not known."""
        recorded = self.about.get("ranks")
        return recorded if isinstance(recorded, list) and all(isinstance(rank, dict) for rank in recorded) else []

    @property
    def before(self) -> dict[str, float]:
        """Seconds of what the driver did before it started ranks, by its name, such as the writing of the rows."""
        recorded = self.about.get("before")
        named = recorded.items() if isinstance(recorded, dict) else ()
        return {str(name): s for name, value in named if (s := number(value)) is not None and s > 0}

    def host_of(self, rank: int) -> str:
        """Host of a rank; empty if it is not known."""
        return str(self.ranks[rank].get("host", "")) if rank < len(self.ranks) else ""


@dataclass(frozen=True)
class RunLog:
    """What is known about a run."""

    run_dir: str
    attempts: list[AttemptLog]
    """Oldest first; at least one."""
    config: Mapping[str, Any]
    """Settings of the newest attempt; empty if they are not known."""
    kept: frozenset[str]
    """Names of the checkpoints that are there now."""
    problems: list[str]
    """What is damaged, and left out."""

    def lines(self, kind: str) -> list[Line]:
        """Lines of all attempts. kind: a field of `AttemptLog` that is a list of lines."""
        return [line for attempt in self.attempts for line in getattr(attempt, kind)]

    @property
    def last(self) -> AttemptLog:
        return self.attempts[-1]

    @property
    def validations(self) -> list[Line]:
        """Lines of all validations, in the order of steps: of the ends of epochs, and of steps within them."""
        lines = (*self.lines("epochs"), *self.lines("validations"))
        return sorted(lines, key=lambda line: number(line["step"]) or 0.0)


def read_run(run_dir: str) -> RunLog:
    """Reads a run folder. Called on the driver, without Spark. Raises ValueError if there is no run."""
    names = storage.list_names(run_dir)
    run_names = {metrics.FILE, generations.FOLDER, environment.FOLDER, checkpoint.FOLDER}
    if not run_names & {*names}:
        found = f"found {', '.join(names[:8])}" if names else "found nothing"
        raise ValueError(f"no run at {run_dir}: expected a run_dir of spark_dl.train, with {metrics.FILE}; {found}")
    lines, damaged = metrics.read_valid_lines(run_dir)
    problems = [f"{metrics.FILE}, line {number}: {line[:80].decode(errors='replace')}" for number, line in damaged]
    recorded, bad_files = environment.read(run_dir)
    if has_trials(run_dir) and not recorded:
        raise ValueError(
            f"{run_dir} is a run of spark_dl.tune, which has no report; write one of a trial, such as "
            f"{storage.within(run_dir, TRIALS, '0000')}"
        )
    attempts = _attempts(run_dir, recorded, is_legacy=not recorded and bool(lines))
    kept = frozenset(storage.list_names(checkpoint.folder(run_dir)))
    _share_out(lines, attempts)
    _finish(attempts)
    return RunLog(run_dir, attempts, _config(run_dir, attempts), kept, [*problems, *bad_files])


def number(value: Any) -> float | None:
    """Returns a number of a file as a float, also NaN; None for other values."""
    return float(value) if is_number(value) else None


def _attempts(run_dir: str, recorded: Sequence[environment.AttemptRecord], *, is_legacy: bool) -> list[AttemptLog]:
    by_generation = {attempt.generation: attempt for attempt in recorded}
    first = min(
        by_generation, default=0
    )  # those before it belong to runs that were overwritten, of which nothing else is left
    for name in storage.list_names(storage.within(run_dir, generations.FOLDER)):
        if name.isdecimal() and int(name) >= first:
            by_generation.setdefault(int(name), environment.AttemptRecord(int(name)))
    if not by_generation:
        return [AttemptLog(0, {}, NOT_RECORDED)]
    newest = max(by_generation)
    return [
        _attempt(run_dir, by_generation[g], is_newest=g == newest, is_legacy=is_legacy) for g in sorted(by_generation)
    ]


def _attempt(run_dir: str, known: environment.AttemptRecord, *, is_newest: bool, is_legacy: bool) -> AttemptLog:
    driver, ranks = known.driver, known.ranks
    begun: dict[str, Any] = {}
    is_alive = None
    try:
        begun = generations.read_record(generations.record_url(run_dir, known.generation))
    except (OSError, ValueError):  # damaged, or a run under torchrun, which has none
        begun = {}
    outcome = ranks.get("outcome") or driver.get("outcome")
    if outcome in (None, environment.RUNNING):
        is_alive = _is_alive(driver or begun)
        is_gone = not is_newest or is_alive is False
        outcome = environment.INTERRUPTED if is_gone else environment.RUNNING if driver or ranks else PREPARING
    if is_legacy:
        outcome = NOT_RECORDED
    return AttemptLog(
        known.generation,
        {**begun, **driver, **ranks, "driver": driver.get("host") or begun.get("host")},
        str(outcome),
        error=str(driver.get("error") or ""),
        is_alive=bool(is_alive),
        started=number(driver.get("started")) or number(ranks.get("started")) or _seconds(begun.get("started")),
        lines_from=number(ranks.get("started")),
        ended=number(driver.get("ended")) or number(ranks.get("ended")),
    )


def _is_alive(record: Mapping[str, Any]) -> bool | None:
    """Whether the driver's process is there; None if it ran on another host."""
    pid = record.get("pid")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        return True
    return True


def _seconds(started: Any) -> float | None:
    try:
        return datetime.datetime.strptime(str(started), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _share_out(lines: Sequence[Line], attempts: Sequence[AttemptLog]) -> None:
    """Gives each attempt the lines that were written after its start, and before that of the next one."""
    kinds = {
        "step": "steps", "epoch": "epochs", "validation": "validations", "checkpoint": "checkpoints",
        "checkpoint_failed": "failed_checkpoints", "skip": "left_out", "rollback": "left_out", "test": "tests",
    }  # fmt: skip
    for line in lines:
        at = number(line["time"]) or 0.0
        attempt_of_line = attempts[0]
        for attempt in attempts[1:]:
            begin = attempt.lines_from or attempt.started
            if begin is not None and at >= begin:
                attempt_of_line = attempt
        if line["kind"] in kinds:
            getattr(attempt_of_line, kinds[line["kind"]]).append(line)


def _finish(attempts: Sequence[AttemptLog]) -> None:
    """Says of runs of older versions what their lines tell: that all steps are done."""
    last = attempts[-1]
    if last.outcome == NOT_RECORDED and last.checkpoints:
        saved = last.checkpoints[-1]
        if saved["step"] == saved.get("steps"):
            last.outcome = environment.FINISHED
    for attempt in attempts:
        if attempt.ended is None and attempt.outcome not in (environment.RUNNING, PREPARING):
            times = [number(line["time"]) for line in (*attempt.steps, *attempt.epochs, *attempt.checkpoints)]
            attempt.ended = max((t for t in times if t is not None), default=None)


def last_sign(attempt: AttemptLog) -> float:
    """Returns the time of the last line of an attempt, or of its start."""
    times = [number(line["time"]) for line in (*attempt.steps, *attempt.epochs, *attempt.checkpoints)]
    return max([t for t in (*times, attempt.started) if t is not None], default=time.time())


def _config(run_dir: str, attempts: Sequence[AttemptLog]) -> Mapping[str, Any]:
    config = attempts[-1].about.get("config")
    if config is None:
        url = storage.within(run_dir, CONFIG)
        try:
            config = yaml.safe_load(storage.read_bytes(url)) if storage.exists(url) else {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            config = {}
    return config if isinstance(config, dict) else {}
