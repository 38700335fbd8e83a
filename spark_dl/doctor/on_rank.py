"""Collects the facts about the host of a rank for a diagnosis, and reaps what dead runs have left there.

Called on every rank, in a barrier task.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spark_dl.checks.storage import delete_probe, is_there, write_probe
from spark_dl.doctor import leftovers, links
from spark_dl.doctor.limited import Calls, within
from spark_dl.launch.rank import gpus
from spark_dl.launch.rank.peers import versions
from spark_dl.launch.rank.rendezvous import socket_interface
from spark_dl.launch.rank.sender import Reporter
from spark_dl.launch.rank.task import RankResult, local_folders
from spark_dl.launch.rank.tasks import host_of
from spark_dl.world import address_of, interface_of

WAITS = "waits"
"""Kind of the event that a rank has done its part, and waits for the other ranks."""
_SHM = "/dev/shm"  # noqa: S108 - where shared memory is, not a file


def examine(
    probes: Sequence[str], secret: bytes, timeout_s: float, files_s: float, device: str, *,
    reap: bool, report: Reporter,
) -> RankResult:  # fmt: skip
    """Returns the facts of this rank. Collective.

    probes: for each rank a file in the folder that all ranks must write to; empty to leave this out.
    secret: of the connections. timeout_s: of the driver's answer. device: `launch.device`.
    files_s: how long to wait for a disk or the folder, which may never answer.
    reap: whether to end and delete what dead runs have left. The first rank of each host does it.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    task, executor = context.partitionId(), context.getTaskInfos()[context.partitionId()].address
    host = host_of(executor)
    facts: dict[str, Any] = {"host": host, "executor": executor, "pid": os.getpid(), **versions()}
    facts |= {"place": leftovers.place(), "leftovers": None, **_gpus(device, context.resources())}
    try:
        address = address_of(host, socket_interface())
    except RuntimeError as error:
        address, facts["address_error"] = "127.0.0.1", str(error)
    facts |= {"address": address, "interface": interface_of(address) or "", "writes": "", "missing": []}
    late = f"no answer within {files_s:g} s: a dead mount?"
    with Calls() as files:
        written = files.start(lambda: write_probe(probes[task]) if probes else "")
        try:
            with links.listening(address, secret) as port:
                message = json.dumps([address, port, facts["place"]])
                report({"kind": WAITS})
                answers = report.exchange(message, timeout_s) or context.allGather(message)
                facts["time"] = time.time()  # all ranks get the answer at nearly the same time
                ports, places = zip(*(((a, p), place) for a, p, place in map(json.loads, answers)), strict=True)
                found = links.measure(task, ports, secret)
                if facts["place"] and places.index(facts["place"]) == task:
                    facts["leftovers"] = leftovers.look(reap=reap)
                facts["writes"] = within(written, files_s, late)
                report({"kind": WAITS})
                context.barrier()
            facts["mbit_per_s"] = [None if rate is None else rate * 8 / 1e6 for rate, _ in found]
            facts["link_errors"] = {str(other): why for other, (_, why) in enumerate(found) if why}
            with Calls() as disks:  # of what was reaped, too
                facts["disk_free_bytes"] = within(disks.start(_disk_free), files_s, late=None)
            facts |= _limits()
            if probes:
                facts |= _missing(probes, files, files_s) if written.done() else {}
                report({"kind": WAITS})
                context.barrier()  # until all have looked
        finally:
            if probes:
                deleted = files.start(functools.partial(delete_probe, probes[task]))
                within(deleted, files_s if written.done() else 0.0, None)
    return RankResult(task, json.dumps(facts))


def _missing(probes: Sequence[str], files: Calls, files_s: float) -> dict[str, Any]:
    """Returns which ranks have written files that this one does not see."""
    looked = files.start(lambda: [task for task, probe in enumerate(probes) if not is_there(probe)])
    return {"missing": within(looked, files_s, [])}


def _disk_free() -> int | None:
    return min(shutil.disk_usage(folder).free for folder in local_folders())


def _limits() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "shm_free_bytes": shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "hostname": socket.gethostname(),
    }  # fmt: skip


def _gpus(device: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the GPUs that this task uses or, if Spark has assigned none, that it sees.

    `own_gpus` are the identities of those that Spark has assigned.
    """
    found: dict[str, Any] = {"gpus": [], "own_gpus": []}
    if device == "cpu":
        return found
    try:
        own = gpus.gpus_of_task("auto", resources)
    except RuntimeError as error:
        return {**found, "gpu_error": str(error)}
    if not torch.cuda.is_available():
        return found
    seen, addresses = gpus.see_gpus(), gpus.addresses_of(resources)
    used = [gpu.index for gpu in own] or range(len(seen.uuids))
    found["gpus"] = [f"{torch.cuda.get_device_name(i)} {seen.identity(i)}" for i in used]
    found["own_gpus"] = [seen.identity(gpu.index, address) for gpu, address in zip(own, addresses, strict=True)]
    return found
