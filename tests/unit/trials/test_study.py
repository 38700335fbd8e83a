"""The trials of a real study of Optuna, whose trainings are made up: values, failures, pruning, folds, restarts."""

import dataclasses
import html.parser
import json
import re
import sys

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from spark_dl import TuneResult
from spark_dl.rundir import generations
from spark_dl.spec import Run
from spark_dl.trials.rank import split_values
from spark_dl.trials.study import Goal, StudyTrials, best_value, direction_of, results_of, take_up
from spark_dl.trials.tune import import_optuna
from tests.builders.models import MLP
from tests.builders.settings import make_config

BASE = make_config(epochs=3)


@pytest.fixture(autouse=True, scope="module")
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def suggest(trial):
    return {"train.lr": trial.suggest_float("lr", 0.1, 1)}


def start(folder, study, suggest=suggest, *, num_trials=4, metric="loss", num_folds=0, check=lambda *_: None):
    """The trials of a new attempt, as the driver makes them, and the events that it shows."""
    generation, events = generations.start_generation(str(folder)), []
    run = Run(spec=MLP, config=BASE, train=None, run_dir=str(folder), generation=generation)
    trials = StudyTrials(
        study, suggest, MLP, run, Goal(metric, num_folds), num_trials=num_trials, check=check, on_event=events.append
    )
    return trials, events


def new_study(seed=0, **options):
    return optuna.create_study(**{"sampler": optuna.samplers.RandomSampler(seed=seed), **options})


def result(loss, **metrics):
    return {
        "checkpoint": "/c", "epochs": 3, "steps": 9, "rows": 90, "train_loss": 2 * loss, "rows_per_s": 5.0,
        "seconds": 1.0, "metrics": {"loss": loss, **metrics}, "history": [], "stopped_early": False,
    }  # fmt: skip


def entry(epoch, loss):
    return {"epoch": epoch, "train_loss": loss, "metrics": {"loss": loss}}


def train_all(trials, loss_of, *, at_once=1):
    """Trains up to `at_once` trials at the same time; of these, the last one ends first."""
    while orders := [order for _ in range(at_once) if (order := trials.next())]:
        for order in reversed(orders):
            trials.finish(order, result(loss_of(order)), None)


def lr_of(order):
    return order.config.train.lr


def test_the_best_trial_does_not_depend_on_how_many_are_trained_at_the_same_time(tmp_path):
    found = {}
    for at_once in (1, 2, 4):
        study, folder = new_study(seed=3), tmp_path / str(at_once)
        trials, events = start(folder, study)
        assert trials.prepare()
        train_all(trials, lr_of, at_once=at_once)
        assert trials.next() is None
        found[at_once] = [(t.number, t.state, t.values, t.value) for t in results_of(study, str(folder), BASE)]
        assert study.best_value == best_value(study, str(folder)) == events[-1]["best"]
        assert [(e["done"], e["trials"]) for e in events] == [(done, 4) for done in (1, 2, 3, 4)]
    assert found[1] == found[2] == found[4]
    assert [number for number, *_ in found[1]] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", [
    lambda: optuna.samplers.GridSampler({"lr": [0.25, 0.5, 0.75]}, seed=1), optuna.samplers.BruteForceSampler,
], ids=["grid", "brute force"])  # fmt: skip
def test_a_grid_is_trained_once_and_then_the_run_is_over(tmp_path, sampler):
    study = optuna.create_study(sampler=sampler())
    points = [0.25, 0.5, 0.75]
    trials, _ = start(
        tmp_path, study, lambda trial: {"train.lr": trial.suggest_categorical("lr", points)}, num_trials=5
    )
    train_all(trials, lr_of)
    assert sorted(t.value for t in results_of(study, str(tmp_path), BASE)) == points
    trials, _ = start(tmp_path, study, num_trials=3)
    assert not trials.prepare()  # a resumed run has nothing left to train


def test_a_point_of_a_grid_that_was_lost_is_trained_again(tmp_path):
    def grid():
        return optuna.samplers.GridSampler({"lr": [0.25, 0.5, 0.75]}, seed=1)

    study = new_study(sampler=grid())
    trials, _ = start(tmp_path, study, num_trials=3)
    trials.next()
    train_all(trials, lr_of)
    study.sampler = grid()
    resumed, _ = start(tmp_path, study, num_trials=3)
    take_up(study, str(tmp_path))
    train_all(resumed, lr_of)
    assert sorted(t.value for t in results_of(study, str(tmp_path), BASE)) == [0.25, 0.5, 0.75]


