"""Checks of a job of trials on the driver, before a group of ranks gets a training."""

from __future__ import annotations

import dataclasses
from typing import Any

from spark_dl.checks.settings import check_settings
from spark_dl.checks.storage import check_dtypes
from spark_dl.config import Config, strategies
from spark_dl.launch import preflight
from spark_dl.spark_job import is_connect
from spark_dl.spec import ModelSpec, Run


def check_cluster(spark: Any, config: Config, num_groups: int) -> None:
    """Raises ValueError over Spark Connect, for local storage and for a range of ranks, RuntimeError for too few slots.

    Args:
        num_groups: groups of `launch.num_ranks` ranks that train at the same time.
    """
    if is_connect(spark):
        raise ValueError(
            "trials in one job: found a Spark Connect session; the ranks ask the driver for their trials, and cannot "
            "reach it over Spark Connect; use a classic session, or train one trial after another with train"
        )
    _check_unplanned(config)
    if config.shards.storage == "local":
        raise ValueError("shards.storage: expected 'shared' for trials, each of which reads all rows, found 'local'")
    if config.launch.min_ranks is not None:
        raise ValueError(
            "launch.min_ranks: expected null for trials, whose groups of ranks are equal, found "
            f"{config.launch.min_ranks}"
        )
    num_ranks = num_groups * config.launch.num_ranks
    try:
        preflight.check(spark, dataclasses.replace(config.launch, num_ranks=num_ranks))
    except preflight.TooFewSlotsError as error:
        of_trials = f"parallel_trials={num_groups} with launch.num_ranks={config.launch.num_ranks}: "
        message = f"{of_trials}{error}".replace("lower launch.num_ranks", "lower one of them")
        raise preflight.TooFewSlotsError(message, error.is_retryable) from error


def check_trial(spark: Any, spec: ModelSpec, config: Config, run: Run) -> None:
    """Raises ValueError for invalid settings and functions of a trial. run: the dataset of all trials."""
    if strategies.find(config.parallel.strategy).train_from_driver is not None:
        raise ValueError(
            f"parallel.strategy: expected a strategy whose ranks train, found {config.parallel.strategy!r}, whose "
            "steps are Spark jobs of the driver"
        )
    _check_unplanned(config)
    check_settings(spark, spec, config, has_validation=run.validation is not None)
    check_dtypes(spec, run.train.select(config.data.columns), config)


def _check_unplanned(config: Config) -> None:
    if config.parallel.planned:
        raise ValueError(
            f"parallel.strategy: expected another strategy for trials, found {config.parallel.strategy!r}, which plans "
            "one training; set it to 'mesh'"
        )
