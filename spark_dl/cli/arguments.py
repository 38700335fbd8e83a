"""Shared code of the jobs: the parser, the Spark session, the datasets, the output and the exit code."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import jsonargparse

from spark_dl.config import Config
from spark_dl.config.kinds import hints_of
from spark_dl.config.load import SettingsParser, describe_settings, parse_config
from spark_dl.launch.session import build_session
from spark_dl.spec import ModelSpec, import_object
from spark_dl.storage import join as join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("spark_dl")
"""Log on standard error. Standard output is for the result."""


class UsageError(ValueError):
    """A setting of a job that cannot be used; nothing was started."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """Input rows: files or a table, read by Spark, or datasets that are read in place."""

    path: str | None = None
    """Path or URL for Spark's reader."""
    format: str = "parquet"
    """Format of the files: csv, parquet, json, orc ..."""
    options: dict[str, str | bool | int | float] = field(default_factory=dict)
    """Options of Spark's reader for this format."""
    table: str | None = None
    """A table of the catalog, instead of `path`."""
    function: str | None = None
    """Function (spark) -> DataFrame, as `package.module:name` or `folder/file.py:name`, instead of `path`."""
    sql: dict[str, str] = field(default_factory=dict)
    """Views by name, each a SELECT from `input` (the rows read) or from earlier views. The views `train`, `validation`
    and `test` are the datasets. Without views, `input` is `train`."""
    datasets: dict[str, str] = field(default_factory=dict)
    """URLs of datasets by name (`train`, `validation`, `test`), instead of the other settings: written by
    `jobs/prepare.py`, plain Parquet, or Petastorm."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The functions of the model, as `package.module:name` or `folder/file.py:name`."""

    build: str = ""
    """Function that returns the model."""
    loss: str = "CrossEntropyLoss"
    """A loss of `torch.nn` by name, or a function."""
    forward: str | None = None
    """Function (model, batch) -> output. The default calls the model with the features."""
    predict: str | None = None
    """Function (output) -> columns that `predict` adds."""
    transform: str | None = None
    """Function (batch) -> batch, called in threads of the loader."""
    augment: str | None = None
    """Function (batch, generator) -> batch, called in training only."""
    metrics: dict[str, str] = field(default_factory=dict)
    """Metrics of your own by name: functions (output, batch) -> one value per row, or classes of
    torchmetrics.Metric."""
    layers: list[str] | None = None
    """Names or patterns of the modules which, called in order, are the model: where a pipeline cuts it."""
    tensor_plan: dict[str, str] | None = None
    """How modules are cut over tensor ranks: words, such as `colwise`, by names or patterns."""
    plot: str | None = None
    """Function (rows, path) that draws a few predicted rows of the test set."""

    def spec(self) -> ModelSpec:
        """Imports the functions. Raises UsageError, with the key, for a function that cannot be imported."""
        if not self.build:
            raise UsageError("model.build: expected 'package.module:name' or 'folder/file.py:name', found nothing")
        try:
            functions = {
                name: import_object(path, f"model.{name}")
                for name in ("build", "forward", "predict", "transform", "augment")
                if (path := getattr(self, name)) is not None
            }
            loss = import_object(self.loss, "model.loss") if ":" in self.loss else self.loss
            metrics = {name: import_object(path, f"model.metrics.{name}") for name, path in self.metrics.items()}
        except ValueError as error:
            raise UsageError(str(error)) from error
        return ModelSpec(
            loss=loss, metrics=metrics, layers=self.layers, tensor_plan=self.tensor_plan, **functions
        )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """The checked settings of a job."""

    args: Mapping[str, Any]
    """The options of this job, by name."""
    config: Config
    input: Input
    model: Model

    def session(self, name: str) -> Any:
        """Starts the Spark session, with `--master` and `--spark_conf`."""
        return build_session(name, master=self.args["master"], conf=self.args["spark_conf"])


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
    """Keeps line breaks in the description and in the list of settings."""


