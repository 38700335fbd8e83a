"""Prepares a run on the driver: checks the data, opens or writes datasets, finds the checkpoint to resume.

`prepare_run` returns the `Run`, which is sent to the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from spark_dl import storage
from spark_dl.checks.auto import mesh_in_words, plan_mesh_of
from spark_dl.checks.functions import check_training
from spark_dl.checks.mesh import fit_mesh
from spark_dl.checks.storage import check_dtypes, check_predict, check_transform
from spark_dl.config import Config
from spark_dl.data.columns.batch import check_assembled
from spark_dl.data.columns.schema import Column
from spark_dl.data.dataset.manifest import delete_dataset
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.draws import weigh_groups
from spark_dl.data.load.mixture import Mixture, dataset_configs
from spark_dl.data.load.resume_check import check_rows, for_ranks
from spark_dl.data.write.vocabulary import NO_ROWS
from spark_dl.inputs import Reuse, as_source, check_mixture, check_storage, shards_of, warn_of_few_rows
from spark_dl.rundir import checkpoint, generations, run_folder, signing
from spark_dl.rundir.run_folder import SHARDS
from spark_dl.spark_job import is_connect, is_local_master, refuse_stream
from spark_dl.spec import ModelSpec, Run
from spark_dl.storage.owner import temporary_prefix
from spark_dl.training import initial
from spark_dl.training.finite import warn_of_late_checkpoints
from spark_dl.training.initial import code_of, warn_of_changes

_log = logging.getLogger("spark_dl")


@contextlib.contextmanager
def prepare_run(
    data: Any,
    spec: ModelSpec | None,
    config: Config,
    *,
    spark: Any = None,
    validation: Any = None,
    run_dir: Any = None,
    resume: bool | str = False,
    overwrite: bool = False,
    reuse_shards: bool = False,
    stage: Callable[[str], None] = lambda text: None,
) -> Iterator[Run]:
    """Yields a run that is ready to start, with its datasets written or opened, and checked.

    Shards in a store are not deleted until the end of the block. `stage` is called with a text about what is done now.

    Args:
        spec: None for trials, each of which has its own.
        spark: the session, for `parallel.strategy: auto`, which starts the ranks once to measure the network.
        reuse_shards: uses the shards of an earlier attempt also without a checkpoint.

    Raises:
        ValueError: For invalid data, settings and `run_dir`, before an earlier run is deleted.
        RuntimeError: If a newer attempt of the run has started.
    """
    run_dir = storage.absolute(run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")
    check_storage(config, data, validation)
    check_mixture(config, data)
    generation, saved = run_folder.begin_attempt(run_dir, config, resume=resume, overwrite=overwrite)
    with contextlib.ExitStack() as until_done:
        with generations.explained(run_dir, generation):
            check_newest = functools.partial(generations.check_newest, run_dir, generation)
            code = {} if spec is None else code_of(spec)
            _warn(spec, config, saved, code)  # not in each restart, which has the same settings
            spec, before = initial.begin(spec, config, saved, run_dir, overwrite=overwrite)
            reuse = _reuse(saved, config, reuse_shards)
            datasets = _Datasets(run_dir, config, until_done, reuse, check_newest, stage)
            train = datasets.to_train_on(data, before)
            if config.parallel.planned:
                stage("planning the mesh")
                config = plan_mesh_of(spark, spec, train, config, saved)
                stage(f"planned {mesh_in_words(config)}")
            if config.shards.storage == "shared":  # with local storage the ranks check this
                check_rows(train, config, saved.manifest if saved else None)
                warn_of_few_rows(train.rows, config)
            each_row = config.without_sampling()
            reference_columns = train.columns and train.select(each_row.data.columns)  # unknown yet with local storage
            validation_shards = None
            if validation is not None:
                validation_shards = datasets.to_shards(validation, "validation", reference_columns, each_row)
            run = Run(
                spec=cast("ModelSpec", spec),
                config=config,
                train=for_ranks(train, config),
                validation=None if validation_shards is None else for_ranks(validation_shards, config),
                run_dir=run_dir,
                generation=generation,
                code=code,
                checkpoint=saved.url if saved else None,
                checkpoint_sha256=saved.sha256 if saved else "",
                reference_columns=tuple(before),
            )
            if run.train.columns and spec is not None:  # the columns are unknown with local storage
                check_assembled(run.train.select(config.data.columns), config.data)
                check_dtypes(spec, run.train.select(config.data.columns), config)
                check_transform(spec, run.train.select(config.data.columns), config)
                check_predict(spec, run.train.select(config.data.columns), config)
                check_training(spec, run.train, config, saved)
                run = replace(run, config=fit_mesh(spec, run.train, config, saved))
            # Only now, so that an earlier run is not deleted for invalid data.
            kept_urls = [*datasets.written, *_urls(train), *_urls(validation_shards)]
            run_folder.take_over(run, overwrite=overwrite, keep=kept_urls)
            _log.info("training on %d ranks%s", config.launch.num_ranks, f", from step {saved.step}" if saved else "")
        yield run


def _warn(spec: ModelSpec | None, config: Config, saved: checkpoint.Saved | None, code: Mapping[str, str]) -> None:
    """Warns of what a run that begins, or goes on from a checkpoint, may not be meant to do."""
    if saved is None:
        warn_of_late_checkpoints(config)
        return
    signing.warn_if_ignored(saved.url, saved.manifest, config.checkpoint.signing_key_file)
    if spec is not None:
        warn_of_changes(saved.manifest.get("code"), code, saved.url)


def next_attempt(run: Run, first_generation: int, restart: Mapping[str, Any] | None = None) -> Run:
    """Returns the run of another attempt after one that has failed, from the last checkpoint. Called on the driver.

    Args:
        first_generation: that of the first attempt of this call.
        restart: the event of the restart (`restart_event`), which is written to `metrics.jsonl`; None for an attempt
            with more ranks.

    Raises:
        RuntimeError: If the attempt of another driver has started since, and as `begin_attempt` does.
    """
    with run_folder.explained(run_folder.READ, run.run_dir):
        generations.check_newest(run.run_dir, run.generation)
        # Until this call has committed one, it is the checkpoint that it began from, which need not be the last one.
        is_own = checkpoint.newest_committed_attempt(run.run_dir) >= first_generation
    resume: bool | str = True if is_own or run.checkpoint is None else run.checkpoint
    generation, saved = run_folder.begin_attempt(run.run_dir, run.config, resume=resume, overwrite=False)
    next_run = replace(
        run, generation=generation, checkpoint=saved.url if saved else None,
        checkpoint_sha256=saved.sha256 if saved else "",
    )  # fmt: skip
    line = None if restart is None else {name: value for name, value in restart.items() if name != "error"}
    run_folder.take_over(next_run, overwrite=False, keep=(), restart=line)
    return next_run


@contextlib.contextmanager
def prepare_evaluation(
    data: Any,
    spec: ModelSpec,
    config: Config,
    saved: checkpoint.Saved,
    *,
    spark: Any,
    run_dir: Any = None,
    stage: Callable[[str], None],
) -> Iterator[Run]:
    """Yields a run that evaluates a checkpoint. Shards of a DataFrame are deleted at the end of the block."""
    with contextlib.ExitStack() as until_done:
        folder, config = _own_folder(run_dir, saved), config.without_sampling()
        if not isinstance(data, (str, ShardSet)) and not folder:
            folder, config = _private_place(spark, config, saved, until_done)
        check_storage(config, data)
        _say_stage(stage, data, config, "evaluate")
        written = storage.join(folder, SHARDS, f"evaluate-{uuid.uuid4().hex[:8]}")
        if folder:
            until_done.callback(delete_dataset, written)
        shards = shards_of(data, written, config, until_done, saved.columns, reuse="no")
        if shards.columns:
            check_dtypes(spec, shards.select(config.data.columns), config)
        yield Run(
            spec=spec, config=config, train=for_ranks(shards, config), run_dir=folder, checkpoint=saved.url,
            checkpoint_sha256=saved.sha256, reference_columns=saved.columns,
        )  # fmt: skip


def _own_folder(run_dir: Any, saved: checkpoint.Saved) -> str:
    """Returns the folder that the caller names, or the run folder of a checkpoint if he can write to it and it is his.

    Else returns an empty string.

    Others can read what is written to a run folder of theirs. An object store does not say whose a folder is.
    """
    if run_dir is not None:
        return storage.absolute(run_dir)
    folder = checkpoint.run_dir_of(saved)
    path = storage.resolve(folder)[1] if storage.is_local(folder) else None
    if path is None or os.stat(path).st_uid != os.geteuid() or not os.access(path, os.W_OK):
        return ""
    return folder


def _private_place(
    spark: Any, config: Config, saved: checkpoint.Saved, until_done: contextlib.ExitStack
) -> tuple[str, Config]:
    """Returns a folder for the rows of a DataFrame, which others cannot read; or settings that need no folder."""
    if config.shards.storage == "local":
        return "", config
    if not is_connect(spark) and is_local_master(spark.conf.get("spark.master", "")):
        return until_done.enter_context(tempfile.TemporaryDirectory(prefix=temporary_prefix())), config
    try:
        shards = replace(config.shards, storage="local", store=None, cache_dir=None, cache_mib=0)
        return "", replace(config, shards=shards)
    except ValueError as error:
        raise ValueError(
            f"run_dir: expected a folder that all executors can access, for the rows of the DataFrame. "
            f"{checkpoint.run_dir_of(saved)} is not known to be yours, and the local disks of the ranks cannot have "
            f"them: {error}"
        ) from error


def as_sources(data: Any, call: str) -> Any:
    """Returns one dataset, or several by name, as `as_source` does. Raises ValueError for other types and streams.

    Args:
        call: names the caller in errors.
    """
    for source in data.values() if isinstance(data, Mapping) else [data]:
        refuse_stream(source, call)
    return {name: as_source(d) for name, d in data.items()} if isinstance(data, Mapping) else as_source(data)


def _reuse(saved: checkpoint.Saved | None, config: Config, reuse_shards: bool) -> Reuse:
    if saved is None:
        return "same" if reuse_shards else "no"
    at_end = (saved.manifest.get("rows") or {}).get("step_of_epoch") == 0
    return "any" if at_end and not config.train.validation_fraction else "same"


@dataclass(frozen=True)
class _Datasets:
    """Opens and writes the datasets of one attempt."""

    run_dir: str
    config: Config
    until_done: contextlib.ExitStack
    reuse: Reuse
    """Which shards of an earlier attempt are used again."""
    before_commit: Callable[[], None]
    stage: Callable[[str], None]
    written: list[str] = field(default_factory=list)
    """URLs of the datasets that are written from DataFrames."""

    def to_train_on(self, data: Any, reference_columns: Sequence[Column]) -> ShardSet | Mixture:
        """Returns the dataset to train on, or the mixture of several datasets."""
        if not isinstance(data, Mapping):
            return weigh_groups(self.to_shards(data, "train", reference_columns), self.config)
        datasets: dict[str, ShardSet] = {}
        for name, dataset_config in dataset_configs(self.config).items():
            if datasets:
                reference_columns = next(iter(datasets.values())).columns
            datasets[name] = self.to_shards(data[name], f"train-{name}", reference_columns, dataset_config, len(data))
        return Mixture(datasets)

    def to_shards(
        self,
        rows: Any,
        name: str,
        reference_columns: Sequence[Column] = (),
        config: Config | None = None,
        num_datasets: int = 1,
    ) -> ShardSet:
        """Opens or writes one dataset with `shards_of`. config: settings of this dataset, if there are several."""
        url = storage.within(self.run_dir, SHARDS, name)
        # Other validation rows change no step: the scores of the old ones are left behind.
        reuse: Reuse = "any" if name == "validation" and self.reuse != "no" else self.reuse
        _say_stage(self.stage, rows, self.config, name, reuse=reuse != "no")
        if not isinstance(rows, (str, ShardSet)) and self.config.shards.storage == "shared":
            self.written.append(url)
        try:
            return shards_of(
                rows, url, config or self.config, self.until_done, reference_columns,
                reuse=reuse, num_datasets=num_datasets, before_commit=self.before_commit,
            )  # fmt: skip
        except ValueError as error:
            if name == "validation" and str(error).startswith(NO_ROWS):
                raise ValueError(f"validation: {NO_ROWS}; pass at least one row, or no validation") from error
            raise


def _say_stage(stage: Callable[[str], None], rows: Any, config: Config, name: str, *, reuse: bool = False) -> None:
    if isinstance(rows, (str, ShardSet)):
        stage(f"opening the {name} dataset")
    elif config.shards.storage == "shared":
        stage(f"{'looking for the shards of' if reuse else 'writing'} the {name} rows")


def _urls(data: ShardSet | Mixture | None) -> list[str]:
    """URLs of the datasets; rows on the local disks of ranks have none."""
    datasets = data.datasets.values() if isinstance(data, Mixture) else [data] if data else []
    return [shards.url for shards in datasets if shards.url]
