"""Checks on the driver, before data is read and ranks are started."""

from __future__ import annotations

import dataclasses
from typing import Any

from spark_dl.checks.functions import check_functions
from spark_dl.config import Config, Launch, strategies
from spark_dl.config.checks import SettingError
from spark_dl.data.dataset.records import ShardSet
from spark_dl.inputs import as_written
from spark_dl.launch import preflight
from spark_dl.launch.code import payload
from spark_dl.rundir.signing import read_key
from spark_dl.spec import ModelSpec, check_spec
from spark_dl.training.optimizer_settings import check_optimization
from spark_dl.training.row_metrics import build_metrics, check_scalar


def check_settings(spark: Any, spec: ModelSpec, config: Config, *, has_validation: bool) -> None:
    """Raises ValueError for invalid settings and functions, RuntimeError if the cluster is too small."""
    check_spec(spec)
    if not isinstance(config, Config):
        raise ValueError(
            f"config: expected a spark_dl.Config, found a {type(config).__name__}; spark_dl.load_config reads a "
            "file, and settings by key"
        )
    strategies.find(config.parallel.strategy).check(spark, config)
    check_functions(spec, config)
    if spec.optimizer is None:
        check_optimization(config)
    metrics = build_metrics(spec, config)
    stops_at, known = config.train.early_stop_metric, ["loss", *(m.name for m in metrics)]
    if stops_at is not None and stops_at not in known and spec.evaluation is None:
        raise SettingError("train.early_stop_metric", f"expected one of {known}, found {stops_at!r}")
    for metric in metrics:
        if metric.name == stops_at and metric.function is None:
            check_scalar(metric.name, metric.metric)
    need_rows = {
        "train.early_stop_metric": config.train.early_stop_metric,
        "train.validate_every_steps": config.train.validate_every_steps,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    for key, value in need_rows.items():
        if value and not (has_validation or config.train.validation_fraction):
            raise SettingError(key, "needs validation rows; set train.validation_fraction, or pass validation")
    if config.checkpoint.signing_key_file:
        read_key(config.checkpoint.signing_key_file)
    payload.pack_call(None, (), {"spec": spec})
    preflight.check(spark, launch_of(spark, config), at_once=not config.parallel.by_spark)


def launch_of(spark: Any, config: Config) -> Launch:
    """Returns the settings of the launch, with the number of GPUs that the strategy needs."""
    if not config.parallel.all_gpus:
        return config.launch
    return preflight.with_all_gpus(config.launch, preflight.read_session(spark))


def evaluation_config(config: Config, data: Any) -> Config:
    """Returns settings for an evaluation, given those of training."""
    if isinstance(data, (str, ShardSet)):  # cleaning rules apply to the training rows
        return dataclasses.replace(config, data=as_written(config.data, data))
    # Filters apply to datasets only.
    return dataclasses.replace(config, data=dataclasses.replace(config.data, filters=()))
