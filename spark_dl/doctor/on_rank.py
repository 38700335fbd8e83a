"""Collects the facts about the host of a rank for a diagnosis, and reaps what dead runs have left there.

Called on every rank, in a barrier task.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import time
from typing import Any

import torch

from spark_dl import storage
from spark_dl.checks.storage import delete_probe, is_there
from spark_dl.doctor import leftovers, links
from spark_dl.launch.peers import versions
from spark_dl.launch.rank.sender import Reporter
from spark_dl.launch.rank.task import RankResult, local_folders
from spark_dl.launch.rank.tasks import host_of
from spark_dl.world import interface_of, local_address

_SHM = "/dev/shm"  # noqa: S108 - where shared memory is, not a file


def examine(run_dir: str, secret: bytes, timeout_s: float, *, reap: bool, report: Reporter) -> RankResult:
    """Returns the facts of this rank. Collective.

    run_dir: the folder that all ranks must write to; empty to leave this out. secret: of the connections.
    reap: whether to end and delete what dead runs have left. The first rank of each host does it.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    task, infos = context.partitionId(), context.getTaskInfos()
    host = host_of(infos[task].address)
    facts: dict[str, Any] = {"host": host, "pid": os.getpid(), **versions(), "gpus": _gpus()}
    facts |= {"place": leftovers.place(), "leftovers": None}
    try:
        address = local_address(host)
    except RuntimeError as error:
        address, facts["address_error"] = "127.0.0.1", str(error)
    with links.listening(address, secret) as port:
        probe = storage.join(run_dir, f"probe-doctor-{secret.hex()[:8]}-{task}") if run_dir else ""
        facts |= {"address": address, "interface": interface_of(address) or "", "writes": _write(probe)}
        message = json.dumps([address, port, facts["place"]])
        answers = report.exchange(message, timeout_s) or context.allGather(message)
        facts["time"] = time.time()  # all ranks get the answer at nearly the same time
        ports, places = zip(*(((each[0], each[1]), each[2]) for each in map(json.loads, answers)), strict=True)
        found = links.measure(task, ports, secret)
        facts["mbit_per_s"] = [None if rate is None else rate * 8 / 1e6 for rate, _ in found]
        facts["link_errors"] = {str(other): why for other, (_, why) in enumerate(found) if why}
        if facts["place"] and places.index(facts["place"]) == task:
            facts["leftovers"] = leftovers.look(reap=reap)
        context.barrier()
    facts |= _limits()  # also of what was reaped
    if run_dir:
        probes = [f"probe-doctor-{secret.hex()[:8]}-{other}" for other in range(len(infos))]
        facts["missing"] = [t for t, name in enumerate(probes) if not is_there(storage.join(run_dir, name))]
        context.barrier()  # until all have looked
        delete_probe(probe)
    return RankResult(task, json.dumps(facts))


def _limits() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "disk_free_bytes": min(shutil.disk_usage(folder).free for folder in local_folders()),
        "shm_free_bytes": shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "hostname": socket.gethostname(),
    }  # fmt: skip


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_properties(i).uuid}"
            for i in range(torch.cuda.device_count())]  # fmt: skip


def _write(probe: str) -> str:
    """Returns why this rank cannot write and read a file; empty if it can, or shall not."""
    if not probe:
        return ""
    content = b"spark_dl writes here, and deletes this"
    try:
        storage.write_bytes(probe, content)
        return "" if storage.read_bytes(probe) == content else "it has not the content that was written"
    except (OSError, ValueError) as error:
        return str(error)
