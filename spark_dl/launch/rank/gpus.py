"""The GPUs of a rank: from the addresses that Spark assigns to a task to torch's devices, and their names.

Torch numbers the GPUs that its process sees. The number depends on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, so an
address of Spark is not a device. The UUID of a GPU is the same in all processes, containers and hosts.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

_SMI_WAIT_S = 30.0
UUID_STARTS = ("GPU-", "MIG-")


@dataclass(frozen=True)
class Seen:
    """The GPUs that this process sees, in torch's order."""

    visible: str | None
    """CUDA_VISIBLE_DEVICES, if set."""
    uuids: tuple[str, ...]
    """`GPU-...` of each GPU; empty strings where torch does not know it."""
    are_slices: bool = False
    """Whether they are MIG instances, several of which are on one GPU."""

    @property
    def names(self) -> list[str]:
        """Returns CUDA_VISIBLE_DEVICES as a list with one name per GPU; empty if it has no effect."""
        names = [name.strip() for name in self.visible.split(",")] if self.visible else []
        # CUDA stops at the first unknown name. With fewer names than GPUs, the variable was set after CUDA had started.
        return names[: len(self.uuids)] if len(names) >= len(self.uuids) else []

    def name_of(self, index: int) -> str:
        """Returns a name of a GPU for CUDA_VISIBLE_DEVICES of another process on this host."""
        name = self.names[index] if self.names else ""
        if self.are_slices:  # torch can report the UUID of the whole GPU
            return name or str(index)
        return self.uuids[index] or name or str(index)

    def identity(self, index: int, address: str = "") -> str:
        """Returns a name of a GPU that is unique on its host; one with a UUID is unique everywhere.

        Args:
            address: the GPU's address of Spark.
        """
        if self.are_slices and address.startswith("MIG-"):
            return address
        name = self.name_of(index)
        return name if name.startswith(UUID_STARTS) else f"GPU {name}" if self.names else f"cuda:{index}"


def see_gpus() -> Seen:
    """Returns the GPUs that this process sees. Starts CUDA if there are any."""
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    uuids = tuple(_with_prefix(str(getattr(p, "uuid", None) or "")) for p in properties)
    are_slices = any(" MIG " in f" {p.name} " for p in properties)
    return Seen(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids, are_slices)


def _with_prefix(uuid: str) -> str:
    return uuid if not uuid or uuid.startswith(UUID_STARTS) else f"GPU-{uuid}"


def gpus_of_task(wanted: str, resources: Mapping[str, Any]) -> tuple[torch.device, ...]:
    """Returns the GPUs that Spark assigned to a task; empty on the CPU. Called on a worker.

    Args:
        wanted: `launch.device`.

    Raises:
        RuntimeError: If it is "cuda" and the task has no GPU, and if torch cannot use the task's GPU.
    """
    addresses = addresses_of(resources)
    if wanted == "cpu" or (wanted == "auto" and not addresses):
        return ()
    if not addresses:
        raise RuntimeError(
            "launch.device is 'cuda', but Spark gave this task no GPU; set spark.executor.resource.gpu.amount, "
            "spark.task.resource.gpu.amount and spark.executor.resource.gpu.discoveryScript, or launch.device: cpu"
        )
    # CUDA's own order puts the fastest GPU first. The addresses are those of nvidia-smi, which goes by the PCI bus.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    _check_cuda(f"Spark gave this task GPU {addresses[0]}, but")
    seen = see_gpus()
    if any(name.startswith(UUID_STARTS) for name in seen.names) and any(a.isdigit() for a in addresses):
        listed = listed_uuids()  # nvidia-smi's numbers say nothing about a list of UUIDs
        addresses = [listed.get(address, address) for address in addresses]
    return tuple(torch.device("cuda", index) for index in device_indices(addresses, seen))


def addresses_of(resources: Mapping[str, Any]) -> list[str]:
    """Returns the addresses of the GPUs that Spark assigned to a task."""
    return list(resources["gpu"].addresses) if "gpu" in resources else []


