"""Times of pipelines whose layers sleep: bubbles and throughput by schedule, and PipeDream beside GPipe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.parallel.sleeping import Times, build_chain, passes, set_awake
from benchmarks.parallel.training import build_batches, build_config, build_spec, take_step, training
from spark_dl.config import Config
from spark_dl.gather import gather_json
from spark_dl.parallel.mesh.planner.records import Seconds
from spark_dl.parallel.mesh.settings import Mesh
from spark_dl.parallel.trainable import Trainable
from spark_dl.spec import Batch
from spark_dl.world import World

SHAPE = (128, 256)
"""Of a row: the activations of 128 tokens, 128 KiB."""
SCHEDULES = {"naive": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2, "zbv": 2}
"""Stages of each rank."""


def bubble(schedule: str, num_ranks: int, micro_batches: int) -> float | None:
    """Returns the part of a step in which a rank waits, by the formula of the schedule; None if there is none.

    GPipe: Huang et al. 2019, arXiv:1811.06965, section 2.3; 1F1B has the same. Interleaved, with v stages on each rank:
    Narayanan et al. 2021, arXiv:2104.04473, section 2.2, of the ideal time (p - 1) / (v m), here of the whole time.
    """
    waits = num_ranks - 1
    if schedule == "naive":
        return waits / num_ranks
    if schedule in ("gpipe", "1f1b"):
        return waits / (micro_batches + waits)
    if schedule == "interleaved":
        return waits / (SCHEDULES[schedule] * micro_batches + waits)
    return None


def measure_bubbles(
    world: World, *, pass_s: float = 0.08, micro_batches: Sequence[int] = (4, 8, 16), repeats: int = 3,
    schedules: Sequence[str] = tuple(SCHEDULES),
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns a row for each schedule and number of micro-batches. Collective.

    pass_s: of a layer forward, for the gradient of its input, and for that of its weights. Each stage has one layer.
    """
    return [
        _of_schedule(
            schedule, m, world, pass_s, 1 if schedule == "naive" else repeats
        )  # it takes several times as long
        for schedule in schedules
        for m in micro_batches
    ]


def _of_schedule(schedule: str, m: int, world: World, pass_s: float, repeats: int) -> dict[str, Any]:
    p, of_rank = world.world_size, SCHEDULES[schedule]
    times = Times.equal(Seconds(pass_s))
    parallel = Mesh(pipeline=p, schedule=schedule, stages_per_rank=of_rank, stages=_stages(p * of_rank))  # type: ignore[arg-type]
    config = build_config(parallel, p, micro_batches=m)
    spec = build_spec(lambda: build_chain([times] * p * of_rank, SHAPE[-1]))
    batches, seconds = build_batches(SHAPE, config), []
    with training(spec, world, config) as trainable:
        _warm_up(trainable, batches, config)
        for _ in range(repeats):
            set_awake(trainable.modules[0], False)
            start, end = _timed(lambda: take_step(trainable, batches, config))
            seconds.append(end - start)
        own = passes(trainable.modules[0], world.rank, start)
    step_s = statistics.median(seconds)
    return {
        "schedule": schedule, "stages": p, "micro_batches": m, "measured": 1 - m * of_rank * times.total_s(1) / step_s,
        "formula": bubble(schedule, p, m), "step_s": step_s, "stages_per_rank": of_rank,
        "passes_per_s": m * of_rank / step_s,
        "passes": [each for of_each in gather_json(own) for each in of_each],
    }  # fmt: skip


def measure_pipedream(
    world: World, *, pass_s: float = 0.24, mini_batches: int = 64, micro_batches: int = 4, gpipe_steps: int = 6
) -> list[dict[str, Any]]:
    """Returns a row for PipeDream, and one for GPipe with as many rows in a step. Collective.

    pass_s: of a layer, for all rows of a step. A micro-batch of GPipe takes the part of its rows.
    """
    times = Times.equal(Seconds(per_row=pass_s / micro_batches))
    of_pipedream = _of_steps("pipedream", 1, micro_batches, mini_batches, world, times)
    of_gpipe = _of_steps("gpipe", micro_batches, 1, gpipe_steps, world, times)
    return [of_pipedream, of_gpipe]


def _of_steps(schedule: str, m: int, rows: int, steps: int, world: World, times: Times) -> dict[str, Any]:
    p = world.world_size
    parallel = Mesh(pipeline=p, schedule=schedule, stages=_stages(p))  # type: ignore[arg-type]
    config = build_config(parallel, p, micro_batches=m, rows=rows)
    found = timed_steps(lambda: build_chain([times] * p, SHAPE[-1]), SHAPE, world, config, steps)
    # PipeDream fills the pipeline once, and GPipe in each step.
    turns = steps + p - 1 if schedule == "pipedream" else steps * (m + p - 1)
    return {
        "schedule": schedule, "stages": p, "micro_batches": m, **found,
        "of_ideal": turns * times.total_s(rows) / found["seconds"],
    }  # fmt: skip


def timed_steps(
    build: Callable[[], nn.Module], shape: tuple[int, ...], world: World, config: Config, steps: int
) -> dict[str, Any]:
    """Takes steps without a wait between them. Returns their time, and the first passes of the layers. Collective.

    shape: of a row
    """
    batches = build_batches(shape, config)
    with training(build_spec(build), world, config) as trainable:
        _warm_up(trainable, batches, config)
        set_awake(trainable.modules[0], False)

        def train() -> None:
            for _ in range(steps):
                take_step(trainable, batches, config)
            trainable.sync_weights()

        start, end = _timed(train)
        own = passes(trainable.modules[0], world.rank, start)
    return {
        "steps": steps, "rows": config.train.global_batch_size, "seconds": end - start,
        "steps_per_s": steps / (end - start),
        "passes": [each for of_each in gather_json(own) for each in of_each if each[2] < _SHOWN],
    }  # fmt: skip


_SHOWN = 16
"""Mini-batches, or micro-batches, in the picture."""


def _stages(number: int) -> tuple[int, ...]:
    return (2, *(1 for _ in range(number - 1)))  # the first one also has the layer that takes no time


def _warm_up(trainable: Trainable, batches: list[Batch], config: Config) -> None:
    """Takes steps without sleeping: shapes are found, and connections made."""
    set_awake(trainable.modules[0], True)
    for _ in range(2):
        take_step(trainable, batches, config)
    trainable.sync_weights()


def _timed(run: Callable[[], None]) -> tuple[float, float]:
    """Returns when the first rank has started, and when the last one has ended. Collective."""
    dist.barrier()
    start = time.monotonic()
    run()
    own = (start, time.monotonic())
    starts, ends = zip(*gather_json(own), strict=True)
    return min(starts), max(ends)
