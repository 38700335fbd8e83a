"""The metrics of test rows: a line of `metrics.jsonl`, which reports show, and metrics of the run's MLflow run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_dl.config import Config
from spark_dl.rundir import metrics
from spark_dl.track import mlflow_run

if TYPE_CHECKING:
    from spark_dl.driver import TrainResult

KIND = "test"
_log = logging.getLogger("spark_dl")


def record(result: TrainResult, config: Config, values: Mapping[str, Any], rows: int) -> None:
    """Records the metrics of test rows, after a training. Called on the driver.

    They do not belong to the training, so what cannot be written is a warning.

    Args:
        values: loss and metrics by name, of `spark_dl.evaluate`.
        rows: the number of test rows.
    """
    line = {
        "kind": KIND, "step": result.steps, "epoch": result.epochs - 1, "checkpoint": result.checkpoint, "rows": rows,
        "metrics": dict(values), "time": time.time(),
    }  # fmt: skip
    record_line(result.run_dir, config, line)


def record_line(run_dir: str, config: Config, line: Mapping[str, Any]) -> None:
    """Adds a line to `metrics.jsonl` and to the MLflow run, after a training. What cannot be written is a warning."""
    try:
        metrics.add_line(run_dir, line)
    except (OSError, ValueError) as error:
        _log.warning("the metrics of the %s rows are not in %s: %s", line["kind"], metrics.FILE, error)
    if config.track.mlflow:
        try:
            mlflow_run.log_after(run_dir, line)
        except Exception as error:  # of the server or the network
            _log.warning("the metrics of the %s rows are not in MLflow: %s", line["kind"], error)
