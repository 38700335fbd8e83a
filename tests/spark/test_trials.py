"""spark_dl.tune in a real session, with real studies: one job, one dataset, and what is left when a rank is killed."""

import concurrent.futures
import functools
import os
import signal
import time
from pathlib import Path

import optuna
import pytest
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder, TrainValidationSplit

import spark_dl
from spark_dl import Launch, ModelSpec, RankError, Shards, TreeReduce
from spark_dl.launch import barrier
from spark_dl.ml import TorchClassifier
from tests.builders.models import MLP, blobs, build_mlp, same_bits, small_config

CONFIG = small_config(2, train={"epochs": 3, "validation_fraction": 0.25, "log_every": 100})


@pytest.fixture(scope="module", autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def points(spark):
    columns = blobs(240)
    rows = [([float(v) for v in x], int(y)) for x, y in zip(*columns.values(), strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label bigint").repartition(2).cache()


class KilledOnce:
    """Builds the model; the first rank that does so with a name of a file that does not exist is killed."""

    def __init__(self, mark):
        self.mark = mark

    def __call__(self):
        if self.mark and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return build_mlp()


def spec_of(mark=""):
    return ModelSpec(build=KilledOnce(mark))


def suggest(trial, mark):
    """Trial 1 is pruned, trial 2 fails, and trial 4 kills a rank."""
    lr = 1e-6 if trial.number == 1 else trial.suggest_float("lr", 0.3, 0.9)
    fails = {"train.optimizer": "SparseAdam"} if trial.number == 2 else {}  # for sparse gradients alone
    return {"train.lr": lr, **fails, **({"mark": mark} if trial.number == 4 else {})}


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_study_in_sqlite_survives_a_killed_rank_and_is_resumed_from_one_dataset(spark, points, tmp_path):
    mark, run_dir, url = str(tmp_path / "mark"), tmp_path / "run", f"sqlite:///{tmp_path}/study.db"
    pruner = optuna.pruners.ThresholdPruner(upper=0.95, n_warmup_steps=1)

    def tune(**more):
        sampler = optuna.samplers.RandomSampler(seed=len(more))
        study = optuna.create_study(
            storage=url, study_name="s", sampler=sampler, pruner=pruner, load_if_exists=True
        )  # fmt: skip
        return spark_dl.tune(
            points, spec_of, functools.partial(suggest, mark=mark), CONFIG, num_trials=7, parallel_trials=2,
            study=study, run_dir=run_dir, progress=False, **more,
        )  # fmt: skip

    with pytest.raises(RankError, match="was killed"):
        tune()
    before = optuna.load_study(study_name="s", storage=url).trials
    states = [trial.state.name for trial in before]
    assert states[:3] == ["COMPLETE", "PRUNED", "FAIL"]
    assert "RUNNING" not in states
    shards = sorted((run_dir / "shards" / "train").glob("*.parquet"))
    with pytest.raises(ValueError, match="already has trials of spark_dl.tune; set resume"):
        tune()

    events = []
    result = tune(resume=True, on_event=events.append)
    assert [trial.state for trial in result.trials] == ["complete", "pruned", "failed", *["complete"] * 4]
    assert "SparseAdam takes sparse gradients alone, and the model has none" in result.trials[2].error
    assert result.trials[0].value == before[0].value
    assert sorted((run_dir / "shards" / "train").glob("*.parquet")) == shards
    assert not list(run_dir.glob("trials/*/shards"))
    assert {e["trial"] for e in events if e["kind"] == "epoch"} == {t.number for t in result.trials if t.number > 3}
    best = result.best
    assert best.value == min(trial.value for trial in result.trials if trial.state == "complete")
    alone = spark_dl.train(
        str(run_dir / "shards" / "train"), MLP, best.config, run_dir=tmp_path / "alone", progress=False
    )
    assert alone.metrics == best.result.metrics
    assert alone.history == best.result.history
    assert same_bits(alone.load_model(MLP).state_dict(), best.result.load_model(MLP).state_dict())


@pytest.mark.slow
@pytest.mark.modes("local")
def test_folds_are_trained_in_one_job_and_the_default_study_is_in_the_run_folder(spark, points, tmp_path):
    config = small_config(1, train={"epochs": 2, "log_every": 100})

    def tune(num_trials, **more):
        return spark_dl.tune(
            points, MLP, lambda trial: {"train.lr": trial.suggest_float("lr", 0.01, 0.5)}, config,
            num_trials=num_trials, parallel_trials=3, num_folds=3, run_dir=tmp_path / "run", progress=False, **more,
        )  # fmt: skip

    first = tune(2)
    assert [len(trial.results) for trial in first.trials] == [3, 3]
    for trial in first.trials:
        folds = [result.metrics["loss"] for result in trial.results]
        assert trial.value == pytest.approx(sum(folds) / 3)
        assert sorted(result.rows for result in trial.results) == [320] * 3
    again = tune(3, resume=True)
    assert again.trials[:2] == first.trials
    assert len(again.trials) == 3
    assert again.best.value == min(trial.value for trial in again.trials)
    assert len(tune(1, overwrite=True).trials) == 1
    left = sorted(os.listdir(tmp_path / "run" / "trials" / "0001-fold-0"))
    assert left == ["checkpoints", "environment", "generations"]


@pytest.mark.modes("local")
def test_what_cannot_be_tuned_is_an_error_before_anything_is_written(spark, points, tmp_path):
    study = optuna.create_study(direction="maximize")
    for options, message in (
        ({"num_trials": 0}, "num_trials: expected an integer >= 1, found 0"),
        ({"parallel_trials": 1.5}, "parallel_trials: expected an integer >= 1, found 1.5"),
        ({"suggest": {"train.lr": 1}}, "suggest: expected a function"),
        ({"spec": "model"}, "spec: expected a ModelSpec, or a function that returns one, found 'model'"),
        ({"num_folds": 1}, "num_folds: expected 0, or at least 2 folds, found 1"),
        ({"num_folds": 2}, "num_folds: the folds are the validation rows; remove train.validation_fraction"),
        ({"study": "sqlite:///s.db"}, "study: expected an optuna.Study, found str"),
        ({"study": optuna.create_study(directions=["minimize", "minimize"])}, "study: expected one objective, found 2"),
        ({"study": study, "direction": "minimize"}, "direction: 'minimize' is asked for.* the study has 'maximize'"),
        ({"study": study}, "direction: 'minimize' is asked for, or is that of the metric.* has 'maximize'"),
        ({"metric": "own"}, "direction: 'own' does not say which value is better; pass direction='minimize' or"),
        ({"direction": "min"}, "direction: expected 'minimize' or 'maximize', found 'min'"),
        ({"config": small_config(2)}, "metric: 'loss' is a value of the validation rows; set train.validation_frac"),
        ({"config": small_config(2, train={"validation_fraction": 0.2}, shards=Shards(storage="local"))},
         "shards.storage: expected 'shared' for trials"),
    ):  # fmt: skip
        arguments = {"spec": MLP, "suggest": lambda trial: {}, "config": CONFIG, "num_trials": 2, **options}
        with pytest.raises(ValueError, match=message):
            spark_dl.tune(points, run_dir=tmp_path / "run", progress=False, **arguments)
    with pytest.raises(RuntimeError, match="6 ranks need 6 task slots at the same time, and the cluster has 4"):
        spark_dl.tune(points, MLP, dict, CONFIG, num_trials=3, parallel_trials=3, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.modes("local")
@pytest.mark.parametrize(("settings", "options", "message"), [
    ({"parallel.strategy": TreeReduce.strategy}, {}, "parallel.strategy: expected a str"),
    ({}, {"metric": "accurcy", "direction": "maximize"}, "metric: no value 'accurcy'"),
])  # fmt: skip
def test_trials_that_all_fail_are_one_error_without_any_rank(spark, points, tmp_path, settings, options, message):
    started = []
    with pytest.raises(RuntimeError, match=rf"all 2 trials failed; trial 0: ValueError: {message}"):
        spark_dl.tune(
            points, MLP, lambda trial: settings, CONFIG, num_trials=2, run_dir=tmp_path, progress=False,
            on_event=lambda event: started.append(event["kind"]), **options,
        )  # fmt: skip
    assert started == ["trial", "trial"]


@pytest.mark.modes("connect")
def test_over_connect_trials_are_refused(spark, points, tmp_path):
    with pytest.raises(ValueError, match="trials in one job: found a Spark Connect session"):
        spark_dl.tune(points, MLP, lambda trial: {}, CONFIG, num_trials=2, run_dir=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.modes("local")
def test_models_of_param_maps_that_are_trained_together_are_those_that_are_fitted_one_by_one(spark, points, tmp_path):
    config = small_config(2, train={"log_every": 100})

    def classifier(name, **params):
        return TorchClassifier(build_mlp, config, runDir=str(tmp_path / name), progress=False, **params)

    together, single = classifier("together", parallelTrials=2), classifier("single")

    def grid(estimator):
        return ParamGridBuilder().addGrid(estimator.lr, [0.001, 0.1]).addGrid(estimator.epochs, [1, 2]).build()

    models = dict(together.fitMultiple(points, grid(together)))
    assert sorted(models) == list(range(4))
    for index in (0, 3):
        params = {single.lr: models[index].getOrDefault("lr"), single.epochs: models[index].getOrDefault("epochs")}
        alone = single.fit(points, params)
        assert same_bits(alone.load_model().state_dict(), models[index].load_model().state_dict())
        assert alone.result.history == models[index].result.history
    (run,) = (tmp_path / "together").iterdir()
    assert len(list((run / "trials").iterdir())) == 4
    assert not list(run.rglob("*.parquet"))  # the rows of a fit are not kept


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.long
def test_cross_validation_with_threads_finds_the_same_with_a_job_for_each_model_and_with_one_for_all(
    spark, points, tmp_path
):
    config = small_config(2, train={"log_every": 100})
    found = []
    for parallel_trials in (1, 2):
        estimator = TorchClassifier(
            build_mlp, config, runDir=str(tmp_path), progress=False, parallelTrials=parallel_trials
        )
        tuning = CrossValidator(
            estimator=estimator,
            estimatorParamMaps=ParamGridBuilder().addGrid(estimator.lr, [0.001, 0.1, 0.9]).build(),
            evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
            numFolds=2,
            parallelism=2,
            seed=7,
        )
        found.append(tuning.fit(points).avgMetrics)
    assert found[0] == found[1]
    assert max(found[0]) > 0.8


@pytest.mark.modes("local")
def test_param_maps_that_need_other_rows_and_one_that_fails_are_errors(spark, points, tmp_path):
    def fit(grid, parallel_trials=2):
        estimator = TorchClassifier(
            build_mlp, small_config(1), runDir=str(tmp_path), progress=False, parallelTrials=parallel_trials
        )
        split = TrainValidationSplit(
            estimator=estimator,
            estimatorParamMaps=grid(estimator),
            evaluator=MulticlassClassificationEvaluator(),
        )
        return split.fit(points)

    with pytest.raises(ValueError, match="the settings launch of param map 1 differ from those of param map 0"):
        fit(lambda e: [{e.lr: 0.1}, {e.numRanks: 2}])
    with pytest.raises(RankError, match="SparseAdam takes sparse gradients alone, and the model has none"):
        fit(lambda e: [{e.lr: 0.1}, {e.settings: {"train.optimizer": "SparseAdam"}}, {e.lr: 0.2}])
    with pytest.raises(ValueError, match=r"^train\.optimizer_args: SGD does not take {'no': 1}"):
        fit(lambda e: [{e.lr: 0.1}, {e.settings: {"train.optimizer_args": {"no": 1}}}, {e.lr: 0.2}])
    with pytest.raises(ValueError, match="parallelTrials: expected an integer >= 1, found 0"):
        fit(lambda e: [{e.lr: 0.1}, {e.lr: 0.2}], parallel_trials=0)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_B21_jobs_of_several_threads_wait_for_each_other_where_the_slots_do_not_suffice(spark, monkeypatch, caplog):
    """As CrossValidator(parallelism=2) starts them; the second one has no slots until after its time limit."""
    monkeypatch.setattr(barrier, "_SAY_AFTER_S", 1.0)
    settings = Launch(num_ranks=3, start_timeout_s=6.0)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(spark_dl.launch, time.sleep, 7.5, settings=settings, spark=spark) for _ in range(2)]
        assert [job.result(60) for job in jobs] == [[None] * 3] * 2
    said = "0 of 3 ranks have started; waiting for task slots: other ranks of this application run"
    # On a busy machine another one says that ranks take their time to reach the driver.
    assert [record.message for record in caplog.records if record.message.startswith("0 of 3")] == [said]
