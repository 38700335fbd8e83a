"""One self-contained HTML page about a run: outcome, curves, time of each rank, stragglers, environment, settings.

Figures are SVG. Their colors are variables of the page's style, for light and dark.
"""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.config import strategies
from spark_dl.rundir import environment
from spark_dl.rundir.run_folder import PROFILE, SUMMARY_END
from spark_dl.track import plots
from spark_dl.track.run_log import PREPARING, AttemptLog, Line, RunLog, last_sign, number, read_run
from spark_dl.track.time_split import LEAST_INTERVALS, PARTS, Straggler, TimeSplit, find_stragglers, split_of

_log = logging.getLogger("spark_dl")
_MOST_RANKS = 32
"""Number of ranks with a bar."""

Floats = npt.NDArray[np.float64]
MOST_POINTS = 600
"""Points of a curve. With more, neighbors are replaced by their mean."""
_MOST_METRICS = 8
_MOST_TICKS = 8
_COLORS = {
    "training": "#00a011", "epoch": "#00a012", "validation": "#00a013",
    **{part: f"#00a02{i}" for i, part in enumerate(PARTS)},
}  # fmt: skip
"""Colors that matplotlib writes, and that are replaced by variables."""

FILE = "report.html"
_MARK = "<!-- a report of spark_dl -->"
_MOST_ATTEMPTS = 3
"""Number of attempts whose times are shown."""
_MOST_LEFT_OUT = 8
"""Number of steps that are listed."""


def text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if (as_number := number(value)) is not None:
        return f"{as_number:.4g}"
    if isinstance(value, list):
        return ", ".join(text(each) for each in value[:8]) + (", ..." if len(value) > 8 else "")
    return str(value)


def when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def duration(seconds: float) -> str:
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, hours = int(seconds / 60), int(seconds / 3600)
    return f"{minutes} min {seconds % 60:.0f} s" if hours < 1 else f"{hours} h {minutes % 60} min"


@dataclass(frozen=True)
class Bar:
    """A bar of parts, which add up to at most 100 %."""

    label: str
    about: str
    parts: list[tuple[str, float, str]]
    """Name, percent, and a text with the seconds of each part."""


@dataclass(frozen=True)
class Times:
    """Where the time of an attempt went."""

    title: str
    whole: Bar
    ranks: list[Bar]
    left_out: int
    """Number of ranks without a bar: those that were busy for the least time."""
    table: list[list[str]]
    not_measured: str
    """Why there are no bars of ranks; empty if there are."""
    stragglers: list[str]


def seconds_of(attempt: AttemptLog, now: float) -> float:
    """Returns how long an attempt took, from the start of its ranks."""
    if attempt.started is None:
        return 0.0
    is_open = attempt.outcome in (environment.RUNNING, PREPARING)
    return max(0.0, (now if is_open else attempt.ended or last_sign(attempt)) - attempt.started)


def times_of(attempt: AttemptLog, strategy: str, now: float, has_others: bool) -> Times:
    split = split_of(attempt.steps)
    first, last = (text(attempt.steps[i]["step"]) for i in (0, -1))
    ranks = [] if split is None else _rank_bars(attempt, split)
    return Times(
        title=f"Attempt {attempt.generation}, log lines of steps {first} to {last}" if has_others else "",
        whole=_whole_bar(attempt, now),
        ranks=ranks[:_MOST_RANKS],
        left_out=max(0, len(ranks) - _MOST_RANKS),
        table=[] if split is None else _rank_table(attempt, split),
        not_measured=_why_not_measured(attempt, strategy) if split is None else "",
        stragglers=[] if split is None else _straggler_texts(attempt, split),
    )


def _whole_bar(attempt: AttemptLog, now: float) -> Bar:
    """Returns how the duration of an attempt was spent, on the clock of the rank that logs."""
    spent = {
        "steps": _sum(attempt.steps, "seconds"),
        "validation": _sum((*attempt.epochs, *attempt.validations), "validation_s"),
        "checkpoints": _sum(attempt.checkpoints, "seconds"),
    }
    since_start = max(seconds_of(attempt, now), sum(spent.values()), 1e-9)
    spent["start and other"] = since_start - sum(spent.values())
    names = {"steps": "steps", "validation": "evaluation", "checkpoints": "saving", "start and other": "wait"}
    spent = {**attempt.before, **spent}  # in the order of time: what came before the ranks
    whole = sum(spent.values())
    return Bar(
        "", "",
        [(names.get(n, "before"), 100 * s / whole, f"{n} {duration(s)}") for n, s in spent.items() if s > 0],
    )  # fmt: skip


