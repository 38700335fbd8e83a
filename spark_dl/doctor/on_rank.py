"""What a rank does for a diagnosis: collects facts about its host, reaps what dead runs left, measures the network.

Called on every rank, in a barrier task. Each rank listens on a free port of its address, and sends to the others in
turn, first to the next one, so that all send at the same time to different ranks. A connection begins with the secret
of the diagnosis; others are closed.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import resource
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from spark_dl.checks.storage import delete_probe, is_there, write_probe
from spark_dl.doctor import leftovers
from spark_dl.doctor.limited import Calls, within
from spark_dl.launch.rank import gpus
from spark_dl.launch.rank.peers import versions
from spark_dl.launch.rank.rendezvous import socket_interface
from spark_dl.launch.rank.sender import Reporter
from spark_dl.launch.rank.task import RankResult, local_folders
from spark_dl.launch.rank.tasks import host_of
from spark_dl.world import address_of, interface_of

CONNECT_S = 3.0
SLOW_LINK = 0.5
"""A link between hosts below this part of the usual rate is slow."""
_MORE_PROBES = 2
_SEND_S = 0.15
_MOST_BYTES = 64 << 20
_CHUNK = bytes(1 << 18)
_SECRET_BYTES = 32
_COUNT = struct.Struct("!Q")

WAITS = "waits"
"""Kind of the event that a rank has done its part, and waits for the other ranks."""
_SHM = "/dev/shm"  # noqa: S108 - where shared memory is, not a file


@contextlib.contextmanager
def listening(address: str, secret: bytes) -> Iterator[int]:
    """Receives what other ranks send, for the block. Yields the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(128)
        thread = threading.Thread(target=_accept, args=(listener, secret), name="spark_dl doctor", daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, secret: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_receive, args=(connection, secret), name="spark_dl doctor", daemon=True).start()


def _receive(connection: socket.socket, secret: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(CONNECT_S)
        sent = b""
        while len(sent) < _SECRET_BYTES:
            if not (part := connection.recv(_SECRET_BYTES - len(sent))):
                return
            sent += part
        if not hmac.compare_digest(sent, secret):
            return
        buffer, count = bytearray(1 << 18), 0
        while received := connection.recv_into(buffer):
            count += received
        connection.sendall(_COUNT.pack(count))


def measure(rank: int, places: Sequence[tuple[str, int]], secret: bytes) -> list[tuple[float | None, str]]:
    """Returns for each rank the bytes per second to it, or None and why there is no connection.

    A link that looks slow beside the others of this rank is measured again: a host that is busy for a moment is no slow
    link. places: address and port of each rank.
    """
    measured: list[tuple[float | None, str]] = [(None, "") for _ in places]
    for step in range(1, len(places)):
        other = (rank + step) % len(places)
        try:
            measured[other] = (_rate(*places[other], secret), "")
        except OSError as error:
            measured[other] = (None, str(error) or type(error).__name__)
    rates = {
        other: rate
        for other, (rate, _) in enumerate(measured)
        if rate is not None and places[other][0] != places[rank][0]
    }
    slow = SLOW_LINK * max(rates.values(), default=0.0)
    for other, rate in rates.items():
        for _ in range(_MORE_PROBES):
            if rate < slow:
                with contextlib.suppress(OSError):  # there is a connection, as the first rate shows
                    rate = max(rate, _rate(*places[other], secret))
        measured[other] = (rate, "")
    return measured


def _rate(address: str, port: int, secret: bytes) -> float:
    with socket.create_connection((address, port), CONNECT_S) as connection:
        connection.sendall(secret)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < _SEND_S and count < _MOST_BYTES:
            connection.sendall(_CHUNK)
            count += len(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while len(answer) < _COUNT.size:
            if not (part := connection.recv(_COUNT.size - len(answer))):
                raise ConnectionError("the other rank has closed the connection")
            answer += part
        seconds = time.perf_counter() - start
    if _COUNT.unpack(answer)[0] != count:
        raise ConnectionError(f"{_COUNT.unpack(answer)[0]} of {count} bytes arrived")
    return count / seconds


def examine(
    probes: Sequence[str], secret: bytes, timeout_s: float, files_s: float, device: str, *,
    reap: bool, report: Reporter,
) -> RankResult:  # fmt: skip
    """Returns the facts of this rank. Collective.

    Args:
        probes: for each rank a file in the folder that all ranks must write to; empty to leave this out.
        secret: of the connections.
        timeout_s: of the driver's answer.
        device: `launch.device`.
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
            with listening(address, secret) as port:
                message = json.dumps([address, port, facts["place"]])
                report({"kind": WAITS})
                answers = report.exchange(message, timeout_s) or context.allGather(message)
                facts["time"] = time.time()  # all ranks get the answer at nearly the same time
                ports, places = zip(*(((a, p), place) for a, p, place in map(json.loads, answers)), strict=True)
                rates = measure(task, ports, secret)
                if facts["place"] and places.index(facts["place"]) == task:
                    facts["leftovers"] = leftovers.look(reap=reap)
                facts["writes"] = within(written, files_s, late)
                report({"kind": WAITS})
                context.barrier()
            facts["mbit_per_s"] = [None if rate is None else rate * 8 / 1e6 for rate, _ in rates]
            facts["link_errors"] = {str(other): why for other, (_, why) in enumerate(rates) if why}
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
    facts: dict[str, Any] = {"gpus": [], "own_gpus": []}
    if device == "cpu":
        return facts
    try:
        of_task = gpus.gpus_of_task("auto", resources)
    except RuntimeError as error:
        return {**facts, "gpu_error": str(error)}
    if not torch.cuda.is_available():
        return facts
    seen, addresses = gpus.see_gpus(), gpus.addresses_of(resources)
    used = [gpu.index for gpu in of_task] or range(len(seen.uuids))
    facts["gpus"] = [f"{torch.cuda.get_device_name(i)} {seen.identity(i)}" for i in used]
    facts["own_gpus"] = [seen.identity(gpu.index, address) for gpu, address in zip(of_task, addresses, strict=True)]
    return facts
