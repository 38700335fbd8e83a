"""Which devices a rank uses."""

from __future__ import annotations

from collections.abc import Mapping
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
    indices = [int(address) for address in addresses]
    if max(indices) >= torch.cuda.device_count():
        indices = list(range(len(indices)))  # CUDA_VISIBLE_DEVICES already hides the other GPUs from this process
    return tuple(torch.device("cuda", index) for index in indices)


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
