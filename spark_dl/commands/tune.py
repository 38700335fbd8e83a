"""Searches for good settings: trains the trials of an Optuna study, several at the same time, and says the best.

spark-dl tune --config train.yaml --run_dir runs/search --num_trials 20 --parallel_trials 2 \\
    --search '{train.lr: {low: 0.0001, high: 0.1, log: true}, train.optimizer: [SGD, AdamW]}'

Each key of `--search` is a setting. A list has its choices. A mapping has the range of a number: `low`, `high`, and
`log: true` or `step`; it is a whole number if both ends are. The rows `validation` of the input, or
`train.validation_fraction`, give the metric. `best.yaml` in the run folder has the best settings, for spark-dl train.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

import spark_dl
from spark_dl import cli
from spark_dl.track import plots
from spark_dl.trials.tune import import_optuna

if TYPE_CHECKING:
    import optuna

OPTIONS = {
    "search": cli.Option(kind=dict[str, Any], default={}, help="the settings to search, as a YAML mapping"),
    "num_trials": cli.Option(kind=int, default=10, help="number of trials; with --resume, those before count"),
    "parallel_trials": cli.Option(kind=int, default=1, help="trials at the same time"),
    "metric": cli.Option(default="loss", help="loss or a metric of the validation rows, or train_loss"),
    "direction": cli.Option(kind=str | None, help="minimize or maximize; known for losses and usual metrics"),
    "num_folds": cli.Option(kind=int, default=0, help="folds of a cross-validation of each trial; 0 for none"),
    "run_dir": cli.Option(kind=str | None, help="folder for the study and the trials; all executors must have access"),
    "resume": cli.Option(kind=bool, default=False, help="continue the study in run_dir"),
    "overwrite": cli.Option(kind=bool, default=False, help="delete the study in run_dir first"),
    "no_progress": cli.Option(kind=bool, default=False, help="do not show a progress bar"),
}
BEST = "best.yaml"
_MARK = "# the best settings of a search, by spark-dl tune"


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("tune", str(__doc__), OPTIONS, given, exclusive=(("resume", "overwrite"),))
    cli.run(lambda: tune(job))


def tune(job: cli.Job) -> dict[str, Any]:
    """Searches, and returns what the command prints."""
    start, args = time.perf_counter(), job.args
    import_optuna()  # before Spark starts
    suggest = suggester(job.required("search"))
    spec = job.model.spec()
    spark = job.session("spark_dl tune")
    datasets = cli.read_datasets(spark, job.input)
    result = spark_dl.tune(
        cli.dataset(datasets, "train"), spec, suggest, job.config,
        num_trials=args["num_trials"], parallel_trials=args["parallel_trials"], metric=args["metric"],
        direction=args["direction"], num_folds=args["num_folds"], validation=datasets.get("validation"),
        run_dir=args["run_dir"], resume=args["resume"], overwrite=args["overwrite"], progress=not args["no_progress"],
    )  # fmt: skip
    best, states = result.best, [trial.state for trial in result.trials]
    url = cli.join(result.run_dir, BEST)
    plots.check_replaceable(url, _MARK, "settings of spark-dl tune", key="run_dir")
    cli.write_text(url, f"{_MARK}\n{yaml.safe_dump(nested(best.values), sort_keys=False)}")
    cli.log.info(f"the best settings: spark-dl train --config ... --config {url}")
    return {
        "run_dir": result.run_dir, "metric": result.metric, "best": best.value, "values": dict(best.values),
        "best_config": url, "trials": {state: states.count(state) for state in sorted({*states})},
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def suggester(search: Mapping[str, Any]) -> Callable[[optuna.Trial], dict[str, Any]]:
    """Returns the function that chooses the settings of a trial. Raises UsageError for what is no list and no range."""
    for key, space in search.items():
        _check(key, space)

    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        return {key: _choose(trial, key, space) for key, space in search.items()}

    return suggest


def _check(key: str, space: Any) -> None:
    if "." not in key:
        raise cli.UsageError(f"search: expected settings such as train.lr, found {key!r}")
    if isinstance(space, list) and space:
        return
    is_range = isinstance(space, dict) and {"low", "high"} <= space.keys() <= {"low", "high", "log", "step"}
    if not is_range or not all(type(space[end]) in (int, float) for end in ("low", "high")):
        raise cli.UsageError(
            f"search.{key}: expected a list of choices, or a range such as {{low: 0.001, high: 0.1, log: true}}, "
            f"found {space!r}"
        )
    if space["low"] > space["high"]:
        raise cli.UsageError(f"search.{key}: expected low <= high, found {space['low']} and {space['high']}")


def _choose(trial: optuna.Trial, key: str, space: Any) -> Any:
    if isinstance(space, list):
        # Optuna takes numbers and strings as choices; lists and mappings have a number.
        plain = all(isinstance(choice, (str, int, float, bool, type(None))) for choice in space)
        return trial.suggest_categorical(key, space) if plain else space[trial.suggest_int(key, 0, len(space) - 1)]
    options = {name: space[name] for name in ("log", "step") if name in space}
    if type(space["low"]) is int and type(space["high"]) is int:
        return trial.suggest_int(key, space["low"], space["high"], **options)
    return trial.suggest_float(key, space["low"], space["high"], **options)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings such as `train.lr` as a mapping of sections."""
    sections: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections
