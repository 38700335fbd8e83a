"""Measures what a killed rank costs, and what checkpoints cost.

`noticed_s`, `training_again_s`: a rank is killed after a checkpoint, in a session with a local master. The waits of the
default settings are part of it (`launch.restart_wait_s`).
`sync_steps_ratio`, `async_steps_ratio`: steps per second with a checkpoint in every tenth step, to those without.

The model is a network of three layers on random rows, with Adam: 12 bytes of state for each parameter.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from benchmarks.faults.killer import Kill, Killer
from spark_dl import driver
from spark_dl.config import Checkpoint, Config, Data, Launch, Loader, Train
from spark_dl.data.write.arrays import write_arrays
from spark_dl.launch.session import build_session
from spark_dl.spec import ModelSpec

NUM_RANKS = 2
EVERY, WARM_UP = 10, 10
_BATCH, _FEATURES, _CLASSES = 64, 64, 10
WAYS: Mapping[str, Mapping[str, Any]] = {
    "none": {}, "sync": {"every_steps": EVERY}, "async": {"every_steps": EVERY, "asynchronous": True},
}  # fmt: skip
"""Settings of checkpoints. Each run also saves one at its end, which is not measured."""


@dataclass(frozen=True)
class Options:
    repeats: int = 7
    steps: int = 50
    """Steps of a measurement of checkpoints, after ten that warm up."""
    width: int = 1536
    """Of the three layers. The state then has 55 MiB."""

    def __post_init__(self) -> None:
        if self.steps < EVERY or self.steps % EVERY:
            raise ValueError(f"steps: expected a multiple of {EVERY}, found {self.steps}")
        if self.repeats < 1:
            raise ValueError(f"repeats: expected at least 1, found {self.repeats}")


def build_network(width: int) -> nn.Module:
    """Rows [rows, 64] -> scores [rows, 10]."""
    return nn.Sequential(
        nn.Linear(_FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, _CLASSES),
    )  # fmt: skip


def state_mib(width: int) -> float:
    """Returns the size of weights and optimizer."""
    return sum(p.numel() for p in build_network(width).parameters()) * 12 / 2**20


def columns_of(options: Options) -> dict[str, Any]:
    """Returns random rows for all steps of a measurement."""
    rng, rows = np.random.default_rng(0), (WARM_UP + options.steps + 1) * _BATCH
    return {"features": rng.standard_normal((rows, _FEATURES), np.float32), "label": rng.integers(0, _CLASSES, rows)}


def settings(max_steps: int, checkpoint: Mapping[str, Any]) -> Config:
    """Returns the settings of a run. # checkpoint: those of the section `checkpoint`"""
    return Config(
        data=Data(features=("features",), label="label"), loader=Loader(num_streams=8),
        train=Train(global_batch_size=_BATCH, lr=1e-4, optimizer="Adam", log_every=1, max_steps=max_steps),
        checkpoint=Checkpoint(**checkpoint), launch=Launch(num_ranks=NUM_RANKS, device="cpu"),
    )  # fmt: skip


def measure(options: Options) -> dict[str, Any]:
    """Measures medians, in turn. Called on the driver, on the machine of the ranks."""
    conf = {"spark.log.level": "OFF", "spark.ui.enabled": "false"}  # Spark's own account of the kills would hide ours
    session = build_session("spark_dl bench", master=f"local[{NUM_RANKS}]", conf=conf)
    last = WARM_UP + options.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        write_arrays(columns_of(options), f"{folder}/data")
        print(f"state of {state_mib(options.width):.0f} MiB", file=sys.stderr)

        def train(name: str, on_event: Any, *, max_steps: int, **checkpoint: Any) -> None:
            driver.train(
                f"{folder}/data", ModelSpec(build=functools.partial(build_network, options.width)),
                settings(max_steps, checkpoint),
                run_dir=f"{folder}/{name}", overwrite=True, progress=False, on_event=on_event, spark=session,
            )  # fmt: skip

        kills = []
        for i in range(options.repeats + 1):
            killer = Killer({EVERY: random.Random(i).randrange(NUM_RANKS)})  # noqa: S311
            train("killed", killer, max_steps=2 * EVERY, every_steps=EVERY)
            kills += killer.done[:1] if i else []  # the first time warms up
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for i in range(options.repeats + 1):
            for way in sorted(WAYS, reverse=bool(i % 2)):  # in turn, so that none always runs first
                times = StepTimes()
                train("checkpoints", times, max_steps=last, **WAYS[way])
                if i:
                    rates[way].append(times.steps_per_s(WARM_UP + 1, last))
    session.stop()
    return summary(kills, rates)


class StepTimes:
    """A function for `on_event` that keeps when each step was logged."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "step":
            self._times[event["step"]] = event["time"]

    def steps_per_s(self, first: int, last: int) -> float:
        """Returns the rate between two steps."""
        return (last - first) / (self._times[last] - self._times[first])


def summary(kills: Sequence[Kill], rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the figures. rates: steps per second of each repetition, by way."""
    for way, values in rates.items():
        print(f"{way}: {statistics.median(values):.2f} steps per second", file=sys.stderr)
    return {
        "noticed_s": statistics.median(kill.noticed_s or 0.0 for kill in kills),
        "training_again_s": statistics.median(kill.again_s or 0.0 for kill in kills),
        "async_steps_ratio": _ratio(rates, "async"),
        "sync_steps_ratio": _ratio(rates, "sync"),
    }


def _ratio(rates: Mapping[str, Sequence[float]], way: str) -> float:
    """Returns the median of the ratios of neighboring runs, with checkpoints to without."""
    return statistics.median(a / b for a, b in zip(rates[way], rates["none"], strict=True))
