"""Trials on a rank: asks the driver for an order, and trains it with the other ranks of its group.

An order is one training that the driver gives to a group of ranks. It travels as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from spark_dl import worker
from spark_dl.checks.storage import check_reach
from spark_dl.config import Config
from spark_dl.config.checks import suggestion
from spark_dl.config.load import build_config, sections, with_settings
from spark_dl.gather import gather_by_store
from spark_dl.launch.failures.errors import describe
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.rendezvous import Group, group_of, joined
from spark_dl.launch.rank.sender import Reporter
from spark_dl.launch.rank.task import RankResult
from spark_dl.rundir import run_folder
from spark_dl.rundir.run_folder import trial_dir
from spark_dl.spec import ModelSpec, Run
from spark_dl.training import initial

Spec: TypeAlias = ModelSpec | Callable[..., ModelSpec]
"""The model of all trials, or a function that returns the model of a trial, given its arguments by name."""
TUNED = ("train", "parallel", "loader", "checkpoint", "faults")
"""Sections whose settings can differ between trials. The others define the dataset and the ranks."""

_WAIT_S = 0.5
"""How long a group without work waits before it asks again."""


@dataclass(frozen=True)
class Order:
    """One training."""

    trial: int
    config: Config
    arguments: Mapping[str, Any]
    """Arguments of the function that returns the model."""
    run_dir: str
    generation: int
    fold: int | None = None

    @property
    def name(self) -> str:
        """Name for messages, unique in the job."""
        return f"trial {self.trial}" + ("" if self.fold is None else f", fold {self.fold}")

    def to_plain(self) -> dict[str, Any]:
        """Returns the order as JSON."""
        return {**dataclasses.asdict(self), "name": self.name, "config": self.config.to_dict()}


def begin(run: Run, trial: int, config: Config, arguments: Mapping[str, Any], fold: int | None = None) -> Order:
    """Starts the run folder of a training, and returns its order. Called on the driver.

    Raises ValueError if there is a training in the folder.
    """
    run_dir = trial_dir(run.run_dir, trial, fold)
    generation, _ = run_folder.begin_attempt(run_dir, config, resume=False, overwrite=False)
    trial_run = dataclasses.replace(run, config=config, run_dir=run_dir, generation=generation)
    run_folder.take_over(trial_run, overwrite=False, keep=())
    return Order(trial, config, dict(arguments), run_dir, generation, fold)


def split_values(values: Any, base: Config) -> tuple[Config, dict[str, Any]]:
    """Returns the settings of a trial, and the arguments of the function that returns its model.

    Args:
        values: by key. Keys with a section, such as `train.lr`, are settings, which replace those of `base`.

    Raises:
        ValueError: For a key of a section that all trials share, and for invalid settings.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"suggest: expected a dict such as {{'train.lr': 0.1}}, found {values!r:.200}")
    settings = {key: value for key, value in values.items() if "." in key}
    for section in (key.split(".")[0] for key in settings):
        if section not in sections():
            raise ValueError(f"suggest: no section {section!r} of settings{suggestion(section, TUNED)}")
        if section not in TUNED:
            raise ValueError(
                f"suggest: expected settings of {', '.join(TUNED)}, found {section!r}, which is the same for all "
                "trials, as they share the ranks and one dataset; set it in config"
            )
    if path := _other_key({key: value for key, value in values.items() if "." not in key}):
        raise ValueError(f"suggest: expected strings as keys, which JSON has, found {path}")
    try:
        arguments = json.loads(json.dumps({key: value for key, value in values.items() if "." not in key}))
    except TypeError as error:
        raise ValueError(f"suggest: expected numbers, strings, lists and dicts: {error}") from None
    return build_config(with_settings(base.to_dict(), settings)), arguments


def _other_key(value: Any, path: str = "") -> str:
    """Returns the first key in nested dicts that is not a string, with where it is; empty without any."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                return f"{key!r} in {path}"
            if other := _other_key(part, f"{path}.{key}" if path else key):
                return other
    if isinstance(value, list | tuple):
        return next(filter(None, (_other_key(part, f"{path}[{i}]") for i, part in enumerate(value))), "")
    return ""


def spec_of(spec: Spec, arguments: Mapping[str, Any]) -> ModelSpec:
    """Returns the model of a trial. Raises ValueError for arguments without a function, and for another result."""
    if isinstance(spec, ModelSpec):
        if arguments:
            raise ValueError(
                f"suggest: found {', '.join(arguments)}, which have no section, such as train.lr, and are arguments of "
                "the function that returns the model; pass a function instead of a ModelSpec"
            )
        return spec
    spec_of_trial = spec(**arguments)
    if not isinstance(spec_of_trial, ModelSpec):
        raise ValueError(f"spec: expected a function that returns a ModelSpec, it returned {spec_of_trial!r:.200}")
    return spec_of_trial


def run_trials(run: Run, spec: Spec, *, report: Reporter) -> RankResult:
    """Trains what the driver orders, until it has no more. Collective: called on every rank of the job.

    A training that fails on a rank is reported to the driver, and the ranks of its group go on with the next one.

    Args:
        run: the datasets and settings that all trials share. `launch.num_ranks` is the number of ranks of a group.

    Raises:
        RuntimeError: If the driver does not answer, or another rank of the group does not leave a training, within
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
            trial_world = dataclasses.replace(world, report=report_trial, ends_run=ends_run)
            result = worker.train_run(initial.for_rank(trial), trial_world)
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
