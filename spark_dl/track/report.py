"""One self-contained HTML page about a run: outcome, curves, time of each rank, stragglers, environment, settings."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.config import strategies
from spark_dl.rundir import environment
from spark_dl.track import plots
from spark_dl.track.report_figures import curves
from spark_dl.track.report_text import duration, text, when
from spark_dl.track.report_times import seconds_of, times_of
from spark_dl.track.run_log import PREPARING, Attempt, Line, RunLog, last_sign, number, read_run
from spark_dl.track.time_split import PARTS, split_of

FILE = "report.html"
_MARK = "<!-- a report of spark_dl -->"
_MOST_ATTEMPTS = 3
"""Number of attempts whose times are shown."""
_MOST_LEFT_OUT = 8
"""Number of steps that are listed."""


def report(run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> str:
    """Writes a report of a run as one HTML page. Called on the driver. Needs no Spark session.

    run_dir: folder or URL of a run of `train`. The run may still go on, or have failed.
    path: file or URL of the page; by default `report.html` in `run_dir`. An earlier report is replaced.

    Returns the path or URL of the page. It loads nothing from elsewhere, so it can be sent as it is.
    Raises ValueError if there is no run, or if `path` is another file than a report; ModuleNotFoundError without the
    packages of `pip install 'spark_dl[plot]'`.
    """
    plots.check_packages("spark_dl.report")
    run_dir = storage.absolute(run_dir)
    url = storage.join(run_dir, FILE) if path is None else storage.absolute(path)
    run = read_run(run_dir)
    plots.check_replaceable(url, _MARK, "a report of spark_dl")
    page = plots.render_page("spark_dl.track", FILE, mark=_MARK, **_content(run, time.time()))
    storage.write_bytes(url, page.encode())
    return url


def _content(run: RunLog, now: float) -> dict[str, Any]:
    steps, epochs = run.lines("steps"), run.lines("epochs")
    with_lines = [attempt for attempt in run.attempts if attempt.steps][-_MOST_ATTEMPTS:]
    strategy = _strategy(run)
    return {
        "title": storage.name(run.run_dir) or run.run_dir,
        "run_dir": run.run_dir,
        "outcome": run.last.outcome,
        "state": _state(run.last, now),
        "error": run.last.error,
        "facts": _facts(run, now),
        "figures": curves(steps, epochs, split_of(steps)),
        "times": [times_of(attempt, strategy, now, len(run.attempts) > 1) for attempt in reversed(with_lines)],
        "is_by_spark": strategies.settings_of(strategy).by_spark,
        "parts": PARTS,
        "epochs": _epoch_table(epochs),
        "checkpoints": _checkpoint_table(run),
        "attempts": _attempt_table(run, now) if len(run.attempts) > 1 else [],
        "environment": _environment(run.last),
        "ranks": [[str(i), *(str(rank.get(key, "")) for key in ("host", "device", "threads", "pid"))]
                  for i, rank in enumerate(run.last.ranks)],
        "datasets": _datasets(run.last),
        "config": yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True) if run.config else "",
        "problems": run.problems,
        "about": f"spark_dl {__version__}, {when(now)}",
    }  # fmt: skip


def _strategy(run: RunLog) -> str:
    parallel = run.config.get("parallel")
    return str(parallel.get("strategy", "")) if isinstance(parallel, dict) else ""


def _state(attempt: Attempt, now: float) -> str:
    """Returns a sentence about how the run ended, or goes on."""
    doubt = "" if attempt.is_alive else ", or its driver was stopped"
    ago = duration(max(0.0, now - last_sign(attempt)))
    return {
        environment.FINISHED: "All steps were done.",
        environment.STOPPED_EARLY: "Early stopping ended the run.",
        environment.FAILED: "The run failed.",
        environment.INTERRUPTED: "The run was interrupted, or its driver was stopped. It can be resumed.",
        environment.RUNNING: f"The run goes on{doubt}. The last line was written {ago} ago.",
        PREPARING: f"The ranks have not started. The attempt began {ago} ago.",
    }.get(attempt.outcome, "The version of spark_dl that wrote this run did not record how it ended.")


def _facts(run: RunLog, now: float) -> list[tuple[str, str]]:
    steps, epochs = run.lines("steps"), run.lines("epochs")
    last: Line = steps[-1] if steps else {}
    ranks = len(run.last.ranks) or _nested(run.config, "launch", "num_ranks")
    hosts = len({rank.get("host") for rank in run.last.ranks})
    where = f" on {hosts} host{'s' * (hosts > 1)}" if hosts else ""
    rates = [rate for line in steps if (rate := number(line.get("rows_per_s"))) is not None]
    facts = [
        ("strategy", f"{_strategy(run)}, {ranks} rank{'s' * (ranks != 1)}{where}" if ranks else _strategy(run)),
        ("steps", f"{text(last.get('step'))} of {text(last.get('steps'))}" if steps else "none"),
        ("left out", _left_out(run.lines("left_out"))),
        ("epochs", f"{len(epochs)} of {text(_nested(run.config, 'train', 'epochs'))}" if run.config else ""),
        ("training loss", text((epochs[-1] if epochs else last).get("train_loss" if epochs else "loss"))),
        *((f"validation {name}", text(value)) for name, value in _last_metrics(epochs).items()),
        ("rows per second", f"{statistics.median(rates):,.0f} (median)" if rates else ""),
        ("started", when(run.attempts[0].started)),
        ("duration", duration(sum(seconds_of(attempt, now) for attempt in run.attempts))),
    ]  # fmt: skip
    return [(name, found) for name, found in facts if found]


def _left_out(lines: Sequence[Line]) -> str:
    """Returns which steps were left out because of NaN or Inf, the first of them with its cause; or nothing."""
    if not lines:
        return ""
    numbers = sorted({text(line.get("bad_step")) for line in lines}, key=lambda number: (len(number), number))
    shown = ", ".join(numbers[:_MOST_LEFT_OUT]) + (" ..." if len(numbers) > _MOST_LEFT_OUT else "")
    back = sum(line["kind"] == "rollback" for line in lines)
    returns = f"; the run went back to a checkpoint {back} time{'s' * (back != 1)}" if back else ""
    first = f"{text(lines[0].get('what'))} on rank {text(lines[0].get('bad_rank'))}"
    return f"{len(numbers)} step{'s' * (len(numbers) != 1)} with NaN or Inf ({shown}), first in {first}{returns}"


def _last_metrics(epochs: Sequence[Line]) -> Mapping[str, Any]:
    found = epochs[-1].get("metrics") if epochs else None
    return {k: v for k, v in found.items() if number(v) is not None} if isinstance(found, dict) else {}


def _epoch_table(epochs: Sequence[Line]) -> dict[str, Any]:
    metrics = [line["metrics"] if isinstance(line.get("metrics"), dict) else {} for line in epochs]
    names = list(dict.fromkeys(name for found in metrics for name in found))
    rows = [
        [text(_plus_one(line.get("epoch"))), text(line.get("step")), text(line.get("train_loss")),
         *(text(found.get(name)) for name in names)]
        for line, found in zip(epochs, metrics, strict=True)
    ]  # fmt: skip
    return {"columns": ["epoch", "step", "training loss", *(f"validation {name}" for name in names)], "rows": rows}


def _checkpoint_table(run: RunLog) -> list[list[str]]:
    found = []
    lines = (*run.lines("checkpoints"), *run.lines("failed_checkpoints"))
    for line in sorted(lines, key=lambda line: number(line["time"]) or 0.0):
        name = storage.name(str(line.get("url", "")))
        state = "kept" if name in run.kept else "deleted"
        if "reason" in line:
            state = f"not written: {text(line['reason'])}"
        found.append([name, text(line.get("step")), when(number(line["time"])), text(line.get("seconds")), state])
    return found


def _attempt_table(run: RunLog, now: float) -> list[list[str]]:
    return [
        [str(a.generation), when(a.started), duration(seconds_of(a, now)), a.outcome,
         f"{text(a.steps[0]['step'])} to {text(a.steps[-1]['step'])}" if a.steps else "", a.error.partition("\n")[0]]
        for a in run.attempts
    ]  # fmt: skip


def _environment(attempt: Attempt) -> list[tuple[str, str]]:
    spark, versions = attempt.about.get("spark"), attempt.about.get("versions")
    return [
        (name, found)
        for name, found in (
            *(((f"Spark {key}" if key != "version" else "Spark", str(value)) for key, value in spark.items())
              if isinstance(spark, dict) else ()),
            *((key, str(value)) for key, value in (versions.items() if isinstance(versions, dict) else ())),
            ("driver", text(attempt.about.get("driver"))),
            ("resumed from", text(attempt.about.get("resumed_from"))),
        )
        if found
    ]  # fmt: skip


def _datasets(attempt: Attempt) -> list[list[str]]:
    found = attempt.about.get("datasets")
    sets = found.items() if isinstance(found, dict) else ()
    return [[name, *(text(about.get(key)) for key in ("rows", "shards", "url"))] for name, about in sets
            if isinstance(about, dict)]  # fmt: skip


def _nested(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _plus_one(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value
