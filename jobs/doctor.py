"""Checks a session and its cluster before a run: settings, slots, versions, network, devices, disks, the run folder.

jobs/doctor.py --config conf/train/digits.yaml --run_dir hdfs:///runs/1
jobs/doctor.py --launch.num_ranks 4 --json
jobs/doctor.py --launch.num_ranks 4 --reap

Nothing is changed without --reap. With it, the processes that dead runs have left on the hosts are ended, and their
temporary folders are deleted. Ends with exit code 1 if a run would fail.
"""

import sys
from typing import Any

import spark_dl
from spark_dl import cli

OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "run_dir": (str, None, "folder or URL of the run, which all hosts must be able to write to"),
    "reap": (bool, False, "end and delete what dead runs have left on the hosts: processes and temporary folders"),
    "json": (bool, False, "print only JSON, without the table"),
}


def examine(job: cli.Job) -> dict[str, Any]:
    spark = job.session("spark_dl doctor")
    found = spark_dl.diagnose(job.config, run_dir=job.args["run_dir"], reap=job.args["reap"], spark=spark)
    if not job.args["json"]:
        sys.stderr.write(f"{found.text}\n")
    return found.to_dict()


if __name__ == "__main__":
    settings = cli.parse(__doc__, OPTIONS)
    cli.run(lambda: examine(settings), is_success=lambda found: bool(found["healthy"]))
