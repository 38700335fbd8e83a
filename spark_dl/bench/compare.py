"""The comparison of all ways to exchange gradients, section by section, and the report on it.

`compare` makes hosts on links of a set rate on this machine (`testbed`) and runs the sections there, with the driver on
a host of its own; `compare_on` runs them on the executors of a Spark session that is there. Each section is measured by
a module of its own; what follows from measurements alone (the cost model, large clusters) is computed here.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_dl.bench import cost, error_runtime, exchange, overlap, steps, testbed
from spark_dl.bench.profiles import PROFILES
from spark_dl.bench.work import METHODS as MODELLED
from spark_dl.bench.work import Exchange
from spark_dl.launch.session import build_session
from spark_dl.parallel import buckets

SECTIONS = ("exchange", "breakdown", "buckets", "scaling", "stragglers")
_SCALED = {"ddp": "backend", "ddp ring": "ring", "reduce_broadcast": "reduce_broadcast"}
"""Methods of the section `scaling`, and their all-reduce."""
_BUCKET_MIB = 25.0
"""Of the whole model: as many buckets as it has, a part of it has, too."""
_TIMEOUT_S = 7200.0


@dataclass(frozen=True)
class Options:
    """What is compared. Plain values, which travel to the driver's host as JSON."""

    hosts: tuple[int, ...] = (4,)
    """Numbers of hosts of the section `exchange`; the largest one is that of the sections after it."""
    rate_mbit: float | None = 200.0
    """Of each link, in each direction; of a cluster that is there, what is known of it."""
    mib: tuple[float, ...] = (1.0, 16.0, 64.0)
    """Sizes of the gradient."""
    methods: tuple[str, ...] = exchange.METHODS
    sections: tuple[str, ...] = SECTIONS
    repeats: int = 3
    scale: float = 0.25
    """Fraction of ResNet-50's parameters in the simulated steps; their compute takes as long as their communication."""
    scaling_ranks: tuple[int, ...] = (1, 2, 4, 8, 16)
    straggler_s: float = 0.1
    """Mean delay of each gradient in the section `stragglers`."""

    def __post_init__(self) -> None:
        for name, known in (("methods", exchange.METHODS), ("sections", SECTIONS)):
            unknown = [value for value in getattr(self, name) if value not in known]
            if unknown:
                raise ValueError(f"{name}: unknown {', '.join(unknown)}; known are {', '.join(known)}")


