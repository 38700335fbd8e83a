"""Runs the comparison of all ways to exchange gradients, section by section.

`compare` creates virtual hosts with limited links on this machine (`testbed`) and runs the sections there, with the
driver on its own host. `compare_on` runs them on the executors of an existing Spark session. Each section has a module.
A section that fails is left out, with the reason. `conclusions.py` derives further results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange import error_runtime, exchange, overlap, steps, waves
from benchmarks.exchange.conclusions import BUCKET_MIB, conclude, with_times_ring
from benchmarks.exchange.log import Log
from benchmarks.exchange.methods import METHODS, RING, measured_in
from benchmarks.exchange.options import Options, listed
from benchmarks.model.profiles import PROFILES
from benchmarks.testbed import backends, testbed
from benchmarks.testbed.links import read_links
from benchmarks.testbed.standalone import start_spark
from spark_dl import storage
from spark_dl.launch.preflight import num_slots
from spark_dl.launch.session import build_session

_ON_OTHER_BEDS = ("backends", "compression", "scaling")
_TIMEOUT_S = 7200.0
_MEMORY_MIB = 2048
"""Memory of each executor. With 1 GiB, blocks of 64 MiB keep its garbage collector busy."""

Results = dict[str, Any]


def compare(options: Options, log: Log) -> Results:
    """Runs all sections on virtual hosts of this machine. `left_out` has the parts that failed.

    Raises ValueError for more hosts than `testbed` supports, and RuntimeError, with the reason, if it cannot create
    any.
    """
    if max(options.hosts) > testbed.MAX_HOSTS:
        raise ValueError(
            f"hosts: at most {testbed.MAX_HOSTS} can be created on one machine, found {listed(options.hosts)}; "
            "set --master to use an existing cluster"
        )
    reason = testbed.unavailable()
    if reason:
        raise RuntimeError(f"cannot create hosts on this machine: {reason}; set --master to use an existing cluster")
    results: Results = {}
    for i, num_hosts in enumerate(sorted(options.hosts)):
        is_last = i == len(options.hosts) - 1
        sections = [s for s in options.sections if s not in _ON_OTHER_BEDS and (s == "exchange" or is_last)]
        if sections:
            here = dataclasses.replace(options, hosts=(num_hosts,), sections=tuple(sections))
            with log.attempt(f"{', '.join(sections)} on {num_hosts} hosts"):
                for name, value in _on_testbed(here, log).items():
                    results[name] = results[name] + value if name in results else value
    if "backends" in options.sections:
        with log.attempt("backends"):
            results["backends"] = _backends(options, log)
    if "compression" in options.sections and _methods("compression", options, log):
        with log.attempt("compression"):
            results["compression"] = _compression(options, results.get("exchange", []), log)
    if "scaling" in options.sections and _methods("scaling", options, log):
        results["scaling"] = _scaling(options, log)
    if not any(results.values()):
        raise RuntimeError("no results; see the log above")
    network = (
        f"{listed(options.hosts)} hosts on one machine, links of {_rate(options.rate_mbit)}, frames of {options.mtu} "
        f"bytes, TCP {options.congestion_control}"
    )
    return {"about": machine(network, options.repeats), **conclude(results, log), "left_out": log.left_out}


def compare_on(spark: Any, folder: str, options: Options, log: Log) -> Results:
    """Runs all sections except `backends`, `compression` and `scaling` on a cluster with one task slot on each host.

    All hosts must have access to `folder`. Its new files are deleted at the end. Raises ValueError for more than one
    number of hosts, and RuntimeError if the application does not have exactly one task slot on each of these hosts.
    """
    if len(options.hosts) != 1:
        raise ValueError(f"hosts: expected one number with --master, found {listed(options.hosts)}")
    (num_hosts,) = options.hosts
    reached = sorted(read_links(spark, num_hosts).keys())
    workers = [host for host in reached if not host.startswith("driver ")]
    slots = num_slots(spark)
    if len(workers) != num_hosts or slots not in (num_hosts, None):
        raise RuntimeError(
            f"hosts: {num_hosts} tasks ran on {', '.join(workers)}, and the application has {slots} task slots; "
            f"expected {num_hosts}, one on each of {num_hosts} hosts; start one executor on each host "
            "(spark.executor.instances or, on a standalone cluster, spark.cores.max), and set spark.executor.cores "
            "to spark.task.cpus"
        )
    for section in _ON_OTHER_BEDS:
        if section in options.sections:
            log.leave_out(section, "needs virtual hosts on this machine")
    with own_folder(folder) as here:
        results = measure(spark, here, options, same_clock=False, log=log)
    network = f"{num_hosts} hosts of {spark.conf.get('spark.master')}, links of {_rate(options.rate_mbit)}"
    return {"about": machine(network, options.repeats), **conclude(results, log), "left_out": log.left_out}


@contextlib.contextmanager
def own_folder(url: str) -> Iterator[str]:
    """Yields the URL of a new folder in `folder`, and deletes it at the end."""
    folder = storage.join(url, f"spark_dl-bench-{uuid.uuid4().hex}")
    try:
        yield folder
    finally:
        storage.delete(folder)


def measure(
    spark: Any,
    folder: str,
    options: Options,
    *,
    same_clock: bool,
    log: Log,
    save: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Runs the sections that are Spark jobs. Called on the driver.

    `save` gets all results so far, after each section and after each row of `exchange`. A section that fails is left
    out.
    """
    num_hosts = max(options.hosts)
    results: Results = {}

    def exchanges() -> Results:
        methods = _methods("exchange", options, log)
        return {"exchange": exchange.measure(
            spark, f"{folder}/exchange", num_hosts=num_hosts, mib=options.mib, methods=methods,
            repeats=options.repeats, rate_mbit=options.rate_mbit, log=log,
            save=lambda rows: save({**results, "exchange": rows}),
        )}  # fmt: skip

    def simulated_steps() -> Results:
        return overlap.measure(
            spark, f"{folder}/steps", num_hosts=num_hosts, profile=options.profile, scale=options.scale,
            repeats=options.repeats, sections=options.sections, methods=options.methods, same_clock=same_clock, log=log,
        )  # fmt: skip

    def few_slots() -> Results:
        rows = waves.measure(spark, f"{folder}/waves", num_hosts=num_hosts, repeats=options.repeats, show=log.show)
        return {"waves": rows}

    def stragglers() -> Results:
        methods = [m for m in _methods("stragglers", options, log) if m in error_runtime.strategies(num_hosts)]
        return {"stragglers": error_runtime.measure(
            spark, f"{folder}/stragglers", num_hosts=num_hosts, straggler_s=options.straggler_s, methods=methods,
            log=log,
        )}  # fmt: skip

    parts: list[tuple[set[str], Callable[[], Results]]] = [
        ({"exchange"}, exchanges), ({"breakdown", "buckets"}, simulated_steps), ({"waves"}, few_slots),
        ({"stragglers"}, stragglers),
    ]  # fmt: skip
    for names, part in parts:
        if asked := names & {*options.sections}:
            with log.attempt(", ".join(sorted(asked))):
                results |= part()
            save(results)
    return results


