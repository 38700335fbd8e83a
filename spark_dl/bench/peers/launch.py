"""Measures the time of a launch: `spark_dl.launch` and PySpark's TorchDistributor, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def measure(spark: Any, *, num_ranks: int = 2, repeats: int = 5) -> dict[str, Any]:
    """Measures median seconds of a warm launch whose ranks join with gloo and sum their ranks. Called on the driver.

    Both are called in turn, after one launch each that is not counted.
    """
    from pyspark.ml.torch.distributor import TorchDistributor

    from spark_dl import driver

    distributor = TorchDistributor(num_processes=num_ranks, local_mode=False, use_gpu=False)
    ways: dict[str, Callable[[], Any]] = {
        "spark_dl": lambda: driver.launch(_sum_of_ranks, num_ranks=num_ranks)[0],
        "torch_distributor": lambda: distributor.run(_sum_of_ranks),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        for name, launch in ways.items():
            start = time.perf_counter()
            total = launch()
            seconds = time.perf_counter() - start
            assert total == sum(range(num_ranks)), f"{name} returned {total}"
            if i:
                times[name].append(seconds)
    ours, theirs = (statistics.median(times[name]) for name in ways)
    return {"spark_dl_s": ours, "torch_distributor_s": theirs, "ratio": ours / theirs, "repeats": repeats}


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)
