"""Looks at a session and its cluster before a run: what would fail there, late or without a reason, and what to change.

The settings of Spark are read on the driver. Then a barrier job starts the ranks, which tell about their hosts, measure
the connections between each other and use the run folder. One rank of each host looks for what dead runs have left
there, and with `reap` ends and deletes it.
"""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spark_dl import storage
from spark_dl.config import Config, Launch
from spark_dl.doctor import leftovers, on_rank
from spark_dl.doctor.ask import ask_ranks
from spark_dl.doctor.findings import ERROR, OK, WARNING, Diagnosis, Finding, sort
from spark_dl.launch import preflight
from spark_dl.launch.rank.peers import TaskRecord, sharing, versions
from spark_dl.launch.session import find_session

_LEAST_DISK_BYTES = 1 << 30
_LEAST_SHM_BYTES = 64 << 20
_LEAST_FILES = 1024
_MOST_CLOCK_S = 2.0
_MOST_NAMES = 3

Ranks = Sequence[Mapping[str, Any]]


def diagnose(
    config: Config | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    reap: bool = False,
    spark: Any = None,
) -> Diagnosis:
    """Checks the session and the cluster for a run with these settings. Called on the driver. Takes seconds.

    Checked are the settings of Spark, the number of task slots, the versions on the executors, the connections between
    all pairs of ranks with their rates, GPUs, clocks, disks, shared memory and limits of the hosts, what dead runs have
    left on them and on the driver's, and whether all of them can use the run folder. Nothing is changed without `reap`.

    Args:
        config: of the run; of its settings, those of `launch` matter.
        run_dir: folder or URL of the run, which all hosts must be able to write to. By default it is not checked.
        spark: the session; by default that of this thread or of the process.
        reap: whether to end the processes that dead ranks have left on the hosts, and to delete temporary folders whose
            processes are dead. Only those of the same user are ended and deleted, and only what spark_dl has made.

    Raises:
        RuntimeError: If there is no session. What is wrong is in the result.

    Example:
        >>> print(spark_dl.diagnose(config, run_dir="runs/probe").text)
    """
    start, launch = time.perf_counter(), (config or Config()).launch
    spark = find_session(None, spark)
    findings = list(_of_settings(spark))
    ranks: list[dict[str, Any]] = []
    try:
        preflight.check(spark, launch, executors_wait_s=preflight.EXECUTORS_WAIT_S)
        findings.append(Finding("slots", OK, _slots(spark, launch.num_ranks)))
        ranks = ask_ranks(spark, launch, storage.absolute(run_dir) if run_dir else "", reap=reap)
    except (ValueError, RuntimeError) as error:
        what, _, change = str(error).rpartition("; ")
        name = "start of the ranks" if any(each.check == "slots" for each in findings) else "slots and settings"
        if isinstance(error.__cause__, TimeoutError):
            name = "answers of the ranks"
        findings.append(Finding(name, ERROR, what or change, change if what else ""))
        left_out = "not checked, as no ranks answered: versions, connections, clocks, devices, hosts, run_dir"
        findings.append(Finding("ranks", WARNING, left_out))
    if ranks:
        for check in (_versions, _links, _clocks, _hosts):
            findings += check(ranks)
        findings += _devices(ranks, launch)
        if run_dir:
            findings += _folder(ranks, str(run_dir))
    findings += _leftovers(_looked_at(ranks, reap=reap), is_reaped=reap)
    rates = tuple(tuple(rank["mbit_per_s"]) for rank in ranks)
    return Diagnosis(sort(findings), tuple(ranks), rates, time.perf_counter() - start)


def _of_settings(spark: Any) -> Iterator[Finding]:
    """Settings of the session that do harm later. Those that forbid a launch are errors of `preflight`."""
    if copies := preflight.speculation(spark):
        yield Finding("speculation", WARNING, *copies)


def _slots(spark: Any, num_ranks: int) -> str:
    slots = preflight.num_slots(spark)
    return f"{num_ranks} wanted" if slots is None else f"{num_ranks} wanted, {slots} there"


def _versions(ranks: Ranks) -> Iterator[Finding]:
    for what, own in versions().items():
        others = _grouped(ranks, operator.itemgetter(what))
        if set(others) == {own}:
            continue
        told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in others.items())
        is_needed = what in ("python", "torch", "spark_dl")
        differ = len(others) > 1 and is_needed
        yield Finding(
            f"version of {what}", ERROR if differ else WARNING, f"{own} on the driver; {told}",
            f"install the same version of {what} on the driver and on all executors",
        )  # fmt: skip
    yield Finding("versions", OK, ", ".join(f"{what} {own}" for what, own in versions().items()))


