"""Shared code of the jobs: the parser, the Spark session, the datasets, the output and the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from spark_dl.config import Config, strategies
from spark_dl.config.kinds import describe, hints_of
from spark_dl.config.load import Layer, Text, build_layers, describe_settings, described, read_file, sections
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


def parse(
    description: str, options: Mapping[str, tuple[Any, Any, str]], *, exclusive: Iterable[tuple[str, str]] = ()
) -> Job:
    """Reads the command line and `--config` files. Ends the process with exit code 2 on wrong usage.

    Args:
        options: options of this job, name -> (type, default, help). A bool is a flag.
        exclusive: pairs of options of which at most one may be set.
    """
    job_options = {
        **options,
        "master": (str | None, None, "Spark master URL, or sc://host:port for Spark Connect"),
        "spark_conf": (dict[str, str], {}, "Spark settings, as a YAML mapping"),
    }
    if {"-h", "--help"} & {*sys.argv[1:]}:
        _print_help(description, job_options)
        sys.exit(0)
    more: dict[str, Any] = {**{name: kind for name, (kind, *_) in job_options.items()}, "input": Input, "model": Model}
    try:
        flags = {name for name, kind in more.items() if kind is bool} | {"print_config"}
        config, parsed = build_layers(_layers_of(sys.argv[1:], flags), {**more, "print_config": bool})
        job = Job(
            args={name: parsed.get(name, default) for name, (_, default, _) in job_options.items()},
            config=config,
            input=Input(**parsed.get("input", {})),
            model=Model(**parsed.get("model", {})),
        )
        for one, other in exclusive:
            if job.args[one] and job.args[other]:
                raise ValueError(f"--{one} and --{other} exclude each other; pass only one of them")
    except ValueError as error:
        _fail(str(error), 2)
    if parsed.get("print_config"):
        about = {"input": dataclasses.asdict(job.input), "model": dataclasses.asdict(job.model)}
        print(yaml.safe_dump({**job.args, **config.to_dict(), **about}, sort_keys=False), end="")
        sys.exit(0)
    return job


def _layers_of(given: Sequence[str], flags: Collection[str]) -> list[Layer]:
    """Returns the options of a command line as layers, in their order; of `--config` those of its file.

    Raises ValueError for an option without a value, and for what is no option.
    """
    layers: list[Layer] = []
    left = list(given)
    while left:
        option = left.pop(0)
        key, equals, value = option[2:].partition("=")
        if not option.startswith("--") or not key:
            raise ValueError(f"expected an option such as --train.lr, found {option!r}")
        if key in flags and not equals:
            layers.append({key: True})
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise ValueError(f"{key}: expected a value, as in --{key}=..., found nothing")
            value = left.pop(0)
        layers.append(read_file(value) if key == "config" else {key: Text(value)})
    return layers


def _print_help(description: str, own: Mapping[str, tuple[Any, Any, str]]) -> None:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=describe_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings; may be repeated")
    parser.add_argument("--print_config", action="store_true", help="print all settings as YAML, and exit")
    for name, (kind, default, text) in own.items():
        said = text if default in (None, False, {}) else f"{text} (default: {default})"
        about: dict[str, Any] = {"action": "store_true"} if kind is bool else {"metavar": name.upper()}
        parser.add_argument(f"--{name}", help=said.replace("%", "%%"), **about)
    known = {**sections(), "input": Input, "model": Model}
    hints = hints_of(known)
    for name, section in known.items():
        group = parser.add_argument_group(name, (section.__doc__ or "").split("\n\n")[0])
        if name == "parallel":
            group.add_argument(
                "--parallel.strategy", metavar="STRATEGY", help=f"one of {', '.join(strategies.names())}"
            )
        for setting, default, meaning in described(section):
            said = f"{meaning} ({describe(hints[f'{name}.{setting}'])}; {default})".replace("%", "%%")
            group.add_argument(f"--{name}.{setting}", metavar=setting.upper(), help=said)
    parser.print_help()


def read_datasets(spark: Any, source: Input, mixed: Iterable[str] = ()) -> dict[str, DataFrame | str]:
    """Reads the datasets of a job, by name: `train`, `validation`, `test`. Called on the driver.

    Datasets of `input.datasets` are URLs, which `train` and `evaluate` open.

    Args:
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

    Exit codes: 0 success; 1 failure, with the error on standard error; 2 for a UsageError, as `parse` has it; 130 after
    SIGINT, 143 after SIGTERM.

    Args:
        is_success: whether a result is one of success; otherwise the exit code is 1.
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
