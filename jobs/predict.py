"""Adds a model's predictions to a dataset and writes it as Parquet.

jobs/predict.py --config conf/train/digits.yaml --checkpoint_path runs/digits --output /data/predictions
"""

import re
import time
from typing import Any

import spark_dl
from spark_dl import cli

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "checkpoint_path": (str, None, "a checkpoint, or a run_dir, for its last checkpoint"),
    "dataset": (str, "test", "name of a dataset of the input"),
    "output": (str, None, "folder for the Parquet files"),
    "mode": (str, "errorifexists", "Spark's save mode: errorifexists, overwrite, append, ignore"),
}


def predict(job: cli.Job) -> dict[str, Any]:
    start = time.perf_counter()
    for name in ("checkpoint_path", "output"):
        if not job.args[name]:
            raise ValueError(f"{name}: expected a path, found nothing; pass --{name}")
    spec = job.model.spec()
    spark = job.session("spark_dl predict")
    data = cli.dataset(cli.read_datasets(spark, job.input), job.args["dataset"])
    if isinstance(data, str):
        raise ValueError("input.datasets: predictions need a DataFrame; use input.path or input.table instead")
    predictions = spark_dl.predict(data, spec, job.args["checkpoint_path"], job.config)
    keeps = job.args["mode"].lower() in ("append", "ignore")
    before = _count_rows(spark, job.args["output"]) if keeps else 0
    predictions.write.mode(job.args["mode"]).parquet(job.args["output"])
    rows = _count_rows(spark, job.args["output"]) - before
    return {"output": job.args["output"], "rows": rows, "seconds": time.perf_counter() - start}


def _count_rows(spark: Any, path: str) -> int:
    """Returns the rows of Parquet files; 0 if there are none."""
    from pyspark.errors import AnalysisException

    try:
        return int(spark.read.parquet(path).count())
    except AnalysisException as error:
        if not re.search("PATH_NOT_FOUND|UNABLE_TO_INFER_SCHEMA", str(error)):
            raise
        return 0


if __name__ == "__main__":
    settings = cli.parse(__doc__, OPTIONS)
    cli.run(lambda: predict(settings))
