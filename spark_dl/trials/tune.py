"""`tune`: the trials of an Optuna study on groups of ranks, in one barrier job, from one dataset."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_dl import storage
from spark_dl.cli.progress import OnEvent, ProgressDisplay, as_functions
from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.launch.session import find_session
from spark_dl.prepare import as_sources, prepare_run
from spark_dl.rundir import generations
from spark_dl.rundir.run_folder import STUDY
from spark_dl.spec import ModelSpec, Run
from spark_dl.training import row_metrics
from spark_dl.training.row_metrics import build_metrics
from spark_dl.trials.checks import check_cluster, check_trial
from spark_dl.trials.hand_out import run_trials, show_trials
from spark_dl.trials.rank import Spec
from spark_dl.trials.study import Direction, Goal, StudyTrials, TuneResult, direction_of, results_of, take_up

if TYPE_CHECKING:
    import optuna
    from pyspark.sql import SparkSession

    from spark_dl.driver import Source


def tune(
    data: Source | Mapping[str, Source],
    spec: Spec,
    suggest: Callable[[optuna.Trial], Mapping[str, Any]],
    config: Config | None = None,
    *,
    num_trials: int,
    parallel_trials: int = 1,
    metric: str = "loss",
    direction: Direction | None = None,
    study: optuna.Study | None = None,
    num_folds: int = 0,
    validation: Source | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    on_event: OnEvent | Sequence[OnEvent] = (),
    spark: SparkSession | None = None,
) -> TuneResult:
    """Trains the trials of an Optuna study, several at the same time, in one barrier job. Called on the driver.

    All trials read one dataset, which is written or opened once. A group of `launch.num_ranks` ranks trains a trial as
    `train` does. The cluster needs `parallel_trials * launch.num_ranks` task slots. A failed trial ends no other one.

    Args:
        spec: the model; or a function that returns it for the arguments that `suggest` chooses, called on both sides.
        suggest: called on the driver with each `optuna.Trial`; returns a dict. Keys with a section, such as `train.lr`,
            are settings that replace those of `config`. All other keys are arguments of the function `spec`.
        num_trials: number of trials of this run. With `resume`, those of earlier attempts count.
        direction: `minimize` or `maximize`, for a new study. The default is known for losses and for classes of
            torchmetrics in `train.metrics` or a `ModelSpec`; metrics of your own need it.
        resume: continues the study in `run_dir`, with its shards. Trials that were not finished are trained again.
        metric: the value of a trial after the last epoch: `train_loss`, or `loss` or a metric of the validation rows.
            The study's pruner gets it after each epoch.
        study: a study with one objective; by default a new one, with the TPE sampler seeded by `train.seed` and without
            a pruner, in the file `study.log` of a local `run_dir`.
        num_folds: trains each trial on each fold of a cross-validation, on several groups at the same time. Its value
            is the mean over the folds, which the pruner gets after each fold.
        on_event: functions that get the events of the trainings, as for `train`, each with `trial`; and at the end of
            each trial an event `trial`, with its `state` and `value`, and the `best` value so far.

    Raises:
        ValueError: For invalid arguments and data.
        RuntimeError: If all trials fail or the cluster cannot run the job.
        RankError: If a process is killed. The study keeps the finished trials.

    Example:
        >>> def suggest(trial):
        ...     return {"train.lr": trial.suggest_float("lr", 0.001, 0.1, log=True)}
        >>> found = spark_dl.tune(df, spec, suggest, config, num_trials=2, metric="train_loss", overwrite=True)
        >>> found.best.values
    """
    start, goal = time.perf_counter(), Goal(metric, num_folds)
    config, data = config or Config(), as_sources(data, "tune")
    validation = None if validation is None else as_sources(validation, "tune")
    config = _check(config, spec, suggest, goal, num_trials, parallel_trials, has_validation=validation is not None)
    direction = _direction(direction, metric, spec, config, study)
    _check_study(study, direction)
    num_groups = min(parallel_trials, num_trials * max(1, num_folds))
    search = _Search(find_session(data, spark), spec, suggest, goal, num_trials, num_groups, as_functions(on_event))
    check_cluster(search.spark, config, num_groups)
    options: dict[str, Any] = {"run_dir": run_dir, "resume": resume, "overwrite": overwrite, "reuse_shards": resume}
    fixed = spec if isinstance(spec, ModelSpec) else None
    with (
        ProgressDisplay("tune", enabled=progress) as shown,
        prepare_run(data, fixed, config, validation=validation, stage=shown.stage, **options) as run,
        generations.explained(run.run_dir, run.generation),
    ):
        study = study or _open_study(direction, run, resume=resume)
        if resume:
            _check_study(study, direction)
            take_up(study, run.run_dir, goal.of_trials(direction_of(study), run.config))
        _run(search, study, run, shown)
    return _result(study, run, metric, time.perf_counter() - start)


@dataclass(frozen=True)
class _Search:
    """The arguments of a call of `tune` that its trials need."""

    spark: Any
    spec: Spec
    suggest: Callable[[optuna.Trial], Mapping[str, Any]]
    goal: Goal
    num_trials: int
    num_groups: int
    functions: Sequence[OnEvent]


def _run(search: _Search, study: Any, run: Run, shown: ProgressDisplay) -> None:
    """Trains the trials that are left. If the job ends early, the study has no trial that seems to run."""
    pass_on = show_trials(shown, search.functions)
    trials = StudyTrials(
        study, search.suggest, search.spec, run, search.goal, num_trials=search.num_trials,
        check=_checks(search.spark, run, search.goal), on_event=pass_on,
    )  # fmt: skip
    try:
        if trials.prepare():
            shown.stage(f"starting {search.num_groups} x {run.config.launch.num_ranks} rank(s)")
            run_trials(search.spark, run, search.spec, trials, num_groups=search.num_groups, on_event=pass_on)
    except BaseException:
        trials.lose()
        raise


class TrialsFailedError(RuntimeError):
    """All trials of a search have failed, each with an error of its own."""

    is_retryable = False


def _result(study: Any, run: Run, metric: str, seconds: float) -> TuneResult:
    """Returns the result of a run. Raises TrialsFailedError if all its trials have failed."""
    trials = results_of(study, run.run_dir, run.config)
    if trials and all(trial.state == "failed" for trial in trials):
        raise TrialsFailedError(f"all {len(trials)} trials failed; trial {trials[0].number}: {trials[0].error}")
    return TuneResult(run.run_dir, metric, direction_of(study), trials, study, seconds)


def _check(
    config: Config, spec: Any, suggest: Any, goal: Goal, num_trials: Any, parallel_trials: Any, *, has_validation: bool
) -> Config:
    """Checks the arguments of `tune`. Returns the settings of all trials, with a validation split for folds."""
    for name, value, least in (
        ("num_trials", num_trials, 1), ("parallel_trials", parallel_trials, 1), ("num_folds", goal.num_folds, 0)
    ):  # fmt: skip
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, found {value!r}")
    if not callable(suggest):
        raise ValueError(f"suggest: expected a function that gets a trial and returns a dict, found {suggest!r:.200}")
    if not isinstance(spec, ModelSpec) and not callable(spec):
        raise ValueError(f"spec: expected a ModelSpec, or a function that returns one, found {spec!r:.200}")
    if goal.num_folds == 1:
        raise ValueError("num_folds: expected 0, or at least 2 folds, found 1")
    if goal.num_folds and (has_validation or config.train.validation_fraction):
        raise ValueError(
            "num_folds: the folds are the validation rows; remove train.validation_fraction and validation"
        )
    if goal.num_folds:
        fraction = 1 / goal.num_folds
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, validation_fraction=fraction))
    if goal.metric != "train_loss" and not (has_validation or config.train.validation_fraction):
        raise ValueError(
            f"metric: {goal.metric!r} is a value of the validation rows; set train.validation_fraction, pass "
            "validation, or set num_folds; or set metric to 'train_loss'"
        )
    return config


def _direction(
    direction: Direction | None, metric: str, spec: Spec, config: Config, study: Any
) -> Direction | None:  # fmt: skip
    """Returns the direction that was given, or that of the metric; None for a study whose metric does not say it."""
    if direction is not None:
        return direction
    mode = row_metrics.better(metric, spec if isinstance(spec, ModelSpec) else None, config)
    if mode is None and study is None:
        raise ValueError(
            f"direction: {metric!r} does not say which value is better; pass direction='minimize' or 'maximize'"
        )
    return None if mode is None else "minimize" if mode == "min" else "maximize"


def _check_study(study: Any, direction: Any) -> None:
    """Raises ValueError for anything that is not a study with one objective, and for another direction than its own."""
    optuna = import_optuna()
    if direction not in (None, "minimize", "maximize"):
        raise ValueError(f"direction: expected 'minimize' or 'maximize', found {direction!r}")
    if study is None:
        return
    if not isinstance(study, optuna.Study):
        raise ValueError(f"study: expected an optuna.Study, found {type(study).__name__}")
    if len(study.directions) != 1:
        raise ValueError(f"study: expected one objective, found {len(study.directions)}")
    if direction not in (None, direction_of(study)):
        raise ValueError(
            f"direction: {direction!r} is asked for, or is that of the metric, and the study has "
            f"{direction_of(study)!r}; create it with direction={direction!r}"
        )


def import_optuna() -> Any:
    """Returns the package. Raises ModuleNotFoundError with what to install."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tune needs Optuna on the driver: pip install optuna (the extra spark_dl[optuna])", name=error.name
        ) from error
    return optuna