def _methods(section: str, options: Options, log: Log) -> list[str]:
    """Returns the selected methods that a section measures, and logs if there are none."""
    methods = measured_in(section, options.methods)
    if not methods:
        log.leave_out(section, "measures none of the selected methods")
    return methods


def _bed(num_hosts: int, options: Options) -> contextlib.AbstractContextManager[testbed.Bed]:
    return testbed.hosts(
        num_hosts, rate_mbit=options.rate_mbit, mtu=options.mtu, congestion_control=options.congestion_control
    )


def _on_testbed(options: Options, log: Log) -> Results:
    """Runs `measure` in a process on the driver's host of a new bed."""
    with _bed(options.hosts[0], options) as bed:
        log.show(f"starting Spark on {options.hosts[0]} hosts")
        master = start_spark(bed, memory_mib=_MEMORY_MIB)
        settings = json.dumps({**dataclasses.asdict(options), "folder": str(bed.folder), "master": master})
        path = bed.folder / "results.json"
        process = bed.popen(bed.driver, [sys.executable, "-m", "benchmarks.exchange.compare", settings, str(path)])
        try:
            code = process.wait(_TIMEOUT_S)
            ended = f"ended with exit code {code}; see the log above" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"took longer than {_TIMEOUT_S:g} s; choose fewer --sections, --methods or --mib"
        results: Results = json.loads(path.read_text()) if path.exists() else {}
        log.left_out += results.pop("left_out", [])
        if ended:
            log.leave_out(f"the rest on {options.hosts[0]} hosts", f"the driver on {bed.driver.name} {ended}")
        if not any(results.values()):
            raise RuntimeError(f"no results on {options.hosts[0]} hosts; see the log above")
        return results


def _backends(options: Options, log: Log) -> list[dict[str, Any]]:
    """Measures the all-reduce of Gloo, NCCL and MPI, each alone, with the largest number of hosts and gradient."""
    with _bed(max(options.hosts), options) as bed:
        return backends.measure(
            bed, mib=max(options.mib), repeats=options.repeats, rate_mbit=options.rate_mbit, show=log.show
        )


