"""Writes a report of a run: one HTML page with outcome, curves, time of each rank, stragglers and environment.

jobs/report.py runs/digits
jobs/report.py s3://bucket/runs/digits --path digits.html
"""

import argparse
from typing import Any

import spark_dl
from spark_dl import cli


def report(args: argparse.Namespace) -> dict[str, Any]:
    return {"report": spark_dl.report(args.run_dir, args.path)}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", help="folder or URL of a run of jobs/train.py")
    parser.add_argument("--path", help="file or URL of the page; by default report.html in run_dir")
    return parser


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    cli.run(lambda: report(arguments))
