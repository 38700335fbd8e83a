"""The driver: from a DataFrame to trained weights. `train` is check, prepare, launch, result.

1. `check_settings` checks the settings, the model and the session, before any data is read.
2. `prepare_run` writes the DataFrame as a dataset, or opens an existing dataset, and returns a `Run`.
3. `run_barrier` of `worker.main(run)` starts one barrier task per rank. Rank 0 commits checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from spark_dl import worker
from spark_dl.checks.settings import check_settings, evaluation_config, launch_of
from spark_dl.cli.progress import (
    OnEvent,
    ProgressDisplay,
    RunEvents,
    as_functions,
    follow_logs,
    restart_event,
    show_output,
    with_log_dir,
)
from spark_dl.config import Config, Data, Launch, Loader, Shards, strategies
from spark_dl.config.load import as_read
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load import local
from spark_dl.evaluate import load_model
from spark_dl.inputs import check_rank_rows
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.calls import as_call, check_call, check_dataframe, launch_settings
from spark_dl.launch.failures.errors import RankError
from spark_dl.launch.rank.task import Attempt, RankResult
from spark_dl.launch.session import describe_session, find_session, start_seconds
from spark_dl.launch.supervise import MoreSlotsError, check_growth, fit_ranks, run_attempts
from spark_dl.prepare import as_sources, next_attempt, prepare_evaluation, prepare_run
from spark_dl.rundir import checkpoint, environment, generations, metrics
from spark_dl.rundir.own_checkpoints import OwnRun, start_own_run
from spark_dl.spark_job import describe, is_connect
from spark_dl.spec import ModelSpec, Run
from spark_dl.track import tracking
from spark_dl.track.events import name_of
from spark_dl.track.notebook import result_html
from spark_dl.training import row_metrics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Source: TypeAlias = DataFrame | str | os.PathLike[str] | ShardSet

_log = logging.getLogger("spark_dl")


@dataclass(frozen=True)
class TrainResult:
    """The result of `train`.

    Example:
        >>> result = spark_dl.train(df, spec, config, run_dir="runs/2", overwrite=True)
        >>> model = result.load_model(spec)
    """

    run_dir: str
    checkpoint: str
    """URL of the last checkpoint, with the trained weights."""
    best_checkpoint: str | None = field(default=None, kw_only=True)
    """URL of the best checkpoint that is kept (`checkpoint.keep_best`); None without validation rows."""
    epochs: int
    steps: int
    """Optimizer steps, over all epochs and attempts."""
    rows: int
    """Rows used, over all epochs and attempts."""
    train_loss: float | None
    """Mean loss over the training rows of the last epoch, computed during training."""
    metrics: dict[str, Any]
    """Loss and metrics of the validation rows after the last epoch; empty without validation."""
    rows_per_s: float
    """Rows per second of this attempt over all ranks, including evaluations and checkpoints."""
    seconds: float
    """Duration of the whole call: shards, launch, training."""
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """One entry per epoch: `epoch`, `train_loss`, `metrics`."""
    stopped_early: bool = False
    skipped_steps: int = 0
    """Steps whose update was left out because of NaN or Inf, over all attempts (`train.on_nonfinite`)."""
    skipped_rows: int = 0
    """Rows of these steps. They are not among `rows`."""
    rollbacks: int = 0
    """How often the run has gone back to a checkpoint because of NaN or Inf."""
    failed_checkpoints: int = 0
    """Checkpoints that could not be written, also those of earlier attempts (`checkpoint.on_error`)."""
    restarts: int = 0
    """How often this call has started the ranks again after a failure."""
    staleness: dict[str, Any] | None = None
    """With parameter servers, over all attempts: `mean`, `max` and `counts` of the staleness of applied gradients, in
    updates, and the number of `discarded` computations, which were cancelled or too stale."""

    def load_model(self, spec: ModelSpec) -> nn.Module:
        """Returns the trained model, on the CPU, in evaluation mode."""
        return load_model(spec, self.checkpoint)

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return result_html(self)


def train(
    data: Source | Mapping[str, Source],
    spec: ModelSpec,
    config: Config | None = None,
    *,
    validation: Source | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool | str = False,
    overwrite: bool = False,
    progress: bool = True,
    on_event: OnEvent | Sequence[OnEvent] = (),
    spark: SparkSession | None = None,
) -> TrainResult:
    """Trains on a DataFrame, or on a dataset by its URL. Called on the driver.

    Args:
        data: a DataFrame, a dataset or its URL; or a mapping of names to these, mixed in every global batch in
            `loader.proportions`.
        spec: the model, its loss and its functions.
        config: the settings; by default those of `Config()`.
        validation: rows, like `data`, for the loss and the metrics after each epoch. Without them,
            `train.validation_fraction` can take a part of `data`.
        run_dir: folder or URL for shards (of a DataFrame), checkpoints, settings and metrics. All executors must have
            access to it. With `shards.storage` "local" the rows are written to the local disks of the ranks' hosts
            instead.
        resume: continues from the last checkpoint in `run_dir`, if there is one, or from that of this URL, with its
            shards.
        overwrite: deletes an earlier run in `run_dir`.
        progress: shows a progress bar, or lines where there is no terminal.
        on_event: functions that the driver calls with each event of the run (`EVENTS`). If one raises, the run ends.
        spark: the session; by default that of the DataFrame, of this thread or of the process.

    Raises:
        ValueError: For invalid settings, models and data, if possible before any rank starts.
        RuntimeError: If the cluster cannot run the job.
        RankError: If a rank fails, and another attempt would fail as well or cannot start, or `launch.max_restarts` are
            done.

    Example:
        >>> result = spark_dl.train(df, spec, config, run_dir="runs/1", overwrite=True)
        >>> result.metrics, result.checkpoint
    """
    start, functions = time.perf_counter(), as_functions(on_event)
    config, data = config or Config(), as_sources(data, "train")
    validation = None if validation is None else as_sources(validation, "train")
    spark, most_ranks = find_session(data, spark), config.launch.num_ranks
    config = fit_ranks(spark, config, most_ranks)
    check_settings(spark, spec, config, has_validation=validation is not None)
    row_metrics.with_mode(spec, config)  # an error that ranks would raise; the settings that are saved are the user's
    tracking.check(config.track)
    options: dict[str, Any] = {"run_dir": run_dir, "resume": resume, "overwrite": overwrite, "spark": spark}
    with (
        ProgressDisplay("train", enabled=progress) as shown,
        prepare_run(data, spec, config, validation=validation, stage=shown.stage, **options) as run,
        tracking.tracking(run, resume=bool(resume)) as tracker,
    ):
        result = _train_in_attempts(spark, run, data, shown, [tracker.put, *functions], most_ranks)
        if run.checkpoint is not None and result["checkpoint"] == run.checkpoint:
            _log.warning(
                "no step was trained: the checkpoint %s has %d epochs and %d steps, and the settings ask for no more "
                "(train.epochs, train.max_steps), or early stopping has ended the run",
                run.checkpoint, result["epochs"], result["steps"],
            )  # fmt: skip
        tracker.finish(result, shown.stage)
    return TrainResult(**{**result, "run_dir": run.run_dir, "seconds": time.perf_counter() - start})


def _train_in_attempts(
    spark: Any, run: Run, data: Any, shown: ProgressDisplay, functions: Sequence[OnEvent], most_ranks: int
) -> dict[str, Any]:
    """Starts the ranks, and after a failure again, from the last checkpoint. Returns the result of the last attempt.

    Args:
        most_ranks: how many were asked for; with `launch.min_ranks` each attempt has as many as there are slots for.
    """
    first_generation, resizes = run.generation, 0
    restart: Mapping[str, Any] | None = None

    def attempt(this: Attempt) -> dict[str, Any]:
        nonlocal resizes
        while True:
            try:
                result = start(dataclasses.replace(this, number=this.number + resizes))
            except MoreSlotsError as more:
                _log.info("%s; starting them from the checkpoint", more)
                resizes += 1
            else:
                told = row_metrics.with_mode(run.spec, run.config).train
                best = checkpoint.best_url(run.run_dir, str(told.early_stop_mode), told.early_stop_metric or "loss")
                return {**result, "restarts": this.number, "best_checkpoint": best}

    def start(this: Attempt) -> dict[str, Any]:
        nonlocal run, restart
        before = {} if this.number else _seconds_before(spark, shown)
        if this.number:
            config = fit_ranks(spark, run.config, most_ranks, left_out=this.left_out)
            run, restart = next_attempt(dataclasses.replace(run, config=config), first_generation, restart), None
        with (
            environment.recorded(run, describe_session(spark), before) as record_end,
            generations.explained(run.run_dir, run.generation),
        ):
            on_event: list[OnEvent] = [*functions, functools.partial(grow, this.left_out)]
            result = _launch_run(spark, run, data, shown, task="train", functions=on_event, attempt=this)
            record_end(result)
        return result

    def grow(left_out: frozenset[str], event: Mapping[str, Any]) -> None:
        if event["kind"] == "checkpoint":
            check_growth(spark, run.config, most_ranks, left_out)

    def on_restart(error: RankError, restarts: int) -> None:
        nonlocal restart
        restart = restart_event(error, restarts, run.generation)
        for function in functions:
            function(restart)

    def advice() -> str:
        return generations.advice(run.run_dir, run.generation) or checkpoint.how_to_resume(run.run_dir)

    return run_attempts(attempt, run.config.launch, on_restart=on_restart, advice=advice)


def _seconds_before(spark: Any, shown: ProgressDisplay) -> dict[str, float]:
    """Returns how long each thing has taken that this call did before its ranks start, by its name."""
    started = start_seconds(spark)
    return {**({} if started is None else {"starting Spark": started}), **shown.stage_seconds()}


def evaluate(
    data: Source,
    spec: ModelSpec,
    checkpoint_url: str | os.PathLike[str],
    config: Config | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    spark: SparkSession | None = None,
) -> dict[str, Any]:
    """Computes the loss and metrics of a checkpoint, or of the last one of a run, over all rows. Called on the driver.

    Every row counts exactly once. Returns `{"rows", "loss", <metrics>}`.

    Raises as `train` does, and ValueError if none of these can have the rows.

    Args:
        config: the default is the checkpoint's settings, but for those that say where to write or to connect, such as
            `shards.store` and `launch.log_dir`: these are not used, as a checkpoint can be somebody else's.
        run_dir: folder or URL that all executors can access, for the rows of a DataFrame, which are written as shards
            and deleted at the end. The default is the run folder of the checkpoint, if it is a folder of this user;
            else a private temporary folder in a local session, and the local disks of the ranks on a cluster.

    Example:
        >>> spark_dl.evaluate(df, spec, "runs/1")["loss"]
    """
    key_file = config.checkpoint.signing_key_file if config else None
    data, saved = as_sources(data, "evaluate"), checkpoint.find(checkpoint_url, only_weights=True, key_file=key_file)
    config = config or evaluation_config(as_read(saved.manifest["config"]), data)
    spark = find_session(data, spark)
    with evaluating(data, spec, config, saved, spark=spark, run_dir=run_dir, progress=progress) as evaluate_one:
        return evaluate_one(saved)


@contextlib.contextmanager
def evaluating(
    data: Any,
    spec: ModelSpec,
    config: Config,
    saved: checkpoint.Saved,
    *,
    spark: Any,
    run_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Iterator[Callable[[checkpoint.Saved], dict[str, Any]]]:
    """Yields a function that evaluates checkpoints of one model on the same rows, which are written once.

    Args:
        saved: one of the checkpoints.
    """
    most_ranks = config.launch.num_ranks
    config = fit_ranks(spark, config, most_ranks)
    check_settings(spark, spec, config, has_validation=True)
    with (
        ProgressDisplay("evaluate", enabled=progress) as shown,
        prepare_evaluation(data, spec, config, saved, spark=spark, run_dir=run_dir, stage=shown.stage) as prepared,
    ):

        def evaluate_one(saved: checkpoint.Saved) -> dict[str, Any]:
            run = dataclasses.replace(prepared, checkpoint=saved.url, checkpoint_sha256=saved.sha256)

            def attempt(this: Attempt) -> dict[str, Any]:
                fits = fit_ranks(spark, run.config, most_ranks, left_out=this.left_out) if this.number else run.config
                return _launch_run(
                    spark, dataclasses.replace(run, config=fits), data, shown, task="evaluate", attempt=this
                )

            return run_attempts(attempt, config.launch)

        yield evaluate_one


def launch(
    fn: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    num_ranks: int | None = None,
    settings: Launch | None = None,
    env: Mapping[str, str] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    spark: SparkSession | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs a function or a program as `num_ranks` ranks in one barrier job. Called on the driver.

    Returns the results of the ranks by rank: numbers, strings, bytes, dates, arrays and tensors, in dicts, lists,
    tuples and sets; of a program None. Other objects are an error, as nothing that a rank sends is unpickled. The
    environment is as under torchrun: `torch.distributed.init_process_group()` joins the group of all ranks, and
    TORCHELASTIC_RESTART_COUNT is the number of failed attempts. A function that takes an optimizer step without the
    group fails, unless `launch.independent_ranks` is set.
    Raises as `run_barrier` does, in particular RankError with the traceback, or the exit code, of the first rank that
    failed.

    Args:
        fn: a function, called as `fn(*args, **kwargs)`; or the path of a Python program, or `"-m"` and the name of a
            module, with its arguments as strings: `launch("train.py", "--lr", "0.1", num_ranks=4)`. A program runs in a
            process of its own on each rank, from the driver's working folder if the executor has it.
        num_ranks: by default that of `settings`.
        env: environment variables of the ranks, set when the function is called. A program starts with them.
        settings: time limits, the device, `max_restarts`, and `output`: which ranks' output the driver shows.
        resume: goes on from the last checkpoint of an earlier call.
        overwrite: deletes these, once the call can start.
        run_dir: folder or URL for the function's own checkpoints, which it reads and writes with `open_checkpoints`.
            After a failure, the ranks go on from the last one.

    Example:
        >>> def rank():
        ...     import os
        ...
        ...     return int(os.environ["RANK"])
        >>> spark_dl.launch(rank, num_ranks=2)  # [0, 1]
    """
    settings = launch_settings(settings, num_ranks)
    spark = find_session(None, spark)
    call, args, env, program = as_call(fn, args, kwargs, env)
    own_run = start_own_run(run_dir, resume=resume, overwrite=overwrite)
    return _call_in_attempts(
        spark, functools.partial(worker.call, call, args, kwargs, settings), settings, own_run=own_run, env=env,
        description=describe("launch", settings.num_ranks, program or name_of(fn)),
    )  # fmt: skip