def _sum(lines: Sequence[Line], key: str) -> float:
    return sum(s for line in lines if (s := number(line.get(key))) is not None and s > 0)


def _rank_bars(attempt: AttemptLog, split: TimeSplit) -> list[Bar]:
    """Returns a bar for each rank; if there are too many to show, those that were busy for longest are first."""
    totals = {part: split.totals(part) for part in PARTS}
    whole = np.sum([*totals.values()], axis=0)
    order = range(split.num_ranks)
    if split.num_ranks > _MOST_RANKS:
        order = (totals["data"] + totals["compute"]).argsort()[::-1].tolist()
    return [
        Bar(
            f"rank {rank}",
            attempt.host_of(rank),
            [(part, 100 * totals[part][rank] / max(whole[rank], 1e-9), f"{part} {duration(totals[part][rank])}")
             for part in PARTS],
        )
        for rank in order
    ]  # fmt: skip


def _rank_table(attempt: AttemptLog, split: TimeSplit) -> list[list[str]]:
    totals = [split.totals(part) for part in PARTS]
    return [[str(r), attempt.host_of(r), *(text(t[r]) for t in totals)] for r in range(split.num_ranks)]


def _why_not_measured(attempt: AttemptLog, strategy: str) -> str:
    line = attempt.steps[-1]
    data = line.get("ranks", {}).get("data_s") if isinstance(line.get("ranks"), dict) else None
    if data is None:
        is_apart = not strategies.settings_of(strategy).common_steps
        why = "trainers and servers take no steps together" if is_apart else (
            "the version of spark_dl that wrote this run logged the times of one rank only"
        )  # fmt: skip
        seconds = _sum(attempt.steps, "data_s")
        who = "the trainers, on average" if is_apart else "rank 0"
        return f"Not measured: {why}. Waiting for data, {who}: {duration(seconds)}."
    if any(rank.get("device") not in ("cpu", None) for rank in attempt.ranks):
        why = "on GPUs the host does not wait for computation and exchanges, so its clock says nothing about them"
    else:
        why = f"the strategy {strategy!r} does not measure its exchanges"
    waits = [_sum([{"s": line["ranks"]["data_s"][r]} for line in attempt.steps], "s") for r in range(len(data))]
    texts = ", ".join(f"rank {r} {duration(s)}" for r, s in enumerate(waits[:_MOST_RANKS]))
    return f"Computation, communication and wait are not measured: {why}. Waiting for data: {texts}."


def _straggler_texts(attempt: AttemptLog, split: TimeSplit) -> list[str]:
    if split.num_ranks == 1:
        return ["There is one rank."]
    if len(split.last_steps) < LEAST_INTERVALS:
        return [f"There are fewer than {LEAST_INTERVALS} log lines, which are too few to tell."]
    stragglers = find_stragglers(split)
    return [_straggler_text(attempt, s) for s in stragglers] or ["No rank was slower than the others for long."]


def _straggler_text(attempt: AttemptLog, slow: Straggler) -> str:
    host = attempt.host_of(slow.rank)
    what = {"data": "mostly to wait for data", "compute": "mostly to compute"}.get(
        slow.cause, f"to wait for data ({duration(slow.data_s)}) and to compute ({duration(slow.compute_s)})"
    )
    return (
        f"Rank {slow.rank}{f' on {host}' * bool(host)} was busy {slow.factor:.1f} times as long as the median of the "
        f"other ranks, in {slow.intervals} of {slow.of} log lines (steps {slow.first_step:,} to {slow.last_step:,}). "
        f"It took {duration(slow.surplus_s)} longer, {what}."
    )


@dataclass(frozen=True)
class Figure:
    """A figure with its title."""

    title: str
    svg: str


