"""Checks that a training does not depend on ranks, micro-batches, padding and restarts, and says what does.

spark-dl certify --config train.yaml --page certificate.html
spark-dl certify --config train.yaml --accept random --only "2 ranks" --only "cut and resumed"

A few hundred rows are trained on in several ways, whose weights must be the same. Ends with exit code 1 if something
differs that was not accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import spark_dl
from spark_dl import cli

OPTIONS = {
    "page": cli.Option(kind=str | None, help="HTML page to write; the data are written beside it, as .json"),
    "accept": cli.Option(kind=tuple[str, ...], default=(), help="causes and checks that are no reason to refuse"),
    "only": cli.Option(kind=tuple[str, ...], default=(), help="names of checks, if not all of them are run"),
    "rows": cli.Option(kind=int, default=245, help="rows of a table that are used"),
    "compiled": cli.Option(kind=bool, default=False, help="check train.compile, too, which takes a minute or more"),
    "work_dir": cli.Option(kind=str | None, help="folder that all executors have access to, for the runs"),
    "dataset": cli.Option(default="train", help="name of a dataset of the input"),
    "json": cli.Option(kind=bool, default=False, help="print only JSON, without the table"),
}


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("certify", str(__doc__), OPTIONS, given)
    cli.run(lambda: certify(job), is_success=lambda found: bool(found["passed"]))


def certify(job: cli.Job) -> dict[str, Any]:
    """Trains in several ways, shows a table, and returns what the command prints."""
    options = {name: job.args[name] for name in ("page", "accept", "only", "rows", "compiled", "work_dir")}
    spec, spark = job.model.spec(), job.session("spark_dl certify")
    data = cli.dataset(cli.read_datasets(spark, job.input), job.args["dataset"])
    found = spark_dl.certify(data, spec, job.config, spark=spark, **options)
    if not job.args["json"]:
        sys.stderr.write(f"{found.text}\n")
    return found.to_dict()
