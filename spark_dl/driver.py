"""The driver story: from a DataFrame to trained weights, in two steps.

1. `write_shards`: the DataFrame becomes a dataset on storage (a dataset that exists is used as it is).
2. `run_barrier(worker.main, run)`: one barrier task per rank trains; rank 0 commits checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml
from torch import nn

from spark_dl import checkpoint, generations, metrics, storage, strategies, worker
from spark_dl.checkpoint_files import MODEL
from spark_dl.cli.progress import ProgressBar
from spark_dl.config import Config, Data, Launch, Loader, Shards
from spark_dl.config.load import build_config
from spark_dl.data import local
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.folder import delete_dataset
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.mixture import Mixture, dataset_configs
from spark_dl.data.load.resume_check import check_same_rows, for_ranks
from spark_dl.data.plan import check_held_out
from spark_dl.early_stop import check_scalar
from spark_dl.evaluate import build_metric, load_model
from spark_dl.inputs import (
    as_source,
    as_written,
    check_mixture,
    check_rank_rows,
    check_storage,
    shards_of,
    warn_of_few_rows,
)
from spark_dl.launch import payload, preflight
from spark_dl.launch.barrier import run_barrier
from spark_dl.run_folder import CONFIG, SHARDS, check_folder, delete_run
from spark_dl.spec import ModelSpec, Run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    Source: TypeAlias = DataFrame | str | os.PathLike[str] | ShardSet

_log = logging.getLogger("spark_dl")


@dataclass(frozen=True)
class TrainResult:
    """What training leaves."""

    run_dir: str
    checkpoint: str
    """URL of the last checkpoint, which holds the weights."""
    epochs: int
    steps: int
    """Optimizer steps, over all epochs and attempts."""
    rows: int
    """Rows used, over all epochs and attempts."""
    train_loss: float | None
    """Mean loss of the last epoch's rows, as they were trained on."""
    metrics: dict[str, Any]
    """Loss and metrics of the validation rows after the last epoch; empty where there are none."""
    rows_per_s: float
    """Rows per second of this attempt's loop, over all ranks, with evaluations and checkpoints."""
    seconds: float
    """Of the whole call: shards, launch, training."""
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Per epoch: `epoch`, `train_loss`, `metrics`."""
    stopped_early: bool = False
    staleness: dict[str, Any] | None = None
    """With parameter servers: `mean`, `max` and `counts` of how many updates the gradients that were used were behind,
    and how many computations were `discarded`, as they were cancelled or too old. Over all attempts."""

    def load_model(self, spec: ModelSpec) -> nn.Module:
        """The trained model, on the CPU, in evaluation mode."""
        return load_model(spec, self.checkpoint)


def train(
    data: Source | Mapping[str, Source],
    spec: ModelSpec,
    config: Config | None = None,
    *,
    validation: Source | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Trains on a DataFrame or on a dataset by its URL. Called on the driver.

    With several of them, by name, every global batch has rows of each, in `loader.proportions`.

    `run_dir` gets the shards (of a DataFrame), checkpoints, settings and metrics; all executors must reach it. With
    `resume` training goes on from its last checkpoint with the shards that are there, or starts anew where there is
    none; with `overwrite` what it holds is deleted. With `shards.storage` "local" the rows go to the disks of the
    ranks' hosts instead, and no further.

    Raises ValueError for settings, a model or data that do not fit, before any rank starts where that can be seen;
    RuntimeError for a cluster that cannot run the job; RankError for a rank that fails.
    """
    start = time.perf_counter()
    config = config or Config()
    data = {name: as_source(d) for name, d in data.items()} if isinstance(data, Mapping) else as_source(data)
    validation = None if validation is None else as_source(validation)
    spark = _session(data)
    run_dir = storage.absolute(run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")
    strategy = strategies.find(config.parallel.strategy)
    strategy.check(spark, config)
    _check_before_start(spark, spec, config, has_validation=validation is not None)
    check_storage(config, data, validation)
    check_mixture(config, data)
    generation, saved = _begin_attempt(run_dir, config, resume=resume, overwrite=overwrite)
    check_newest = functools.partial(generations.check_newest, run_dir, generation)
    written: list[str] = []
    with contextlib.ExitStack() as until_done, generations.explained(run_dir, generation):

        def to_shards(
            rows: Any, name: str, like: Sequence[Column] = (), config: Config = config, num_datasets: int = 1
        ) -> ShardSet:
            url = storage.join(run_dir, SHARDS, name)
            if not isinstance(rows, (str, ShardSet)) and config.shards.storage == "shared":
                written.append(url)
            return shards_of(
                rows, url, config, until_done, like,
                reuse=saved is not None, num_datasets=num_datasets, before_commit=check_newest,
            )  # fmt: skip

        train_shards: ShardSet | Mixture
        if isinstance(data, Mapping):
            datasets: dict[str, ShardSet] = {}
            for name, own in dataset_configs(config).items():
                like = next(iter(datasets.values())).columns if datasets else ()
                datasets[name] = to_shards(data[name], f"train-{name}", like, own, len(data))
            train_shards = Mixture(datasets)
        else:
            train_shards = to_shards(data, "train")
        if config.shards.storage == "shared":  # with local storage the ranks look
            check_held_out(train_shards.rows, config.train.validation_fraction)
            warn_of_few_rows(train_shards.rows, config)
            if saved is not None:
                check_same_rows(
                    saved.manifest.get("rows"), train_shards, validation_fraction=config.train.validation_fraction
                )
        like = train_shards.columns and train_shards.select(config.data.columns)  # with local storage not known yet
        held = to_shards(validation, "validation", like) if validation is not None else None
        run = Run(
            spec=spec,
            config=config,
            train=for_ranks(train_shards, config),
            validation=for_ranks(held, config) if held is not None else None,
            run_dir=run_dir,
            generation=generation,
            checkpoint=saved.url if saved else None,
            checkpoint_sha256=saved.sha256 if saved else None,
        )
        # And not before, as data that do not fit are to cost nobody a run.
        _take_over(run, overwrite=overwrite, keep=[*written, *_urls(train_shards), *_urls(run.validation)])
        _log.info("training on %d ranks%s", config.launch.num_ranks, f", from step {saved.step}" if saved else "")
        with ProgressBar("train", enabled=progress) as bar:
            if strategy.train_from_driver is not None:
                _log_dataset(train_shards)
                result = strategy.train_from_driver(spark, run, report=bar.show)
            else:
                result = _run_ranks(data, run, task="train", on_event=bar.show, poll=metrics.follow(run_dir))[0]
    return TrainResult(**{**result, "run_dir": run_dir, "seconds": time.perf_counter() - start})


def evaluate(
    data: Source,
    spec: ModelSpec,
    checkpoint_url: str | os.PathLike[str],
    config: Config | None = None,
) -> dict[str, Any]:
    """Loss and metrics of a checkpoint (or the last one of a run) over all rows, exact to the row. On the driver.

    Without `config` the settings of the checkpoint hold. A DataFrame is written as shards to the run's folder first.
    Returns `{"rows", "loss", <metrics>}`. Raises as `train` does.
    """
    data, saved = as_source(data), checkpoint.find(checkpoint_url, names=(MODEL,))
    if config is None:
        config = build_config(saved.manifest["config"])
        if isinstance(data, (str, ShardSet)):  # how the training rows were written says nothing of this dataset
            config = dataclasses.replace(config, data=as_written(config.data, data))
        else:  # filters choose rows of a dataset that is read; a DataFrame has those that are meant
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, filters=()))
    spark = _session(data)
    _check_before_start(spark, spec, config, has_validation=True)
    check_storage(config, data)
    run_dir = checkpoint.run_dir_of(saved)
    written = storage.join(run_dir, SHARDS, f"evaluate-{uuid.uuid4().hex[:8]}")
    with contextlib.ExitStack() as until_done:
        until_done.callback(delete_dataset, written)
        shards = shards_of(data, written, config, until_done, saved.columns, reuse=False)
        run = Run(
            spec=spec, config=config, train=for_ranks(shards, config), run_dir=run_dir, checkpoint=saved.url,
            checkpoint_sha256=saved.sha256,
        )  # fmt: skip
        result: dict[str, Any] = _run_ranks(data, run, task="evaluate", like=saved.columns)[0]
    return result


