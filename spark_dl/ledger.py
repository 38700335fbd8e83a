"""The ledger of a run: which rows each step has used, computed again from the plan.

A run records no row: the order of the rows is a function of the seed, of the epoch and of the dataset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from spark_dl import storage
from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.config.load import build_config
from spark_dl.data.columns.ragged import Array
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.build import build_loader
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.load.mixture import MixedLoader, Mixture, dataset_configs
from spark_dl.data.load.resume_check import dataset_digest
from spark_dl.data.load.row_names import places_of_stream
from spark_dl.data.plan import Ints
from spark_dl.evaluate import load_model
from spark_dl.inputs import shards_of
from spark_dl.launch.session import find_session
from spark_dl.parallel.loss import autocast, loss_and_count, row_losses, select_rows
from spark_dl.rundir import checkpoint, environment
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spark_job import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_dl.spec import Batch, ModelSpec

_ROWS_AT_ONCE, _MOST_TASKS = 1 << 16, 200
_SCHEMA = "epoch long, step long, global_step long, dataset string, file string, row long"


def ledger(
    run_dir: str | os.PathLike[str], *, columns: Sequence[str] = (), spark: SparkSession | None = None
) -> DataFrame:
    """Returns which rows each step of a run has used, as a DataFrame with a line for each row of each step.

    It is computed by Spark when it is used, from the plan of the run, and needs the dataset of the training as it was.
    Its columns are `epoch` and `step`, from 0, the step in its epoch; `global_step`, from 1, as in the metrics;
    `dataset`, the name in a mixture, else empty; `file` and `row`, the name of the shard and the place in it, from 0;
    `logged_loss`, that of the log line of this step, which is the mean since the line before, or null; and `columns`.
    Called on the driver.

    Args:
        run_dir: of a run with a checkpoint. It has the lines up to the last one.
        columns: columns of the dataset, as they are stored, such as an id.
        spark: the session; by default that of this process.

    Raises:
        ValueError: For a run without a checkpoint, a dataset that is not there or has changed, a column that is not in
            it, and for rows whose step is not known without reading them (`loader.group_by_length`, `sequences`,
            `shards.storage: local`, and `columns` with `data.filters`).

    Example:
        >>> lines = spark_dl.ledger("runs/1")
        >>> lines.where("global_step = 1").show(3)
    """
    spark = find_session(None, spark)
    run = _open(run_dir)
    columns = [columns] if isinstance(columns, str) else list(columns)
    _check_columns(run, columns)
    parts = list(_parts(run))
    numbers = spark.range(0, len(parts), 1, min(len(parts), _MOST_TASKS))
    lines = numbers.mapInArrow(functools.partial(_lines, run, parts), _SCHEMA)
    if columns:
        lines = lines.join(_read_columns(spark, run, columns), ["dataset", "file", "row"])
    losses = {line["step"]: line["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "step"}
    logged = spark.createDataFrame(sorted(losses.items()) or [(0, 0.0)], "global_step long, logged_loss double")
    lines = lines.join(logged, "global_step", "left")
    return lines.select(*(name.split()[0] for name in _SCHEMA.split(", ")), "logged_loss", *map(quoted, columns))


def why(
    run_dir: str | os.PathLike[str],
    spec: ModelSpec,
    step: int,
    *,
    columns: Sequence[str] = (),
    spark: SparkSession | None = None,
) -> DataFrame:
    """Returns the rows of a step with the loss of each, the largest first, to find what a spike of the loss is from.

    The losses are computed on the driver, with the weights of the last checkpoint before the step, or of the first one,
    if there is none before it, with the model in evaluation mode, after `spec.transform` and `spec.augment` of that
    step. The columns are `loss`, `weight`, `file`, `row` and `columns`, as of `ledger`. Called on the driver.

    Args:
        run_dir: of a run.
        spec: that it was trained with.
        step: from 1, as in the metrics (`global_step`).
        columns: as of `ledger`.
        spark: as of `ledger`.

    Raises:
        ValueError: As `ledger` does, for a step that the run has not done, and for a run with several datasets.

    Example:
        >>> spark_dl.why("runs/1", spec, step=1).show(3)
    """
    spark = find_session(None, spark)
    run = _open(run_dir)
    columns = [columns] if isinstance(columns, str) else list(columns)
    _check_columns(run, columns)
    if not 1 <= step <= run.last_step:
        raise ValueError(
            f"why: step: expected 1 to {run.last_step}, the last checkpoint of {run.run_dir}, found {step}"
        )
    if isinstance(run.data, Mixture):
        raise ValueError(f"why: expected a run of one dataset, found those of a mixture, {list(run.datasets)}")
    before = [each for each in checkpoint.list_checkpoints(run.run_dir) if each.step < step]
    saved = before[-1] if before else checkpoint.list_checkpoints(run.run_dir)[0]
    config = dataclasses.replace(run.config, loader=dataclasses.replace(run.config.loader, max_tokens=None))
    loader = build_loader(
        run.data, config, rank=0, world_size=1, split="train", prepare=spec.prepare_in_loader(config.train.seed)
    )
    assert isinstance(loader, ShardLoader)
    plan = loader.plan
    epoch, at = divmod(step - 1, plan.steps)
    with contextlib.closing(loader.epoch(epoch, at)) as steps:
        (batch,) = next(steps).micro_batches
    streams = plan.streams(epoch)
    first, stop = at * plan.stream_batch, (at + 1) * plan.stream_batch
    of_streams = [places_of_stream(stream, first, min(stop, stream.rows)) for stream in streams]
    is_true = np.arange(plan.stream_batch) < np.array([[len(places)] for places in of_streams])
    losses = _losses(spec, load_model(spec, saved.url), batch, config)[is_true.reshape(-1)]
    shard, row = _files_of(run.data, loader.of_dataset(np.concatenate(of_streams)))
    names, weights = run.data.shards.column("name"), batch["weight"].numpy()[is_true.reshape(-1)]
    lines = [
        (float(loss), float(weight), names[s], int(r))
        for loss, weight, s, r in zip(losses, weights, shard, row, strict=True)
    ]
    found = spark.createDataFrame(lines, "loss double, weight double, file string, row long")
    if columns:
        found = found.join(_read_columns(spark, run, columns).drop("dataset"), ["file", "row"])
    order = found["loss"].desc_nulls_last()
    return found.select("loss", "weight", "file", "row", *map(quoted, columns)).orderBy(order, "file", "row")


def _losses(spec: ModelSpec, model: nn.Module, batch: Batch, config: Config) -> Array:
    """Returns the loss of each row of a batch. # (rows,)"""
    with torch.no_grad(), autocast(batch, config):
        if spec.batch_loss is None:
            losses, _ = row_losses(spec, spec.output(model, batch, config.inputs), batch, config.data.label)
            found: Array = losses.float().numpy()
            return found
        rows = [select_rows(batch, torch.tensor([i])) for i in range(len(batch["weight"]))]
        pairs = [loss_and_count(spec, model, {**row, "weight": torch.ones(1)}, config) for row in rows]
        return np.array([loss / (count or 1.0) for loss, count in pairs])


