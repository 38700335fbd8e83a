"""Writes a report of a run: one HTML page with outcome, curves, time of each rank, stragglers and environment.

spark-dl report runs/1
spark-dl report s3://bucket/runs/1 --path run-1.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import spark_dl
from spark_dl import cli

OPTIONS = {
    "run_dir": cli.Option(is_positional=True, help="folder or URL of a run of spark-dl train"),
    "path": cli.Option(kind=str | None, help="file or URL of the page; by default report.html in run_dir"),
}


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    args = cli.parse("report", str(__doc__), OPTIONS, given, has_settings=False).args
    cli.run(lambda: {"report": spark_dl.report(args["run_dir"], args["path"])})
