"""What follows from measured exchanges: factors, crossings, the cost model and its errors, large clusters. Pure.

Nothing here goes beyond what was measured or counted. A crossing lies between two measured sizes. The model of a method
is fitted to the smallest and the largest gradient, on the fewest and on the most hosts, and only where other points are
left to check it; only a model that has passed is used, beside what was measured. What is said of large clusters is
counted, and takes no fit.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_dl.bench.exchange.log import Log
from spark_dl.bench.exchange.methods import METHODS, RING
from spark_dl.bench.model import cost
from spark_dl.bench.model.profiles import PROFILES
from spark_dl.bench.model.work import Exchange, work
from spark_dl.parallel.exchange import buckets

BUCKET_MIB = 25.0
"""Of the whole model: as many buckets as it has, a part of it has, too."""
CLEAR = 1.05
"""From one run to the next the same exchange differs by up to 5 %: methods that are nearer to each other are equal."""
MOST_ERROR = 0.25
"""Largest relative error on held-out points with which a model is used."""
RANKS = (16, 64, 256, 1024, 4096)
"""Of the large clusters."""
Row = Mapping[str, Any]
Rows = Sequence[Row]


def conclude(results: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """The results with what follows from those that are there: `exchange` has the factor by which the ring is faster
    (`times_ring`), `scaling` its efficiency, and there are `model`, `crossings` and `plan`, if anything is in them.

    A method whose model cannot be checked, or does not pass, is left out of it with the reason.
    """
    found = dict(results)
    models: dict[str, _Model] = {}
    if rows := results.get("exchange") or ():
        found["exchange"] = with_times_ring(rows)
        models = _models(rows, log)
        parts = {
            "model": [point for model in models.values() for point in model.points],
            "crossings": _crossings(found["exchange"]), "plan": _plan(rows),
        }  # fmt: skip
        found |= {name: part for name, part in parts.items() if part}
    if scaling := results.get("scaling"):
        networks = {method: model.network for method, model in models.items() if model.error <= MOST_ERROR}
        found["scaling"] = [with_efficiency(row, scaling, networks) for row in scaling]
    return found


def with_times_ring(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows with how many times as long as DDP's ring they take, of the same gradient on as many hosts."""
    rows = list(rows)
    ring = {(row["hosts"], row["mib"]): row["seconds"] for row in rows if row["method"] == RING}
    seconds = [ring.get((row["hosts"], row["mib"])) for row in rows]
    return [{**row, "times_ring": row["seconds"] / s if s else None} for row, s in zip(rows, seconds, strict=True)]


