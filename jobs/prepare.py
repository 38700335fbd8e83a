"""Writes the datasets of a job as shards, so that later jobs do not read and clean them again.

jobs/prepare.py --config conf/train/digits.yaml --output /data/digits
jobs/train.py --config conf/train/digits.yaml --input.datasets '{train: /data/digits/train}'

With `--shards.store` and without `--output`, it writes to the store, where runs with the same data and settings find
the shards. `--key` names the rows in the store. Spark Connect needs it. Change it whenever the rows change. `--clean`
deletes datasets from the store that were not used for `--unused-days`.
"""

import time
from typing import Any

import spark_dl
from spark_dl import cli

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "output": (str, None, "folder for one dataset per name: train, validation, test"),
    "key": (str, None, "name of the rows in shards.store, instead of a key from their query plan; for Spark Connect"),
    "clean": (bool, False, "write nothing; delete expired and unused datasets from shards.store"),
    "unused_days": (float, 30.0, "days without use after which --clean deletes a dataset"),
    "overwrite": (bool, False, "replace existing datasets"),
}


def prepare(job: cli.Job) -> dict[str, Any]:
    start = time.perf_counter()
    config = job.config
    store = config.shards.store
    if job.args["clean"]:
        if not store:
            raise ValueError("shards.store: expected the store to clean, found nothing; pass --shards.store")
        return dict(spark_dl.clean_store(store, ttl_days=job.args["unused_days"]))
    if not job.args["output"] and not store:
        raise ValueError("output: expected a folder, found nothing; pass --output or --shards.store")
    if job.input.datasets:
        raise ValueError(
            f"input.datasets: found {sorted(job.input.datasets)}, which are already written; "
            "use input.path or input.table to write other datasets, or pass input.datasets to jobs/train.py"
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
                df, config.data, key=key, run="jobs/prepare.py", reference_columns=train, **layout
            )
            if lease is not None:
                lease.release()
        train = train or shards.columns
        cli.log.info(f"{name}: {shards.rows} rows in {len(shards.shards)} shards at {shards.url}")
        written[name] = {"url": shards.url, "rows": shards.rows, "shards": len(shards.shards)}
    return {"datasets": written, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    settings = cli.parse(__doc__, OPTIONS)
    cli.run(lambda: prepare(settings))
