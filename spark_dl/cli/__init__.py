"""Shared code of the commands: arguments, Spark session, datasets, progress, plots, output and exit codes."""

from spark_dl.cli.arguments import (
    Input,
    Job,
    Model,
    Option,
    UsageError,
    dataset,
    join,
    log,
    parse,
    read_datasets,
    run,
    write_text,
)
from spark_dl.scoring.export import check_export

__all__ = [
    "Input",
    "Job",
    "Model",
    "Option",
    "UsageError",
    "check_export",
    "dataset",
    "join",
    "log",
    "parse",
    "read_datasets",
    "run",
    "write_text",
]