def compare(options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    """All sections on hosts of this machine. Raises RuntimeError where `testbed` cannot make them, saying why."""
    reason = testbed.unavailable()
    if reason:
        raise RuntimeError(f"no hosts can be made on this machine: {reason}; give --master for a cluster that is there")
    results: dict[str, Any] = {}
    for i, num_hosts in enumerate(sorted(options.hosts)):
        is_last = i == len(options.hosts) - 1
        sections = [s for s in options.sections if s != "scaling" and (s == "exchange" or is_last)]
        if sections:
            here = dataclasses.replace(options, hosts=(num_hosts,), sections=tuple(sections))
            _add(results, _on_testbed(here, show))
    if "scaling" in options.sections:
        results["scaling"] = _scaling(options, show)
    return {
        "about": _about(
            options, f"{_listed(options.hosts)} hosts on one machine, links of {options.rate_mbit:g} Mbit/s"
        ),
        **results,
        **model_of(results),
    }


def compare_on(spark: Any, folder: str, options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    """All sections but `scaling` on a cluster with one task slot on each host. `folder` is one that all hosts reach."""
    results = measure(spark, folder, options, same_clock=False, show=show)
    rate = f" of {options.rate_mbit:g} Mbit/s" if options.rate_mbit else ""
    return {
        "about": _about(options, f"{_listed(options.hosts)} hosts of {spark.conf.get('spark.master')}, links{rate}"),
        **results,
        **model_of(results),
    }


def measure(
    spark: Any, folder: str, options: Options, *, same_clock: bool, show: Callable[[str], None]
) -> dict[str, Any]:
    """The sections that run as Spark jobs. Called on the driver."""
    results: dict[str, Any] = {}
    num_hosts = max(options.hosts)
    if "exchange" in options.sections:
        results["exchange"] = exchange.measure(
            spark, f"{folder}/exchange", num_hosts=num_hosts, mib=options.mib, methods=options.methods,
            repeats=options.repeats, rate_mbit=options.rate_mbit, show=show,
        )  # fmt: skip
    if {"breakdown", "buckets"} & {*options.sections}:
        results |= overlap.measure(
            spark, f"{folder}/steps", num_hosts=num_hosts, scale=options.scale, repeats=options.repeats,
            sections=options.sections, methods=options.methods, same_clock=same_clock, show=show,
        )  # fmt: skip
    if "stragglers" in options.sections:
        results["stragglers"] = error_runtime.measure(
            spark, f"{folder}/stragglers", num_hosts=num_hosts, straggler_s=options.straggler_s, show=show
        )
    return results


def _on_testbed(options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    """`measure` in a process on the driver's host of a bed that is made for it."""
    with testbed.hosts(options.hosts[0], rate_mbit=options.rate_mbit) as bed, tempfile.TemporaryDirectory() as folder:
        show(f"starting Spark on {options.hosts[0]} hosts")
        master = bed.start_spark()
        settings = json.dumps({**dataclasses.asdict(options), "folder": folder, "master": master})
        command = [sys.executable, "-m", "spark_dl.bench.compare", settings, f"{folder}/results.json"]
        process = bed.popen(bed.driver, command)
        if process.wait(_TIMEOUT_S):
            raise RuntimeError(f"the driver on {bed.driver.name} ended with exit code {process.returncode}; see above")
        results: dict[str, Any] = json.loads(Path(folder, "results.json").read_text())
        return results


def _scaling(options: Options, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Weak and strong scaling on up to 16 hosts, without Spark: its executors would be too many for one machine."""
    rows = []
    compute_s = _balanced_compute_s(options)
    for ranks in options.scaling_ranks:
        with testbed.hosts(ranks, rate_mbit=options.rate_mbit) as bed:
            for (kind, share), (method, all_reduce) in itertools.product(
                (("weak", 1.0), ("strong", 1 / ranks)), _SCALED.items()
            ):
                settings = steps.Steps(
                    scale=options.scale, forward_s=share * compute_s / 3, backward_s=share * compute_s * 2 / 3,
                    all_reduce=all_reduce, num_steps=options.repeats, bucket_mib=_BUCKET_MIB * options.scale,
                )  # fmt: skip
                path = f"{bed.folder}/{kind}-{all_reduce}.json"
                module = [sys.executable, "-m", "spark_dl.bench.steps"]
                bed.run_ranks([*module, json.dumps(dataclasses.asdict(settings)), path], timeout_s=settings.timeout_s)
                step_s = json.loads(Path(path).read_text())["step_s"]
                rows.append({
                    "kind": kind, "method": method, "ranks": ranks, "step_s": step_s, "scale": options.scale,
                    "forward_s": settings.forward_s, "backward_s": settings.backward_s,
                })  # fmt: skip
                show(f"{kind} scaling, {ranks} ranks, {method}: {step_s:.3f} s")
    return rows


def with_efficiency(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], networks: Mapping[str, cost.Network]
) -> dict[str, Any]:
    """The row with its efficiency: against the same step on one rank and, in strong scaling, its share of it.

    With `predicted_efficiency`, where the network is known as the method finds it.
    """
    alone = next(r["step_s"] for r in rows if (r["kind"], r["method"], r["ranks"]) == (row["kind"], row["method"], 1))
    ideal = alone if row["kind"] == "weak" else alone / row["ranks"]
    found = {**row, "efficiency": ideal / row["step_s"]}
    if row["method"] in networks:
        found["predicted_efficiency"] = ideal / _predicted_step_s(row, networks[row["method"]])
    return found


def _predicted_step_s(row: Mapping[str, Any], network: cost.Network) -> float:
    """By the cost model of an all-reduce and the pipeline of DDP's buckets."""
    profile = PROFILES["resnet50"]().shrunk(row["scale"])
    sizes = [layer.gradient_bytes for layer in profile.backward_layers()]

    def all_reduce_s(num_bytes: float) -> float:
        return cost.cost(Exchange(_modelled(row["method"]), row["ranks"], num_bytes), network).seconds

    bucket_bytes = int(_BUCKET_MIB * row["scale"] * 2**20)
    ready_s = profile.ready_s(row["backward_s"])
    return float(row["forward_s"]) + buckets.backward_s(ready_s, sizes, bucket_bytes, all_reduce_s)


def _balanced_compute_s(options: Options) -> float:
    """Seconds of compute that equal those of a ring's communication on many hosts: 2 N bytes at the link's rate."""
    gradient_bytes = PROFILES["resnet50"]().shrunk(options.scale).gradient_bytes
    return 2 * gradient_bytes / ((options.rate_mbit or 1000.0) * 1e6 / 8)


def model_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that follow from the exchanges that were measured: `model`, `plan`, `crossings`, and `scaling` with
    its efficiency.

    For each method the smallest and the largest gradient, on the fewest and the most hosts, fit the model; all others
    are held out.
    """
    rows = [{**row, "kind": _modelled(row["method"])} for row in results.get("exchange", ())]
    networks, points, crossings = {}, [], []
    for method in dict.fromkeys(row["method"] for row in rows if row["kind"]):
        here = [row for row in rows if row["method"] == method]
        ends = {edge(row["mib"] for row in here) for edge in (min, max)}
        fitted = [row for row in here if row["mib"] in ends]
        networks[method] = cost.fit([cost.Point(_exchange(row), row["seconds"]) for row in fitted])
        for row in here:
            predicted = cost.cost(_exchange(row), networks[method]).seconds
            points.append({
                "method": method, "hosts": row["hosts"], "mib": row["mib"], "measured_s": row["seconds"],
                "predicted_s": predicted, "held_out": row not in fitted,
            })  # fmt: skip
    found: dict[str, Any] = {"model": points} if points else {}
    if scaling := results.get("scaling"):
        found["scaling"] = [with_efficiency(row, scaling, networks) for row in scaling]
    if "ddp" not in networks:
        return found
    hosts = max(row["hosts"] for row in rows)
    for method, network in networks.items():
        first, ring = (Exchange(_modelled(name), hosts, 0.0) for name in (method, "ddp"))
        size = cost.crossing_bytes(first, ring, network, networks["ddp"]) if method != "ddp" else None
        if size is not None:
            crossings.append({"method": method, "hosts": hosts, "mib": size / 2**20})
    gradient_bytes = PROFILES["resnet50"]().gradient_bytes
    plan = [
        {**row, "method": method}
        for method, network in networks.items()
        for row in cost.plan(gradient_bytes, {_modelled(method): network})
    ]
    return {**found, "crossings": crossings, "plan": plan}


def _modelled(method: str) -> str:
    """The name by which the cost model knows a method, or nothing."""
    known = {
        "ddp": "ring",
        "backend": "ring",
        "ddp ring": "ring",
        "horovod": "ring",
        "parameter_server sync": "parameter_server",
    }
    return known.get(method, method if method in MODELLED else "")


def _exchange(row: Mapping[str, Any]) -> Exchange:
    return Exchange(_modelled(row["method"]), row["hosts"], row["mib"] * 2**20)


def _add(results: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        results[name] = results[name] + value if name in results else value


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(v) for v in values)


def _about(options: Options, network: str) -> dict[str, Any]:
    import pyspark
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "network": network,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, PySpark {pyspark.__version__}",
        "repeats": options.repeats,
        "command": " ".join(["jobs/bench.py", *sys.argv[1:]]),
    }


def _main(settings: dict[str, Any], path: str) -> None:
    """The driver's process on a bed."""
    folder, master = settings.pop("folder"), settings.pop("master")
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    options = Options(**plain)
    spark = build_session("spark_dl bench exchange", master=master, conf={"spark.executor.memory": "1g"})
    try:
        results = measure(
            spark, folder, options, same_clock=True, show=lambda line: print(line, file=sys.stderr, flush=True)
        )
        Path(path).write_text(json.dumps(results))
    finally:
        spark.stop()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), sys.argv[2])
