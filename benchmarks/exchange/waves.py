"""Measures a step when Spark has fewer task slots than ranks.

Tasks of an ordinary stage are independent, so Spark runs them in waves. Ranks of a ring exchange data in every step, so
all must run at once, which barrier mode ensures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.exchange import exchange
from benchmarks.exchange.accelerator import accelerator_spec
from spark_dl import driver
from spark_dl.baselines.driver_loop.tree_reduce import TreeReduce
from spark_dl.parallel.ddp import DDP

_COMPUTE_S = 0.5
_MIB = 1.0


def measure(
    spark: Any, folder: str, *, num_hosts: int, repeats: int, show: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Returns rows of `method, ranks, slots, compute_s, step_s` for the report.

    A ring with too few slots has `refused_s` and `reason` instead of `step_s`. Called on the driver of a cluster with
    one task slot on each of `num_hosts` hosts.
    """
    spec = accelerator_spec(exchange.random_profile(_MIB), forward_s=_COMPUTE_S / 3, backward_s=_COMPUTE_S * 2 / 3)
    rows: list[dict[str, Any]] = []
    for ranks in (num_hosts, 2 * num_hosts):
        found = exchange.measure_job(
            spark, f"{folder}/{ranks}", TreeReduce(), spec,
            num_hosts=num_hosts, repeats=repeats, num_ranks=ranks,
        )  # fmt: skip
        rows.append({"method": "tree_reduce", "ranks": ranks, "step_s": found["seconds"]})
        show(f"treeReduce, {ranks} ranks on {num_hosts} slots: a step of {found['seconds']:.3f} s")
    config = exchange.config_of(DDP(), ranks)
    start = time.perf_counter()
    try:
        driver.train(f"{folder}/{ranks}/data", spec, config, run_dir=f"{folder}/ring", progress=False)
    except (ValueError, RuntimeError) as error:
        refused = {"refused_s": time.perf_counter() - start, "reason": str(error).splitlines()[0]}
        rows.append({"method": "ddp", "ranks": ranks, **refused})
        show(f"DDP, {ranks} ranks on {num_hosts} slots: refused after {refused['refused_s']:.3f} s")
    return [{"slots": num_hosts, "compute_s": _COMPUTE_S, **row} for row in rows]
