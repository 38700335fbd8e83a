"""Trials on a rank: asks the driver for trainings, and trains each one with the other ranks of its group."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from spark_dl import worker
from spark_dl.checks.storage import check_reach
from spark_dl.config.load import build_config
from spark_dl.gather import gather_by_store
from spark_dl.launch.failures.describe import describe
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.groups import Group, group_of, joined
from spark_dl.launch.rank.sender import Reporter
from spark_dl.launch.rank.task import RankResult
from spark_dl.spec import Run
from spark_dl.training import initial
from spark_dl.trials.order import Spec, spec_of

_WAIT_S = 0.5
"""How long a group without work waits before it asks again."""


def run_trials(run: Run, spec: Spec, *, report: Reporter) -> RankResult:
    """Trains what the driver orders, until it has no more. Collective: called on every rank of the job.

    run: the datasets and settings that all trials share. `launch.num_ranks` is the number of ranks of a group.
    A training that fails on a rank is reported to the driver, and the ranks of its group go on with the next one.
    Raises RuntimeError if the driver does not answer, or another rank of the group does not leave a training, within
    `launch.collective_timeout_s`.
    """
    launch = run.config.launch
    with rendezvous.join(launch, init_group=False, report=report) as world:
        gather = functools.partial(gather_by_store, world.store, world.rank, world.world_size)
        check_reach(run, gather, rank=world.rank, host=world.host, writes=True)
        group = group_of(world, gather("hosts", world.host), launch.num_ranks)
        outcome: dict[str, Any] = {}
        first = group.number * launch.num_ranks
        last = first + launch.num_ranks - 1
        limit = (
            f"rank {world.rank} waited longer than launch.collective_timeout_s={launch.collective_timeout_s:g} s for "
            f"the driver, or for another rank of its group (ranks {first} to {last}) to end a trial"
        )
        while (order := report.ask({"what": "next", **outcome}, launch.collective_timeout_s, limit)) != "end":
            if order == "wait":
                outcome = {}
                time.sleep(_WAIT_S)
            else:
                outcome = _train(order, run, spec, group, report)
        return RankResult(world.rank, None)


def _train(order: Mapping[str, Any], run: Run, spec: Spec, group: Group, report: Reporter) -> dict[str, Any]:
    """Trains one order with the group. Returns its result, or its failure, for the driver."""
    config = build_config(order["config"])
    limit = f"the driver did not answer within launch.collective_timeout_s={config.launch.collective_timeout_s:g} s"

    def ends_run(entry: Mapping[str, Any]) -> bool:
        question = {"what": "epoch", "entry": entry}
        return bool(report.ask(question, config.launch.collective_timeout_s, limit))

    def report_trial(event: Mapping[str, Any]) -> None:
        report({**event, "trial": order["trial"]})

    try:
        with joined(group, order["name"], config.launch, has_group=config.parallel.has_group) as world:
            trial = dataclasses.replace(
                run, spec=spec_of(spec, order["arguments"]), config=config, run_dir=order["run_dir"],
                generation=order["generation"],
            )  # fmt: skip
            own = dataclasses.replace(world, report=report_trial, ends_run=ends_run)
            result = worker.train_run(initial.for_rank(trial), own)
    except (Exception, SystemExit) as error:
        failure = describe(error, {"rank": group.world.rank, "host": group.world.host, "pid": os.getpid()})
        outcome: dict[str, Any] = {"failed": failure}
    else:
        # The history is in the run folder, and can be long.
        outcome = {"result": {**result, "history": []}} if group.world.rank == 0 else {}
    if group.world.device.type == "cuda":
        _free_gpu()
    return outcome


def _free_gpu() -> None:
    """Frees the memory of the last training. Raises the error of CUDA if a failure has left the GPU unusable."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
