"""The command `spark-dl`: the list of its commands, and which module runs each."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from spark_dl._version import __version__

COMMANDS = {
    "init": "write a first YAML file and a first program for a table",
    "train": "train a model, and evaluate it on the test rows",
    "certify": "check that a training does not depend on ranks and restarts",
    "evaluate": "compute the loss and metrics of a trained model",
    "predict": "add the predictions of a trained model to a table",
    "prepare": "write the rows as a dataset, which several runs can use",
    "tune": "search for good settings, with Optuna",
    "plan": "plan how a large model is laid out on ranks",
    "report": "write the report of a run, as an HTML page",
    "doctor": "check the cluster before a run",
    "clean": "delete old runs and datasets",
}
"""The commands, each a module of `spark_dl.commands`, in the order in which a new user meets them."""

HELP = f"""usage: spark-dl COMMAND [--OPTION VALUE ...]

Trains PyTorch models on the data that a Spark cluster already has.

commands:
{chr(10).join(f"  {name:10}{text}" for name, text in COMMANDS.items())}

spark-dl COMMAND --help has the options of a command, and examples. spark-dl --version prints the version.
With spark-submit, pass the file jobs/COMMAND.py of the repository, or that of `python -c "import spark_dl.__main__ as
m; print(m.__file__)"`, which takes the command as its first argument."""


def main(command: str | None = None) -> NoReturn:
    """Runs a command, and exits with its exit code (`exit_codes`).

    Args:
        command: its name; by default the first argument of the process.
    """
    given = sys.argv[1:]
    if command is None:
        command, given = (given or ["--help"])[0], given[1:]
    if command in ("-h", "--help", "help"):
        print(HELP)
        sys.exit(0)
    if command == "--version":
        print(f"spark_dl {__version__}")
        sys.exit(0)
    if command not in COMMANDS:
        from spark_dl.config.checks import suggestion

        sys.stderr.write(
            f"error: expected a command, found {command!r}{suggestion(command, [*COMMANDS])}; the commands are "
            f"{', '.join(COMMANDS)}\n"
        )
        sys.exit(2)
    importlib.import_module(f"spark_dl.commands.{command}").main(given)
    raise AssertionError(f"{command} has not exited")
