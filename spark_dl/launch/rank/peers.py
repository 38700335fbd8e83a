"""The facts that ranks exchange before the first collective operation: versions, hosts and GPUs.

Each task sends a `TaskRecord`, and gets those of all tasks. So all tasks compute the same ranks, backend and errors.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy
import pyarrow
import torch
import torch.distributed as dist

from spark_dl._version import __version__
from spark_dl.config import Launch
from spark_dl.launch.rank import gpus

_MUST_AGREE = ("python", "torch", "spark_dl", "device_type")


class VersionError(RuntimeError):
    """Hosts have different versions. Another attempt would find the same."""

    is_retryable = False


@dataclass(frozen=True, kw_only=True)
class TaskRecord:
    """Data about a task, which all tasks exchange."""

    partition: int
    host: str
    executor: str
    """Host and port of the Spark executor; unique for each process under torchrun."""
    address: str = ""
    port: int = 0
    """Port of the store, of the task that opens it."""
    device: str = "cpu"
    gpus: tuple[str, ...] = ()
    """Identities of the task's GPUs; one with a UUID is unique everywhere, others on their host. Empty on the CPU."""
    names: tuple[str, ...] = ()
    """Names of these GPUs for CUDA_VISIBLE_DEVICES."""
    sees: str = ""
    """Names of all GPUs that the process sees. Empty on the CPU."""
    is_slice: bool = False
    """Whether the GPU is a MIG instance."""
    python: str = platform.python_version()
    torch: str = torch.__version__
    spark_dl: str = __version__
    pid: int = 0

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]

    @property
    def gpu_keys(self) -> dict[tuple[str, str], str]:
        """Returns the GPUs by what is the same for two tasks on one GPU. A UUID is the same in different containers."""
        return {("" if gpu.startswith(gpus.UUID_STARTS) else self.host, gpu): gpu for gpu in self.gpus}

    @property
    def place(self) -> tuple[str, str]:
        """Returns what ranks with a common `LOCAL_RANK` numbering share: the host, and the GPUs that they see."""
        return self.host, self.sees

    def to_json(self) -> str:
        return json.dumps(vars(self))


def from_json(message: str) -> TaskRecord:
    """Returns the peer of a message."""
    fields = json.loads(message)
    return TaskRecord(**{**fields, "gpus": tuple(fields["gpus"]), "names": tuple(fields["names"])})


def describe(
    partition: int, host: str, executor: str, own: Sequence[torch.device], addresses: Sequence[str], *,
    address: str = "", port: int = 0,
) -> TaskRecord:  # fmt: skip
    """Returns the peer of this process. # own: the GPUs of the task; addresses: theirs of Spark"""
    peer = TaskRecord(
        partition=partition, host=host, executor=executor, address=address, port=port,
        device=str(gpus.first(tuple(own))), pid=os.getpid(),
    )  # fmt: skip
    if not own:
        return peer
    seen, indices = gpus.see_gpus(), [gpu.index for gpu in own]
    by_task = [*addresses, *[""] * (len(indices) - len(addresses))]
    about = {
        "gpus": tuple(seen.identity(i, address) for i, address in zip(indices, by_task, strict=True)),
        "names": tuple(seen.name_of(i) for i in indices),
        "sees": ",".join(seen.identity(i) for i in range(len(seen.uuids))),
        "is_slice": seen.are_slices,
    }
    return TaskRecord(**{**vars(peer), **about})


def check_peers(peers: Sequence[TaskRecord], launch: Launch) -> None:
    """Raises RuntimeError if versions or device types of the ranks differ, or if two have the same GPU by mistake.

    Tasks of one executor have the same GPU only if Spark's amount for a task is below 1. Two executors have it only if
    both have discovered it; `launch.gpus_per_rank` below 1 allows this, too.
    """
    for what in _MUST_AGREE:
        values = [getattr(p, what) for p in peers]
        if len(set(values)) > 1:
            table = ", ".join(f"task {p.partition} on {p.host}: {v}" for p, v in zip(peers, values, strict=True))
            same = "set launch.device, or use executors with equal devices" if what == "device_type" else (
                f"install the same version of {what} on all executors"
            )  # fmt: skip
            kind = RuntimeError if what == "device_type" else VersionError
            raise kind(f"the ranks do not agree on {what}: {table}; {same}")
    may_share = launch.gpus_per_rank != "auto" and launch.gpus_per_rank < 1
    for a, b, gpu in [] if may_share else sharing(peers):
        if a.executor != b.executor:
            raise RuntimeError(
                f"task {a.partition} on {a.host} and task {b.partition} on {b.host} have the same GPU, {gpu}, in two "
                "executors; give each executor GPUs of its own: what its spark.executor.resource.gpu.discoveryScript "
                "prints must not be printed for another executor. If ranks shall share a GPU, set "
                "launch.gpus_per_rank below 1"
            )


