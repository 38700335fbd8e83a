"""The environment of each attempt of a run, for reports: versions, hosts, devices, datasets, settings, outcome.

    <run_dir>/environment/000003-driver.json     by the driver: Spark, the outcome
    <run_dir>/environment/000003-ranks.json      by rank 0: the ranks; without a driver (torchrun) also the end

The number is the generation of the attempt; under torchrun it is 0. Nothing of a run depends on these files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.data.dataset.records import ShardSet
from spark_dl.data.load.mixture import Mixture
from spark_dl.spec import Run
from spark_dl.world import World

FOLDER = "environment"
RUNNING, FINISHED, STOPPED_EARLY, FAILED, INTERRUPTED = "running", "finished", "stopped early", "failed", "interrupted"
"""Values of `outcome`."""
_FORMAT = "spark_dl.environment"
_NAME = re.compile(r"(\d{6,})-(driver|ranks)\.json")
OWN_FILE = re.compile(rf"{_NAME.pattern}(\.tmp-[0-9a-f]*)?")
"""The names of the files in the folder."""
_MAX_ERROR = 20_000
_log = logging.getLogger("spark_dl")


@dataclass
class AttemptRecord:
    """What is known about one attempt. Both parts are empty if they were not written, or are damaged."""

    generation: int
    driver: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, Any] = field(default_factory=dict)


def read(run_dir: str) -> tuple[list[AttemptRecord], list[str]]:
    """Returns the attempts of a run, oldest first, and a text for each damaged file."""
    folder = storage.within(run_dir, FOLDER)
    attempts: dict[int, AttemptRecord] = {}
    problems: list[str] = []
    for name in storage.list_names(folder):
        if match := _NAME.fullmatch(name):
            attempt = attempts.setdefault(int(match[1]), AttemptRecord(int(match[1])))
            try:
                record = json.loads(storage.read_bytes(storage.join(folder, name)))
                if not isinstance(record, dict) or record.get("format") != _FORMAT:
                    raise ValueError(f"expected a JSON object of the format {_FORMAT}")
                setattr(attempt, match[2], record)
            except (OSError, ValueError, RecursionError) as error:
                problems.append(f"{FOLDER}/{name}: {error}")
    return [attempts[generation] for generation in sorted(attempts)], problems


@contextlib.contextmanager
def recorded(
    run: Run, spark: Mapping[str, Any], before: Mapping[str, float]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Records an attempt by its driver: its start, and at the end of the block its outcome.

    Yields a function that takes the result of the run.

    Args:
        spark: what the driver knows about Spark.
        before: the seconds of what came before, such as the writing of the rows, by its name.
    """
    about = {
        **_about(run),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "spark": dict(spark),
        "before": dict(before),
        "outcome": RUNNING,
    }
    _write(run, "driver", about)
    result: dict[str, Any] = {}
    try:
        yield result.update
    except BaseException as error:
        from spark_dl.spark_job import SessionEndedError

        is_failure = isinstance(error, Exception) and not isinstance(error, SessionEndedError)
        text = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        end = {"outcome": FAILED if is_failure else INTERRUPTED, "error": text, "ended": time.time()}
        _write(run, "driver", {**about, **end})
        raise
    _write(run, "driver", {**about, **_end(result)})


def about_rank(world: World) -> dict[str, Any]:
    """Returns the facts about this rank that `recorded_on_ranks` takes."""
    is_gpu = world.device.type == "cuda"
    return {
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if is_gpu else str(world.device),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "pid": os.getpid(),
    }


@contextlib.contextmanager
def recorded_on_ranks(run: Run, ranks: list[Any], *, writes: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Records an attempt by its ranks, on the rank that `writes`. Yields a function that takes the result of the run.

    Args:
        ranks: `about_rank` of each rank.
    """
    about = {**_about(run), "ranks": ranks}
    if writes:
        _write(run, "ranks", about)
    result: dict[str, Any] = {}
    yield result.update
    if writes:
        _write(run, "ranks", {**about, **_end(result)})


def _about(run: Run) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "generation": run.generation,
        "started": time.time(),
        "resumed_from": run.checkpoint,
        "versions": {
            "spark_dl": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "pyarrow": pa.__version__,
            "system": platform.platform(),
        },
        "datasets": {**_datasets("train", run.train), **_datasets("validation", run.validation)},
        "config": run.config.to_dict(),
    }


def _datasets(name: str, data: ShardSet | Mixture | None) -> dict[str, Any]:
    if isinstance(data, Mixture):
        return {f"{name}: {key}": _dataset(shards) for key, shards in data.datasets.items()}
    return {} if data is None or not data.columns else {name: _dataset(data)}


def _dataset(shards: ShardSet) -> dict[str, Any]:
    decoded = int(shards.decoded_bytes(shards.columns).sum())
    return {"url": shards.url, "rows": shards.rows, "shards": shards.num_shards, "decoded_bytes": decoded}


def _end(result: Mapping[str, Any]) -> dict[str, Any]:
    outcome = STOPPED_EARLY if result.get("stopped_early") else FINISHED
    return {"outcome": outcome, "ended": time.time(), "steps": result.get("steps"), "epochs": result.get("epochs")}


def _write(run: Run, part: str, about: Mapping[str, Any]) -> None:
    url = storage.within(run.run_dir, FOLDER, f"{run.generation:06d}-{part}.json")
    try:
        storage.write_bytes(url, json.dumps(about, indent=1).encode())
    except OSError as error:  # the run itself goes on, or has an error of its own
        _log.warning("cannot write %s, so a report will not show it: %s", url, error)