def test_a_failure_is_that_of_its_trial(tmp_path):
    def bad(trial):
        if trial.number == 3:
            raise ZeroDivisionError("in suggest")
        return {0: {"train.lrr": 1}, 1: {"model": 3}}.get(trial.number) or suggest(trial)

    study = new_study()
    trials, _ = start(tmp_path, study, bad, num_trials=6)
    assert trials.prepare()  # the first trial that can be trained
    first, second, third = (trials.next() for _ in range(3))
    assert [order.trial for order in (first, second, third)] == [2, 4, 5]
    trials.finish(first, None, RuntimeError("rank 1 on h failed: no loss"))
    trials.finish(second, result(float("nan")), None)
    trials.finish(third, result(0.5), None)
    assert trials.next() is None
    found = results_of(study, str(tmp_path), BASE)
    assert [trial.state for trial in found] == ["failed"] * 5 + ["complete"]
    for trial, message in zip(found, (
        "unknown config key 'train.lrr'; did you mean 'train.lr'", "suggest: found model, which have no section",
        "rank 1 on h failed: no loss", "ZeroDivisionError: in suggest", "expected a finite number, found loss=nan",
    ), strict=False):  # fmt: skip
        assert message in trial.error
    assert found[0].values == {"train.lrr": 1}
    assert [trial.config is None for trial in found] == [True, False, False, True, False, False]


@pytest.mark.parametrize("metric", ["loss", "accuracy", "train_loss"])
def test_the_value_is_the_metric_of_the_last_epoch(tmp_path, metric):
    study = new_study(direction="maximize")
    trials, _ = start(tmp_path, study, num_trials=2, metric=metric)
    for loss in (0.5, 0.25):
        trials.finish(trials.next(), result(loss, accuracy=1 - loss), None)
    expected = {"loss": [0.5, 0.25], "accuracy": [0.5, 0.75], "train_loss": [1.0, 0.5]}[metric]
    assert [trial.value for trial in study.trials] == expected
    assert best_value(study, str(tmp_path)) == max(expected)
    assert direction_of(study) == "maximize"


def test_an_unknown_metric_fails_the_trial_after_its_first_epoch(tmp_path):
    study = new_study()
    trials, _ = start(tmp_path, study, num_trials=1, metric="auroc")
    order = trials.next()
    assert trials.ends(order, entry(0, 1.0))
    trials.finish(order, result(1.0), None)
    (trial,) = results_of(study, str(tmp_path), BASE)
    assert trial.error == "metric: expected one of ['train_loss', 'loss'], found 'auroc'"


def test_a_pruner_ends_a_trial_and_its_last_epoch_is_not_pruned(tmp_path):
    study = new_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    trials, events = start(tmp_path, study, num_trials=3)
    good, bad, late = (trials.next() for _ in range(3))
    assert [trials.ends(good, entry(epoch, 0.5)) for epoch in range(3)] == [False] * 3
    assert [trials.ends(bad, entry(epoch, loss)) for epoch, loss in enumerate((0.5, 1.5))] == [False, True]
    assert [trials.ends(late, entry(epoch, loss)) for epoch, loss in enumerate((0.5, 0.5, 1.5))] == [False] * 3
    for order, loss in ((good, 0.5), (bad, 1.5), (late, 1.5)):
        trials.finish(order, result(loss), None)
    found = results_of(study, str(tmp_path), BASE)
    assert [(t.state, t.value) for t in found] == [("complete", 0.5), ("pruned", 1.5), ("complete", 1.5)]
    assert [event["state"] for event in events] == ["complete", "pruned", "complete"]
    assert study.trials[1].intermediate_values == {0: 0.5, 1: 1.5}


def test_the_value_of_folds_is_their_mean_and_they_split_the_same_rows(tmp_path):
    study = new_study()
    trials, _ = start(tmp_path, study, num_trials=2, num_folds=3)
    orders = [trials.next() for _ in range(6)]
    assert [(order.trial, order.fold) for order in orders] == [(t, f) for t in range(2) for f in range(3)]
    assert len({order.run_dir for order in orders}) == 6
    assert {(o.config.train.validation_fraction, o.config.train.validation_fold) for o in orders} == {
        (1 / 3, fold) for fold in range(3)
    }
    for order in reversed(orders):
        assert not trials.ends(order, entry(0, 99.0))
        trials.finish(order, result(order.trial + order.fold), None)
    assert [trial.value for trial in study.trials] == [1.0, 2.0]
    found = results_of(study, str(tmp_path), BASE)
    assert [len(trial.results) for trial in found] == [3, 3]
    assert found[0].config.train.validation_fold is None