@dataclass(frozen=True)
class _Run:
    """A run that has trained, as its folder describes it."""

    run_dir: str
    config: Config
    data: ShardSet | Mixture
    last_step: int

    @property
    def datasets(self) -> Mapping[str, ShardSet]:
        return self.data.datasets if isinstance(self.data, Mixture) else {"": self.data}

    def loaders(self) -> tuple[int, dict[str, tuple[ShardLoader, int]]]:
        """Returns the steps of an epoch, and for each dataset a loader of all streams, and how many of its own steps
        are between the starts of two epochs."""
        loader = build_loader(self.data, self.config, rank=0, world_size=1, split="train")
        if isinstance(loader, MixedLoader):
            by_dataset = {name: (each, loader.plan.per_epoch(each.plan)) for name, each in loader.loaders.items()}
            return loader.plan.steps, by_dataset
        assert isinstance(loader, ShardLoader)
        return loader.plan.steps, {"": (loader, loader.plan.steps)}


@dataclass(frozen=True)
class _Part:
    """A stream of a dataset, in one pass over it."""

    dataset: str
    number: int
    """The pass, from 0: the epoch, except in a mixture, in which a dataset may be read more or less often."""
    stream: int


def _open(run_dir: str | os.PathLike[str]) -> _Run:
    url = storage.absolute(run_dir)
    saved = checkpoint.find(url)
    config = build_config(saved.manifest["config"])
    for key, is_set, why in (
        ("sequences", config.sequences is not None, "whose samples are of several rows"),
        ("shards.storage", config.shards.storage == "local", "whose rows are gone with the disks of the ranks"),
        ("data.sampling_weight", config.data.sampling_weight is not None, "whose draws depend on the weights of rows"),
        ("loader.group_by_length", config.loader.group_by_length, "with which steps depend on the lengths of rows"),
    ):
        if is_set:
            raise ValueError(f"ledger: not known for a run with {key}, {why}")
    attempts, _ = environment.read(url)
    datasets = (attempts[-1].driver or attempts[-1].ranks).get("datasets", {}) if attempts else {}
    urls = {name.partition(": ")[2]: about["url"] for name, about in datasets.items() if name.split(":")[0] == "train"}
    if not urls:
        raise ValueError(f"ledger: {url} does not say which dataset it was trained on (environment/)")
    configs = dataset_configs(config) if "" not in urls else {"": config}
    with contextlib.ExitStack() as stack:
        opened = {
            name: shards_of(urls[name], urls[name], each, stack, saved.columns, reuse="no", num_datasets=len(configs))
            for name, each in configs.items()
        }
    data = opened[""] if "" in opened else Mixture(opened)
    before, now = saved.manifest.get("rows") or {}, dataset_digest(data)
    if any(before.get(key) != value for key, value in now.items()):
        raise ValueError(
            f"ledger: the dataset at {', '.join(urls.values())} has changed since the training; restore it, as the "
            "plan of its rows would be another one"
        )
    return _Run(url, config, data, saved.step)


