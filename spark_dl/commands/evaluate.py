"""Evaluates a checkpoint on a dataset. Each row counts exactly once.

spark-dl evaluate --config train.yaml --checkpoint_path runs/1
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import spark_dl
from spark_dl import cli

OPTIONS = {
    "checkpoint_path": cli.Option(help="a checkpoint, or a run_dir, for its last checkpoint"),
    "dataset": cli.Option(default="test", help="name of a dataset of the input"),
    "run_dir": cli.Option(kind=str | None, help="folder or URL for the rows of a DataFrame; by default a private one"),
}


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("evaluate", str(__doc__), OPTIONS, given)
    cli.run(lambda: evaluate(job))


def evaluate(job: cli.Job) -> dict[str, Any]:
    """Evaluates, and returns what the command prints."""
    start = time.perf_counter()
    checkpoint_path = job.required("checkpoint_path")
    spec = job.model.spec()
    spark = job.session("spark_dl evaluate")
    data = cli.dataset(cli.read_datasets(spark, job.input), job.args["dataset"])
    metrics = spark_dl.evaluate(data, spec, checkpoint_path, job.config, run_dir=job.args["run_dir"])
    rows = metrics.pop("rows")
    return {"checkpoint": checkpoint_path, "rows": rows, "metrics": metrics, "seconds": time.perf_counter() - start}