def curves(
    steps: Sequence[Line], epochs: Sequence[Line], validations: Sequence[Line], split: TimeSplit | None
) -> list[Figure]:
    """Draws loss, metrics, learning rate, rows per second, and the parts of a step, as far as there are lines.

    Args:
        validations: of the ends of epochs, too, in the order of steps.
    """
    figures = [
        ("Loss", lambda axes: _loss(axes, steps, epochs, validations)),
        *(
            (f"Validation: {name}", lambda axes, name=name: _metric(axes, name, epochs, validations))
            for name in metric_names(validations)[:_MOST_METRICS]
        ),
        ("Learning rate", lambda axes: _by_step(axes, steps, "lr")),
        ("Rows per second", lambda axes: _by_step(axes, steps, "rows_per_s", from_zero=True)),
    ]
    if split is not None and len(split.last_steps) > 1:
        figures.append(("Seconds per step, mean of the ranks", lambda axes: _parts(axes, split)))
    drawn = [Figure(title, svg) for title, plot in figures if (svg := _draw(title, plot))]
    return drawn if steps or epochs else []


def metric_names(validations: Sequence[Line]) -> list[str]:
    """Returns the names of metrics that are single numbers, except the loss."""
    names = {name: None for line in validations for name, value in _metrics(line).items() if number(value) is not None}
    return [name for name in names if name != "loss"]


