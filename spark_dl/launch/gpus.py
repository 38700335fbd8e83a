"""Which device a rank uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def device_of_task(wanted: str, resources: Mapping[str, Any]) -> torch.device:
    """The device of a barrier task, from the GPU addresses that Spark gave it. Called on a worker.

    Raises RuntimeError if a GPU is asked for and the task has none, or has one that torch cannot use.
    """
    addresses = resources["gpu"].addresses if "gpu" in resources else []
    if wanted == "cpu" or (wanted == "auto" and not addresses):
        return torch.device("cpu")
    if not addresses:
        raise RuntimeError(
            "launch.device is 'cuda', but Spark gave this task no GPU; set spark.executor.resource.gpu.amount, "
            "spark.task.resource.gpu.amount and spark.executor.resource.gpu.discoveryScript, or launch.device: cpu"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(f"Spark gave this task GPU {addresses[0]}, but torch {torch.__version__} finds no CUDA here")
    index = int(addresses[0])
    if index >= torch.cuda.device_count():
        index = 0  # CUDA_VISIBLE_DEVICES already hides the other GPUs from this process
    return torch.device("cuda", index)


def device_of_local_rank(wanted: str, local_rank: int) -> torch.device:
    """The device of a rank that torchrun started. Raises RuntimeError if a GPU is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(f"local rank {local_rank} has no GPU: this host has {torch.cuda.device_count()}")
    return torch.device("cuda", local_rank)