def launch(
    fn: Callable[..., Any], *args: Any, num_ranks: int = 1, settings: Launch | None = None, **kwargs: Any
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` as `num_ranks` ranks in one barrier job. Called on the driver.

    Returns what the ranks return (numbers, strings, arrays and tensors, in dicts, lists and tuples), by rank. Inside,
    the environment is as under torchrun: `torch.distributed.init_process_group()` joins the others.
    Raises as `run_barrier` does: in particular RankError with the traceback of the rank that failed first.
    """
    settings = dataclasses.replace(settings or Launch(), num_ranks=num_ranks)
    return run_barrier(_session(None), worker.call, fn, args, kwargs, settings, launch=settings)


def run_on_dataframe(
    fn: Callable[..., Any],
    df: DataFrame,
    *,
    num_ranks: int = 1,
    settings: Launch | None = None,
    data: Data | None = None,
    shards: Shards | None = None,
    loader: Loader | None = None,
    validation_fraction: float = 0.0,
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(rows, **kwargs)` as `launch` does, with the rows of a DataFrame on the ranks' own disks. On the driver.

    `rows` is a `RankRows`: `rows.batches(64, epoch=0)` gives the rank's batches, the same number of them on all ranks.
    The rows stream into the ranks, which spill them to their hosts' disks in bounded memory: no storage that the
    executors share is needed. `data` names the columns, by default all of the DataFrame; `shards` says how they are
    stored, `loader` how they are read, and `validation_fraction` of them are held out.
    Raises as `launch` does, and ValueError for rows that cannot become tensors, and for a DataFrame without any.
    """
    settings = dataclasses.replace(settings or Launch(), num_ranks=num_ranks)
    data = data or Data(features=tuple(df.columns), label=None)
    shards, loader = shards or Shards(), loader or Loader()
    check_rank_rows(df, data, shards, loader)
    dealt, columns = local.deal_rows(df, data, shards, num_ranks)
    return run_barrier(
        df.sparkSession,
        worker.call_on_rows,
        fn,
        columns,
        data,
        shards,
        loader,
        validation_fraction,
        kwargs,
        settings,
        launch=settings,
        source=dealt,
    )


def _run_ranks(data: Any, run: Run, *, task: str, like: Sequence[Column] = (), **watch: Any) -> list[Any]:
    """Runs a task on the ranks; with local storage the rows of the DataFrame `data` stream into them, `like` others."""
    launch = run.config.launch
    if run.config.shards.storage == "shared":
        _log_dataset(run.train)
        return run_barrier(_session(data), worker.main, run, task=task, launch=launch, **watch)
    dealt, columns = local.deal_rows(data, run.config.data, run.config.shards, launch.num_ranks, like)
    return run_barrier(
        _session(data), worker.main_on_rows, run, columns, task=task, launch=launch, source=dealt, **watch
    )


def _log_dataset(shards: ShardSet | Mixture) -> None:
    _log.info("%d rows in %d shards at %s", shards.rows, shards.num_shards, shards.url)


def _session(data: Any) -> Any:
    if hasattr(data, "sparkSession"):
        return data.sparkSession
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()  # that of this thread, or the default one
    except PySparkRuntimeError as error:
        raise RuntimeError("no active Spark session; make one first: SparkSession.builder.getOrCreate()") from error


def _check_before_start(spark: Any, spec: ModelSpec, config: Config, *, has_validation: bool) -> None:
    """What can be seen on the driver, before rows are moved or ranks started."""
    for name, args in config.train.metrics.items():
        metric = build_metric(name, args)
        if name == config.train.early_stop_metric:
            check_scalar(name, metric)
    if config.train.early_stop_metric and not (has_validation or config.train.validation_fraction):
        raise ValueError("train.early_stop_metric: needs validation rows; set train.validation_fraction or pass some")
    payload.pack_call(None, (), {"spec": spec})
    preflight.check(spark, config.launch, at_once=not config.parallel.by_spark)


def _begin_attempt(
    run_dir: str, config: Config, *, resume: bool, overwrite: bool
) -> tuple[int, checkpoint.Saved | None]:
    """The number of this attempt, and the checkpoint to go on from, if any."""
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    check_folder(run_dir, overwrite=overwrite)
    strict, step = config.checkpoint.strict, checkpoint.last_step(run_dir)
    if step is not None and not resume and not overwrite:
        raise ValueError(
            f"{run_dir} holds checkpoints already (the last is of step {step}); resume to go on from there, "
            "overwrite to delete them, or name another run_dir"
        )
    found = _check_resume(run_dir, config) if resume else None
    try:
        generation = checkpoint.start_generation(run_dir, after=checkpoint.newest_attempt(run_dir))
    except OSError as error:
        raise ValueError(f"cannot write to the run_dir {run_dir}: {error}") from error
    # Ranks of an older attempt, whose driver is gone, may have saved until now, and cannot any more.
    saved = checkpoint.last_valid(run_dir, strict=strict, trusted=found) if resume else None
    if saved is not None:
        checkpoint.check_same_settings(saved, config)
    return generation, saved


def _check_resume(run_dir: str, config: Config) -> checkpoint.Saved | None:
    """The checkpoint to go on from, if any. Raises ValueError for what cannot be resumed; no attempt has begun yet."""
    strict = config.checkpoint.strict
    found = checkpoint.last_valid(run_dir, strict=strict)
    damage = generations.damage(run_dir, at_least=checkpoint.newest_attempt(run_dir))
    if damage and strict:
        raise ValueError(f"checkpoint.strict: {damage}; resume once with checkpoint.strict set to false")
    if damage:
        used = found.url if found else "the start"
        _log.warning("%s; the next generation is above all that have saved, and training goes on from %s", damage, used)
    if found is not None:
        checkpoint.check_same_settings(found, config)
        metrics.read_metrics(run_dir)
    return found


def _take_over(run: Run, *, overwrite: bool, keep: Sequence[str]) -> None:
    """The run_dir becomes that of this run, which starts now; the datasets at `keep` are read."""
    generations.check_newest(run.run_dir, run.generation)
    try:
        if overwrite:
            delete_run(run.run_dir, keep)
        if run.checkpoint is None:  # what an attempt without a checkpoint has left
            storage.delete_file(storage.join(run.run_dir, metrics.FILE))
        content = yaml.safe_dump(run.config.to_dict(), sort_keys=False)
        storage.write_bytes(storage.join(run.run_dir, CONFIG), content.encode())
    except OSError as error:
        raise ValueError(f"cannot write to the run_dir {run.run_dir}: {error}") from error


def _urls(data: ShardSet | Mixture | None) -> list[str]:
    """Where the datasets lie that are read; rows on the ranks' own disks have no URL."""
    datasets = data.datasets.values() if isinstance(data, Mixture) else [data] if data else []
    return [shards.url for shards in datasets if shards.url]
