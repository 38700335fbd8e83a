"""Measures trials on groups of ranks in one barrier job, and the same trials as one job after another.

Both ways train the same settings, which a seeded sampler of Optuna suggests, on the UCI digits (from scikit-learn),
from one dataset that is written before. `digits` computes. In `sleep`, the loss of each step sleeps, so that the ranks
do not share the cores of the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.exchange.error_runtime import build_network, write_digits
from benchmarks.peers.step import build_cnn
from spark_dl import driver
from spark_dl.config import Config, Data, Launch, Train
from spark_dl.spec import ModelSpec
from spark_dl.trials.rank import split_values
from spark_dl.trials.tune import import_optuna, tune


@dataclass(frozen=True)
class Options:
    trials: int = 8
    groups: int = 2
    """Trials that are trained at the same time."""
    ranks: int = 1
    """Ranks of each trial."""
    epochs: int = 5
    sleep_s: float = 0.02
    """Seconds that the loss of a step sleeps, in `sleep`. An epoch has 23 steps."""
    repeats: int = 3


class Sleeping:
    """Cross entropy that takes a given time."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return nn.functional.cross_entropy(output, label, reduction="none")


def measure(spark: Any, options: Options) -> dict[str, Any]:
    """Measures median seconds of both ways, in turn. Called on the driver, which must share its disk with the ranks.

    `ratio` is the time of the one job to that of the others. `same_trials` is whether both ways found the same value
    for each trial, and so the same best trial.
    """
    specs = {
        "digits": ModelSpec(build=build_cnn),
        "sleep": ModelSpec(build=build_network, loss=Sleeping(options.sleep_s)),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_digits(folder)
        for name, spec in specs.items():
            ways = {
                "one_job_s": functools.partial(_in_one_job, spark, spec, folder, options),
                "job_by_job_s": functools.partial(_job_by_job, spark, spec, folder, options),
            }
            warm = dataclasses.replace(options, trials=options.groups, epochs=1)
            _in_one_job(spark, spec, folder, warm, f"{folder}/{name}-warm")
            found[name] = _measure(ways, f"{folder}/{name}", options)
            _show(f"{name}: {found[name]}")
    return {**found, **dataclasses.asdict(options)}


def _measure(ways: Mapping[str, Callable[[str], list[float]]], folder: str, options: Options) -> dict[str, Any]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    values: dict[str, list[float]] = {}
    for i in range(options.repeats):
        for way, train in ways.items():
            start = time.perf_counter()
            values[way] = train(f"{folder}-{way}-{i}")
            times[way].append(time.perf_counter() - start)
    found: dict[str, Any] = {way: statistics.median(each) for way, each in times.items()}
    one_job, job_by_job = values.values()
    return {**found, "ratio": found["one_job_s"] / found["job_by_job_s"], "same_trials": one_job == job_by_job}


def _in_one_job(spark: Any, spec: ModelSpec, folder: str, options: Options, run_dir: str) -> list[float]:
    result = tune(
        f"{folder}/train", spec, _suggest, _config(options), num_trials=options.trials, parallel_trials=options.groups,
        study=_new_study(), validation=f"{folder}/test", run_dir=run_dir, progress=False, spark=spark,
    )  # fmt: skip
    return [trial.value for trial in result.trials if trial.value is not None]


def _job_by_job(spark: Any, spec: ModelSpec, folder: str, options: Options, run_dir: str) -> list[float]:
    study, values = _new_study(), []
    for number in range(options.trials):
        trial = study.ask()
        config, _ = split_values(_suggest(trial), _config(options))
        result = driver.train(
            f"{folder}/train", spec, config, validation=f"{folder}/test", run_dir=f"{run_dir}/{number}",
            progress=False, spark=spark,
        )  # fmt: skip
        study.tell(trial, result.metrics["loss"])
        values.append(result.metrics["loss"])
    return values


def _new_study() -> Any:
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())


def _suggest(trial: Any) -> dict[str, Any]:
    return {"train.lr": trial.suggest_float("lr", 0.001, 0.1, log=True)}


def _config(options: Options) -> Config:
    return Config(
        data=Data(features=("image",), label="digit"),
        train=Train(epochs=options.epochs, optimizer_args={"momentum": 0.9}, log_every=1000),
        launch=Launch(num_ranks=options.ranks, device="cpu"),
    )


def _show(line: str) -> None:
    print(line, file=sys.stderr)
