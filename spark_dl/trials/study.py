"""The trials of a study, on the driver: what is asked for settings, what is told the values, and what a user gets.

An Optuna study is the record of its trials: each trial has its run folder, its results and its error as attributes. A
trial without an error that has failed was lost with its driver or its job. A resumed run trains it again. Trainings
whose settings are known in advance, such as the param maps of Spark ML, are a list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from spark_dl.cli.progress import ProgressDisplay
from spark_dl.config import Config
from spark_dl.config.fields import as_numbers
from spark_dl.config.load import build_config, with_settings
from spark_dl.driver import TrainResult
from spark_dl.prepare import prepare_run
from spark_dl.rundir import generations, metrics
from spark_dl.rundir.run_folder import has_trials
from spark_dl.spec import ModelSpec, Run
from spark_dl.trials.checks import check_cluster, check_trial
from spark_dl.trials.hand_out import run_trials, show_trials
from spark_dl.trials.rank import TUNED, Order, Spec, begin, spec_of, split_values

if TYPE_CHECKING:
    import optuna

State = Literal["complete", "pruned", "failed"]
Direction = Literal["minimize", "maximize"]

_log = logging.getLogger("spark_dl")

RUN, RUN_DIR, GOAL, VALUES, RESULTS, ERROR, RETRY_OF = (
    f"spark_dl:{name}" for name in ("run", "run_dir", "goal", "values", "results", "error", "retry_of")
)
"""Attributes of the trials of a study. `run` is the id of the whole run, whose folder can be moved, and `run_dir` the
folder then. `goal` is what the values of trials need to have in common."""

_COMPARED = ("data", "sequences", "train", "parallel")
"""Sections that decide what a trial trains."""
_HARMLESS = ("log_every", "check_replicas_every", "check_batch_loss", "compile", "channels_last")
"""Settings of `train` that change no value of a trial."""

Check = Callable[[ModelSpec, Config], None]


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
        ProgressDisplay("fit", enabled=progress) as shown,
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


@dataclass(frozen=True)
class TrialResult:
    """One trial of `tune`."""

    number: int
    """Number of the trial in the study."""
    state: State
    """`pruned`: the pruner of the study ended it. `failed`: it has an `error`."""
    values: Mapping[str, Any]
    """What `suggest` returned: settings by key, and arguments of the function that returns the model."""
    value: float | None
    """The metric of the last epoch; with folds, its mean. Of a pruned trial, the last one that was reported."""
    config: Config | None = field(repr=False)
    """The settings of the trial, for `spark_dl.train`; None if they are invalid."""
    results: tuple[TrainResult, ...] = field(repr=False)
    """The result of the training; with folds, one for each fold that was trained."""
    error: str
    seconds: float
    """From the choice of the settings to the end of the training."""

    @property
    def result(self) -> TrainResult | None:
        """The first of `results`; None without any."""
        return self.results[0] if self.results else None


@dataclass(frozen=True)
class TuneResult:
    """The result of `tune`. In a notebook it is shown as a table of the trials."""

    run_dir: str
    metric: str
    direction: Direction
    trials: tuple[TrialResult, ...] = field(repr=False)
    """The trials of this run, by number, with those of earlier attempts."""
    study: optuna.Study = field(repr=False)
    """Optuna's study, for its plots and data frames."""
    seconds: float
    """Duration of the call."""

    @property
    def best(self) -> TrialResult:
        """The best trial that is complete. Raises ValueError if there is none."""
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        if not complete:
            raise ValueError(f"none of {len(self.trials)} trials is complete; see `trials`")
        sign = 1 if self.direction == "minimize" else -1
        return min(complete, key=lambda trial: sign * (trial.value or 0.0))

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.values))
        best = self.best.number if any(trial.state == "complete" for trial in self.trials) else None
        head = ["trial", "state", self.metric, *names, "seconds"]
        rows = [_row(trial, names, is_best=trial.number == best) for trial in self.trials]
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        caption = f"{len(self.trials)} trials of {self.run_dir} ({self.direction} {self.metric}, {self.seconds:.1f} s)"
        return (
            f'<div style="overflow-x:auto"><table><caption>{html.escape(caption)}</caption>'
            f"<thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )


def _row(trial: TrialResult, names: Sequence[str], *, is_best: bool) -> str:
    value = "" if trial.value is None else f"{trial.value:.6g}"
    cells = [
        str(trial.number), "best" if is_best else trial.state, value,
        *(_text(trial.values.get(name, "")) for name in names), f"{trial.seconds:.1f}",
    ]  # fmt: skip
    style = ' style="font-weight:bold"' if is_best else ""
    title = f' title="{html.escape(trial.error)}"' if trial.error else ""
    return f"<tr{style}{title}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def history_of(run_dir: str) -> list[dict[str, Any]]:
    """Returns the history of a training, as in its `TrainResult`, from its run folder. Called on the driver."""
    lines = [line for line in metrics.read_metrics(run_dir) if line["kind"] == "epoch"]
    return [{name: line[name] for name in ("epoch", "train_loss", "metrics")} for line in lines]


@dataclass(frozen=True)
class Goal:
    """What a study minimizes or maximizes."""

    metric: str
    """`train_loss`, or a value of the validation rows."""
    num_folds: int = 0

    def of_trials(self, direction: Direction, config: Config) -> dict[str, Any]:
        """Returns what trials must have in common, so that their values can be compared, as JSON."""
        settings = {
            f"{name}.{key}": value
            for name, section in config.to_dict().items()
            if isinstance(section, dict) and name in _COMPARED
            for key, value in section.items()
            if name != "train" or key not in _HARMLESS
        }
        return {"metric": self.metric, "direction": direction, "num_folds": self.num_folds, **settings}

    def value(self, train_loss: float | None, values: Mapping[str, Any]) -> float:
        """Returns the value of a trial. Raises ValueError if it has no such value, or not one finite number."""
        known = {"train_loss": train_loss, **values}
        if self.metric not in known:
            raise ValueError(f"metric: expected one of {list(known)}, found {self.metric!r}")
        best = known[self.metric]
        if not isinstance(best, (int, float)) or not math.isfinite(best):
            raise ValueError(f"metric: expected a finite number, found {self.metric}={best!r:.80}")
        return float(best)


@dataclass
class _Running:
    """A trial that is not finished."""

    trial: optuna.Trial
    values: list[float] = field(default_factory=list)
    """The value of each training of the trial that has ended."""
    results: list[dict[str, Any]] = field(default_factory=list)
    is_pruned: bool = False


class _OtherSpaceError(Exception):
    """The study has trials in which a parameter has other choices."""


class StudyTrials:
    """The trainings of a study, as `Trials`: one for each trial, or one for each fold of a trial."""

    def __init__(
        self,
        study: optuna.Study,
        suggest: Callable[[optuna.Trial], Mapping[str, Any]],
        spec: Spec,
        run: Run,
        goal: Goal,
        *,
        num_trials: int,
        check: Check,
        on_event: Callable[[Mapping[str, Any]], None],
    ):
        self._study, self._suggest, self._spec, self._run, self._goal = study, suggest, spec, run, goal
        self._num_trials, self._check, self._on_event = num_trials, check, on_event
        self._orders: deque[Order] = deque()
        """Trainings that no group has got yet."""
        self._running: dict[int, _Running] = {}
        self._ended = len(_ended(study, run.run_dir))
        self._has_begun = False
        """Whether `suggest` has chosen settings in this call."""
        self._is_over = False
        """Whether the sampler has no more settings to choose, such as those of a grid."""

    def next(self) -> Order | None:
        while not self._orders and not self._is_over and self._ended + len(self._running) < self._num_trials:
            self._ask()
        return self._orders.popleft() if self._orders else None

    def prepare(self) -> bool:
        """Chooses the settings of the first trial. Returns False if there is nothing to train."""
        order = self.next()
        if order is not None:
            self._orders.appendleft(order)
        return order is not None

    def ends(self, order: Order, entry: Mapping[str, Any]) -> bool:
        running = self._running.get(order.trial)
        if running is None:  # another fold has failed, or the folds so far were pruned
            return True
        if self._goal.num_folds:
            return False
        try:
            value = self._goal.value(entry["train_loss"], entry["metrics"])
        except ValueError:  # `finish` says so
            return True
        running.trial.report(value, entry["epoch"])
        if entry["epoch"] + 1 < order.config.train.epochs:
            running.is_pruned = bool(running.trial.should_prune())
        return running.is_pruned

    def finish(self, order: Order, result: Mapping[str, Any] | None, error: BaseException | None) -> None:
        running = self._running.get(order.trial)
        if running is None:
            return
        if result is None:
            self._fail(order.trial, str(error))
            return
        running.results.append({**result, "run_dir": order.run_dir})
        running.trial.set_user_attr(RESULTS, running.results)
        try:
            running.values.append(self._goal.value(result["train_loss"], result["metrics"]))
        except ValueError as found:
            self._fail(order.trial, str(found))
            return
        mean = sum(running.values) / len(running.values)
        done, folds = len(running.values), self._goal.num_folds
        if done < folds:
            running.trial.report(mean, done - 1)
            running.is_pruned = bool(running.trial.should_prune())
        if running.is_pruned:
            self._end(order.trial, "pruned")
        elif done >= folds:
            self._end(order.trial, "complete", mean)

    def _ask(self) -> None:
        """Asks the study for a trial, and puts its trainings into the queue. A trial with invalid settings fails."""
        import optuna

        generations.check_newest(self._run.run_dir, self._run.generation)
        trial = self._study.ask()
        trial.set_user_attr(RUN_DIR, self._run.run_dir)
        trial.set_user_attr(RUN, generations.read_run_id(self._run.run_dir))
        trial.set_user_attr(GOAL, self._goal.of_trials(direction_of(self._study), self._run.config))
        is_first = not self._running and not self._has_begun
        self._running[trial.number] = _Running(trial)
        try:
            try:
                values = as_numbers(self._suggest(trial))
            except ValueError as error:
                if is_first and ("dynamic value space" in str(error) or "different distribution" in str(error)):
                    raise _OtherSpaceError(error) from error
                raise
            if isinstance(values, Mapping):
                trial.set_user_attr(VALUES, dict(values))
            config, arguments = split_values(values, self._run.config)
            self._check(spec_of(self._spec, arguments), config)
            self._orders += [self._begin(trial.number, config, arguments, fold) for fold in self._folds()]
            self._has_begun = True
        except optuna.TrialPruned:
            self._end(trial.number, "pruned")
        except _OtherSpaceError as error:
            self.lose()
            raise ValueError(
                f"suggest: it chooses from other values than the trials that the study has ({error}), so that their "
                "values cannot be compared; restore them, or use another run_dir or study"
            ) from error
        except Exception as error:  # of the user's functions, too
            self._fail(trial.number, f"{type(error).__name__}: {error}")

    def _folds(self) -> list[int | None]:
        return list(range(self._goal.num_folds)) or [None]

    def _begin(self, trial: int, config: Config, arguments: Mapping[str, Any], fold: int | None) -> Order:
        if fold is not None:
            fold_settings = {"train.validation_fraction": 1 / self._goal.num_folds, "train.validation_fold": fold}
            config = build_config(with_settings(config.to_dict(), fold_settings))
        return begin(self._run, trial, config, arguments, fold)

    def _fail(self, number: int, error: str) -> None:
        self._running[number].trial.set_user_attr(ERROR, error)
        _log.warning("trial %d failed: %s", number, error.partition("\n")[0])
        self._end(number, "failed")

    def _end(self, number: int, state: State, value: float | None = None) -> None:
        """Tells the study the end of a trial. Trainings of it that no group has got yet are dropped."""
        del self._running[number]
        self._orders = deque(order for order in self._orders if order.trial != number)
        self._ended += 1
        self._is_over |= _tell(self._study, number, state, value)
        best = best_value(self._study, self._run.run_dir)
        self._on_event({
            "kind": "trial", "trial": number, "state": state, "value": value, "done": self._ended,
            "trials": self._num_trials, "best": best,
        })  # fmt: skip

    def lose(self) -> None:
        """Marks the trials that are not finished as failed, without an error: their job has ended."""
        for number in list(self._running):
            with contextlib.suppress(Exception):  # the first error is more helpful; `take_up` marks them otherwise
                del self._running[number]
                _tell(self._study, number, "failed")


def take_up(study: optuna.Study, run_dir: str, goal: Mapping[str, Any] | None = None) -> None:
    """Queues the trials again that an earlier attempt of this run has lost, with the same values.

    Called when the run has a new generation, so the earlier attempt gives out no more trials. goal: `Goal.of_trials`.
    Raises ValueError if the study does not have the trials of the run, or if these have another goal.
    """
    known_trials = _own(study, run_dir)
    for trial in known_trials:
        now = json.loads(json.dumps(goal or {}))
        before = trial.user_attrs.get(GOAL, now)
        if goal is not None and before != now:
            differ = [
                f"{key}: was {before.get(key)!r}, now {now.get(key)!r}"
                for key in sorted(before.keys() | now.keys())
                if before.get(key) != now.get(key)
            ]
            raise ValueError(
                f"cannot resume the study of {run_dir}, as the values of its trials could not be compared with those "
                f"of new ones ({'; '.join(differ)}); restore the settings, or use another run_dir"
            )
    if not known_trials and has_trials(run_dir):
        raise ValueError(
            f"study: found none of the trials of {run_dir}; to resume, pass the study of the earlier attempt from its "
            "storage: optuna.load_study(...)"
        )
    for trial in known_trials:
        if trial.state.name == "RUNNING":
            _tell(study, trial.number, "failed")
    again = {trial.user_attrs.get(RETRY_OF) for trial in known_trials}
    for trial in _own(study, run_dir):
        if _is_lost(trial) and trial.number not in again:
            again_attrs = {RUN_DIR: run_dir, RUN: generations.read_run_id(run_dir), RETRY_OF: trial.number}
            study.enqueue_trial(trial.params, user_attrs=again_attrs)


def _tell(study: optuna.Study, number: int, state: State, value: float | None = None) -> bool:
    """Tells a study the end of a trial. Returns whether its sampler wants to end the study."""
    try:
        study.tell(number, value, _states()[state])
    except Exception as error:
        # NOTE: with the last trial of a grid, GridSampler and BruteForceSampler call `Study.stop`, which is an error
        # outside of `Study.optimize`. The trial has its state by then.
        if not study.get_trials(deepcopy=False)[number].state.is_finished():
            raise
        if "Study.stop" in str(error):
            return True
        _log.warning("the sampler of the study failed after trial %d: %r", number, error)
    return False


def results_of(study: optuna.Study, run_dir: str, base: Config) -> tuple[TrialResult, ...]:
    """Returns the finished trials of a run, by number."""
    return tuple(_result(trial, base, run_dir) for trial in _ended(study, run_dir))


def best_value(study: optuna.Study, run_dir: str) -> float | None:
    """Returns the best value of the complete trials of a run."""
    values = [t.value for t in _ended(study, run_dir) if t.value is not None and t.state.name == "COMPLETE"]
    return (min if direction_of(study) == "minimize" else max)(values, default=None)


def direction_of(study: optuna.Study) -> Direction:
    """Returns the direction of a study with one objective."""
    return "minimize" if study.direction.name == "MINIMIZE" else "maximize"


def _states() -> dict[State, optuna.trial.TrialState]:
    from optuna.trial import TrialState

    return {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


def _own(study: optuna.Study, run_dir: str) -> list[optuna.trial.FrozenTrial]:
    """Returns the trials of a run, whose folder may have been moved; a study can have others, too."""
    run_id = generations.read_run_id(run_dir)

    def is_own(attributes: Mapping[str, Any]) -> bool:
        if run_id is not None and RUN in attributes:
            return bool(attributes[RUN] == run_id)
        return attributes.get(RUN_DIR) == run_dir

    return [trial for trial in study.get_trials(deepcopy=False) if is_own(trial.user_attrs)]


def _ended(study: optuna.Study, run_dir: str) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in _own(study, run_dir) if trial.state.is_finished() and not _is_lost(trial)]


def _is_lost(trial: optuna.trial.FrozenTrial) -> bool:
    return trial.state.name == "FAIL" and ERROR not in trial.user_attrs


def _result(trial: optuna.trial.FrozenTrial, base: Config, run_dir: str) -> TrialResult:
    if trial.user_attrs.get(GOAL, {}).get("num_folds"):  # the folds are those of the study: its best settings have none
        base = dataclasses.replace(base, train=dataclasses.replace(base.train, validation_fraction=0.0))
    values = trial.user_attrs.get(VALUES, {})
    config = None
    with contextlib.suppress(ValueError):
        config = split_values(values, base)[0]
    return TrialResult(
        number=trial.number,
        state=next(state for state, known in _states().items() if known == trial.state),
        values=values,
        value=trial.value,
        config=config if VALUES in trial.user_attrs else None,
        results=tuple(
            TrainResult(**{**training, "history": history_of(training["run_dir"])})
            for training in _moved(trial.user_attrs.get(RESULTS, ()), trial.user_attrs.get(RUN_DIR), run_dir)
        ),
        error=trial.user_attrs.get(ERROR, ""),
        seconds=trial.duration.total_seconds() if trial.duration else 0.0,
    )


def _moved(results: Sequence[Mapping[str, Any]], before: str | None, run_dir: str) -> list[dict[str, Any]]:
    """Returns the results of a trial with the URLs that they have now. before: the folder of the run then."""
    if before is None or before == run_dir:
        return [dict(training) for training in results]

    def moved(value: Any) -> Any:
        is_inside = isinstance(value, str) and value.startswith(f"{before}/")
        return f"{run_dir}{value[len(before) :]}" if is_inside else value

    return [{key: moved(value) for key, value in training.items()} for training in results]