def versions() -> dict[str, str]:
    """Returns the versions of this process. On any side."""
    return {
        "python": platform.python_version(), "spark_dl": __version__, "torch": str(torch.__version__),
        "numpy": numpy.__version__, "pyarrow": pyarrow.__version__,
    }  # fmt: skip


def check_versions(driver: Mapping[str, str], own: Mapping[str, str], host: str) -> None:
    """Raises VersionError if this executor has another spark_dl, or another minor version of torch, than the driver.

    Functions, settings and results travel between both. The error has all versions that differ. Spark itself compares
    the minor versions of Python. driver, own: from `versions`.
    """
    strict = {
        "spark_dl": (driver["spark_dl"], own["spark_dl"]),
        "torch": (_minor(driver["torch"]), _minor(own["torch"])),
    }
    if all(there == here for there, here in strict.values()):
        return
    table = ", ".join(f"{name} {own[name]} there and {driver[name]} on the driver" for name in driver
                      if own[name] != driver[name])  # fmt: skip
    raise VersionError(
        f"the Python of the executor on {host} has other versions than the driver: {table}; install the versions of "
        "the driver on the executors, or set PYSPARK_PYTHON to an interpreter that has them"
    )


def _minor(version: str) -> str:
    """Returns `2.13` of `2.13.0+cpu`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def sharing(peers: Sequence[TaskRecord]) -> list[tuple[TaskRecord, TaskRecord, str]]:
    """Returns the pairs of peers on one GPU, the first one there and each further one, with the name of the GPU."""
    used: dict[tuple[str, str], TaskRecord] = {}
    pairs = [(used.setdefault(key, p), p, gpu) for p in peers for key, gpu in p.gpu_keys.items()]
    return [(a, b, gpu) for a, b, gpu in pairs if a is not b]


def backend_of(peers: Sequence[TaskRecord]) -> str:
    """Returns the backend for collective operations: NCCL, or Gloo where NCCL does not work.

    NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), of which MIG instances can be parts
    (https://github.com/NVIDIA/nccl/issues/1716).
    """
    slices = [p.host for p in peers if p.is_slice]
    has_gpus = all(p.device_type == "cuda" for p in peers) and dist.is_nccl_available()
    return "nccl" if has_gpus and not sharing(peers) and len(slices) == len(set(slices)) else "gloo"


def deal_ranks(peers: Sequence[TaskRecord]) -> list[int]:
    """Returns the partition of each rank. Ranks of one place are consecutive; places are ordered by first partition.

    Within a place ranks are in the order of their GPUs. So if they use all GPUs that they see, or the first ones, the
    GPU of a rank has the index `LOCAL_RANK`, as under torchrun.
    """
    places: dict[tuple[str, str], list[TaskRecord]] = {}
    for p in sorted(peers, key=lambda p: p.partition):
        places.setdefault(p.place, []).append(p)
    return [p.partition for on_host in places.values() for p in sorted(on_host, key=lambda p: _gpu_index(p))]


def _gpu_index(peer: TaskRecord) -> int:
    return int(peer.device.partition(":")[2] or 0)


def child_env(me: TaskRecord, local: Sequence[TaskRecord]) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES for a child process of a rank, which sees no GPU if the rank is on the CPU.

    In the child, the GPU of local rank n has the index n, as programs for torchrun expect. Ranks that share a GPU see
    only their own.

    Args:
        local: the ranks of the same place, by local rank.
    """
    if not me.names:
        return {"CUDA_VISIBLE_DEVICES": ""}
    by_turn = [name for names in zip_longest(*(p.names for p in local)) for name in names if name is not None]
    names = list(me.names) if len(by_turn) > len(set(by_turn)) else by_turn
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}
