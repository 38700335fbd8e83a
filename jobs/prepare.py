"""Writes the datasets of a job as shards, so that later jobs need not read and clean them again.

jobs/prepare.py --config conf/train/digits.yaml --output /data/digits
jobs/train.py --config conf/train/digits.yaml --input.datasets '{train: /data/digits/train}'
"""

import time
from typing import Any

import spark_dl
from spark_dl import cli

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "output": (str, None, "folder that gets one dataset per name: train, validation, test"),
    "overwrite": (bool, False, "replace datasets that are there"),
}


def prepare(job: cli.Job) -> dict[str, Any]:
    start = time.perf_counter()
    if not job.args["output"]:
        raise ValueError("output: expected a folder, found nothing; pass --output")
    spark = job.session("spark_dl prepare")
    written: dict[str, Any] = {}
    train: tuple[Any, ...] = ()  # the others are written like it: with its vocabularies and shapes
    for name, data in cli.read_datasets(spark, job.input).items():
        url = f"{job.args['output']}/{name}"
        shards = spark_dl.write_shards(data, url, job.config.data, overwrite=job.args["overwrite"], like=train)
        train = train or shards.columns
        cli.log.info(f"{name}: {shards.rows} rows in {len(shards.shards)} shards at {shards.url}")
        written[name] = {"url": shards.url, "rows": shards.rows, "shards": len(shards.shards)}
    return {"datasets": written, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    settings = cli.parse(__doc__, OPTIONS)
    cli.run(lambda: prepare(settings))
