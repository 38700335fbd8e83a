"""The driver story: from a DataFrame to trained weights, in two steps.

1. `write_shards`: the DataFrame becomes a dataset on storage (a dataset that exists is used as it is).
2. `run_barrier(worker.main, run)`: one barrier task per rank trains; rank 0 commits checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from spark_dl import checkpoint, metrics, storage, worker
from spark_dl.config import Config, Data, Launch
from spark_dl.data import local
from spark_dl.data.filter_counts import filter_rows
from spark_dl.data.foreign import open_parquet
from spark_dl.data.loader import check_row_groups
from spark_dl.data.manifest import MANIFEST, ShardSet, read_shards
from spark_dl.data.mixture import Mixture, batch_shares
from spark_dl.data.schema import Column, check_like, check_settings
from spark_dl.data.sequences import with_runs
from spark_dl.data.store import reopen, store_shards
from spark_dl.evaluate import build_metric, load_model
from spark_dl.launch import payload, preflight
from spark_dl.launch.barrier import run_barrier
from spark_dl.progress import ProgressBar
from spark_dl.spec import ModelSpec, Run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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

    def load_model(self, spec: ModelSpec) -> nn.Module:
        """The trained model, on the CPU, in evaluation mode."""
        return load_model(spec, self.checkpoint)


def train(
    data: DataFrame | str | ShardSet | Mapping[str, DataFrame | str | ShardSet],
    spec: ModelSpec,
    config: Config | None = None,
    *,
    validation: DataFrame | str | ShardSet | None = None,
    run_dir: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Trains on a DataFrame or on a dataset by its URL. Called on the driver.

    With several of them, by name, every global batch has rows of each, in `data.proportions`.

    `run_dir` gets the shards (of a DataFrame), checkpoints, settings and metrics; all executors must reach it. With
    `resume` training goes on from its last checkpoint, or starts where there is none; with `overwrite` what it holds is
    deleted. With `data.storage` "local" the rows go to the disks of the ranks' hosts instead, and no further.

    Raises ValueError for settings, a model or data that do not fit, before any rank starts where that can be seen;
    RuntimeError for a cluster that cannot run the job; RankError for a rank that fails.
    """
    start = time.perf_counter()
    config = config or Config()
    spark = _session(data)
    run_dir = storage.absolute(run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    _check_before_start(spark, spec, config, has_validation=validation is not None)
    _check_storage(config, data, validation)
    _check_mixture(config, data)
    saved = _prepare_run_dir(run_dir, config, resume=resume, overwrite=overwrite)
    with contextlib.ExitStack() as until_done:

        def shards_of(rows: Any, name: str, like: Sequence[Column] = ()) -> ShardSet:
            return _shards(rows, storage.join(run_dir, "shards", name), config, until_done, like, reuse=resume)

        train_shards: ShardSet | Mixture
        if isinstance(data, Mapping):
            datasets: dict[str, ShardSet] = {}
            for name in config.data.proportions:
                like = next(iter(datasets.values())).columns if datasets else ()
                datasets[name] = shards_of(data[name], f"train-{name}", like)
            train_shards = Mixture(datasets)
        else:
            train_shards = shards_of(data, "train")
        like = train_shards.columns and train_shards.select(config.data.columns)  # with local storage not known yet
        run = Run(
            spec=spec,
            config=config,
            train=train_shards,
            validation=shards_of(validation, "validation", like) if validation is not None else None,
            run_dir=run_dir,
            generation=checkpoint.start_generation(run_dir),
            checkpoint=saved.url if saved else None,
        )
        _log.info("training on %d ranks%s", config.launch.num_ranks, f", from step {saved.step}" if saved else "")
        with ProgressBar("train", enabled=progress) as bar:
            results = _run_ranks(data, run, task="train", on_event=bar.show, poll=metrics.follow(run_dir))
    result = results[0]
    return TrainResult(**{**result, "run_dir": run_dir, "seconds": time.perf_counter() - start})


def evaluate(
    data: DataFrame | str | ShardSet,
    spec: ModelSpec,
    checkpoint_url: str,
    config: Config | None = None,
) -> dict[str, Any]:
    """Loss and metrics of a checkpoint (or the last one of a run) over all rows, exact to the row. On the driver.

    Without `config` the settings of the checkpoint hold. A DataFrame is written as shards to the run's folder first.
    Returns `{"rows", "loss", <metrics>}`. Raises as `train` does.
    """
    saved = checkpoint.find(checkpoint_url)
    config = config or checkpoint.config_of(saved)
    spark = _session(data)
    _check_before_start(spark, spec, config, has_validation=True)
    _check_storage(config, data)
    run_dir = checkpoint.run_dir_of(saved)
    written = storage.join(run_dir, "shards", f"evaluate-{uuid.uuid4().hex[:8]}")
    with contextlib.ExitStack() as until_done:
        until_done.callback(storage.delete, written)
        shards = _shards(data, written, config, until_done, saved.columns, reuse=False)
        run = Run(spec=spec, config=config, train=shards, run_dir=run_dir, checkpoint=saved.url)
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
    **kwargs: Any,
) -> list[Any]:
    """Runs `fn(rows, **kwargs)` as `launch` does, with the rows of a DataFrame on the ranks' own disks. On the driver.

    `rows` is a `RankRows`: `rows.batches(64, epoch=0)` gives the rank's batches, the same number of them on all ranks.
    The rows stream into the ranks, which spill them to their hosts' disks in bounded memory: no storage that the
    executors share is needed. `data` names the columns, by default all of the DataFrame, and how they are stored.
    Raises as `launch` does, and ValueError for rows that cannot become tensors, and for a DataFrame without any.
    """
    settings = dataclasses.replace(settings or Launch(), num_ranks=num_ranks)
    data = data or Data(features=tuple(df.columns), label=None)
    _check_unfiltered(data, df)
    dealt, columns = local.deal_rows(df, data, num_ranks)
    return run_barrier(
        df.sparkSession, worker.call_on_rows, fn, columns, data, kwargs, settings, launch=settings, source=dealt
    )