def test_a_fold_that_fails_or_is_pruned_ends_its_trial_alone(tmp_path):
    study = new_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    trials, _ = start(tmp_path, study, num_trials=3, num_folds=3)
    first, other_fold = trials.next(), trials.next()
    trials.finish(first, None, RuntimeError("no loss"))
    assert trials.ends(other_fold, entry(0, 0.5))  # which another group trains
    trials.finish(other_fold, result(0.5), None)
    pruned = trials.next()
    assert (pruned.trial, pruned.fold) == (1, 0)  # the third fold of trial 0 is dropped
    trials.finish(pruned, result(2.0), None)
    train_all(trials, lambda order: 0.5)
    assert [(t.state, t.value) for t in results_of(study, str(tmp_path), BASE)] == [
        ("failed", None), ("pruned", 2.0), ("complete", 0.5)
    ]  # fmt: skip


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_run_that_is_resumed_keeps_finished_trials_and_trains_those_again_that_were_lost(tmp_path, is_killed):
    url = f"sqlite:///{tmp_path}/study.db"
    study = new_study(storage=url, study_name="s")
    trials, _ = start(tmp_path, study, num_trials=5)
    done, failed, *lost = (trials.next() for _ in range(4))
    trials.finish(done, result(0.25), None)
    trials.finish(failed, None, RuntimeError("no loss"))
    if not is_killed:  # the job ends with an error, and the driver goes on
        trials.lose()

    again = optuna.load_study(storage=url, study_name="s", sampler=optuna.samplers.RandomSampler(seed=99))
    resumed, _ = start(tmp_path, again, num_trials=5)
    take_up(again, str(tmp_path))
    assert {t.number: t.state for t in again.trials if t.number in (2, 3)} == {2: TrialState.FAIL, 3: TrialState.FAIL}
    first, second, third = (resumed.next() for _ in range(3))
    assert [lr_of(order) for order in (first, second)] == [lr_of(order) for order in lost]
    assert lr_of(third) not in [lr_of(order) for order in lost]
    assert resumed.next() is None
    for order in (first, second, third):
        resumed.finish(order, result(0.5), None)
    found = results_of(again, str(tmp_path), BASE)
    assert [(trial.state, trial.value) for trial in found] == [
        ("complete", 0.25), ("failed", None), *[("complete", 0.5)] * 3
    ]  # fmt: skip
    take_up(again, str(tmp_path))  # nothing is lost any more
    assert len(again.trials) == 7
    with pytest.raises(RuntimeError, match="attempt 2 has started since"):
        start_order_of(trials, study)


def start_order_of(trials, study):
    """What the first driver gets, which does not know that another one has taken over."""
    trials._num_trials += 1
    return trials.next()


def test_a_run_is_not_resumed_with_a_study_that_does_not_have_its_trials(tmp_path):
    trials, _ = start(tmp_path, new_study())
    trials.next()
    with pytest.raises(ValueError, match=r"study: found none of the trials of .*optuna.load_study"):
        take_up(new_study(), str(tmp_path))


def test_trials_of_other_runs_in_a_study_are_left_alone(tmp_path):
    study = new_study()
    study.enqueue_trial({"lr": 0.75})
    other = study.ask()  # of somebody else, and still running
    trials, _ = start(tmp_path / "a", study, num_trials=1)
    train_all(trials, lr_of)
    trials, _ = start(tmp_path / "b", study, num_trials=1)
    train_all(trials, lr_of)
    take_up(study, str(tmp_path / "a"))
    assert study.trials[other.number].state == TrialState.RUNNING
    assert [len(results_of(study, str(tmp_path / name), BASE)) for name in "ab"] == [1, 1]


