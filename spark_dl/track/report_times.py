"""The part of a report about time: what each rank did, and which ranks were slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spark_dl.config import strategies
from spark_dl.rundir import environment
from spark_dl.track.report_text import duration, text
from spark_dl.track.run_log import PREPARING, Attempt, Line, last_sign, number
from spark_dl.track.time_split import LEAST_INTERVALS, PARTS, Straggler, TimeSplit, find_stragglers, split_of

_MOST_RANKS = 32
"""Number of ranks with a bar."""


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


def seconds_of(attempt: Attempt, now: float) -> float:
    if attempt.started is None:
        return 0.0
    is_open = attempt.outcome in (environment.RUNNING, PREPARING)
    return max(0.0, (now if is_open else attempt.ended or last_sign(attempt)) - attempt.started)


def times_of(attempt: Attempt, strategy: str, now: float, has_others: bool) -> Times:
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


def _whole_bar(attempt: Attempt, now: float) -> Bar:
    """Returns how the duration of an attempt was spent, on the clock of the rank that logs."""
    spent = {
        "steps": _sum(attempt.steps, "seconds"),
        "validation": _sum(attempt.epochs, "validation_s"),
        "checkpoints": _sum(attempt.checkpoints, "seconds"),
    }
    whole = max(seconds_of(attempt, now), sum(spent.values()), 1e-9)
    spent["start and other"] = whole - sum(spent.values())
    names = {"steps": "steps", "validation": "evaluation", "checkpoints": "saving", "start and other": "wait"}
    return Bar("", "", [(names[n], 100 * s / whole, f"{n} {duration(s)}") for n, s in spent.items() if s > 0])


def _sum(lines: Sequence[Line], key: str) -> float:
    return sum(s for line in lines if (s := number(line.get(key))) is not None and s > 0)


def _rank_bars(attempt: Attempt, split: TimeSplit) -> list[Bar]:
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


def _rank_table(attempt: Attempt, split: TimeSplit) -> list[list[str]]:
    totals = [split.totals(part) for part in PARTS]
    return [[str(r), attempt.host_of(r), *(text(t[r]) for t in totals)] for r in range(split.num_ranks)]


def _why_not_measured(attempt: Attempt, strategy: str) -> str:
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


def _straggler_texts(attempt: Attempt, split: TimeSplit) -> list[str]:
    if split.num_ranks == 1:
        return ["There is one rank."]
    if len(split.last_steps) < LEAST_INTERVALS:
        return [f"There are fewer than {LEAST_INTERVALS} log lines, which are too few to tell."]
    found = find_stragglers(split)
    return [_straggler_text(attempt, s) for s in found] or ["No rank was slower than the others for long."]


def _straggler_text(attempt: Attempt, slow: Straggler) -> str:
    host = attempt.host_of(slow.rank)
    what = {"data": "mostly to wait for data", "compute": "mostly to compute"}.get(
        slow.cause, f"to wait for data ({duration(slow.data_s)}) and to compute ({duration(slow.compute_s)})"
    )
    return (
        f"Rank {slow.rank}{f' on {host}' * bool(host)} was busy {slow.factor:.1f} times as long as the median of the "
        f"other ranks, in {slow.intervals} of {slow.of} log lines (steps {slow.first_step:,} to {slow.last_step:,}). "
        f"It took {duration(slow.surplus_s)} longer, {what}."
    )
