"""Adds a model's predictions to a dataset, and writes it as files or as a table.

spark-dl predict --config train.yaml --checkpoint_path runs/1 --output /data/predictions
spark-dl predict --config train.yaml --checkpoint_path runs/1 --table scores --partition_by day --mode overwrite
spark-dl predict --config train.yaml --checkpoint_path runs/1 --dataset /data/test --keys id --output /data/scores

`--dataset` is a view of `input.sql`; or `input`, the rows before the views, such as new rows (`--input.path new.csv`);
or the path or URL of a dataset, which is read in place: the result then has the columns `--keys` and the predictions.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import spark_dl
from spark_dl import cli
from spark_dl.spark_job import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OPTIONS = {
    "checkpoint_path": cli.Option(help="a checkpoint, or a run_dir, for its last checkpoint"),
    "dataset": cli.Option(default="test", help="a view, input, or the path or URL of a dataset"),
    "output": cli.Option(kind=str | None, help="folder or URL for the files"),
    "table": cli.Option(kind=str | None, help="table of the catalog, instead of --output"),
    "format": cli.Option(
        kind=str | None, help="format of the files or of a new table: parquet, orc, delta ...; default: parquet"
    ),
    "mode": cli.Option(default="errorifexists", help="Spark's save mode: errorifexists, overwrite, append, ignore"),
    "columns": cli.Option(
        kind=tuple[str, ...], default=(), help="columns to write, separated by commas; by default all"
    ),
    "partition_by": cli.Option(
        kind=tuple[str, ...], default=(),
        help="columns of the partitions; with --mode overwrite only the partitions that have new rows are replaced",
    ),
    "keys": cli.Option(kind=tuple[str, ...], default=(), help="columns to keep of a dataset that is read by its URL"),
    "on_bad_rows": cli.Option(
        default="raise", help="raise, or null: a row that the model cannot take gets null predictions"
    ),
    "gpus": cli.Option(
        kind=float | None, help="GPUs of each task; by default the resources of all tasks of the session"
    ),
}  # fmt: skip


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("predict", str(__doc__), OPTIONS, given, exclusive=(("output", "table"),))
    cli.run(lambda: predict(job))


def predict(job: cli.Job) -> dict[str, Any]:
    """Writes the predictions, and returns what the command prints."""
    start = time.perf_counter()
    checkpoint_path, args = job.required("checkpoint_path"), job.args
    if not args["output"] and not args["table"]:
        raise cli.UsageError("output: expected a path, found nothing; pass --output or --table")
    spec = job.model.spec()
    spark = job.session("spark_dl predict")
    data = _dataset(spark, job)
    keys = {"keys": args["keys"]} if args["keys"] else {}
    predictions = spark_dl.predict(
        data, spec, checkpoint_path, job.config, on_bad_rows=args["on_bad_rows"], gpus=args["gpus"], spark=spark, **keys
    )
    before = () if isinstance(data, str) else data.columns
    added = [name for name in predictions.columns if name not in {*before, *args["keys"]}]
    counts = _write(predictions, added, args)
    if counts["bad_rows"]:
        cli.log.warning(f"{counts['bad_rows']} rows have null predictions, as the model cannot take them")
    place = args["table"] or args["output"]
    return {"output": place, **counts, "seconds": time.perf_counter() - start}


def _dataset(spark: Any, job: cli.Job) -> Any:
    """Returns the DataFrame, or the URL, of `--dataset`."""
    name = job.args["dataset"]
    if "/" in name:  # no view has such a name
        return name
    if name == "input":  # the rows as they are read, before the views of input.sql
        return cli.dataset(cli.read_datasets(spark, dataclasses.replace(job.input, sql={})), "train")
    return cli.dataset(cli.read_datasets(spark, job.input, (name,)), name)


def _exists(spark: Any, args: Any) -> bool:
    """Whether there is a table, or files, where the predictions go."""
    from pyspark.errors import AnalysisException

    if args["table"]:
        return bool(spark.catalog.tableExists(args["table"]))
    try:
        spark.read.format(args["format"] or "parquet").load(args["output"])
    except AnalysisException as error:
        if not re.search("PATH_NOT_FOUND|UNABLE_TO_INFER_SCHEMA", str(error)):
            raise
        return False
    return True


def _write(predictions: DataFrame, added: Sequence[str], args: Any) -> dict[str, int]:
    """Writes the rows, and returns how many there are, and how many have no predictions."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    for name in (*args["columns"], *args["partition_by"]):
        if name not in predictions.columns:
            raise ValueError(f"no column {name!r} in the predictions; their columns are {predictions.columns}")
    spark, first = predictions.sparkSession, F.col(quoted(added[0]))
    if args["mode"] == "ignore" and _exists(spark, args):  # Spark would compute and count nothing
        return {"rows": 0, "bad_rows": 0}
    counted = Observation("spark_dl predict")
    rows = predictions.observe(
        counted, F.count(F.lit(1)).alias("rows"), F.count(F.when(first.isNull(), 1)).alias("bad_rows")
    )
    if args["columns"]:
        rows = rows.select(*map(quoted, dict.fromkeys((*args["columns"], *args["partition_by"]))))
    writer = rows.write.mode(args["mode"])
    if args["format"] or not args["table"]:
        writer = writer.format(args["format"] or "parquet")
    if args["partition_by"]:
        writer = writer.partitionBy(*args["partition_by"]).option("partitionOverwriteMode", "dynamic")
    if not args["table"]:
        writer.save(args["output"])
    elif args["partition_by"] and args["mode"] == "overwrite" and spark.catalog.tableExists(args["table"]):
        # saveAsTable would replace the table, with all its partitions. insertInto goes by the place of a column.
        placed = rows.select(*map(quoted, spark.table(args["table"]).columns))
        spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
        placed.write.insertInto(args["table"], overwrite=True)
    else:
        writer.saveAsTable(args["table"])
    return {name: int(counted.get[name]) for name in ("rows", "bad_rows")}
