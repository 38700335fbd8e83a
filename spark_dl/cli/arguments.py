"""Shared code of the commands: the parser, the Spark session, the datasets, the output and the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import signal
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin

import yaml

from spark_dl import storage
from spark_dl.cli import exit_codes
from spark_dl.config import Config, strategies
from spark_dl.config.checks import suggestion
from spark_dl.config.kinds import describe, hints_of, options_of
from spark_dl.config.load import (
    Layer,
    Text,
    build_layers,
    describe_settings,
    described,
    read_file,
    read_text,
    sections,
)
from spark_dl.launch.session import build_session
from spark_dl.spec import ModelSpec, import_object
from spark_dl.storage import join as join

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("spark_dl")
"""Log on standard error. Standard output is for the result."""


PROGRAM = "spark-dl"


class UsageError(ValueError):
    """An option of a command that cannot be used; nothing was started."""


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
    `spark-dl prepare`, plain Parquet, or Petastorm."""


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


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command."""

    kind: Any = str
    """The type of its value. A bool is a flag."""
    default: Any = None
    help: str
    is_positional: bool = False
    """Whether it is given by its place, without `--`."""


@dataclass(frozen=True)
class Job:
    """The checked settings of a command."""

    args: Mapping[str, Any]
    """The options of this command, by name."""
    config: Config
    input: Input
    model: Model

    def session(self, name: str) -> Any:
        """Starts the Spark session, with `--master` and `--spark_conf`."""
        return build_session(name, master=self.args["master"], conf=self.args["spark_conf"])

    def required(self, name: str) -> Any:
        """Returns an option. Raises UsageError if it was not given."""
        value = self.args[name]
        if value in (None, "", (), []):
            raise UsageError(f"{name}: expected a value, found nothing; pass --{name}")
        return value


_OF_SPARK = {
    "master": Option(kind=str | None, help="Spark master URL, or sc://host:port for Spark Connect"),
    "spark_conf": Option(kind=dict[str, str], default={}, help="Spark settings, as a YAML mapping"),
}


def parse(
    command: str,
    description: str,
    options: Mapping[str, Option],
    given: Sequence[str],
    *,
    exclusive: Iterable[tuple[str, str]] = (),
    has_settings: bool = True,
) -> Job:
    """Reads the command line and `--config` files. Ends the process with exit code 2 on wrong usage.

    Args:
        command: name of the command, for `--help`.
        description: what it does, in the first paragraph, and examples.
        options: options of this command by name. `--run_dir` can be written `--run-dir`, too.
        given: the arguments after the command.
        exclusive: pairs of options of which at most one may be set.
        has_settings: whether the command takes the settings of runs, `--config`, and a Spark session.
    """
    options = {**options, **(_OF_SPARK if has_settings else {})}
    if {"-h", "--help", "--help-all"} & {*given}:
        print(_help(command, description, options, has_settings=has_settings, is_whole="--help-all" in given))
        sys.exit(0)
    more: dict[str, Any] = {name: option.kind for name, option in options.items()}
    if has_settings:
        more |= {"input": Input, "model": Model, "print_config": bool}
    try:
        config, parsed = build_layers(_layers_of(given, more, options, has_settings=has_settings), more)
        job = Job(
            args={name: parsed.get(name, option.default) for name, option in options.items()},
            config=config,
            input=Input(**parsed.get("input", {})),
            model=Model(**parsed.get("model", {})),
        )
        for one, other in exclusive:
            if job.args[one] and job.args[other]:
                raise ValueError(f"--{one} and --{other} exclude each other; pass only one of them")
        for name, option in options.items():
            if option.is_positional and job.args[name] is None:
                raise ValueError(f"expected {name.upper()}, found nothing; see {PROGRAM} {command} --help")
    except ValueError as error:
        _fail(str(error), exit_codes.USAGE)
    if parsed.get("print_config"):
        about = {"input": dataclasses.asdict(job.input), "model": dataclasses.asdict(job.model)}
        print(yaml.safe_dump({**job.args, **config.to_dict(), **about}, sort_keys=False), end="")
        sys.exit(0)
    return job


def _layers_of(
    given: Sequence[str], kinds: Mapping[str, Any], options: Mapping[str, Option], *, has_settings: bool
) -> list[Layer]:
    """Returns the options of a command line as layers, in their order; of `--config` those of its file.

    Raises ValueError for an option without a value, and for what is no option.
    """
    layers: list[Layer] = []
    left, places = list(given), [name for name, option in options.items() if option.is_positional]
    while left:
        option = left.pop(0)
        key, equals, value = option[2:].partition("=")
        if places and not option.startswith("-"):
            layers.append({places.pop(0): Text(option)})
            continue
        if not option.startswith("--") or not key:
            raise ValueError(f"expected an option such as --{next(iter(options))}, found {option!r}")
        if "." not in key:
            key = key.replace("-", "_")
        if kinds.get(key) is bool and not equals:
            layers.append({key: True})
            continue
        if not has_settings and key not in options:
            raise ValueError(f"unknown option --{key}{suggestion(key, [*options])}")
        if not equals:
            if not left or left[0].startswith("--"):
                raise ValueError(f"{key}: expected a value, as in --{key}=..., found nothing")
            value = left.pop(0)
        if key in options and get_origin(options[key].kind) is tuple:
            layers.append({key: _listed(value, options[key].kind)})
        else:
            layers.append(read_file(value) if key == "config" and has_settings else {key: Text(value)})
    return layers


def _listed(value: str, kind: Any) -> list[Any]:
    """Returns the values of a text such as `a,b`."""
    parts = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
    return parts if get_args(kind)[0] is str else [read_text(part) for part in parts]


def _help(
    command: str, description: str, options: Mapping[str, Option], *, has_settings: bool, is_whole: bool
) -> str:  # fmt: skip
    """Returns the text of `--help`: a screen; with `is_whole` all settings."""
    places = [name.upper() for name, option in options.items() if option.is_positional]
    usage = " ".join([PROGRAM, command, *places, *["[--config FILE]"] * has_settings, "[--OPTION VALUE ...]"])
    more = (
        f"Each setting of a run is an option, too, such as --train.lr 0.1: {PROGRAM} {command} --help-all lists them."
    )
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {command}",
        description=description,
        epilog=describe_settings() if is_whole else more if has_settings else None,
        formatter_class=_Formatter,
        usage=usage,
        add_help=False,
    )
    for name, option in options.items():
        default = ",".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
        said = (option.help if default in (None, False, {}, "") else f"{option.help} (default: {default})").replace(
            "%", "%%"
        )
        if option.is_positional:
            parser.add_argument(name, metavar=name.upper(), help=said)
        else:
            is_flag = option.kind is bool
            about: dict[str, Any] = {"action": "store_true"} if is_flag else {"metavar": _word(option.kind)}
            parser.add_argument(f"--{name}", help=said, **about)
    if has_settings:
        parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings; may be repeated")
        parser.add_argument("--print_config", action="store_true", help="print all settings as YAML, and exit")
        parser.add_argument("--help-all", action="store_true", help="show all settings, and exit")
    parser.add_argument("-h", "--help", action="store_true", help="show this text, and exit")
    if is_whole and has_settings:
        _add_settings(parser)
    return parser.format_help().rstrip()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help in lines that are as long as those of this file, whatever the terminal."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=116)


def _word(kind: Any) -> str:
    """Returns a word for the value of an option."""
    plain = next(option for option in options_of(kind) if option is not types.NoneType)
    return {int: "N", float: "X", str: "TEXT"}.get(plain, "A,B" if get_origin(plain) is tuple else "YAML")


def _add_settings(parser: argparse.ArgumentParser) -> None:
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


def write_text(url: str, text: str) -> None:
    """Writes a small file of a command to a path or URL."""
    storage.write_bytes(storage.absolute(url), text.encode())


def dataset(datasets: Mapping[str, Any], name: str) -> Any:
    """Returns the dataset of this name. Raises ValueError with the known names."""
    if name not in datasets:
        raise ValueError(f"no dataset {name!r} among {sorted(datasets)}; add it to input.sql or input.datasets")
    return datasets[name]


def run(
    work: Callable[[], Mapping[str, Any]], *, is_success: Callable[[Mapping[str, Any]], bool] = lambda result: True
) -> NoReturn:
    """Runs a command, prints its result as one JSON object in the last line of standard output, and exits.

    The exit codes are those of `exit_codes`. The error of a failure is on standard error.

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
        _fail(str(error), exit_codes.USAGE)
    except Exception as error:
        text = f"{error}" if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: {error}"
        _fail(text, exit_codes.of(error))
    print(json.dumps(result), flush=True)
    sys.exit(exit_codes.DONE if is_success(result) else exit_codes.FAILED)


def _fail(message: str, code: int) -> NoReturn:
    if code == exit_codes.TEMPORARY:
        message += f"\nThe same command can succeed later (exit code {code})."
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
