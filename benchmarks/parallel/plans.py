"""All plans of a small chain, measured, beside what the planner predicts. The ranks are hosts with limited links."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parallel.sleeping import Times, build_chain, set_awake
from benchmarks.parallel.training import build_batches, build_config, build_spec, take_step, training
from spark_dl.gather import gather_json
from spark_dl.parallel.cost.cost import Network
from spark_dl.parallel.mesh.planner.records import STATES, Cluster, LayerProfile, Seconds
from spark_dl.parallel.mesh.planner.search import MeshPlan, Problem, plans_of_choices
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.world import World

SHAPE = (128, 256)
_ROW_BYTES = 4 * SHAPE[0] * SHAPE[1]
_SMALL, _LARGE = 1 << 18, 1 << 23  # bytes of the messages that the network is fitted to
_MESSAGES = 5


def measure(
    world: World, *, layers: int = 8, fixed_s: float = 0.008, per_row_s: float = 0.016, parameter_mib: float = 3.0,
    global_batch_size: int = 8, repeats: int = 2,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns a row for each plan, with its predicted and measured seconds, the shortest prediction first. Collective.

    The plans are all meshes, ZeRO stages, schedules and numbers of micro-batches, with the best cuts of each.
    fixed_s, per_row_s: of a layer forward, for the gradient of its input, and for that of its weights.
    """
    times = Times.equal(Seconds(fixed_s, per_row_s))
    parameter_bytes = int(parameter_mib * 2**20)
    network = fit_network(world)
    backward = Seconds(2 * fixed_s, 2 * per_row_s)
    chain = [
        LayerProfile("scale", Seconds(), Seconds(), 4, _ROW_BYTES),
        *(LayerProfile(f"layer{i}", times.forward, backward, parameter_bytes, _ROW_BYTES) for i in range(layers)),
    ]
    cluster = Cluster(world.world_size, world.world_size, within=network, between=network)
    problem = Problem(tuple(chain), cluster, STATES["sgd"], global_batch_size)
    spec = build_spec(lambda: build_chain([times] * layers, SHAPE[-1], parameter_bytes))
    found = []
    for plan in plans_of_choices(problem):
        measured_s = _measure(plan, spec, world, parameter_mib, repeats)
        choice, dims = plan.choice, plan.choice.dims
        found.append({
            "pipeline": dims.pipeline, "data": dims.data, "zero_stage": choice.zero_stage,
            "schedule": choice.schedule if dims.pipeline > 1 else "", "micro_batches": choice.micro_batches,
            "stages": list(plan.cut), "predicted_s": plan.step_s, "measured_s": measured_s,
            "rate_mbit": network.bytes_per_s * 8 / 1e6, "latency_ms": network.alpha_s * 1e3,
        })  # fmt: skip
    return found


def _measure(plan: MeshPlan, spec: Any, world: World, bucket_mib: float, repeats: int) -> float:
    """Returns the seconds of a step, median of some. Collective."""
    choice, dims = plan.choice, plan.choice.dims
    parallel = Mesh(
        pipeline=dims.pipeline, schedule=choice.schedule, stages=plan.cut if dims.pipeline > 1 else None,  # type: ignore[arg-type]
        zero_stage=choice.zero_stage, bucket_mib=bucket_mib,  # type: ignore[arg-type]
    )  # fmt: skip
    config = build_config(parallel, world.world_size, micro_batches=choice.micro_batches, rows=choice.rows)
    batches = build_batches(SHAPE, config)
    with training(spec, world, config) as trainable:
        set_awake(trainable.modules[0], True)
        take_step(trainable, batches, config)
        set_awake(trainable.modules[0], False)
        return statistics.median(_slowest(lambda: take_step(trainable, batches, config)) for _ in range(repeats))


def fit_network(world: World, small: int = _SMALL, large: int = _LARGE) -> Network:
    """Measures the latency and the rate of messages of these bytes from each rank to the next. Collective."""
    small_s, large_s = (_ring_s(world, num_bytes) for num_bytes in (small, large))
    bytes_per_s = (large - small) / (large_s - small_s)
    return Network(max(0.0, small_s - small / bytes_per_s), bytes_per_s)


def _ring_s(world: World, num_bytes: int) -> float:
    """Returns the seconds in which each rank sends a tensor to the next one, median of some. Collective."""
    sent, received = torch.rand(num_bytes // 4), torch.empty(num_bytes // 4)
    ahead, behind = (world.rank + 1) % world.world_size, (world.rank - 1) % world.world_size

    def send() -> None:
        for work in (dist.isend(sent, ahead), dist.irecv(received, behind)):
            assert work is not None
            work.wait()

    send()
    return statistics.median(_slowest(send) for _ in range(_MESSAGES))


def _slowest(run: Callable[[], object]) -> float:
    """Returns the seconds of the slowest rank. Collective."""
    dist.barrier()
    start = time.perf_counter()
    run()
    return float(max(gather_json(time.perf_counter() - start)))


def times_best(rows: Sequence[dict[str, Any]]) -> float:
    """Returns the measured time of the plan that is predicted to be the fastest, over the least measured time."""
    chosen = min(rows, key=lambda row: row["predicted_s"])
    return float(chosen["measured_s"] / min(row["measured_s"] for row in rows))


def rank_correlation(rows: Sequence[dict[str, Any]]) -> float:
    """Returns Spearman's correlation of the predicted and the measured times."""
    return float(np.corrcoef(*(_ranks([row[key] for row in rows]) for key in ("predicted_s", "measured_s")))[0, 1])


def _ranks(values: Sequence[float]) -> Any:
    """Returns the place of each value in their order. Equal ones have the mean of their places."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[group]
