"""Shared code of the jobs: arguments, Spark session, datasets, progress, plots, output and exit codes."""

from spark_dl.cli.arguments import Input, Job, Model, dataset, join, log, parse, read_datasets, run
from spark_dl.scoring.export import check_export

__all__ = ["Input", "Job", "Model", "check_export", "dataset", "join", "log", "parse", "read_datasets", "run"]