def thin_out(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Returns at most `MOST_POINTS` points: means of neighbors, without those that are not finite."""
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(x) <= MOST_POINTS:
        return x, y
    starts = np.arange(MOST_POINTS) * len(x) // MOST_POINTS
    counts = np.diff([*starts, len(x)])
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def _draw(title: str, plot: Callable[[Any], bool]) -> str:
    """Returns a figure, or an empty string if `plot` has nothing to draw."""
    has_points = False

    def on(figure: Any) -> None:
        nonlocal has_points
        axes = figure.subplots()
        has_points = plot(axes)
        axes.grid(alpha=0.5, linewidth=0.5)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.02)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has it
        svg = plots.draw_for_page(on, title=title, colors=_COLORS, width=4.8, height=2.9)
    return svg if has_points else ""


def _points(lines: Sequence[Line], value: Callable[[Line], Any]) -> tuple[Floats, Floats]:
    points = [(number(line["step"]), number(value(line))) for line in lines]
    pairs = np.array([(x, y) for x, y in points if x is not None and y is not None], dtype=np.float64).reshape(-1, 2)
    return thin_out(pairs[:, 0], pairs[:, 1])


def _plot(axes: Any, points: tuple[Floats, Floats], color: str, *, label: str | None = None, **style: Any) -> bool:
    x, y = points
    if not len(x):
        return False
    marker = {"marker": "o", "markersize": 3} if len(x) <= 40 else {}
    axes.plot(x, y, color=_COLORS[color], label=label, **{"linewidth": 1.2, **marker, **style})
    return True


def _loss(axes: Any, steps: Sequence[Line], epochs: Sequence[Line], validations: Sequence[Line]) -> bool:
    curves = [
        (_points(steps, lambda line: line.get("loss")), "training", "training"),
        (_points(epochs, lambda line: line.get("train_loss")), "epoch", "training, mean of an epoch"),
        (_points(validations, lambda line: _metrics(line).get("loss")), "validation", "validation"),
    ]
    drawn = [
        _plot(axes, points, color, label=label, **({"marker": "", "linewidth": 1} if color == "training" and
              len(points[0]) > 1 else {}))
        for points, color, label in curves
    ]  # fmt: skip
    values = np.concatenate([points[1] for points, *_ in curves])
    if len(values) and values.min() > 0 and values.max() > 20 * values.min():
        axes.set_yscale("log")
    _epochs_on_top(axes, epochs)
    return any(drawn)


def _metric(axes: Any, name: str, epochs: Sequence[Line], validations: Sequence[Line]) -> bool:
    drawn = _plot(axes, _points(validations, lambda line: _metrics(line).get(name)), "validation")
    _epochs_on_top(axes, epochs)
    return drawn


def _by_step(axes: Any, steps: Sequence[Line], key: str, *, from_zero: bool = False) -> bool:
    drawn = _plot(axes, _points(steps, lambda line: line.get(key)), "training")
    if drawn and from_zero:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return drawn


def _parts(axes: Any, split: TimeSplit) -> bool:
    last = np.array(split.last_steps, dtype=np.float64)
    steps = np.diff(last, prepend=last[0] - (last[1] - last[0]))
    steps = np.where(steps > 0, steps, np.nan)
    parts = [thin_out(last, getattr(split, part).mean(axis=1) / steps) for part in PARTS]
    axes.stackplot(
        parts[0][0], [y for _, y in parts], labels=PARTS, colors=[_COLORS[part] for part in PARTS], linewidth=0
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(PARTS))
    return True


def _epochs_on_top(axes: Any, epochs: Sequence[Line]) -> None:
    """Marks the ends of epochs above the figure."""
    ends = [(x, n + 1) for line in epochs if (x := number(line["step"])) is not None
            and (n := number(line.get("epoch"))) is not None]  # fmt: skip
    if not ends:
        return
    every = math.ceil(len(ends) / _MOST_TICKS)
    shown = ends[every - 1 :: every]
    top = axes.secondary_xaxis("top")
    top.set_xticks([x for x, _ in shown], [f"{n:.0f}" for _, n in shown])
    top.set_xlabel("epoch")


def _metrics(line: Line) -> Mapping[str, Any]:
    values = line.get("metrics")
    return values if isinstance(values, dict) else {}


def report(run_dir: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> str:
    """Writes a report of a run as one HTML page. Called on the driver. Needs no Spark session.

    Returns the path or URL of the page. It loads nothing from elsewhere, so it can be sent as it is.
    Raises ValueError if there is no run, or if `path` is another file than a report; ModuleNotFoundError without the
    packages of the extra `spark_dl[plot]`.

    Args:
        run_dir: folder or URL of a run of `train`. The run may still go on, or have failed.
        path: file or URL of the page; by default `report.html` in `run_dir`. An earlier report is replaced.

    Example:
        >>> spark_dl.report("runs/1")
    """
    plots.check_packages("spark_dl.report")
    run_dir = storage.absolute(run_dir)
    url = storage.join(run_dir, FILE) if path is None else storage.absolute(path)
    run = read_run(run_dir)
    plots.check_replaceable(url, _MARK, "a report of spark_dl")
    page = plots.render_page("spark_dl.track", FILE, mark=_MARK, **_content(run, time.time()))
    storage.write_bytes(url, page.encode())
    return url


def is_report(run_dir: str) -> bool:
    """Whether a run folder has a report of ours."""
    url = storage.within(run_dir, FILE)
    return storage.info(url).type == FileType.File and _MARK.encode() in storage.read_bytes(url)[:200]


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
        "figures": curves(steps, epochs, run.validations, split_of(steps)),
        "times": [times_of(attempt, strategy, now, len(run.attempts) > 1) for attempt in reversed(with_lines)],
        "profiles": _profiles(run),
        "is_by_spark": strategies.settings_of(strategy).by_spark,
        "parts": PARTS,
        "epochs": _validation_table(run.validations),
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


@dataclass(frozen=True)
class Profile:
    """What a rank's device did in the steps of a profile (`track.profile_steps`)."""

    bar: Bar
    about: str
    top: list[list[str]]
    """The operations that took longest: name, seconds in a step, number in a step."""


_IDLE = {"data": "wait for data", "communication": "communication", "host": "the host"}
"""Reasons for which a device is idle, by the part of a step."""
_OF_PROFILE = {"compute": "compute", "communication": "communication", "data": "data", "host": "wait"}
"""Colors of the parts of a step in a profile."""


def _profiles(run: RunLog) -> list[Profile]:
    found = []
    folder = storage.within(run.run_dir, PROFILE)
    names = [name for name in storage.list_names(folder) if name.endswith(SUMMARY_END)]
    for name in sorted(names, key=lambda name: (len(name), name))[:_MOST_RANKS]:
        try:
            found.append(_profile(name.removesuffix(SUMMARY_END).replace("-", " "), storage.within(folder, name)))
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.warning("%s is left out of the report: %s", storage.within(folder, name), error)
    return found


def _profile(rank: str, url: str) -> Profile:
    about = json.loads(storage.read_bytes(url))
    step_s = float(about["step_s"])
    parts = {part: float(about[f"{part}_s"]) for part in _OF_PROFILE}
    idle = {part: 100 * parts[part] / step_s for part in _IDLE}
    reasons = ", ".join(f"{_IDLE[part]} {percent:.0f} %" for part, percent in idle.items())
    device = "GPU" if about["device"] == "gpu" else "CPU"
    return Profile(
        Bar(
            rank, "",
            [(_OF_PROFILE[n], 100 * s / step_s, f"{n} {duration(s)}") for n, s in parts.items() if s > 0],
        ),
        f"A step of {rank} takes {duration(step_s)} and has {about['operations']:,.0f} "
        f"{'kernels' if device == 'GPU' else 'operations'}. The {device} computes nothing for "
        f"{sum(idle.values()):.0f} % of it: {reasons}.",
        [[str(name), duration(float(seconds)), f"{count:.1f}"] for name, seconds, count in about["top"]],
    )  # fmt: skip


def _strategy(run: RunLog) -> str:
    parallel = run.config.get("parallel")
    return str(parallel.get("strategy", "")) if isinstance(parallel, dict) else ""


def _state(attempt: AttemptLog, now: float) -> str:
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
        *((f"validation {name}", text(value)) for name, value in _last_metrics(run.validations).items()),
        *((f"test {name}", text(value)) for name, value in _last_metrics(run.lines("tests")).items()),
        ("rows per second", f"{statistics.median(rates):,.0f} (median)" if rates else ""),
        ("started", when(run.attempts[0].started)),
        ("duration", duration(sum(seconds_of(a, now) + sum(a.before.values()) for a in run.attempts))),
        ("before the ranks", duration(before) if (before := sum(run.attempts[0].before.values())) else ""),
    ]  # fmt: skip
    return [(name, fact) for name, fact in facts if fact]


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


