"""One rank: joins the process group, trains or evaluates, and leaves the group.

`main` runs in a barrier task, which `driver.py` starts, and under torchrun, where a script calls `main(run)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spark_dl.checks.storage import check_dtypes, check_reach, check_transform
from spark_dl.config import Config, Launch, strategies
from spark_dl.data.columns.ragged import check_lengths
from spark_dl.data.columns.schema import check_reference_columns
from spark_dl.data.dataset.memory import check_memory
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.resume_check import check_rows
from spark_dl.evaluate import evaluate
from spark_dl.gather import gather_by_store
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.task import RankResult, TaskInput
from spark_dl.loop import train
from spark_dl.rundir import checkpoint, environment
from spark_dl.spec import Run
from spark_dl.training import initial
from spark_dl.training.checks import out_of_memory_explained
from spark_dl.world import World

if TYPE_CHECKING:
    from spark_dl.data.columns.source import SourceColumn
    from spark_dl.data.load.local import Gather, RowSettings, Spilled

_log = logging.getLogger("spark_dl")

Report = Callable[[Mapping[str, Any]], None]
"""Sends an event to the driver. Does not block and does not raise."""


def main(
    run: Run,
    *,
    task: str = "train",
    columns: Sequence[SourceColumn] = (),
    rows: TaskInput | None = None,
    report: Report | None = None,
) -> RankResult:
    """Trains or evaluates as one rank of a run. Collective: called on every rank.

    Args:
        task: `train` or `evaluate`.
        rows: with `shards.storage` "local", the rows that are streamed to this task; they replace `run.train`.
        columns: the columns of `rows`.
    """
    config = run.config
    with (
        _spilled(rows, columns, config) as spilled,
        rendezvous.join(config.launch, init_group=config.parallel.has_group, report=report) as world,
    ):
        if task == "train":
            run = initial.for_rank(run)
        check_reach(run, _gather(world), rank=world.rank, host=world.host, writes=task == "train")
        if spilled is not None:
            try:
                shards = spilled.assemble(_gather(world))
                _check_streamed(shards, run, world, task)
            except ValueError as error:
                return RankResult(world.rank, None, refused=str(error))
            run = dataclasses.replace(run, train=shards)
        _say_unused_gpus(config, world)
        with out_of_memory_explained(config, world), _deterministic(config):
            return RankResult(world.rank, train_run(run, world) if task == "train" else evaluate(run, world))


def call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    launch: Launch,
    *,
    columns: Sequence[SourceColumn] = (),
    settings: RowSettings | None = None,
    rows: TaskInput | None = None,
    report: Report | None = None,
) -> RankResult:
    """Calls a user's function as one rank. Collective: called on every rank.

    The environment is as under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...). The function creates the
    process group itself, if it needs one: `torch.distributed.init_process_group()`. It can do so several times.
    A function that calls `sys.exit(0)` returns None.

    Args:
        rows: rows that are streamed to this task, the first argument of the function, as a `RankRows`.
        columns, settings: the columns of `rows`, and how they are stored and read.
    """
    # The ranks of a training need none of these.
    from spark_dl.launch.backends import checked_backends
    from spark_dl.launch.rank.desync import first_compared
    from spark_dl.launch.rank.environment import first_step_checked, own_groups
    from spark_dl.launch.rank.script import run_script

    with (
        _spilled(rows, columns, settings) as spilled,
        # A script has its GPU for itself, so this process must not take memory of it.
        rendezvous.join(
            launch, init_group=False, use_gpu=fn is not run_script, for_script=fn is run_script, report=report
        ) as world,
    ):
        if spilled is not None:
            assert settings is not None
            try:
                args = (settings.rank_rows(spilled.assemble(_gather(world))), *args)
            except ValueError as error:
                return RankResult(world.rank, None, refused=str(error))
        if fn is run_script:
            kwargs = {**kwargs, "gpu_env": world.child_env}
        with (
            first_step_checked(world, may_be_alone=launch.independent_ranks),
            own_groups(world, launch.collective_timeout_s),
            checked_backends(),
            first_compared(world),
        ):
            process = os.getpid()
            sys.argv[1:] = []  # those of Spark's worker are no arguments of the function
            try:
                result = fn(*args, **kwargs)
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise
                result = None
            finally:
                if os.getpid() != process:  # a forked child that returns, too: its result is not that of the rank
                    os._exit(0 if sys.exc_info()[0] is None else 1)
        world.report({"kind": "returned"})  # before the group ends, which is an error for ranks that still use it
        return RankResult(world.rank, result)


def _say_unused_gpus(config: Config, world: World) -> None:
    if world.rank == 0 and len(world.gpus) > 1 and not config.parallel.all_gpus:
        _log.warning(
            "each rank has %d GPUs and trains on one of them; set launch.gpus_per_rank to 1, with more ranks, or "
            "parallel.strategy to dp_single_process, with one rank", len(world.gpus),
        )  # fmt: skip


def _deterministic(config: Config) -> contextlib.AbstractContextManager[None]:
    if not config.train.deterministic:
        return contextlib.nullcontext()
    from spark_dl.launch.rank.environment import deterministic  # which other trainings need not load

    return deterministic()


def train_run(run: Run, world: World) -> dict[str, Any]:
    """Trains with the strategy of a run. Collective in the world; every rank returns the same."""
    strategy = strategies.find(run.config.parallel.strategy)
    world = run.config.parallel.place(world)
    ranks = _gather(world)("environment", environment.about_rank(world))
    with environment.recorded_on_ranks(run, ranks, writes=world.rank == 0) as record_end:
        if strategy.train_on_ranks is not None:
            result = strategy.train_on_ranks(run, world)
        else:
            assert strategy.parallelize is not None, "strategies of the driver do not start ranks"
            result = train(run, world, strategy.parallelize)
        record_end(result)
    return result


@contextlib.contextmanager
def _spilled(
    rows: TaskInput | None, columns: Sequence[SourceColumn], settings: Config | RowSettings | None
) -> Iterator[Spilled | None]:
    """Writes the rows of this task to the local disk for the block. Yields None if no rows are streamed."""
    if rows is None:
        yield None
        return
    # Imported with local storage alone: it brings what writes shards.
    from spark_dl.data.load import local

    assert settings is not None
    with local.spill(
        rows.batches,
        tuple(columns),
        settings.data,
        layout=settings.shards,
        task=rows.task,
        folder=rows.folder,
        env=rows.outliving_env,
    ) as spilled:
        yield spilled


def _check_streamed(shards: ShardSet, run: Run, world: World, task: str) -> None:
    """Checks streamed rows as the driver checks datasets. Raises the same ValueError on all ranks."""
    check_reference_columns(shards.columns, run.reference_columns)
    check_lengths(shards.select(run.config.data.columns), run.config.loader)
    check_memory(shards, shards.select(run.config.data.columns), run.config, run.config.data_size)
    check_dtypes(run.spec, shards.select(run.config.data.columns), run.config)
    check_transform(run.spec, shards.select(run.config.data.columns), run.config)
    if task == "train":
        saved = None
        if run.checkpoint is not None:
            saved = checkpoint.open_checkpoint(run.checkpoint, sha256=run.checkpoint_sha256).manifest
        check_rows(shards, run.config, saved)


def _gather(world: World) -> Gather:
    return functools.partial(gather_by_store, world.store, world.rank, world.world_size)
