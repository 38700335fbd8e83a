"""Which devices a rank uses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def gpus_of_task(wanted: str, resources: Mapping[str, Any]) -> tuple[torch.device, ...]:
    """The GPUs that Spark gave a barrier task; none where it uses the CPU. Called on a worker.

    Raises RuntimeError if a GPU is asked for and the task has none, or has one that torch cannot use.
    """
    addresses = resources["gpu"].addresses if "gpu" in resources else []
    if wanted == "cpu" or (wanted == "auto" and not addresses):
        return ()
    if not addresses:
        raise RuntimeError(
            "launch.device is 'cuda', but Spark gave this task no GPU; set spark.executor.resource.gpu.amount, "
            "spark.task.resource.gpu.amount and spark.executor.resource.gpu.discoveryScript, or launch.device: cpu"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"Spark gave this task GPU {addresses[0]}, but torch {torch.__version__} finds no CUDA here")
    indices = device_indices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    return tuple(torch.device("cuda", index) for index in indices)


def device_indices(addresses: Sequence[str], visible: str | None, count: int) -> list[int]:
    """Torch's indices of the GPUs with Spark's addresses, in a process that sees `count` GPUs.

    addresses: what the discovery script printed: indices of the host, or UUIDs (`GPU-...`, `MIG-...`).
    visible: CUDA_VISIBLE_DEVICES of the process, if it is set. Torch numbers the GPUs by their places in it.
    Raises RuntimeError for an address that cannot be found among them.
    """
    names = visible_names(visible, count)
    places = [_place(address, names) for address in addresses]
    if None not in places:
        return [place for place in places if place is not None]
    if len(addresses) == count:  # the process sees the GPUs of its task alone, by whatever numbers
        return list(range(count))
    are_of_host = not any(name.isdigit() for name in names)  # and nothing numbers them otherwise
    if are_of_host and all(address.isdigit() and int(address) < count for address in addresses):
        return [int(address) for address in addresses]
    raise RuntimeError(
        f"Spark gave this task the GPUs {list(addresses)}, and torch finds {count} with CUDA_VISIBLE_DEVICES="
        f"{'(not set)' if visible is None else visible}; make spark.executor.resource.gpu.discoveryScript "
        "print the indices that nvidia-smi shows, or set CUDA_VISIBLE_DEVICES of the executor to what it prints"
    )


def visible_names(visible: str | None, count: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES as a list, one name for each of `count` GPUs; empty where it has no effect."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    # CUDA stops at the first name that it does not know. With fewer names than GPUs, it was set when CUDA had started.
    return names[:count] if len(names) >= count else []


def _place(address: str, names: Sequence[str]) -> int | None:
    """The place of a GPU in CUDA_VISIBLE_DEVICES, which may have the first letters of a UUID."""
    for place, name in enumerate(names):
        if address == name or (name.startswith(("GPU-", "MIG-")) and address.startswith(name)):
            return place
    return None


def name_on_host(device: torch.device, visible: str | None, count: int) -> str:
    """A name that tells the GPUs of a host apart, also where its processes see different ones."""
    names = visible_names(visible, count)
    return f"GPU {names[device.index]}" if names and device.index is not None else str(device)


def gpus_of_local_rank(wanted: str, local_rank: int, local_world_size: int) -> tuple[torch.device, ...]:
    """The GPU of a rank that torchrun started; all of the host's for one that is alone there; none on a CPU.

    Raises RuntimeError if a GPU is asked for and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return ()
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}")
    indices = range(torch.cuda.device_count()) if local_world_size == 1 else [local_rank]
    return tuple(torch.device("cuda", index) for index in indices)


def first(gpus: tuple[torch.device, ...]) -> torch.device:
    """The device of a rank: the first of its GPUs, or the CPU."""
    return gpus[0] if gpus else torch.device("cpu")
