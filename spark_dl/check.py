"""Checks on the driver, before data is read and ranks are started."""

from __future__ import annotations

import dataclasses
from typing import Any

from spark_dl import strategies
from spark_dl.config import Config
from spark_dl.data.dataset.records import ShardSet
from spark_dl.evaluate import build_metric
from spark_dl.inputs import as_written
from spark_dl.launch import payload, preflight
from spark_dl.spec import ModelSpec
from spark_dl.training.early_stop import check_scalar


def find_session(data: Any) -> Any:
    """Returns the session of a DataFrame, or of this thread, or the default one. Raises RuntimeError without one."""
    if hasattr(data, "sparkSession"):
        return data.sparkSession
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()  # of this thread, or the default one
    except PySparkRuntimeError as error:
        raise RuntimeError("no active Spark session; create one: SparkSession.builder.getOrCreate()") from error


def check_settings(spark: Any, spec: ModelSpec, config: Config, *, has_validation: bool) -> None:
    """Raises ValueError for invalid settings and functions, RuntimeError if the cluster is too small."""
    strategies.find(config.parallel.strategy).check(spark, config)
    for name, args in config.train.metrics.items():
        metric = build_metric(name, args)
        if name == config.train.early_stop_metric:
            check_scalar(name, metric)
    if config.train.early_stop_metric and not (has_validation or config.train.validation_fraction):
        raise ValueError(
            "train.early_stop_metric: needs validation rows; set train.validation_fraction, or pass validation"
        )
    payload.pack_call(None, (), {"spec": spec})
    preflight.check(spark, config.launch, at_once=not config.parallel.by_spark)


def evaluation_config(config: Config, data: Any) -> Config:
    """Returns settings for an evaluation, given those of training."""
    if isinstance(data, (str, ShardSet)):  # cleaning rules apply to the training rows
        return dataclasses.replace(config, data=as_written(config.data, data))
    # Filters apply to datasets only.
    return dataclasses.replace(config, data=dataclasses.replace(config.data, filters=()))
