"""Measures how much communication a strategy hides behind computation, and the effect of DDP's bucket size.

The backward pass of a simulated network (`profiles.py`) takes as long as its communication alone, and its forward pass
half of that. Here overlap helps most. Gradients are ready only in the backward pass, so a step takes at least the time
of the forward pass plus that of the communication.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.exchange import exchange
from benchmarks.exchange.accelerator import accelerator_spec
from benchmarks.exchange.log import Log
from benchmarks.exchange.methods import METHODS, measured_in, settings_of
from benchmarks.exchange.steps import Steps, time_steps
from benchmarks.model.profiles import PROFILES
from spark_dl.config import Launch
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank.rendezvous import join
from spark_dl.launch.rank.task import RankResult
from spark_dl.parallel import ddp
from spark_dl.parallel.exchange.buckets import CANDIDATES_MIB, MIB, backward_s, interpolate_all_reduce_s
from spark_dl.spec import ModelSpec

_ALL_REDUCE_MIB = (0.125, 1.0, 4.0, 16.0)


def measure(
    spark: Any,
    folder: str,
    *,
    num_hosts: int,
    profile: str,
    scale: float,
    repeats: int,
    sections: Sequence[str],
    methods: Sequence[str],
    same_clock: bool,
    log: Log,
) -> dict[str, Any]:
    """Measures the sections `breakdown` and `buckets` of the report, if `sections` has them. Called on the driver.

    `breakdown` measures the given methods with overlap and, for comparison, without.
    """
    launch = Launch(num_ranks=num_hosts, device="cpu")

    def take(**settings: Any) -> dict[str, Any]:
        steps = Steps(profile=profile, scale=scale, num_steps=repeats, same_clock=same_clock, **settings)
        found: dict[str, Any] = run_barrier(
            spark, functools.partial(time_steps, dataclasses.asdict(steps)), launch=launch
        )[0]
        return found

    alone = take()
    communication_s = alone["step_s"] - alone["optimizer_s"]
    compute = {"forward_s": communication_s / 2, "backward_s": communication_s}
    log.show(f"{profile}: {communication_s:.3f} s of communication alone, and backward passes as long")
    network = PROFILES[profile]().shrunk(scale)
    auto_mib = run_barrier(
        spark, functools.partial(_choose_on_rank, profile, {"scale": scale, **compute}), launch=launch
    )[0]
    log.show(f"bucket_mib: auto chooses {auto_mib:g} MiB")
    results: dict[str, Any] = {"auto_bucket_mib": auto_mib}
    if "breakdown" in sections:
        largest_s = max(sum(compute.values()), communication_s)
        results["breakdown"] = []
        for method in measured_in("breakdown", methods):
            with log.attempt(f"breakdown of {method}"):
                if METHODS[method].how == "job":
                    spec = accelerator_spec(PROFILES[profile](), scale=scale, **compute)
                    found = _job_row(spark, folder, method, spec, num_hosts, repeats, compute)
                else:
                    settings = dataclasses.asdict(METHODS[method].parallel)
                    found = take(parallel=settings, warm_ups=METHODS[method].warm_ups, bucket_mib=auto_mib, **compute)
                results["breakdown"].append({
                    "method": method, "profile": profile, **found,
                    "communication_s": communication_s, "times_largest": found["step_s"] / largest_s,
                })  # fmt: skip
                log.show(f"{method}: a step of {found['step_s']:.3f} s")
    if "buckets" in sections:
        sizes = [layer.gradient_bytes for layer in network.backward_layers()]
        ready_s = network.ready_s(compute["backward_s"])
        results["buckets"] = []
        with log.attempt("buckets"):
            all_reduce_s = _time_all_reduces(spark, num_hosts)
            for mib in (mib for mib in CANDIDATES_MIB if mib * MIB < 2 * sum(sizes)):
                found = take(bucket_mib=mib, **compute)
                predicted_s = compute["forward_s"] + backward_s(ready_s, sizes, int(mib * MIB), all_reduce_s)
                results["buckets"].append({"profile": profile, "bucket_mib": mib, "step_s": found["step_s"],
                                           "predicted_s": predicted_s + found["optimizer_s"]})  # fmt: skip
                log.show(f"buckets of {mib:g} MiB: a step of {found['step_s']:.3f} s")
    return results


def _choose_on_rank(profile: str, settings: dict[str, Any], report: Any = None) -> RankResult:
    """Returns the choice of `parallel.bucket_mib: auto` in a run of the strategy. Collective, in a barrier task."""
    with join(Launch(device="cpu"), report=report) as world, contextlib.ExitStack() as until_done:
        config = exchange.config_of(ddp.DDP(bucket_mib="auto"), world.world_size)
        trainable = ddp.parallelize(accelerator_spec(PROFILES[profile](), **settings), world, config)
        until_done.callback(trainable.close)
        trainable.forward_backward([exchange.batch_of(world)], world.world_size)
        return RankResult(world.rank, trainable.extra_state["bucket_size"].mib)


def _time_all_reduces(spark: Any, num_hosts: int) -> Callable[[float], float]:
    """Returns seconds of an all-reduce by its bytes, interpolated between measured sizes."""
    rows = exchange.measure(spark, "", num_hosts=num_hosts, mib=_ALL_REDUCE_MIB, methods=["backend"])
    return interpolate_all_reduce_s([row["mib"] * MIB for row in rows], [row["seconds"] for row in rows])


def _job_row(
    spark: Any, folder: str, method: str, spec: ModelSpec, num_hosts: int, repeats: int, compute: dict[str, float]
) -> dict[str, Any]:
    """Measures a method without overlap: all time except computation is exposed, including the weight update."""
    settings = settings_of(method, num_hosts)
    found = exchange.measure_job(
        spark, f"{folder}/{method.replace(' ', '-')}", settings, spec, num_hosts=num_hosts, repeats=repeats
    )
    exposed_s = found["seconds"] - sum(compute.values())
    return {"step_s": found["seconds"], **compute, "hidden_s": 0.0, "exposed_s": exposed_s, "optimizer_s": 0.0,
            "wait_s": 0.0, "other_s": 0.0}  # fmt: skip
