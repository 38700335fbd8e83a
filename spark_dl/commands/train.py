"""Trains a model. If there is a dataset `test`, evaluates on it and writes its predictions as Parquet.

spark-dl train --config train.yaml --run_dir runs/1
spark-dl train --config train.yaml --run_dir runs/1 --resume
spark-submit --properties-file conf/spark/standalone.conf jobs/train.py --config train.yaml --run_dir /shared/runs/1
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import spark_dl
from spark_dl import cli
from spark_dl.track import plots, tested

OPTIONS = {
    "run_dir": cli.Option(
        kind=str | None, help="folder for checkpoints, settings and metrics; all executors must have access"
    ),
    "resume": cli.Option(kind=bool, default=False, help="continue from the last checkpoint of run_dir"),
    "resume_from": cli.Option(kind=str | None, help="continue from this checkpoint of run_dir"),
    "overwrite": cli.Option(kind=bool, default=False, help="delete the run in run_dir first"),
    "export": cli.Option(
        kind=str | None, help="file or folder to write the trained weights to; nothing is overwritten"
    ),
    "export_format": cli.Option(
        kind=str, default="safetensors", help="format of export: safetensors, hf, dcp, export or onnx"
    ),
    "no_progress": cli.Option(kind=bool, default=False, help="do not show a progress bar"),
}
FAILED = "predictions_failed"
EXCLUSIVE = (("resume", "overwrite"), ("resume_from", "overwrite"), ("resume_from", "resume"))


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("train", str(__doc__), OPTIONS, given, exclusive=EXCLUSIVE)
    cli.run(lambda: train(job), is_success=lambda result: FAILED not in result)


def train(job: cli.Job) -> dict[str, Any]:
    """Trains, and returns what the command prints."""
    start = time.perf_counter()
    spec = job.model.spec()
    if job.args["export"]:
        cli.check_export(job.args["export"], job.args["export_format"], spec)  # before hours of training
    spark = job.session("spark_dl train")
    mixed = job.config.loader.proportions
    datasets = cli.read_datasets(spark, job.input, mixed)
    result = spark_dl.train(
        {name: cli.dataset(datasets, name) for name in mixed} if mixed else cli.dataset(datasets, "train"),
        spec,
        job.config,
        validation=datasets.get("validation"),
        run_dir=job.args["run_dir"],
        resume=job.args["resume_from"] or job.args["resume"],
        overwrite=job.args["overwrite"],
        progress=not job.args["no_progress"],
    )
    if job.args["export"]:
        kind = job.args["export_format"]
        written = spark_dl.export(result.checkpoint, job.args["export"], format=kind, spec=spec)
        cli.log.info(f"{kind}: {written}")
    metrics, of_test = result.metrics, dict[str, Any]()
    if "test" in datasets:
        metrics, of_test = test(job, spec, datasets["test"], result)
    if picture := plots.plot_loss(result.run_dir):
        cli.log.info(f"loss: {picture}")
    names = ("run_dir", "checkpoint", "epochs", "steps", "rows", "train_loss")
    rate = {"rows_per_s": result.rows_per_s, "seconds": time.perf_counter() - start}
    return {**{name: getattr(result, name) for name in names}, "metrics": metrics, **rate, **of_test}


def test(
    job: cli.Job, spec: spark_dl.ModelSpec, data: Any, result: spark_dl.TrainResult
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metrics of the test rows, and where their predictions are, or why there are none."""
    metrics = spark_dl.evaluate(data, spec, result.checkpoint, job.config, run_dir=result.run_dir)
    rows = metrics.pop("rows")
    cli.log.info(f"test: {metrics}")
    tested.record(result, job.config, metrics, rows)
    if isinstance(data, str) or job.config.sequences:  # predictions need a DataFrame
        return metrics, {}
    try:
        path = write_predictions(job, spec, data, result)
    except Exception as error:  # keeps the trained model and its metrics
        cli.log.error(f"predictions failed: {error}; run spark-dl predict with another --output")
        return metrics, {"predictions": None, FAILED: f"{type(error).__name__}: {error}"}
    try:
        draw_predictions(job, data, path, result)
    except Exception as error:
        cli.log.warning(f"the predictions are written, but the picture of model.plot failed: {error}")
    return metrics, {"predictions": path}


def write_predictions(job: cli.Job, spec: spark_dl.ModelSpec, data: Any, result: spark_dl.TrainResult) -> str:
    """Writes the predictions of the test rows to the run folder. Returns their URL."""
    run_dir = job.args["run_dir"] or ""
    path = cli.join(run_dir if "://" in run_dir else result.run_dir, "predictions")  # as Spark knows it: s3a, hdfs ...
    predictions = spark_dl.predict(data, spec, result.checkpoint, job.config)
    predictions.write.mode("overwrite").parquet(path)
    cli.log.info(f"predictions: {path}")
    return path


def draw_predictions(job: cli.Job, data: Any, path: str, result: spark_dl.TrainResult) -> None:
    """Draws some of the predictions with `model.plot`, if it is set."""
    if job.model.plot:
        picture = cli.join(result.run_dir, "predictions.png")
        rows = data.sparkSession.read.parquet(path).limit(1000).collect()
        spark_dl.import_object(job.model.plot, "model.plot")(rows, picture)
        cli.log.info(f"a few of them: {picture}")
