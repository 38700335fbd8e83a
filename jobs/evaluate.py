"""Evaluates a checkpoint on a dataset. Each row counts exactly once.

jobs/evaluate.py --config conf/train/digits.yaml --checkpoint_path runs/digits
"""

import time
from typing import Any

import spark_dl
from spark_dl import cli

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "checkpoint_path": (str, None, "a checkpoint, or a run_dir, for its last checkpoint"),
    "dataset": (str, "test", "name of a dataset of the input"),
    "run_dir": (str | None, None, "folder or URL for the rows of a DataFrame; by default a private one"),
}


def evaluate(job: cli.Job) -> dict[str, Any]:
    start = time.perf_counter()
    if not job.args["checkpoint_path"]:
        raise ValueError("checkpoint_path: expected a checkpoint or a run_dir, found nothing")
    spec = job.model.spec()
    spark = job.session("spark_dl evaluate")
    data = cli.dataset(cli.read_datasets(spark, job.input), job.args["dataset"])
    metrics = spark_dl.evaluate(data, spec, job.args["checkpoint_path"], job.config, run_dir=job.args["run_dir"])
    rows = metrics.pop("rows")
    return {
        "checkpoint": job.args["checkpoint_path"],
        "rows": rows,
        "metrics": metrics,
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    settings = cli.parse(__doc__, OPTIONS)
    cli.run(lambda: evaluate(settings))
