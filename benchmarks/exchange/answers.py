"""The results of the gradient exchange benchmark in sentences: answers to common questions about all-reduce in Spark.

The results are those of `report.py`. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.exchange.methods import METHODS, RING

Rows = Sequence[Mapping[str, Any]]


def answers(results: Mapping[str, Any]) -> list[str]:
    """Returns one sentence for each question that the results can answer."""
    parts = (_cost_of_shuffles, _crossings, _compression, _overlap, _waves, _waiting)
    return [sentence for part in parts for sentence in part(results)]


def _cost_of_shuffles(results: Mapping[str, Any]) -> list[str]:
    rows = results.get("exchange") or []
    if not any(r["method"] == RING for r in rows):
        return []
    hosts = max(r["hosts"] for r in rows)
    mib = max(r["mib"] for r in rows if r["hosts"] == hosts)
    here = {r["method"]: r for r in rows if (r["hosts"], r["mib"]) == (hosts, mib)}
    factors = [
        f"{name} takes {row['seconds'] / here[RING]['seconds']:.1f} times as long"
        for name, row in here.items()
        if METHODS[name].how == "job" and RING in here
    ]
    if not factors:
        return []
    ring = here[RING]
    allowed = f" ({ring['ratio_to_limit']:.0%} of what the links allow)" if ring["ratio_to_limit"] else ""
    return [
        f"Cost of a shuffle compared to a ring: for {mib:g} MiB on {hosts} hosts, the ring takes "
        f"{ring['seconds']:.2f} s{allowed}; {', '.join(factors)}."
    ]


def _crossings(results: Mapping[str, Any]) -> list[str]:
    return [
        f"On {row['hosts']} hosts {row['method']} is faster than DDP's ring at {row['faster_mib']:g} MiB and slower at "
        f"{row['slower_mib']:g} MiB." for row in results.get("crossings") or []
    ]  # fmt: skip


def _compression(results: Mapping[str, Any]) -> list[str]:
    found = []
    for method, rows in _by_method(results.get("compression") or []):
        rows = [r for r in rows if r["times_ring"]]
        if method != RING and rows:
            cases = [
                f"{_rate(r['rate_mbit'])} it sends {1 / r['bytes_factor']:.1f} times fewer bytes and takes "
                f"{r['times_ring']:.2f} times as long" for r in rows
            ]  # fmt: skip
            found.append(f"{method} against whole gradients, {rows[0]['mib']:g} MiB: {'; '.join(cases)}.")
    return ["When compression helps. " + " ".join(found)] if found else []


def _by_method(rows: Rows) -> list[tuple[str, list[Mapping[str, Any]]]]:
    return [(m, [r for r in rows if r["method"] == m]) for m in dict.fromkeys(r["method"] for r in rows)]


def _rate(mbit: float | None) -> str:
    return f"at {mbit:g} Mbit/s" if mbit else "on links without a limit"


def _waves(results: Mapping[str, Any]) -> list[str]:
    rows = results.get("waves") or []
    trees = sorted((r for r in rows if r["method"] == "tree_reduce"), key=lambda r: int(r["ranks"]))
    refused = [r for r in rows if r.get("refused_s") is not None]
    if len(trees) < 2 or not refused:
        return []
    few, many, ring = trees[0], trees[-1], refused[0]
    return [
        f"Fewer slots than ranks: with {many['ranks']} ranks on {many['slots']} slots, treeReduce runs tasks in waves. "
        f"A step takes {many['step_s']:.2f} s instead of {few['step_s']:.2f} s with {few['ranks']} ranks. All ranks of "
        f"a ring must run at once, so DDP stops with an error after {ring['refused_s']:.1f} s."
    ]


def _overlap(results: Mapping[str, Any]) -> list[str]:
    rows = {r["method"]: r for r in results.get("breakdown") or []}
    if RING not in rows:
        return []
    ring = rows[RING]
    whole = ring["hidden_s"] + ring["exposed_s"]
    text = (
        f"Overlap: DDP hides {ring['hidden_s']:.2f} of {whole:.2f} s of communication behind the "
        f"backward pass, and its step takes {ring['step_s']:.2f} s, {ring['times_largest']:.2f} times the larger of "
        "compute and communication"
    )
    if "tree_reduce" in rows:
        tree = rows["tree_reduce"]
        text += (
            f"; a task of treeReduce ends before it sends, hides {tree['hidden_s']:.2f} s, and takes "
            f"{tree['step_s']:.2f} s, {tree['times_largest']:.2f} times"
        )
    return [text + "."]


def _waiting(results: Mapping[str, Any]) -> list[str]:
    rows = results.get("stragglers") or []
    if len(rows) < 2:
        return []
    ordered = sorted(rows, key=lambda r: float(r["seconds"]))
    first, last = ordered[0], ordered[-1]
    return [
        f"Cost of slow ranks: with the same rows, {first['method']} finishes after {first['seconds']:.0f} s (accuracy "
        f"{first['accuracy']:.3f}), {last['method']} after {last['seconds']:.0f} s ({last['accuracy']:.3f})."
    ]