def _check_columns(run: _Run, columns: Sequence[str]) -> None:
    for name, shards in run.datasets.items():
        known = [column.name for column in shards.columns]
        if missing := [column for column in columns if column not in known]:
            near = suggestion(missing[0], known)
            raise ValueError(
                f"ledger: no column {missing[0]!r} in the dataset {shards.url}{near}; a column is there if it is read "
                "in the training, or if the dataset was prepared with it"
            )
        if columns and shards.filtered is not None:
            raise ValueError(
                f"ledger: columns={list(columns)} are not known with data.filters, data.nulls and data.nonfinite of "
                f"the dataset {name or shards.url}, as rows are numbered among those that pass; leave them out"
            )


def _parts(run: _Run) -> Iterator[_Part]:
    steps, loaders = run.loaders()
    last_epoch, last = divmod(run.last_step - 1, steps)
    for name, (loader, per_epoch) in loaders.items():
        passes = (last_epoch * per_epoch + last) // loader.plan.steps + 1
        for number, stream in itertools.product(range(passes), range(run.config.loader.num_streams)):
            yield _Part(name, number, stream)


def _lines(run: _Run, parts: Sequence[_Part], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the lines of some parts. Called in Spark tasks. batches: with their numbers, in the column id"""
    steps, loaders = run.loaders()
    for batch in batches:
        for number in batch.column(0).to_pylist():
            part = parts[number]
            (loader, per_epoch), shards = loaders[part.dataset], run.datasets[part.dataset]
            (stream,) = loader.plan.streams(part.number, range(part.stream, part.stream + 1))
            places = loader.of_dataset(places_of_stream(stream, 0, stream.rows))
            of_pass = np.arange(len(places)) // loader.plan.stream_batch
            epoch, step = np.divmod(part.number * loader.plan.steps + of_pass, per_epoch)
            global_step = epoch * steps + step + 1
            used = (step < steps) & (global_step <= run.last_step)
            shard, row = _files_of(shards, places[used])
            names = np.array(shards.shards.column("name"), dtype=object)
            for first in range(0, len(row), _ROWS_AT_ONCE):
                some = slice(first, first + _ROWS_AT_ONCE)
                yield pa.RecordBatch.from_pydict({
                    "epoch": epoch[used][some], "step": step[used][some], "global_step": global_step[used][some],
                    "dataset": [part.dataset] * len(row[some]), "file": names[shard[some]].tolist(), "row": row[some],
                })  # fmt: skip


def _files_of(shards: ShardSet, places: Ints) -> tuple[Ints, Ints]:
    """Returns the shard and the row in its file. places: row groups, and rows in them # (rows, 2)"""
    table = shards.shards
    before = np.concatenate([[0], np.cumsum(table.group_rows)])
    shard = np.searchsorted(table.first_groups, places[:, 0], side="right") - 1
    return shard, before[places[:, 0]] - before[table.first_groups[shard]] + places[:, 1]


def _read_columns(spark: SparkSession, run: _Run, columns: Sequence[str]) -> DataFrame:
    """Returns columns of all rows of the datasets, with the dataset, the file and the row."""
    files = [(name, shards.url, file) for name, shards in run.datasets.items() for file in shards.shards.column("name")]
    first = run.datasets[files[0][0]]
    stored = pq.read_schema(storage.open_input(storage.join(first.url, files[0][2])))
    place = [("dataset", pa.string()), ("file", pa.string()), ("row", pa.int64())]
    types = pa.schema([*place, *map(stored.field, columns)])
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                name, url, file = files[number]
                first = 0
                with storage.open_input(storage.join(url, file)) as source:
                    for rows in pq.ParquetFile(source).iter_batches(_ROWS_AT_ONCE, columns=[*columns]):
                        n = len(rows)
                        place = [pa.array([name] * n), pa.array([file] * n), pa.array(range(first, first + n))]
                        yield pa.RecordBatch.from_arrays([*place, *map(rows.column, columns)], schema=types)
                        first += n

    return spark.range(0, len(files), 1, min(len(files), _MOST_TASKS)).mapInArrow(read, from_arrow_schema(types))