def _run_ranks(data: Any, run: Run, *, task: str, like: Sequence[Column] = (), **watch: Any) -> list[Any]:
    """Runs a task on the ranks; with local storage the rows of the DataFrame `data` stream into them, `like` others."""
    launch = run.config.launch
    if run.config.data.storage == "shared":
        _log.info("%d rows in %d shards at %s", run.train.rows, len(run.train.shards), run.train.url)
        return run_barrier(_session(data), worker.main, run, task=task, launch=launch, **watch)
    dealt, columns = local.deal_rows(data, run.config.data, launch.num_ranks, like)
    return run_barrier(
        _session(data), worker.main_on_rows, run, columns, task=task, launch=launch, source=dealt, **watch
    )


def _check_storage(config: Config, data: Any, validation: Any = None) -> None:
    _check_unfiltered(config.data, data, validation)
    if config.data.storage == "shared":
        return
    if isinstance(data, (str, ShardSet)):
        raise ValueError(
            "data.storage: 'local' is for a DataFrame, found a dataset, which is read where it lies; set it to 'shared'"
        )
    if validation is not None and not isinstance(validation, (str, ShardSet)):
        raise ValueError(
            "data.storage: 'local' holds one DataFrame, found another one for validation; set "
            "data.validation_fraction instead, pass a dataset that all executors reach, or set data.storage to 'shared'"
        )


def _check_mixture(config: Config, data: Any) -> None:
    proportions = config.data.proportions
    names = list(data) if isinstance(data, Mapping) else []
    if sorted(names) != sorted(proportions):
        found = f"datasets {names}" if names else "one dataset"
        raise ValueError(
            f"data.proportions: expected a share for each dataset, found {dict(proportions)} for {found}; several "
            "datasets are passed as a mapping of names to datasets"
        )
    if proportions:
        shares = batch_shares(proportions, config.train.global_batch_size, config.data.num_streams)
        _log.info("rows of each global batch: %s", shares)


def _check_unfiltered(data: Data, *sources: Any) -> None:
    several = [list(source.values()) if isinstance(source, Mapping) else [source] for source in sources]
    if data.filters and not all(s is None or isinstance(s, (str, ShardSet)) for found in several for s in found):
        raise ValueError(
            "data.filters: for datasets, which are read where they lie, found a DataFrame; filter that: df.filter(...)"
        )


