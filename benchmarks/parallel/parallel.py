"""Measures the ways to train models that are cut or sharded, section by section, on virtual hosts of this machine.

    held        bytes that a rank holds at three points of a step: DDP, and the stages of ZeRO
    activations bytes of activations, kept, and computed again
    sent        bytes that a rank sends in a step, by the counters of the interface of its host
    bubbles     pipelines of layers that sleep: bubble and throughput of each schedule, with a timeline
    pipedream   PipeDream beside GPipe with as many rows in a step
    plans       all plans of a small chain on limited links, beside what the planner predicts
    vgg16       data parallelism, GPipe, 1F1B and PipeDream for PipeDream's profile of VGG-16, on limited links

Each section has a module, which runs on the ranks. A section that fails is left out, with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.exchange.compare import machine
from benchmarks.exchange.log import Log
from benchmarks.literature.literature import PROFILES
from benchmarks.literature.pipedream import find_profile
from benchmarks.literature.profile_text import chain, read_graph
from benchmarks.parallel import vgg16
from benchmarks.parallel.plans import rank_correlation, times_best
from benchmarks.testbed import testbed

NUM_RANKS = 4
SECTIONS = ("held", "activations", "sent", "bubbles", "pipedream", "plans", "vgg16")
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Options:
    """Of the command."""

    sections: tuple[str, ...] = SECTIONS
    rate_mbit: float = 200.0
    """Rate of each link in each direction, in the section `plans`. `vgg16` has rates of its own, and in the others,
    links have no limit."""
    repeats: int = 3
    """Steps of each schedule of a pipeline, of which the median is taken."""
    profiles: str = PROFILES
    """Folder with PipeDream's profiles, for the section `vgg16`."""
    arguments: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Further arguments of the function of a section, by its name."""

    def __post_init__(self) -> None:
        if unknown := [name for name in self.sections if name not in SECTIONS]:
            raise ValueError(f"sections: unknown {', '.join(unknown)}; expected some of {', '.join(SECTIONS)}")
        if not self.rate_mbit > 0:
            raise ValueError(f"rate_mbit: expected a number above 0, found {self.rate_mbit!r}")
        if self.repeats < 1:
            raise ValueError(f"repeats: expected at least 1, found {self.repeats}")


def measure(options: Options, log: Log) -> dict[str, Any]:
    """Returns the rows of each section. `left_out` has the sections that failed.

    Raises RuntimeError, with the reason, if hosts cannot be created on this machine, or no section has a result.
    """
    if reason := testbed.unavailable():
        raise RuntimeError(f"cannot create hosts on this machine: {reason}")
    results: dict[str, Any] = {}
    for name in options.sections:
        start = time.perf_counter()
        with log.attempt(name):
            results[name] = _measure(name, options)
            log.show(f"{name}: measured in {time.perf_counter() - start:.0f} s")
    if not results:
        raise RuntimeError("no results; see the log above")
    network = (
        f"{NUM_RANKS} hosts on one machine, links without a limit; for plans, links of {options.rate_mbit:g} Mbit/s, "
        "and for vgg16, of " + " and ".join(f"{vgg16.link_mbit(rate):.3g} Mbit/s" for rate in vgg16.RATES_GBIT)
    )
    return {"about": machine(network, options.repeats), **results, "left_out": log.left_out}


def _measure(name: str, options: Options) -> Any:
    arguments = options.arguments.get(name, {})
    if name == "vgg16":
        layers = [
            (node.forward_s, node.backward_s, node.output_bytes, node.parameter_bytes)
            for node in chain(read_graph(find_profile(options.profiles, name)))
        ]
        rows = [
            _on_ranks(name, {"layers": layers, "rate_gbit": rate, **arguments}, vgg16.link_mbit(rate))
            for rate in vgg16.RATES_GBIT
        ]
        return [row for of_rate in rows for row in of_rate]
    if name == "bubbles":
        arguments = {"repeats": options.repeats, **arguments}
    return _on_ranks(name, arguments, options.rate_mbit if name == "plans" else None)


def _on_ranks(section: str, arguments: Mapping[str, Any], rate_mbit: float | None) -> Any:
    """Runs a section with one rank on each host."""
    with testbed.hosts(NUM_RANKS, rate_mbit=rate_mbit) as bed:
        path = bed.folder / "result.json"
        command = [sys.executable, "-m", "benchmarks.parallel.ranks", section, json.dumps(arguments), str(path)]
        bed.run_ranks(command, timeout_s=_TIMEOUT_S, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
        return json.loads(path.read_text())


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the main figures of the sections that were measured."""
    found: dict[str, Any] = {}
    if rows := results.get("held"):
        forms = dict.fromkeys(row["form"] for row in rows)
        found["held_bytes_per_parameter"] = {f: max(r["held"] for r in rows if r["form"] == f) for f in forms}
    if rows := results.get("activations"):
        found["activations"] = [{key: row[key] for key in ("form", "zero_stage", "held", "formula")} for row in rows]
    if rows := results.get("sent"):
        found["sent_per_gradient"] = {row["form"]: row["per_gradient"] for row in rows if row["of_gradients"]}
        found["sent_times_formula"] = {row["form"]: row["times_formula"] for row in rows}
    if rows := results.get("bubbles"):
        keys = ("schedule", "stages", "micro_batches", "measured", "formula")
        found["bubble"] = [{key: row[key] for key in keys} for row in rows if row["formula"] is not None]
        found["throughput"] = _throughput(rows)
    if rows := results.get("pipedream"):
        ours, gpipe = rows
        found["pipedream"] = {
            "of_ideal": ours["of_ideal"], "times_gpipe": ours["steps_per_s"] / gpipe["steps_per_s"],
        }  # fmt: skip
    if rows := results.get("plans"):
        found["planner"] = {
            "times_best": times_best(rows), "rank_correlation": rank_correlation(rows), "plans": len(rows),
        }  # fmt: skip
    if rows := results.get("vgg16"):
        keys = ("form", "rate_gbit", "mini_batch_s", "predicted_s", "times_data_parallel")
        found["vgg16"] = [{key: row[key] for key in keys} for row in rows]
    return found


def _throughput(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ("schedule", "stages", "stages_per_rank", "micro_batches", "step_s", "passes_per_s")
    return [{key: row[key] for key in keys} for row in rows]