def run_on_dataframe(
    fn: Callable[..., Any],
    df: DataFrame,
    *,
    num_ranks: int | None = None,
    settings: Launch | None = None,
    data: Data | None = None,
    shards: Shards | None = None,
    loader: Loader | None = None,
    validation_fraction: float = 0.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(rows, **kwargs)` as `launch` does, on the rows of a DataFrame. Called on the driver.

    `rows` is a `RankRows`: `rows.batches(64, epoch=0)` yields the batches of the rank, the same number on all ranks.
    The rows are streamed to the ranks, which write them to local disks in bounded memory. Shared storage is not needed.

    Raises as `launch` does, and ValueError for rows that cannot be converted to tensors and for an empty DataFrame.

    Args:
        data: the columns; by default all columns of the DataFrame, of which one named `weight` has the weights of the
            rows.
        shards: the layout of the rows on disk.
        loader: how rows are read.
        validation_fraction: fraction of rows for `rows.loader(..., split="validation")`.

    Example:
        >>> def count(rows):
        ...     return sum(int((batch["weight"] > 0).sum()) for batch in rows.batches(64, epoch=0))
        >>> spark_dl.run_on_dataframe(count, df.select("features"), num_ranks=2)
    """
    settings = launch_settings(settings, num_ranks)
    check_dataframe(df)
    check_call(fn, ("rows",), kwargs)
    if data is None:
        features = tuple(name for name in df.columns if name != "weight")
        data = Data(features=features, label=None, weight="weight" if "weight" in df.columns else None)
    rows = local.RowSettings(
        data=data, shards=shards or Shards(), loader=loader or Loader(), validation_fraction=validation_fraction
    )
    check_rank_rows(df, rows.data, rows.shards, rows.loader)
    with local.dealt_rows(df, rows.data, rows.shards, settings.num_ranks) as (dealt, columns):
        call = functools.partial(worker.call, fn, (), kwargs, settings, columns=columns, settings=rows)
        return _call_in_attempts(
            find_session(df), call, settings, source=dealt, env=env,
            description=describe("run_on_dataframe", settings.num_ranks, name_of(fn)),
        )  # fmt: skip


def _call_in_attempts(
    spark: SparkSession,
    call: functools.partial[RankResult],
    launch: Launch,
    *,
    description: str,
    env: Mapping[str, str] | None,
    source: DataFrame | None = None,
    own_run: OwnRun | None = None,
) -> list[Any]:
    """Makes a `worker.call` of the user's function on ranks, and after a failure again, if `launch` asks for it."""

    def attempt(this: Attempt) -> list[Any]:
        return run_barrier(
            spark, call, launch=launch, attempt=this, description=description, env=env, source=source,
            begin=own_run.begin if own_run else dict, on_event=show_output, poll=follow_logs(launch),
        )  # fmt: skip

    more: dict[str, Any] = {"advice": own_run.how_to_resume} if own_run else {"default_restarts": 0}
    return run_attempts(attempt, launch, **more)


def _launch_run(
    spark: Any,
    run: Run,
    data: Any,
    shown: ProgressDisplay,
    *,
    task: str,
    functions: Sequence[OnEvent] = (),
    attempt: Attempt,
) -> dict[str, Any]:
    """Runs a task on ranks or from the driver, as its strategy needs, and returns its result.

    With local storage the rows of the DataFrame `data` are streamed to the ranks.

    Args:
        functions: those of the user for events.
    """
    config = run.config
    strategy = strategies.find(config.parallel.strategy)
    launch = launch_of(spark, config)
    launch = with_log_dir(launch, run.run_dir) if is_connect(spark) else launch
    polls = [metrics.follow(run.run_dir) if task == "train" else list, follow_logs(launch)]
    watch: dict[str, Any] = {
        "on_event": RunEvents(shown.show, functions).put,
        "poll": lambda: [event for poll in polls for event in poll()],
        "attempt": attempt,
        "description": describe(task, launch.num_ranks, run.run_dir if task == "train" else str(run.checkpoint)),
    }
    shown.stage(f"starting {launch.num_ranks} rank(s){f', restart {attempt.number}' if attempt.number else ''}")
    streams = config.shards.storage == "local"
    if not streams:
        _log.info("%d rows in %d shards at %s", run.train.rows, run.train.num_shards, run.train.url)
    if task == "train" and strategy.train_from_driver is not None:
        return strategy.train_from_driver(spark, run, report=watch["on_event"])
    if not streams:
        results = run_barrier(spark, functools.partial(worker.main, run, task=task), launch=launch, **watch)
    else:
        rows = local.dealt_rows(data, config.data, config.shards, launch.num_ranks, run.reference_columns)
        with rows as (dealt, columns):
            call = functools.partial(worker.main, run, task=task, columns=columns)
            results = run_barrier(spark, call, launch=launch, source=dealt, **watch)
    return dict(results[0])