def _session(data: Any) -> Any:
    if hasattr(data, "sparkSession"):
        return data.sparkSession
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is None:
        raise RuntimeError("no active Spark session; make one first: SparkSession.builder.getOrCreate()")
    return spark


def _check_before_start(spark: Any, spec: ModelSpec, config: Config, *, has_validation: bool) -> None:
    """What can be seen on the driver, before rows are moved or ranks started."""
    for name, args in config.train.metrics.items():
        build_metric(name, args)
    if config.train.early_stop_metric and not (has_validation or config.data.validation_fraction):
        raise ValueError("train.early_stop_metric: needs validation rows; set data.validation_fraction or pass some")
    payload.pack_call(spec, (), {})
    preflight.check(spark, config.launch)


def _prepare_run_dir(run_dir: str, config: Config, *, resume: bool, overwrite: bool) -> checkpoint.Saved | None:
    """The checkpoint to go on from, if any."""
    if resume and overwrite:
        raise ValueError("resume and overwrite exclude each other")
    saved = checkpoint.latest(run_dir)
    if saved is not None and resume:
        checkpoint.check_same_settings(saved, config)
    elif saved is not None and not overwrite:
        raise ValueError(
            f"{run_dir} holds checkpoints already (the last is of step {saved.step}); resume to go on from there, "
            "overwrite to delete them, or name another run_dir"
        )
    elif overwrite:
        for name in ("checkpoints", "shards", metrics.FILE):
            storage.delete(storage.join(run_dir, name))
    try:
        content = yaml.safe_dump(config.to_dict(), sort_keys=False)
        storage.write_bytes(storage.join(run_dir, "config.yaml"), content.encode())
    except OSError as error:
        raise ValueError(f"cannot write to the run_dir {run_dir}: {error}") from error
    return saved if resume else None


_STORED = "part-stored.json"
"""In the place of a run's shards that are in the store: where. Named as shards are, so that it goes as they do."""


def _shards(
    data: DataFrame | str | ShardSet,
    url: str,
    config: Config,
    until_done: contextlib.ExitStack,
    like: Sequence[Column] = (),
    *,
    reuse: bool,
) -> ShardSet:
    """The dataset to read: as given, or written from a DataFrame; a resumed run reads what it wrote before.

    Its columns must be like those of another dataset, whose vocabularies it gets: that which is or was trained on.
    What is read from the store is kept there until the stack is closed.
    """
    if config.data.storage == "local" and not isinstance(data, (str, ShardSet)):
        return ShardSet("", (), ())  # the ranks make it
    if isinstance(data, str):
        try:
            is_ours = storage.exists(storage.join(data, MANIFEST))
        except OSError as error:
            raise ValueError(f"cannot read the dataset {data}: {error}; check its owner and mode") from error
        data = (
            read_shards(data)
            if is_ours
            else open_parquet(data, config.data.stored_columns, data=config.data, like=like)
        )
    elif not isinstance(data, ShardSet):
        data = _shards_of_rows(data, url, config, until_done, like, reuse=reuse)
    if config.data.filters:
        data = filter_rows(data, config.data.filters)
    columns = data.select(config.data.columns)
    check_like(columns, like)
    check_settings(columns, config.data.encode)
    check_row_groups(data, columns, config.data.memory_mib)
    return with_runs(data, config.data)


def _shards_of_rows(
    df: DataFrame, url: str, config: Config, until_done: contextlib.ExitStack, like: Sequence[Column], *, reuse: bool
) -> ShardSet:
    pointer = storage.join(url, _STORED)
    if reuse and storage.exists(storage.join(url, MANIFEST)):
        return read_shards(url)
    if reuse and storage.exists(pointer):
        shards, lease = reopen(json.loads(storage.read_bytes(pointer))["url"], run=url)
    else:
        shards, found = store_shards(df, config.data, url, run=url, like=like)
        if found is None:
            return shards
        lease = found
    until_done.callback(lease.release)
    storage.delete(url)  # what an earlier run without the store may have written
    storage.write_bytes(pointer, json.dumps({"url": shards.url}).encode())
    return shards