def _links(ranks: Ranks) -> Iterator[Finding]:
    for rank in ranks:
        if problem := rank.get("address_error"):
            yield Finding(
                "address", ERROR, f"{rank['host']}: {problem}", "add the host's name to its /etc/hosts, or to DNS"
            )
    broken = [(a, int(b), why) for a, rank in enumerate(ranks) for b, why in rank["link_errors"].items()]
    for a, b, why in broken[:8]:
        yield Finding(
            "connection", ERROR,
            f"{ranks[a]['host']} ({ranks[a]['address']}) cannot connect to {ranks[b]['host']} ({ranks[b]['address']}): "
            f"{why}",
            "allow connections between executors on all ports, and set GLOO_SOCKET_IFNAME (spark.executorEnv."
            "GLOO_SOCKET_IFNAME) if the hosts have several interfaces",
        )  # fmt: skip
    rates = sorted(rate for rank in ranks for rate in rank["mbit_per_s"] if rate is not None)
    if not rates:
        return
    between = {
        (ranks[a]["host"], ranks[b]["host"]): rate
        for a, rank in enumerate(ranks)
        for b, rate in enumerate(rank["mbit_per_s"])
        if rate is not None and ranks[a]["host"] != ranks[b]["host"]
    }
    usual = _usual(between)
    slow = {pair: rate for pair, rate in between.items() if rate < on_rank.SLOW_LINK * usual}
    told = ", ".join(f"{a} to {b} {rate:,.0f}" for (a, b), rate in list(slow.items())[:4])
    interfaces = ", ".join(_grouped(ranks, lambda rank: rank["interface"] or rank["address"]))
    median = rates[len(rates) // 2]
    text = f"{len(rates)} over {interfaces}, {rates[0]:,.0f} to {rates[-1]:,.0f} Mbit/s, median {median:,.0f}"
    yield Finding(
        "connections", WARNING if slow else OK, f"{text}; slow: {told}" if slow else text,
        "look at the network of these hosts: a step waits for the slowest link" if slow else "",
    )  # fmt: skip


def _usual(between: Mapping[tuple[str, str], float]) -> float:
    """Returns the median of the hosts' fastest links. Of 3 hosts with a slow one, 4 of the 6 links are slow."""
    best: dict[str, float] = {}
    for pair, rate in between.items():
        for host in pair:
            best[host] = max(best.get(host, 0.0), rate)
    return sorted(best.values())[len(best) // 2] if best else 0.0


def _clocks(ranks: Ranks) -> Iterator[Finding]:
    first, last = (f(ranks, key=lambda rank: rank["time"]) for f in (min, max))
    apart = last["time"] - first["time"]
    is_off = apart > _MOST_CLOCK_S
    yield Finding(
        "clocks", WARNING if is_off else OK,
        f"{apart:.1f} s apart" + (f": {first['host']} is behind {last['host']}" if is_off else ""),
        "synchronize the clocks of the hosts (NTP); logs and reports compare their times" if is_off else "",
    )  # fmt: skip


def _devices(ranks: Ranks, launch: Launch) -> Iterator[Finding]:
    for rank in ranks:
        if problem := rank.get("gpu_error"):
            what, _, change = problem.rpartition("; ")
            yield Finding("devices", ERROR, f"{rank['host']}: {what or change}", change if what else "")
    by_host: dict[str, dict[str, None]] = {}
    for rank in ranks:
        by_host.setdefault(rank["host"], {}).update(dict.fromkeys(rank["gpus"]))
    if not any(by_host.values()):
        yield Finding("devices", OK, "CPUs; no rank sees a GPU")
        return
    told = "; ".join(f"{host}: {', '.join(gpus) or 'none'}" for host, gpus in by_host.items())
    differ = len({len(rank["gpus"]) for rank in ranks}) > 1
    yield Finding(
        "devices", WARNING if differ else OK, told,
        "give all executors equally many GPUs, or set launch.device to cpu" if differ else "",
    )  # fmt: skip
    yield from _shared_gpus(ranks, launch)


def _shared_gpus(ranks: Ranks, launch: Launch) -> Iterator[Finding]:
    """GPUs that Spark has given to two ranks. A run refuses those of two executors, if it is not told to share them."""
    if launch.gpus_per_rank != "auto" and launch.gpus_per_rank < 1:
        return
    peers = [
        TaskRecord(partition=task, host=rank["host"], executor=rank["executor"], gpus=tuple(rank["own_gpus"]))
        for task, rank in enumerate(ranks)
    ]
    pairs = sharing(peers)
    told = [f"ranks {a.partition} on {a.host} and {b.partition} on {b.host} have {gpu}" for a, b, gpu in pairs]
    if any(a.executor != b.executor for a, b, _ in pairs):
        yield Finding(
            "shared GPUs", ERROR, "; ".join(told[:_MOST_NAMES]),
            "make spark.executor.resource.gpu.discoveryScript print other GPUs for each executor, or set "
            "launch.gpus_per_rank below 1 if ranks shall share a GPU",
        )  # fmt: skip
    elif pairs:
        yield Finding(
            "shared GPUs", WARNING, "; ".join(told[:_MOST_NAMES]),
            "set spark.task.resource.gpu.amount or launch.gpus_per_rank to 1 for a GPU for each rank: ranks that share "
            "one exchange gradients by Gloo, not NCCL",
        )  # fmt: skip


def _hosts(ranks: Ranks) -> Iterator[Finding]:
    limits: tuple[tuple[str, str, float, str, str], ...] = (
        ("disk", "disk_free_bytes", _LEAST_DISK_BYTES, "GiB free", "free space there, or set spark.local.dir"),
        ("shared memory", "shm_free_bytes", _LEAST_SHM_BYTES, "GiB free", "enlarge /dev/shm (docker: --shm-size)"),
        ("open files", "open_files", _LEAST_FILES, "allowed", "raise the limit of the executors: ulimit -n 65536"),
    )
    for check, key, least, unit, change in limits:
        known = {rank["host"]: rank[key] for rank in ranks if rank[key] is not None}
        if not known:
            continue
        host, value = min(known.items(), key=lambda item: item[1])
        is_short = value < least
        shown = f"{value / 2**30:.1f}" if "GiB" in unit else f"{value:,}"
        yield Finding(
            check, WARNING if is_short else OK, f"at least {shown} {unit}" if not is_short else
            f"{shown} {unit} on {host}", change if is_short else "",
        )  # fmt: skip


def _folder(ranks: Ranks, run_dir: str) -> Iterator[Finding]:
    change = (
        "set run_dir to a folder that all hosts can write to by the same path or URL; check its mount and permissions"
    )
    if bad := _grouped([rank for rank in ranks if rank["writes"]], lambda rank: rank["writes"]):
        why, hosts = next(iter(bad.items()))
        yield Finding("run_dir", ERROR, f"{', '.join(hosts)} cannot write to {run_dir}: {why}", change)
    elif apart := [rank for rank in ranks if rank["missing"]]:
        other = ranks[apart[0]["missing"][0]]["host"]
        yield Finding("run_dir", ERROR, f"{run_dir} on {apart[0]['host']} is another folder than on {other}", change)
    else:
        yield Finding(
            "run_dir", OK, f"all hosts ({len({rank['host'] for rank in ranks})}) write to {run_dir} and see it"
        )


def _looked_at(ranks: Ranks, *, reap: bool) -> Ranks:
    """Returns `host` and `leftovers` of each host, also of that of the driver."""
    here = leftovers.place()
    hosts = [{"host": rank["host"], "leftovers": rank["leftovers"]} for rank in ranks if rank["leftovers"]]
    if here and here not in [rank["place"] for rank in ranks]:
        hosts.append({"host": socket.gethostname(), "leftovers": leftovers.look(reap=reap)})
    return hosts


def _leftovers(hosts: Ranks, *, is_reaped: bool) -> Iterator[Finding]:
    told, left, is_complete = [], 0, True
    for each in hosts:
        by_done: dict[str, list[str]] = {}
        for one in each["leftovers"]["found"]:
            by_done.setdefault(one["done"], []).append(one["name"])
        for done, names in by_done.items():
            left += done not in leftovers.DONE
            shown = ", ".join([*names[:_MOST_NAMES], *(["..."] if len(names) > _MOST_NAMES else [])])
            told.append(f"{each['host']}: {len(names)} of dead runs {done}: {shown}")
        if not each["leftovers"]["is_complete"]:
            is_complete = False
            told.append(f"{each['host']}: a folder or a process did not answer within {leftovers.LIMIT_S:g} s")
    if not hosts:
        return
    changes = {
        f"run spark-dl doctor --reap{' again, or end and delete them yourself' if is_reaped else ''}": left,
        "look at the disks of spark.local.dir and the temporary folder of this host": not is_complete,
    }
    yield Finding(
        "leftovers", WARNING if left or not is_complete else OK,
        "; ".join(told) or f"none of dead runs on {', '.join(each['host'] for each in hosts)}",
        "; ".join(change for change, is_needed in changes.items() if is_needed),
    )  # fmt: skip


def _grouped(ranks: Ranks, value_of: Callable[[Any], str]) -> dict[str, list[str]]:
    """Returns the hosts of each value."""
    groups: dict[str, list[str]] = {}
    for rank in ranks:
        hosts = groups.setdefault(value_of(rank), [])
        if rank["host"] not in hosts:
            hosts.append(rank["host"])
    return groups
