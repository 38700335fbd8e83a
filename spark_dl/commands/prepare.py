"""Writes the datasets of the input as shards, so that later runs do not read and clean them again.

spark-dl prepare --config train.yaml --output /data/digits
spark-dl train --config train.yaml --input.datasets '{train: /data/digits/train}'

With `--shards.store` and without `--output`, it writes to the store, where runs with the same data and settings find
the shards. `--key` names the rows in the store. Spark Connect needs it. Change it whenever the rows change.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import spark_dl
from spark_dl import cli

OPTIONS = {
    "output": cli.Option(help="folder for one dataset per name: train, validation, test"),
    "key": cli.Option(
        help="name of the rows in shards.store, instead of a key from their query plan; for Spark Connect"
    ),
    "overwrite": cli.Option(kind=bool, default=False, help="replace existing datasets"),
}


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("prepare", str(__doc__), OPTIONS, given)
    cli.run(lambda: prepare(job))


def prepare(job: cli.Job) -> dict[str, Any]:
    """Writes the datasets, and returns what the command prints."""
    start = time.perf_counter()
    config = job.config
    if not job.args["output"] and not config.shards.store:
        raise cli.UsageError("output: expected a folder, found nothing; pass --output or --shards.store")
    if job.input.datasets:
        raise cli.UsageError(
            f"input.datasets: found {sorted(job.input.datasets)}, which are already written; "
            "use input.path or input.table to write other datasets, or pass input.datasets to spark-dl train"
        )
    spark = job.session("spark_dl prepare")
    written: dict[str, Any] = {}
    layout: dict[str, Any] = {"shards": config.shards, "columns": config.stored_columns}
    train: tuple[Any, ...] = ()  # other datasets get its vocabularies and shapes
    datasets = cli.read_datasets(spark, job.input, config.loader.proportions)
    if not datasets:
        raise ValueError(
            f"input.sql: expected train, validation, test or a name in loader.proportions, found {[*job.input.sql]}"
        )
    for name, df in datasets.items():
        if job.args["output"]:
            url = cli.join(job.args["output"], name)
            shards = spark_dl.write_shards(
                df, url, config.data, overwrite=job.args["overwrite"], reference_columns=train, **layout
            )
        else:
            key = job.args["key"] and f"{job.args['key']}/{name}"
            shards, lease = spark_dl.store_shards(
                df, config.data, key=key, run="spark-dl prepare", reference_columns=train, **layout
            )
            if lease is not None:
                lease.release()
        train = train or shards.columns
        cli.log.info(f"{name}: {shards.rows} rows in {len(shards.shards)} shards at {shards.url}")
        written[name] = {"url": shards.url, "rows": shards.rows, "shards": len(shards.shards)}
    return {"datasets": written, "seconds": time.perf_counter() - start}
