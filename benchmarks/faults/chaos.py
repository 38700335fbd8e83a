"""Trains under random faults on virtual hosts, and compares what a run ends with to a run without faults.

Each run has two real faults, which its seed draws: a rank is killed or stopped, an executor is killed, a host is
unplugged or loses frames. At its end, weights, optimizer and generators must have the bits of an undisturbed run, each
row must have been used once in each epoch, and nothing may be left. All runs are in one Spark session, one after
another: each shows as well that the session has survived what went before.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.cluster import BOUND_S, Cluster
from benchmarks.faults.draw import draw
from benchmarks.faults.job import EPOCHS, STRATEGIES, TIMEOUT_S, Job
from benchmarks.faults.ledger import Ledger, read_ledger, write_rows
from benchmarks.faults.state import checksums, state_of
from benchmarks.testbed import testbed
from spark_dl.rundir import checkpoint

HOSTS = 3
_STEPS = 24
"""Steps of an epoch."""
_RESTARTS = 10


@dataclass(frozen=True)
class Options:
    seeds: int = 20
    first_seed: int = 0
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    out: str | None = None
    """JSON file for the rows of all runs."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds: expected at least 1, found {self.seeds}")
        if unknown := [name for name in self.strategies if name not in STRATEGIES]:
            raise ValueError(f"strategies: unknown {', '.join(unknown)}; expected some of {', '.join(STRATEGIES)}")


@dataclass(frozen=True)
class Row:
    """A run with faults."""

    strategy: str
    seed: int
    faults: Sequence[Mapping[str, Any]]
    """Those that hit a running rank."""
    restarts: int
    seconds: float
    equal: bool
    """Whether all parts of the state have the checksums of those of the undisturbed run."""
    differs: Sequence[str]
    """The parts that have not."""
    lost_rows: int
    repeated_rows: int
    hang: bool
    leftovers: Sequence[str]
    error: str | None


def measure(options: Options) -> dict[str, Any]:
    """Trains once without faults for each strategy, and with faults for each seed and strategy. Needs root on Linux.

    Returns the number of `seeds`; of `faults` that hit a running rank; of seeds all of whose runs were `equal` to the
    undisturbed ones; of uses of rows that were lost or repeated; of `hangs` and of `leftovers`.
    Raises RuntimeError if hosts cannot be created on this machine, or a run without faults fails.
    """
    if reason := testbed.unavailable():
        raise RuntimeError(f"cannot create hosts on this machine: {reason}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, contextlib.ExitStack() as stack:
        num_rows = write_rows(f"{folder}/data", _STEPS)
        cluster = stack.enter_context(Cluster(HOSTS))
        names = (f"{folder}/run-{i}" for i in itertools.count())

        def job(strategy: str, restarts: int) -> Job:
            return Job(
                dataset=f"{folder}/data", run_dir=next(names), rows=num_rows, strategy=strategy, num_ranks=HOSTS,
                max_restarts=restarts,
            )  # fmt: skip

        whole = {strategy: _undisturbed(cluster, job(strategy, 0)) for strategy in options.strategies}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for strategy in options.strategies:
                row = _disturbed(cluster, job(strategy, _RESTARTS), seed, whole[strategy])
                rows.append(row)
                _show(row)
                if row.hang:
                    cluster.restart()
        if left := cluster.close():
            rows[-1] = dataclasses.replace(rows[-1], leftovers=[*rows[-1].leftovers, *left])
    if options.out:
        Path(options.out).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    for line in table(rows):
        print(line, file=sys.stderr)
    return summary(rows)


def _undisturbed(cluster: Cluster, job: Job) -> dict[str, str]:
    """Returns the checksums of a run without faults."""
    start = time.perf_counter()
    end = cluster.train(job, [])
    if end.error or end.is_late or end.restarts:
        raise RuntimeError(f"{job.strategy}: a run without faults has failed: {end}")
    sums, ledger = _state(job)
    if ledger != Ledger(lost=0, repeated=0) or end.leftovers:
        raise RuntimeError(f"{job.strategy}: a run without faults has {ledger}, and left {list(end.leftovers)}")
    print(f"{job.strategy}: undisturbed in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return sums


def _disturbed(cluster: Cluster, job: Job, seed: int, expected: Mapping[str, str]) -> Row:
    faults = draw(f"{seed} {job.strategy}", num_ranks=HOSTS, steps=_STEPS * EPOCHS, timeout_s=TIMEOUT_S)
    start = time.perf_counter()
    end = cluster.train(job, faults)
    seconds = time.perf_counter() - start
    sums, ledger = _state(job) if end.error is None and not end.is_late else ({}, Ledger(lost=0, repeated=0))
    differs = [name for name, value in expected.items() if sums.get(name) != value]
    return Row(
        job.strategy, seed, [dataclasses.asdict(fault) for fault in end.done], end.restarts, round(seconds, 1),
        not differs, differs, ledger.lost, ledger.repeated, end.is_late, sorted(end.leftovers), end.error,
    )  # fmt: skip


def _state(job: Job) -> tuple[dict[str, str], Ledger]:
    saved = checkpoint.find(job.run_dir)
    state = state_of(saved)
    return checksums(state), read_ledger(state["weights"], EPOCHS)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the figures of all runs. See `measure`."""
    seeds = {row.seed for row in rows}
    return {
        "seeds": len(seeds),
        "faults": sum(len(row.faults) for row in rows),
        "equal": len(seeds - {row.seed for row in rows if not row.equal}),
        "lost_rows": sum(row.lost_rows for row in rows),
        "repeated_rows": sum(row.repeated_rows for row in rows),
        "hangs": sum(row.hang for row in rows),
        "leftovers": sum(len(row.leftovers) for row in rows),
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each strategy."""
    for strategy in dict.fromkeys(row.strategy for row in rows):
        own = [row for row in rows if row.strategy == strategy]
        kinds = collections.Counter(fault["kind"] for row in own for fault in row.faults)
        figures = summary(own)
        yield (
            f"{strategy}: {len(own)} runs, {figures['equal']} equal, {figures['hangs']} hangs, "
            f"{figures['leftovers']} leftovers, {sum(row.restarts for row in own)} restarts; "
            + ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
        )


def _show(row: Row) -> None:
    how = "equal" if row.equal else f"differs in {', '.join(row.differs)}"
    faults = "; ".join(_fault(fault) for fault in row.faults)
    left = f"; left {', '.join(row.leftovers)}" if row.leftovers else ""
    failed = f"; no end within {BOUND_S:g} s" if row.hang else f"; {row.error}" if row.error else ""
    what = f"seed {row.seed}, {row.strategy}: {how}, {row.restarts} restarts, {row.seconds:.1f} s"
    print(f"{what} ({faults}){left}{failed}", file=sys.stderr, flush=True)


def _fault(fault: Mapping[str, Any]) -> str:
    lasts = "" if fault["seconds"] is None else f" for {fault['seconds']:.1f} s"
    return f"{fault['kind']} (rank {fault['rank']}, step {fault['step']}){lasts}"
