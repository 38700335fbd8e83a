"""Results derived from measured exchanges: factors, crossings, the cost model and its errors, large clusters. Pure.

No result goes beyond what was measured or counted. A crossing lies between two measured sizes. The model of a method is
fitted to the smallest and largest gradients on the fewest and most hosts, and checked on the other points. Without
other points there is no model, and a model that fails the check is not used. Figures of large clusters are counted,
without a fit.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.exchange.log import Log
from benchmarks.exchange.methods import METHODS, RING
from benchmarks.model.profiles import PROFILES
from spark_dl.parallel.cost import cost
from spark_dl.parallel.cost.cost import ExchangeSize, work
from spark_dl.parallel.exchange import buckets

BUCKET_MIB = 25.0
"""Buckets of the whole model. A scaled model has the same number."""
CLEAR = 1.05
"""Smallest relative difference that counts. The same exchange differs by up to 5 % between runs."""
MOST_ERROR = 0.25
"""Largest accepted relative error of a model on held-out points."""
RANKS = (16, 64, 256, 1024, 4096)
"""Numbers of ranks of the large clusters."""
Row = Mapping[str, Any]
Rows = Sequence[Row]


def conclude(results: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """Returns the results with derived results: `times_ring` in `exchange`, efficiency in `scaling`, and the sections
    `model`, `crossings` and `plan`, if they have rows.

    A method whose model cannot be checked, or fails the check, is left out of `model`, with the reason.
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
    """Returns the rows with their time divided by that of DDP's ring, for the same gradient and number of hosts."""
    rows = list(rows)
    ring = {(row["hosts"], row["mib"]): row["seconds"] for row in rows if row["method"] == RING}
    seconds = [ring.get((row["hosts"], row["mib"])) for row in rows]
    return [{**row, "times_ring": row["seconds"] / s if s else None} for row, s in zip(rows, seconds, strict=True)]


def _of_methods(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Returns the rows of each method in the cost model, by the method's name."""
    counted = [row for row in rows if row["method"] in METHODS and METHODS[row["method"]].counted_as]
    return [(m, [r for r in counted if r["method"] == m]) for m in dict.fromkeys(r["method"] for r in counted)]


@dataclass(frozen=True)
class _Model:
    """The cost model of one method, and its errors."""

    network: cost.Network
    points: list[dict[str, Any]]
    error: float
    """Largest relative error on held-out points."""


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
                f"the error on held-out points is up to {model.error:.0%}; expected at most {MOST_ERROR:.0%}",
            )
    if unchecked:
        log.leave_out(
            f"the cost model of {', '.join(unchecked)}",
            "it is fitted to the smallest and largest gradients and checked on the others; measure three sizes (--mib)",
        )
    return found


def _fit(method: str, rows: Rows, fitted: Rows) -> _Model:
    """Returns the exchange of a row, for the cost model.

    With compression, N is the counted bytes of the compressed gradient. With buckets, each has its own calls and
    messages.
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
    """Returns the fraction of a gradient that a method sends, by the counted bytes of the largest gradient."""
    if not METHODS[method].is_compressed:
        return 1.0
    largest = max(row["mib"] for row in rows)
    counted = [
        row["bytes_per_rank"] / work(_exchange(row, 1.0)).bytes_per_rank for row in rows if row["mib"] == largest
    ]
    return float(statistics.mean(counted))


def _exchange(row: Row, share: float) -> ExchangeSize:
    return _exchange_of(row["method"], row["hosts"], row["mib"] * 2**20, share)


def _exchange_of(name: str, num_ranks: int, gradient_bytes: float, share: float = 1.0) -> ExchangeSize:
    """Returns the exchange of a method that sends a fraction of a gradient. Buckets are those of the whole gradient."""
    method = METHODS[name]
    bucket_bytes = BUCKET_MIB * 2**20 * share if method.is_bucketed else math.inf
    return ExchangeSize(method.counted_as, num_ranks, gradient_bytes * share, bucket_bytes=bucket_bytes)


def _crossings(rows: Rows) -> list[dict[str, Any]]:
    """Returns the sizes between which a method without compression changes from faster to slower than the ring.

    Sizes with equal times are skipped.
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
    """Returns messages and bytes of an exchange of ResNet-50's gradient, for `RANKS` ranks and for the measured hosts.

    The latter also have the bytes that were counted for the largest gradient, scaled to ResNet-50.
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
    """Returns the row with its efficiency, relative to the step on one rank (divided by the ranks in strong scaling).

    With `predicted_efficiency` if the method has a model. Without both if the step on one rank was not measured.
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
    """Predicts a step with the cost model of an all-reduce and the pipeline of DDP's buckets."""
    if row["ranks"] == 1:
        return float(row["forward_s"] + row["backward_s"])
    profile = PROFILES[row["profile"]]().shrunk(row["scale"])
    sizes = [layer.gradient_bytes for layer in profile.backward_layers()]

    def all_reduce_s(num_bytes: float) -> float:
        return cost.cost(ExchangeSize(METHODS[row["method"]].counted_as, row["ranks"], num_bytes), network).seconds

    ready_s = profile.ready_s(row["backward_s"])
    bucket_bytes = int(BUCKET_MIB * row["scale"] * 2**20)
    return float(row["forward_s"]) + buckets.backward_s(ready_s, sizes, bucket_bytes, all_reduce_s)
