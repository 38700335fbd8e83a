"""Trainings whose settings are known in advance, such as those of the param maps of Spark ML. On the driver only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_dl.cli.progress import Progress
from spark_dl.config import Config
from spark_dl.driver import TrainResult
from spark_dl.prepare import prepare_run
from spark_dl.rundir import generations
from spark_dl.spec import ModelSpec, Run
from spark_dl.trials.checks import check_cluster, check_trial
from spark_dl.trials.hand_out import run_trials, show_trials
from spark_dl.trials.order import TUNED, Order, begin
from spark_dl.trials.results import history_of


def train_listed(
    spark: Any,
    data: Any,
    specs: Sequence[ModelSpec],
    configs: Sequence[Config],
    *,
    parallel_trials: int,
    validation: Any,
    run_dir: str,
    progress: bool,
) -> list[TrainResult]:
    """Trains a model for each of the settings, in one barrier job and from one dataset. Called on the driver.

    Raises ValueError if the settings differ in a section that defines the dataset or the ranks, and for invalid
    settings and data. If trainings fail, raises the error of the first one, when all have ended.
    """
    if parallel_trials < 1:
        raise ValueError(f"parallelTrials: expected an integer >= 1, found {parallel_trials}")
    num_groups = min(parallel_trials, len(configs))
    for number, config in enumerate(configs):
        if differ := [name for name in _shared(config) if _shared(config)[name] != _shared(configs[0])[name]]:
            raise ValueError(
                f"trials in one job: the settings {differ[0]} of param map {number} differ from those of param map 0, "
                "but the trials share one dataset and the ranks; train them one after another (parallelTrials=1)"
            )
    check_cluster(spark, configs[0], num_groups)
    with (
        Progress("fit", enabled=progress) as shown,
        prepare_run(data, None, configs[0], validation=validation, run_dir=run_dir, stage=shown.stage) as run,
        generations.explained(run.run_dir, run.generation),
    ):
        for spec, config in zip(specs, configs, strict=True):
            check_trial(spark, spec, config, run)

        show = show_trials(shown)
        trials = _Listed(run, configs, show)
        shown.stage(f"starting {num_groups} x {run.config.launch.num_ranks} rank(s)")
        run_trials(spark, run, _SpecOf(specs), trials, num_groups=num_groups, on_event=show)
    if trials.errors:
        raise trials.errors[min(trials.errors)]
    return [trials.results[number] for number in range(len(configs))]


def _shared(config: Config) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in TUNED}


class _Listed:
    """One training for each settings, as `Trials`. The number of a trial is its place in the list."""

    def __init__(self, run: Run, configs: Sequence[Config], on_event: Callable[[Mapping[str, Any]], None]):
        self._run, self._configs, self._on_event = run, configs, on_event
        self._given = 0
        self.results: dict[int, TrainResult] = {}
        """The results by number, of the trainings that did not fail."""
        self.errors: dict[int, BaseException] = {}

    def next(self) -> Order | None:
        if self._given == len(self._configs):
            return None
        number = self._given
        self._given += 1
        return begin(self._run, number, self._configs[number], {"number": number})

    def ends(self, order: Order, entry: Mapping[str, Any]) -> bool:
        return False

    def finish(self, order: Order, result: Mapping[str, Any] | None, error: BaseException | None) -> None:
        if error is not None:
            self.errors[order.trial] = error
        elif result is not None:
            history = history_of(order.run_dir)
            self.results[order.trial] = TrainResult(**{**result, "run_dir": order.run_dir, "history": history})
        done = len(self.results) + len(self.errors)
        self._on_event(
            {"kind": "trial", "trial": order.trial, "done": done, "trials": len(self._configs), "best": None}
        )


class _SpecOf:
    """The model of each training, by its number. Sent to the ranks."""

    def __init__(self, specs: Sequence[ModelSpec]):
        self._specs = tuple(specs)

    def __call__(self, number: int) -> ModelSpec:
        return self._specs[number]