class Cells(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows = []

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.rows:
            self.rows[-1].append(data)


def test_a_notebook_shows_a_table_with_the_best_trial(tmp_path):
    study = new_study(seed=3)
    trials, _ = start(
        tmp_path, study, lambda trial: {**suggest(trial), "<b>": 1} if trial.number == 1 else suggest(trial)
    )
    train_all(trials, lr_of)
    found = TuneResult(str(tmp_path), "loss", "minimize", results_of(study, str(tmp_path), BASE), study, 1.5)
    best = min((t for t in found.trials if t.value is not None), key=lambda t: t.value)
    assert found.best == best
    cells = Cells()
    cells.feed(found._repr_html_())
    assert cells.rows[0] == ["trial", "state", "loss", "train.lr", "<b>", "seconds"]
    assert [row[:2] for row in cells.rows[1:]] == [
        [str(t.number), "best" if t == best else t.state] for t in found.trials
    ]
    assert "<b>" not in found._repr_html_()
    json.dumps([dict(trial.values) for trial in found.trials])
    with pytest.raises(ValueError, match="none of 0 trials is complete"):
        _ = TuneResult("/r", "loss", "minimize", (), study, 1.5).best


def test_R3_a_study_is_not_resumed_with_another_goal_or_other_settings(tmp_path):
    study = new_study()
    trials, _ = start(tmp_path, study, num_trials=1)
    train_all(trials, lr_of)
    before = Goal("loss").of_trials("minimize", BASE)
    take_up(study, str(tmp_path), before)
    longer = dataclasses.replace(
        BASE, train=dataclasses.replace(BASE.train, epochs=BASE.train.epochs + 4, log_every=77)
    )
    for goal, message in (
        (Goal("acc").of_trials("minimize", BASE), "metric: was 'loss', now 'acc'"),
        (Goal("loss").of_trials("maximize", BASE), "direction: was 'minimize', now 'maximize'"),
        (Goal("loss", 3).of_trials("minimize", BASE), "num_folds: was 0, now 3"),
        (
            Goal("loss").of_trials("minimize", longer),
            f"train.epochs: was {BASE.train.epochs}, now 7",
        ),
    ):
        with pytest.raises(ValueError, match=rf"cannot resume the study of .* \({re.escape(message)}\); restore"):
            take_up(study, str(tmp_path), goal)


def test_R11_the_folder_of_a_study_can_be_moved(tmp_path):
    study = new_study()
    trials, _ = start(tmp_path / "a", study, num_trials=2)
    train_all(trials, lr_of)
    before = results_of(study, str(tmp_path / "a"), BASE)
    (tmp_path / "a").rename(tmp_path / "b")
    take_up(study, str(tmp_path / "b"))
    found = results_of(study, str(tmp_path / "b"), BASE)
    assert [(t.number, t.value) for t in found] == [(t.number, t.value) for t in before]
    assert [t.result.run_dir for t in found] == [t.result.run_dir.replace("/a/", "/b/") for t in before]
    again, _ = start(tmp_path / "b", study, num_trials=2)
    assert again.next() is None


def test_R16_numbers_of_numpy_are_numbers_and_a_key_that_JSON_does_not_have_is_named(tmp_path):
    def numbers(trial):
        return {"train.lr": np.float64(trial.suggest_float("lr", 0.1, 1)), "train.epochs": np.int64(2)}

    study = new_study()
    trials, _ = start(tmp_path, study, numbers, num_trials=1)
    order = trials.next()
    assert order.config.train.epochs == 2
    assert study.trials[0].user_attrs["spark_dl:values"] == {"train.lr": lr_of(order), "train.epochs": 2}
    with pytest.raises(
        ValueError, match=r"suggest: expected strings as keys, which JSON has, found 1 in sizes\[0\]\.all"
    ):
        split_values({"sizes": [{"all": {1: 64}}]}, BASE)


def test_R18_the_best_settings_of_folds_train_on_all_rows(tmp_path):
    study = new_study()
    trials, _ = start(tmp_path, study, num_trials=1, num_folds=4)
    train_all(trials, lr_of)
    folds = dataclasses.replace(BASE, train=dataclasses.replace(BASE.train, validation_fraction=0.25))
    (trial,) = results_of(study, str(tmp_path), folds)
    assert trial.config.train.validation_fraction == 0


def test_R25_other_choices_than_those_of_the_study_are_one_error(tmp_path):
    def of(*choices):
        return lambda trial: {"train.lr": trial.suggest_categorical("lr", choices)}

    study = new_study()
    trials, _ = start(tmp_path, study, of(0.1, 0.2), num_trials=1)
    train_all(trials, lr_of)
    resumed, _ = start(tmp_path, study, of(0.1, 0.2, 0.3), num_trials=9)
    with pytest.raises(ValueError, match=r"^suggest: it chooses from other values than the trials that the study has"):
        resumed.prepare()
    assert len(results_of(study, str(tmp_path), BASE)) == 1, "the trial that could not begin does not count"


def test_without_optuna_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it is not installed
    with pytest.raises(
        ModuleNotFoundError, match=r"tune needs Optuna on the driver: pip install optuna \(the extra spark_dl\[optuna\]"
    ):
        import_optuna()