def _last_metrics(validations: Sequence[Line]) -> Mapping[str, Any]:
    values = validations[-1].get("metrics") if validations else None
    return {k: v for k, v in values.items() if number(v) is not None} if isinstance(values, dict) else {}


def _validation_table(validations: Sequence[Line]) -> dict[str, Any]:
    """Returns the table of the epochs, and of the validations within them, which have no training loss."""
    metrics = [line["metrics"] if isinstance(line.get("metrics"), dict) else {} for line in validations]
    names = list(dict.fromkeys(name for values in metrics for name in values))
    rows = [
        [text(_plus_one(line.get("epoch"))), text(line.get("step")), text(line.get("train_loss")),
         *(text(values.get(name)) for name in names)]
        for line, values in zip(validations, metrics, strict=True)
    ]  # fmt: skip
    return {"columns": ["epoch", "step", "training loss", *(f"validation {name}" for name in names)], "rows": rows}


def _checkpoint_table(run: RunLog) -> list[list[str]]:
    rows = []
    lines = (*run.lines("checkpoints"), *run.lines("failed_checkpoints"))
    for line in sorted(lines, key=lambda line: number(line["time"]) or 0.0):
        name = storage.name(str(line.get("url", "")))
        state = "kept" if name in run.kept else "deleted"
        if "reason" in line:
            state = f"not written: {text(line['reason'])}"
        rows.append([name, text(line.get("step")), when(number(line["time"])), text(line.get("seconds")), state])
    return rows


def _attempt_table(run: RunLog, now: float) -> list[list[str]]:
    return [
        [str(a.generation), when(a.started), duration(seconds_of(a, now)), a.outcome,
         f"{text(a.steps[0]['step'])} to {text(a.steps[-1]['step'])}" if a.steps else "", a.error.partition("\n")[0]]
        for a in run.attempts
    ]  # fmt: skip


def _environment(attempt: AttemptLog) -> list[tuple[str, str]]:
    spark, versions = attempt.about.get("spark"), attempt.about.get("versions")
    return [
        (name, fact)
        for name, fact in (
            *(((f"Spark {key}" if key != "version" else "Spark", str(value)) for key, value in spark.items())
              if isinstance(spark, dict) else ()),
            *((key, str(value)) for key, value in (versions.items() if isinstance(versions, dict) else ())),
            ("driver", text(attempt.about.get("driver"))),
            ("resumed from", text(attempt.about.get("resumed_from"))),
        )
        if fact
    ]  # fmt: skip


def _datasets(attempt: AttemptLog) -> list[list[str]]:
    datasets = attempt.about.get("datasets")
    sets = datasets.items() if isinstance(datasets, dict) else ()
    return [[name, *(text(about.get(key)) for key in ("rows", "shards", "url"))] for name, about in sets
            if isinstance(about, dict)]  # fmt: skip


def _nested(config: Mapping[str, Any], section: str, key: str) -> Any:
    values = config.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _plus_one(value: Any) -> Any:
    return value + 1 if isinstance(value, int) else value