def _check_cuda(otherwise: str) -> None:
    """Raises RuntimeError, which begins with `otherwise`, if torch finds no GPU."""
    if torch.cuda.is_available():
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None and torch.version.hip is None:
        why = "it is built for CPUs; install torch for CUDA"
    elif visible is not None:
        why = f"CUDA_VISIBLE_DEVICES={visible!r} may hide it"
    else:
        why = "look at the output of nvidia-smi on this host"
    raise RuntimeError(f"{otherwise} torch {torch.__version__} finds no CUDA here: {why}")


def listed_uuids() -> dict[str, str]:
    """Returns the UUIDs of this host's GPUs by nvidia-smi's numbers; empty if there is no nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_SMI_WAIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(",") for line in listing.splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


def device_indices(addresses: Sequence[str], seen: Seen) -> list[int]:
    """Returns torch's indices of the GPUs with Spark's addresses.

    Args:
        addresses: output of the discovery script: indices on the host, or UUIDs (`GPU-...`, `MIG-...`).

    Raises:
        RuntimeError: If an address is not found.
    """
    count = len(seen.uuids)
    places = [_place(address, seen) for address in addresses]
    if None not in places:
        return [place for place in places if place is not None]
    is_another = all(seen.uuids) and not seen.are_slices and any(a.startswith("GPU-") for a in addresses)
    if len(addresses) == count and not is_another:  # the process sees only the GPUs of its task
        return list(range(count))
    has_host_indices = not any(name.isdigit() for name in seen.names)  # CUDA_VISIBLE_DEVICES does not renumber the GPUs
    if has_host_indices and all(address.isdigit() and int(address) < count for address in addresses):
        return [int(address) for address in addresses]
    raise RuntimeError(
        f"Spark gave this task the GPUs {list(addresses)}, and torch finds {count} with CUDA_VISIBLE_DEVICES="
        f"{'(not set)' if seen.visible is None else seen.visible}"
        f"{': ' if any(seen.uuids) else ''}{', '.join(filter(None, seen.uuids))}; make "
        "spark.executor.resource.gpu.discoveryScript print the indices or the UUIDs of nvidia-smi, or set "
        "CUDA_VISIBLE_DEVICES of the executor to the output of that script"
    )


def _place(address: str, seen: Seen) -> int | None:
    """Returns torch's index of an address, by UUID or by its name in CUDA_VISIBLE_DEVICES; None if not found."""
    if address.startswith(UUID_STARTS) and address.lower() in (known := [uuid.lower() for uuid in seen.uuids]):
        return known.index(address.lower())
    for place, name in enumerate(seen.names):
        if address == name or (name.startswith(UUID_STARTS) and address.lower().startswith(name.lower())):
            return place
    return None


def gpus_of_local_rank(
    wanted: str, local_rank: int, local_world_size: int, gpus_per_rank: float | Literal["auto"] = "auto"
) -> tuple[torch.device, ...]:
    """Returns the GPUs of a rank for which Spark assigns none: under torchrun, and in local mode. Empty on the CPU.

    Args:
        wanted: `launch.device`. With `gpus_per_rank` "auto", a rank has one GPU, or all if it is the only rank on its
            host.

    Raises:
        RuntimeError: If there are too few GPUs for the ranks on this host.
    """
    if wanted == "cpu" or gpus_per_rank == 0:
        return ()
    if wanted == "auto" and not torch.cuda.is_available():
        return ()
    _check_cuda("launch.device: found 'cuda', but")
    count = torch.cuda.device_count()
    if gpus_per_rank == "auto":
        indices = range(count) if local_world_size == 1 else range(local_rank, local_rank + 1)
    elif gpus_per_rank < 1:
        place = local_rank // math.floor(1 / gpus_per_rank)
        indices = range(place, place + 1)
    else:
        indices = range(local_rank * int(gpus_per_rank), (local_rank + 1) * int(gpus_per_rank))
    if indices[-1] >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: this host has {count} GPU(s) for {local_world_size} rank(s), with "
            f"launch.gpus_per_rank={gpus_per_rank}; start fewer ranks, or set launch.gpus_per_rank below 1, so that "
            "ranks share a GPU"
        )
    return tuple(torch.device("cuda", index) for index in indices)


def first(gpus: tuple[torch.device, ...]) -> torch.device:
    """Returns the device of a rank: the first of its GPUs, or the CPU."""
    return gpus[0] if gpus else torch.device("cpu")
