"""What the jobs share: arguments, the Spark session, datasets, progress, plots, the last line and the exit code."""

from spark_dl.cli.arguments import Input, Job, Model, dataset, join, log, parse, read_datasets, run

__all__ = ["Input", "Job", "Model", "dataset", "join", "log", "parse", "read_datasets", "run"]
