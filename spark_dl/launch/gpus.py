"""The devices of a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def gpus_of_task(wanted: str, resources: Mapping[str, Any]) -> tuple[torch.device, ...]:
    """Returns the GPUs that Spark assigned to a barrier task; empty on the CPU. Called on a worker.

    wanted: `launch.device`. Raises RuntimeError if it is "cuda" and the task has no GPU, and if torch cannot use the
    task's GPU.
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
    """Returns torch's indices of the GPUs with Spark's addresses, in a process that sees `count` GPUs.

    addresses: output of the discovery script: indices on the host, or UUIDs (`GPU-...`, `MIG-...`).
    visible: CUDA_VISIBLE_DEVICES of the process, if set. Torch numbers GPUs by their position in it.
    Raises RuntimeError if an address is not found.
    """
    names = visible_names(visible, count)
    places = [_place(address, names) for address in addresses]
    if None not in places:
        return [place for place in places if place is not None]
    if len(addresses) == count:  # the process sees only the GPUs of its task
        return list(range(count))
    has_host_indices = not any(name.isdigit() for name in names)  # CUDA_VISIBLE_DEVICES does not renumber the GPUs
    if has_host_indices and all(address.isdigit() and int(address) < count for address in addresses):
        return [int(address) for address in addresses]
    raise RuntimeError(
        f"Spark gave this task the GPUs {list(addresses)}, and torch finds {count} with CUDA_VISIBLE_DEVICES="
        f"{'(not set)' if visible is None else visible}; make spark.executor.resource.gpu.discoveryScript "
        "print the indices of nvidia-smi, or set CUDA_VISIBLE_DEVICES of the executor to the output of that script"
    )


def visible_names(visible: str | None, count: int) -> list[str]:
    """Returns CUDA_VISIBLE_DEVICES as a list with one name per visible GPU; empty if it has no effect."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    # CUDA stops at the first unknown name. With fewer names than GPUs, the variable was set after CUDA had started.
    return names[:count] if len(names) >= count else []


def _place(address: str, names: Sequence[str]) -> int | None:
    """Returns the position of a GPU in CUDA_VISIBLE_DEVICES, which may contain prefixes of UUIDs; None if not found."""
    for place, name in enumerate(names):
        if address == name or (name.startswith(("GPU-", "MIG-")) and address.startswith(name)):
            return place
    return None


def name_on_host(device: torch.device, visible: str | None, count: int) -> str:
    """Returns a name of a GPU that is unique on its host, even if processes see different GPUs."""
    names = visible_names(visible, count)
    return f"GPU {names[device.index]}" if names and device.index is not None else str(device)


def gpus_of_local_rank(wanted: str, local_rank: int, local_world_size: int) -> tuple[torch.device, ...]:
    """Returns the GPU of a rank under torchrun, or all GPUs if it is the only rank on its host; empty on the CPU.

    wanted: `launch.device`. Raises RuntimeError if there are fewer GPUs than ranks on this host.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return ()
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()} GPU(s)")
    indices = range(torch.cuda.device_count()) if local_world_size == 1 else [local_rank]
    return tuple(torch.device("cuda", index) for index in indices)


def first(gpus: tuple[torch.device, ...]) -> torch.device:
    """Returns the device of a rank: the first of its GPUs, or the CPU."""
    return gpus[0] if gpus else torch.device("cpu")
