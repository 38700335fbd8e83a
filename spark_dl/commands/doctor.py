"""Checks a session and its cluster before a run: settings, slots, versions, network, devices, disks, the run folder.

spark-dl doctor --master spark://host:7077 --run_dir hdfs:///runs/1
spark-dl doctor --launch.num_ranks 4 --json
spark-dl doctor --launch.num_ranks 4 --reap

Nothing is changed without --reap. With it, the processes that dead runs have left on the hosts are ended, and their
temporary folders are deleted. Ends with exit code 1 if a run would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import spark_dl
from spark_dl import cli

OPTIONS = {
    "run_dir": cli.Option(help="folder or URL of the run, which all hosts must be able to write to"),
    "reap": cli.Option(
        kind=bool, default=False,
        help="end and delete what dead runs have left on the hosts: processes and temporary folders",
    ),
    "json": cli.Option(kind=bool, default=False, help="print only JSON, without the table"),
}  # fmt: skip


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("doctor", str(__doc__), OPTIONS, given)
    cli.run(lambda: examine(job), is_success=lambda found: bool(found["healthy"]))


def examine(job: cli.Job) -> dict[str, Any]:
    """Checks the cluster, shows a table, and returns what the command prints."""
    spark = job.session("spark_dl doctor")
    found = spark_dl.diagnose(job.config, run_dir=job.args["run_dir"], reap=job.args["reap"], spark=spark)
    if not job.args["json"]:
        sys.stderr.write(f"{found.text}\n")
    return found.to_dict()
