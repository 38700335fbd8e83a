"""What follows from measured exchanges: factors, the fitted cost model and its errors, crossings, large clusters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spark_dl.bench.model import cost
from spark_dl.bench.model.profiles import PROFILES
from spark_dl.bench.model.work import METHODS as MODELLED
from spark_dl.bench.model.work import Exchange, work
from spark_dl.parallel.exchange import buckets

BUCKET_MIB = 25.0
"""Of the whole model: as many buckets as it has, a part of it has, too."""
_RINGS = ("ddp", "ddp ring", "ddp fp16", "ddp powersgd", "horovod", "backend")
_ALL_GATHERS = ("ddp threshold", "ddp topk")
Row = Mapping[str, Any]
Rows = Sequence[Row]


def conclude(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results with what follows from those that are there: `exchange` has the factor by which the ring is faster
    (`times_ring`), `scaling` its efficiency, and there are `model`, `crossings` and `plan`.

    The model of each method is fitted to the smallest and the largest gradient on the fewest and on the most hosts; all
    others are held out. Of what is compressed, N is the bytes that are sent of a gradient, as they were counted. What
    goes in buckets has the calls and messages of each.
    """
    found = dict(results)
    rows = results.get("exchange") or ()
    networks: dict[str, cost.Network] = {}
    shares: dict[str, float] = {}
    points: list[dict[str, Any]] = []
    for method in dict.fromkeys(row["method"] for row in rows if kind_of(row["method"])):
        here = [row for row in rows if row["method"] == method]
        ends = [{edge(row[name] for row in here) for edge in (min, max)} for name in ("mib", "hosts")]
        fitted = [row for row in here if row["mib"] in ends[0] and row["hosts"] in ends[1]]
        shares[method] = _share(fitted)
        networks[method] = cost.fit([cost.Point(_exchange(row, shares[method]), row["seconds"]) for row in fitted])
        points += [{
            "method": method, "hosts": row["hosts"], "mib": row["mib"], "measured_s": row["seconds"],
            "predicted_s": cost.cost(_exchange(row, shares[method]), networks[method]).seconds,
            "held_out": row not in fitted,
        } for row in here]  # fmt: skip
    if rows:
        found["exchange"] = with_times_ring(rows)
    if points:
        found["model"] = points
        found["plan"] = _plan(networks, shares)
    if "ddp" in networks:
        found["crossings"] = _crossings(networks, shares, max(row["hosts"] for row in rows))
    if scaling := results.get("scaling"):
        found["scaling"] = [with_efficiency(row, scaling, networks) for row in scaling]
    return found


def with_times_ring(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The rows with how many times as long as DDP's ring they take, of the same gradient on as many hosts."""
    rows = list(rows)
    ring = {(row["hosts"], row["mib"]): row["seconds"] for row in rows if row["method"] == "ddp"}
    seconds = [ring.get((row["hosts"], row["mib"])) for row in rows]
    return [{**row, "times_ring": row["seconds"] / s if s else None} for row, s in zip(rows, seconds, strict=True)]


def kind_of(method: str) -> str:
    """The name by which the cost model knows a method, or nothing."""
    if method in _RINGS:
        return "ring"
    if method in _ALL_GATHERS:  # every rank sends what it has to all others
        return "naive"
    if method.startswith("parameter_server "):
        return "parameter_server"
    return method if method in MODELLED else ""


def _share(rows: Rows) -> float:
    """How much of a gradient a method sends, by the bytes that were counted for its largest one; 1 if all of it."""
    if not rows[0]["method"].startswith("ddp ") or rows[0]["method"] == "ddp ring":
        return 1.0
    largest = max(row["mib"] for row in rows)
    counted = [
        row["bytes_per_rank"] / work(_exchange(row, 1.0)).bytes_per_rank for row in rows if row["mib"] == largest
    ]
    return float(statistics.mean(counted))


def _exchange(row: Row, share: float) -> Exchange:
    return _exchange_of(row["method"], row["hosts"], row["mib"] * 2**20, share)


def _exchange_of(method: str, num_ranks: int, gradient_bytes: float, share: float = 1.0) -> Exchange:
    """What a method does with a gradient of which it sends a share; buckets are those of the whole gradient."""
    return Exchange(kind_of(method), num_ranks, gradient_bytes * share, bucket_bytes=_bucket_bytes(method) * share)


def _bucket_bytes(method: str) -> float:
    return BUCKET_MIB * 2**20 if method.startswith("ddp") or method == "horovod" else math.inf


def _crossings(networks: Mapping[str, cost.Network], shares: Mapping[str, float], hosts: int) -> list[dict[str, Any]]:
    """Where a method that sends whole gradients is faster than the ring for some sizes only."""
    found = []
    ring = _exchange_of("ddp", hosts, 0.0)
    for method, network in networks.items():
        if method == "ddp" or shares[method] != 1:
            continue
        at = cost.crossing(_exchange_of(method, hosts, 0.0), ring, network, networks["ddp"])
        if at is not None:
            faster = "below" if at.first_is_faster_below else "above"
            found.append({"method": method, "hosts": hosts, "mib": at.num_bytes / 2**20, "faster": faster})
    return found


def _plan(networks: Mapping[str, cost.Network], shares: Mapping[str, float]) -> list[dict[str, Any]]:
    gradient_bytes = PROFILES["resnet50"]().gradient_bytes
    return [
        {**row, "method": method}
        for method, network in networks.items()
        for row in cost.plan(
            gradient_bytes * shares[method],
            {kind_of(method): network},
            bucket_bytes=_bucket_bytes(method) * shares[method],
        )
    ]


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
        return cost.cost(Exchange(kind_of(row["method"]), row["ranks"], num_bytes), network).seconds

    ready_s = profile.ready_s(row["backward_s"])
    bucket_bytes = int(BUCKET_MIB * row["scale"] * 2**20)
    return float(row["forward_s"]) + buckets.backward_s(ready_s, sizes, bucket_bytes, all_reduce_s)
