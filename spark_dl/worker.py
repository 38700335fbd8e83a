"""The worker story: what one rank does, from joining the others to leaving them.

The same entry runs in a barrier task, which `driver.py` starts, and under torchrun, where a script calls `main(run)`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from spark_dl import checkpoint, strategies
from spark_dl.config import Data, Launch, Loader, Shards
from spark_dl.data import local
from spark_dl.data.columns.source import SourceColumn
from spark_dl.data.dataset.memory import check_memory
from spark_dl.data.load.resume_check import check_same_rows
from spark_dl.data.plan import check_held_out
from spark_dl.evaluate import evaluate
from spark_dl.gather import gather_by_store
from spark_dl.launch import rendezvous
from spark_dl.launch.barrier import RankResult, TaskInput
from spark_dl.loop import train
from spark_dl.reach import check_reach
from spark_dl.spec import Run
from spark_dl.world import World

Report = Callable[[Mapping[str, Any]], None]

Loop = Callable[[Run, World], dict[str, Any]]


def _train(run: Run, world: World) -> dict[str, Any]:
    strategy = strategies.find(run.config.parallel.strategy)
    if strategy.train_on_ranks is not None:
        return strategy.train_on_ranks(run, world)
    assert strategy.parallelize is not None, "the driver's loop runs no ranks"
    return train(run, world, strategy.parallelize)


LOOPS: dict[str, Loop] = {"train": _train, "evaluate": evaluate}


def main(run: Run, *, task: str = "train", report: Report | None = None) -> RankResult:
    """Trains (or evaluates) as one of the ranks of a run. Collective: called on every rank."""
    with rendezvous.join(run.config.launch, init_group=run.config.parallel.has_group, report=report) as world:
        _check_reach(task, run, world)
        return RankResult(world.rank, LOOPS[task](run, world))


def call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], launch: Launch, report: Report | None = None
) -> RankResult:
    """Calls a user's function as one of the ranks. Collective: called on every rank.

    The environment is as under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...), and the function makes the
    process group itself, if it needs one: `torch.distributed.init_process_group()`.
    """
    with rendezvous.join(launch, init_group=False, report=report) as world:
        return RankResult(world.rank, fn(*args, **kwargs))


def main_on_rows(
    run: Run, sources: tuple[SourceColumn, ...], rows: TaskInput, *, task: str = "train", report: Report | None = None
) -> RankResult:
    """`main` on the rows that stream into this task, which take the place of `run.train`. Collective."""
    data, held_out = run.config.data, run.config.train.validation_fraction
    with (
        local.spill(
            rows.batches, sources, data, layout=run.config.shards, part=rows.task, folder=rows.folder
        ) as spilled,
        rendezvous.join(run.config.launch, init_group=run.config.parallel.has_group, report=report) as world,
    ):
        _check_reach(task, run, world)
        try:
            shards = local.assemble(spilled, _gather(world))
            check_memory(shards, shards.select(data.columns), run.config, world.world_size)
            if task == "train":
                check_held_out(shards.rows, held_out)
                if run.checkpoint is not None:
                    saved = checkpoint.open_checkpoint(run.checkpoint, sha256=run.checkpoint_sha256)
                    check_same_rows(saved.manifest.get("rows"), shards, validation_fraction=held_out)
        except ValueError as error:
            return RankResult(world.rank, None, refused=str(error))
        return RankResult(world.rank, LOOPS[task](dataclasses.replace(run, train=shards), world))


def call_on_rows(
    fn: Callable[..., Any],
    sources: tuple[SourceColumn, ...],
    data: Data,
    shards: Shards,
    loader: Loader,
    validation_fraction: float,
    kwargs: dict[str, Any],
    launch: Launch,
    rows: TaskInput,
    report: Report | None = None,
) -> RankResult:
    """`call` with the rows that stream into this task as the first argument, a `RankRows`. Collective."""
    with (
        local.spill(rows.batches, sources, data, layout=shards, part=rows.task, folder=rows.folder) as spilled,
        rendezvous.join(launch, init_group=False, report=report) as world,
    ):
        try:
            dataset = local.assemble(spilled, _gather(world))
        except ValueError as error:
            return RankResult(world.rank, None, refused=str(error))
        return RankResult(world.rank, fn(local.RankRows(dataset, data, loader, validation_fraction), **kwargs))


def _check_reach(task: str, run: Run, world: World) -> None:
    check_reach(run, _gather(world), rank=world.rank, host=world.host, writes=task == "train")


def _gather(world: World) -> local.Gather:
    return functools.partial(gather_by_store, world.store, world.rank, world.world_size)