def _compression(options: Options, rows: Sequence[Mapping[str, Any]], log: Log) -> list[dict[str, Any]]:
    """Measures exchanges with and without compression, at the set rate (from `rows`) and on links without a limit."""
    hosts, mib = max(options.hosts), sorted(options.mib)[len(options.mib) // 2]
    methods = tuple(measured_in("compression", options.methods))
    here = dataclasses.replace(
        options, hosts=(hosts,), mib=(mib,), rate_mbit=None, methods=methods, sections=("exchange",)
    )
    limited = [r for r in rows if (r["hosts"], r["mib"]) == (hosts, mib) and r["method"] in methods]
    if not limited:
        log.show("compression at the set rate")
        limited = _on_testbed(dataclasses.replace(here, rate_mbit=options.rate_mbit), log).get("exchange", [])
    log.show("compression on links without a limit")
    found = []
    for rate_mbit, measured in ((options.rate_mbit, limited), (None, _on_testbed(here, log).get("exchange", []))):
        ring = {r["method"]: r["bytes_per_rank"] for r in measured}.get(RING)
        found += [
            {**row, "rate_mbit": rate_mbit, "bytes_factor": row["bytes_per_rank"] / ring if ring else None}
            for row in with_times_ring(measured)
        ]
    return found


def _scaling(options: Options, log: Log) -> list[dict[str, Any]]:
    """Measures weak and strong scaling on up to 16 hosts, without Spark, whose executors need too much memory."""
    rows: list[dict[str, Any]] = []
    todo = [(kind, method) for kind in ("weak", "strong") for method in measured_in("scaling", options.methods)]
    for ranks in sorted(options.scaling_ranks):
        with (
            log.attempt(f"scaling to {ranks} ranks"),
            _bed(ranks, options) as bed,
        ):
            for kind, method in tuple(todo):
                try:
                    rows.append(_scaled_step(bed, kind, method, ranks, options))
                except RuntimeError as error:  # more ranks would fail, too
                    log.leave_out(f"{kind} scaling of {method} to {ranks} ranks and more", str(error))
                    todo.remove((kind, method))
                else:
                    log.show(f"{kind} scaling, {ranks} ranks, {method}: {rows[-1]['step_s']:.3f} s")
    return rows


def _scaled_step(bed: testbed.Bed, kind: str, method: str, ranks: int, options: Options) -> dict[str, Any]:
    """Measures a row of the section `scaling`. Raises RuntimeError if the ranks fail."""
    backward_s = _balanced_backward_s(options)
    share, all_reduce = (
        1 / ranks if kind == "strong" else 1.0,
        getattr(METHODS[method].parallel, "all_reduce", "backend"),
    )
    settings = steps.Steps(
        profile=options.profile, scale=options.scale, forward_s=share * backward_s / 2, backward_s=share * backward_s,
        parallel={"all_reduce": all_reduce}, num_steps=options.repeats, bucket_mib=BUCKET_MIB * options.scale,
    )  # fmt: skip
    path = f"{bed.folder}/{kind}-{all_reduce}.json"
    command = [sys.executable, "-m", "benchmarks.exchange.steps", json.dumps(dataclasses.asdict(settings)), path]
    bed.run_ranks(command, timeout_s=settings.timeout_s)
    return {
        "kind": kind, "method": method, "ranks": ranks, "step_s": json.loads(Path(path).read_text())["step_s"],
        "profile": options.profile, "scale": options.scale, "forward_s": settings.forward_s,
        "backward_s": settings.backward_s,
    }  # fmt: skip


def _balanced_backward_s(options: Options) -> float:
    """Returns seconds of a backward pass that takes as long as a ring on many hosts: 2 N bytes at the link's rate."""
    gradient_bytes = PROFILES[options.profile]().shrunk(options.scale).gradient_bytes
    return 2 * gradient_bytes / ((options.rate_mbit or 1000.0) * 1e6 / 8)


def _rate(mbit: float | None) -> str:
    return f"{mbit:g} Mbit/s" if mbit else "an unknown rate"


def machine(network: str, repeats: int) -> dict[str, Any]:
    """Returns what a report says about a measurement: when, where and how it was made."""
    import pyspark
    import torch

    return {
        "date": time.strftime("%Y-%m-%d"),
        "network": network,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, PySpark {pyspark.__version__}",
        "repeats": repeats,
        "command": shlex.join(["jobs/bench.py", *sys.argv[1:]]),
    }


def _main(settings: dict[str, Any], path: str) -> None:
    """Runs the driver's process on a bed."""
    folder, master = settings.pop("folder"), settings.pop("master")
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    options = Options(**plain)
    spark = build_session(
        "spark_dl bench exchange",
        master=master,
        conf={"spark.executor.memory": f"{_MEMORY_MIB}m", "spark.python.worker.memory": f"{_MEMORY_MIB}m"},
    )
    log = Log(lambda line: print(line, file=sys.stderr, flush=True))

    def save(results: Results) -> None:
        storage.write_bytes(path, json.dumps({**results, "left_out": log.left_out}).encode())

    try:
        measure(spark, folder, options, same_clock=True, log=log, save=save)
    finally:
        spark.stop()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), sys.argv[2])
