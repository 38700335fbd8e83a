"""Shared code of the jobs: arguments, Spark session, datasets, progress, plots, output and exit codes."""

from spark_dl.cli.arguments import Input, Job, Model, dataset, join, log, parse, read_datasets, run

__all__ = ["Input", "Job", "Model", "dataset", "join", "log", "parse", "read_datasets", "run"]