def parse(
    description: str, options: Mapping[str, tuple[Any, Any, str]], *, exclusive: Iterable[tuple[str, str]] = ()
) -> Job:
    """Reads the command line and `--config` files. Ends the process with exit code 2 on wrong usage.

    options: options of this job, name -> (type, default, help). A bool is a flag.
    exclusive: pairs of options of which at most one may be set.
    """
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)  # for --help
    parser = SettingsParser(
        description=description,
        epilog=describe_settings() if {"-h", "--help"} & {*sys.argv[1:]} else None,  # loads packages of entry points
        formatter_class=_HelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of these settings; may be repeated")
    parser.add_argument("--master", type=str | None, help="Spark master URL, or sc://host:port for Spark Connect")
    parser.add_argument("--spark_conf", type=dict[str, str], default={}, help="Spark settings, as a YAML mapping")
    for name, (kind, default, text) in options.items():
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_class_arguments(Input, "input")
    parser.add_class_arguments(Model, "model")
    own = {name: kind for name, (kind, *_) in options.items()}
    own |= {"master": str | None, "spark_conf": dict[str, str], "config": str}
    own |= hints_of({"input": Input, "model": Model})
    try:
        config, parsed = parse_config(parser, sys.argv[1:], own)
        for one, other in exclusive:
            if parsed[one] and parsed[other]:
                raise ValueError(f"--{one} and --{other} exclude each other; pass only one of them")
        return Job(
            args={name: parsed[name] for name in (*options, "master", "spark_conf")},
            config=config,
            input=Input(**parsed["input"]),
            model=Model(**parsed["model"]),
        )
    except ValueError as error:
        _fail(str(error), 2)


def read_datasets(spark: Any, source: Input, mixed: Iterable[str] = ()) -> dict[str, DataFrame | str]:
    """Reads the datasets of a job, by name: `train`, `validation`, `test`. Called on the driver.

    Datasets of `input.datasets` are URLs, which `train` and `evaluate` open.
    mixed: names of the datasets that are mixed for training, instead of `train`.
    """
    if source.datasets:
        return dict(source.datasets)
    if source.function:
        df = import_object(source.function, "input.function")(spark)
        if not hasattr(df, "createOrReplaceTempView"):
            raise ValueError(f"input.function: expected a function that returns a DataFrame, it returned {df!r:.80}")
    elif source.table:
        df = spark.table(source.table)
    elif source.path:
        df = spark.read.format(source.format).options(**source.options).load(source.path)
    else:
        raise ValueError("input: expected a path, a table, a function or datasets, found none")
    if not source.sql:
        return {"train": df}
    df.createOrReplaceTempView("input")
    for name, query in source.sql.items():
        spark.sql(query).createOrReplaceTempView(name)
    return {name: spark.table(name) for name in (*mixed, "train", "validation", "test") if name in source.sql}


def dataset(datasets: Mapping[str, Any], name: str) -> Any:
    """Returns the dataset of this name. Raises ValueError with the known names."""
    if name not in datasets:
        raise ValueError(f"no dataset {name!r} among {sorted(datasets)}; add it to input.sql or input.datasets")
    return datasets[name]


def run(
    work: Callable[[], Mapping[str, Any]], *, is_success: Callable[[Mapping[str, Any]], bool] = lambda result: True
) -> NoReturn:
    """Runs a job, prints its result as one JSON object in the last line of standard output, and exits.

    is_success: whether a result is one of success; otherwise the exit code is 1.
    Exit codes: 0 success; 1 failure, with the error on standard error; 2 for a UsageError, as `parse` has it; 130 after
    SIGINT, 143 after SIGTERM.
    """
    received: list[int] = []

    def terminate(number: int, frame: Any) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    log.setLevel(logging.INFO)
    try:
        result = work()
    except KeyboardInterrupt:
        _fail("interrupted", 128 + (received or [signal.SIGINT])[0])
    except UsageError as error:
        _fail(str(error), 2)
    except Exception as error:
        _fail(f"{error}" if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}", 1)
    print(json.dumps(result), flush=True)
    sys.exit(0 if is_success(result) else 1)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