def _of_methods(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each method that the cost model counts, by its name."""
    counted = [row for row in rows if row["method"] in METHODS and METHODS[row["method"]].counted_as]
    return [(m, [r for r in counted if r["method"] == m]) for m in dict.fromkeys(r["method"] for r in counted)]


@dataclass(frozen=True)
class _Model:
    """The cost model of one method, and how it fits."""

    network: cost.Network
    points: list[dict[str, Any]]
    error: float
    """The largest relative one on held-out points."""


def _models(rows: Rows, log: Log) -> dict[str, _Model]:
    found, unchecked = {}, []
    for method, here in _of_methods(rows):
        ends = [{edge(row[name] for row in here) for edge in (min, max)} for name in ("mib", "hosts")]
        fitted = [row for row in here if row["mib"] in ends[0] and row["hosts"] in ends[1]]
        if len(ends[0]) < 2 or len(fitted) == len(here):
            unchecked.append(method)
            continue
        found[method] = model = _fit(method, here, fitted)
        if model.error > MOST_ERROR:
            log.leave_out(
                f"predictions of the cost model for {method}",
                f"on held-out points it is up to {model.error:.0%} off; expected at most {MOST_ERROR:.0%}",
            )
    if unchecked:
        log.leave_out(
            f"the cost model of {', '.join(unchecked)}",
            "it is fitted to the smallest and the largest gradient and checked on those between; measure three sizes "
            "(--mib)",
        )
    return found


def _fit(method: str, rows: Rows, fitted: Rows) -> _Model:
    """Of what is compressed, N is the bytes that are sent of a gradient, as they were counted. What goes in buckets has
    the calls and messages of each.
    """
    share = _share(method, fitted)
    network = cost.fit([cost.Point(_exchange(row, share), row["seconds"]) for row in fitted])
    points = [{
        "method": method, "hosts": row["hosts"], "mib": row["mib"], "measured_s": row["seconds"],
        "predicted_s": cost.cost(_exchange(row, share), network).seconds, "held_out": row not in fitted,
    } for row in rows]  # fmt: skip
    error = max(abs(p["predicted_s"] / p["measured_s"] - 1) for p in points if p["held_out"])
    return _Model(network, points, error)


def _share(method: str, rows: Rows) -> float:
    """How much of a gradient a method sends, by the bytes that were counted for its largest one; 1 if all of it."""
    if not METHODS[method].is_compressed:
        return 1.0
    largest = max(row["mib"] for row in rows)
    counted = [
        row["bytes_per_rank"] / work(_exchange(row, 1.0)).bytes_per_rank for row in rows if row["mib"] == largest
    ]
    return float(statistics.mean(counted))


def _exchange(row: Row, share: float) -> Exchange:
    return _exchange_of(row["method"], row["hosts"], row["mib"] * 2**20, share)


def _exchange_of(name: str, num_ranks: int, gradient_bytes: float, share: float = 1.0) -> Exchange:
    """What a method does with a gradient of which it sends a share; buckets are those of the whole gradient."""
    method = METHODS[name]
    bucket_bytes = BUCKET_MIB * 2**20 * share if method.is_bucketed else math.inf
    return Exchange(method.counted_as, num_ranks, gradient_bytes * share, bucket_bytes=bucket_bytes)


def _crossings(rows: Rows) -> list[dict[str, Any]]:
    """Where a method that sends whole gradients is clearly faster than the ring at one measured size, and clearly
    slower at the next one at which they are not equal.
    """
    found = []
    for method, all_hosts in _of_methods(rows):
        if METHODS[method].is_compressed:
            continue
        for hosts in sorted({row["hosts"] for row in all_hosts}):
            here = [row for row in all_hosts if row["hosts"] == hosts and row["times_ring"]]
            clear = [row for row in here if not 1 / CLEAR <= row["times_ring"] <= CLEAR]
            for one, other in itertools.pairwise(sorted(clear, key=lambda row: float(row["mib"]))):
                if (one["times_ring"] < 1) != (other["times_ring"] < 1):
                    faster, slower = sorted((one, other), key=lambda row: float(row["times_ring"]))
                    found.append({"method": method, "hosts": hosts, "faster_mib": faster["mib"],
                                  "slower_mib": slower["mib"]})  # fmt: skip
    return found


def _plan(rows: Rows) -> list[dict[str, Any]]:
    """What an exchange of ResNet-50's gradient asks of `RANKS` ranks, and of as many as were measured at the most, with
    what was counted there for the largest gradient, in proportion.
    """
    gradient_bytes = PROFILES["resnet50"]().gradient_bytes
    found = []
    for method, here in _of_methods(rows):
        if METHODS[method].is_compressed:
            continue
        measured = max(here, key=lambda row: (row["hosts"], row["mib"]))
        for ranks in (measured["hosts"], *(ranks for ranks in RANKS if ranks > measured["hosts"])):
            done = work(_exchange_of(method, ranks, gradient_bytes))
            row = {"method": method, "ranks": ranks, "messages": done.messages, "bytes_per_rank": done.bytes_per_rank,
                   "busiest_link_bytes": done.busiest_link_bytes}  # fmt: skip
            if ranks == measured["hosts"] and "busiest_link_bytes" in measured:
                times = measured["busiest_link_bytes"] / (measured["mib"] * 2**20)
                row["measured_busiest_bytes"] = times * gradient_bytes
            found.append(row)
    return found


def with_efficiency(row: Row, rows: Rows, networks: Mapping[str, cost.Network]) -> dict[str, Any]:
    """The row with its efficiency: against the same step on one rank and, in strong scaling, its share of it.

    With `predicted_efficiency`, where the network is known as the method finds it. Without either where the step on one
    rank was not measured.
    """
    alone = next((r for r in rows if (r["kind"], r["method"], r["ranks"]) == (row["kind"], row["method"], 1)), None)
    if alone is None:
        return {**row}
    share = 1 if row["kind"] == "weak" else 1 / row["ranks"]
    found = {**row, "efficiency": alone["step_s"] * share / row["step_s"]}
    if row["method"] in networks:
        network = networks[row["method"]]
        found["predicted_efficiency"] = _predicted_step_s(alone, network) * share / _predicted_step_s(row, network)
    return found


def _predicted_step_s(row: Row, network: cost.Network) -> float:
    """By the cost model of an all-reduce and the pipeline of DDP's buckets."""
    if row["ranks"] == 1:
        return float(row["forward_s"] + row["backward_s"])
    profile = PROFILES[row["profile"]]().shrunk(row["scale"])
    sizes = [layer.gradient_bytes for layer in profile.backward_layers()]

    def all_reduce_s(num_bytes: float) -> float:
        return cost.cost(Exchange(METHODS[row["method"]].counted_as, row["ranks"], num_bytes), network).seconds

    ready_s = profile.ready_s(row["backward_s"])
    bucket_bytes = int(BUCKET_MIB * row["scale"] * 2**20)
    return float(row["forward_s"]) + buckets.backward_s(ready_s, sizes, bucket_bytes, all_reduce_s)
