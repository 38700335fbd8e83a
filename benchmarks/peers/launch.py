"""Measures the time of a launch: `spark_dl.launch` and PySpark's TorchDistributor, in one run.

`measure_plain` measures `spark_dl.launch` in a session that the user has built without `build_session`, so that Spark
starts its own Python daemon. A process has one session, so this file runs as a process for it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import ROOT

_PLAIN_LIMIT_S = 600.0


def measure(spark: Any, *, num_ranks: int = 2, repeats: int = 5) -> dict[str, Any]:
    """Measures median seconds of a warm launch whose ranks join with gloo and sum their ranks. Called on the driver.

    All are called in turn, after one launch each that is not counted. TorchDistributor ends Spark's Python workers, so
    the next launch of spark_dl, `new_workers_s`, starts new ones. `spark_dl_s`, of which `ratio` is, reuses them.
    """
    from pyspark.ml.torch.distributor import TorchDistributor

    from spark_dl import driver

    def launch() -> Any:
        return driver.launch(_sum_of_ranks, num_ranks=num_ranks)[0]

    distributor = TorchDistributor(num_processes=num_ranks, local_mode=False, use_gpu=False)
    ways: dict[str, Callable[[], Any]] = {
        "torch_distributor_s": lambda: distributor.run(_sum_of_ranks),
        "new_workers_s": launch,
        "spark_dl_s": launch,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(repeats + 1):
        for name, run in ways.items():
            seconds = _seconds(run, num_ranks)
            if i:
                times[name].append(seconds)
    found: dict[str, Any] = {name: statistics.median(each) for name, each in times.items()}
    return {**found, "ratio": found["spark_dl_s"] / found["torch_distributor_s"], "repeats": repeats}


def measure_plain(master: str, *, num_ranks: int = 2, repeats: int = 5) -> float:
    """Returns the median seconds of a warm `spark_dl.launch` in a plain session on `master`, in a process of its own.

    Stop the caller's session first if the cluster does not have the slots for both. `build_session` has set
    PYSPARK_PYTHON for the process, too. Raises RuntimeError if the process fails.
    """
    # Under spark-submit, these variables would connect the process to the JVM of this one.
    without = ["-u", "PYSPARK_GATEWAY_PORT", "-u", "PYSPARK_GATEWAY_SECRET"]
    module = "benchmarks.peers.launch"
    command = ["env", *without, sys.executable, "-m", module, master, str(num_ranks), str(repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_PLAIN_LIMIT_S, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the launch in a plain session ended with exit code {done.returncode}")
    seconds: float = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _plain_main(master: str, num_ranks: int, repeats: int) -> None:
    """Runs the process of `measure_plain`."""
    from pyspark.sql import SparkSession

    from spark_dl import driver

    spark = SparkSession.builder.master(master).appName("spark_dl bench").getOrCreate()
    if module := spark.conf.get("spark.python.daemon.module", None):
        raise ValueError(f"spark.python.daemon.module: found {module!r}, expected nothing for a plain session")

    def launch() -> Any:
        return driver.launch(_sum_of_ranks, num_ranks=num_ranks)[0]

    found = [_seconds(launch, num_ranks) for _ in range(repeats + 1)]
    spark.stop()
    print(json.dumps(statistics.median(found[1:])))  # the first warms up


def _seconds(launch: Callable[[], Any], num_ranks: int) -> float:
    start = time.perf_counter()
    total = launch()
    seconds = time.perf_counter() - start
    assert total == sum(range(num_ranks)), f"a launch returned {total}"
    return seconds


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


if __name__ == "__main__":
    _plain_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
