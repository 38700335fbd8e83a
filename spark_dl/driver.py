"""The driver story: from a DataFrame to trained weights. `train` is check, prepare, launch, result.

1. `check_settings`: what can be seen before anything moves.
2. `prepare_run`: the DataFrame becomes a dataset on storage (a dataset that exists is used as it is), and a `Run`.
3. `run_barrier(worker.main, run)`: one barrier task per rank trains; rank 0 commits checkpoints.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from spark_dl import strategies, worker
from spark_dl.check import check_settings, evaluation_config, find_session
from spark_dl.cli.progress import ProgressBar
from spark_dl.config import Config, Data, Launch, Loader, Shards
from spark_dl.config.load import build_config
from spark_dl.data import local
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.local import RowSettings
from spark_dl.evaluate import load_model
from spark_dl.inputs import check_rank_rows
from spark_dl.launch.barrier import run_barrier
from spark_dl.prepare import as_sources, prepare_evaluation, prepare_run
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint_files import MODEL
from spark_dl.spec import ModelSpec, Run
from spark_dl.training import metrics

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
    config, data = config or Config(), as_sources(data)
    validation = None if validation is None else as_sources(validation)
    spark = find_session(data)
    check_settings(spark, spec, config, has_validation=validation is not None)
    options: dict[str, Any] = {"run_dir": run_dir, "resume": resume, "overwrite": overwrite}
    with (
        prepare_run(data, spec, config, validation=validation, **options) as run,
        ProgressBar("train", enabled=progress) as bar,
    ):
        result = _launch_run(spark, run, data, task="train", on_event=bar.show, poll=metrics.follow(run.run_dir))
    return TrainResult(**{**result, "run_dir": run.run_dir, "seconds": time.perf_counter() - start})


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
    data, saved = as_sources(data), checkpoint.find(checkpoint_url, names=(MODEL,))
    config = config or evaluation_config(build_config(saved.manifest["config"]), data)
    spark = find_session(data)
    check_settings(spark, spec, config, has_validation=True)
    with prepare_evaluation(data, spec, config, saved) as run:
        return _launch_run(spark, run, data, task="evaluate", reference_columns=saved.columns)


def launch(
    fn: Callable[..., Any], *args: Any, num_ranks: int = 1, settings: Launch | None = None, **kwargs: Any
) -> list[Any]:
    """Runs `fn(*args, **kwargs)` as `num_ranks` ranks in one barrier job. Called on the driver.

    Returns what the ranks return (numbers, strings, arrays and tensors, in dicts, lists and tuples), by rank. Inside,
    the environment is as under torchrun: `torch.distributed.init_process_group()` joins the others.
    Raises as `run_barrier` does: in particular RankError with the traceback of the rank that failed first.
    """
    settings = dataclasses.replace(settings or Launch(), num_ranks=num_ranks)
    return run_barrier(find_session(None), worker.call, fn, args, kwargs, settings, launch=settings)


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
    rows = RowSettings(
        data=data, shards=shards or Shards(), loader=loader or Loader(), validation_fraction=validation_fraction
    )
    check_rank_rows(df, rows.data, rows.shards, rows.loader)
    dealt, columns = local.deal_rows(df, rows.data, rows.shards, num_ranks)
    return run_barrier(
        find_session(df), worker.call, fn, (), kwargs, settings, columns=columns, settings=rows,
        launch=settings, source=dealt,
    )  # fmt: skip


def _launch_run(
    spark: Any, run: Run, data: Any, *, task: str, reference_columns: Sequence[Column] = (), **watch: Any
) -> dict[str, Any]:
    """Runs a task where its strategy runs, and returns its result. `watch` is as for `run_barrier`.

    With local storage the rows of the DataFrame `data` stream into the ranks, in columns as `reference_columns`.
    """
    config = run.config
    strategy = strategies.find(config.parallel.strategy)
    streams = config.shards.storage == "local"
    if not streams:
        _log.info("%d rows in %d shards at %s", run.train.rows, run.train.num_shards, run.train.url)
    if task == "train" and strategy.train_from_driver is not None:
        return strategy.train_from_driver(spark, run, report=watch["on_event"])
    if not streams:
        results = run_barrier(spark, worker.main, run, task=task, launch=config.launch, **watch)
    else:
        dealt, columns = local.deal_rows(data, config.data, config.shards, config.launch.num_ranks, reference_columns)
        results = run_barrier(
            spark, worker.main, run, task=task, columns=columns, launch=config.launch, source=dealt, **watch
        )
    result: dict[str, Any] = results[0]
    return result