def _open_study(direction: Direction | None, run: Run, *, resume: bool) -> Any:
    """Returns the study in a local run folder, a new one or that of the earlier attempt."""
    optuna = import_optuna()
    storage_of_study = None
    if storage.is_local(run.run_dir):
        url = storage.within(run.run_dir, STUDY)
        storage.append(url, b"")  # Optuna would create it readable for all, and follow a link
        path = storage.resolve(url)[1]
        storage_of_study = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(path))
    study = optuna.create_study(
        storage=storage_of_study,
        study_name="trials",
        direction=direction,
        load_if_exists=resume,
        pruner=optuna.pruners.NopPruner(),
    )
    # The generator starts anew with each driver, and must not choose the settings of the first trials again.
    seed = run.config.train.seed + len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=seed)
    return study


def _checks(spark: Any, run: Run, goal: Goal) -> Callable[[ModelSpec, Config], None]:
    """Returns a function that checks the model and the settings of a trial, before a group gets it."""

    def check(spec: ModelSpec, config: Config) -> None:
        check_trial(spark, spec, config, run)
        known = ["train_loss", "loss", *(metric.name for metric in build_metrics(spec, config))]
        if goal.metric not in known and spec.evaluation is None:
            raise ValueError(
                f"metric: no value {goal.metric!r}{suggestion(goal.metric, known)}; set metrics in train.metrics or "
                "ModelSpec.metrics"
            )

    return check
