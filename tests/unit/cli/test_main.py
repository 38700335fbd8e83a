"""The command `spark-dl`: its list, its version, and which module runs a command."""

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import spark_dl
from spark_dl.cli import main

ROOT = Path(__file__).parents[3]


def run(monkeypatch, *given, command=None):
    monkeypatch.setattr(sys, "argv", ["spark-dl", *given])
    with pytest.raises(SystemExit) as ended:
        main.main(command)
    return ended.value.code


@pytest.mark.parametrize("given", [(), ("--help",), ("-h",), ("help",)])
def test_without_a_command_it_lists_the_commands(monkeypatch, capsys, given):
    assert run(monkeypatch, *given) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("  ")] == [*main.COMMANDS]
    assert len(said.splitlines()) <= 24


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"spark_dl {spark_dl.__version__}\n"


def test_an_unknown_command_is_wrong_usage_with_the_nearest(monkeypatch, capsys):
    assert run(monkeypatch, "trian") == 2
    assert "error: expected a command, found 'trian'; did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*main.COMMANDS])
def test_each_command_has_a_module_a_job_and_a_help_of_a_screen(monkeypatch, capsys, command):
    assert run(monkeypatch, command, "--help") == 0
    said = capsys.readouterr().out
    module = importlib.import_module(f"spark_dl.commands.{command}")
    assert said.startswith(f"usage: spark-dl {command} ")
    assert str(module.__doc__).strip().splitlines()[0] in said
    assert re.search(rf"^spark-dl {command} ", said, re.MULTILINE), "an example"
    monkeypatch.setattr(sys, "argv", [f"jobs/{command}.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(ROOT / "jobs" / f"{command}.py"), run_name="__main__")
    assert capsys.readouterr().out == said
    assert len(said.splitlines()) <= 40
    assert max(map(len, said.splitlines())) <= 120


def test_as_a_script_its_folder_is_no_place_of_modules(tmp_path):
    """spark-submit runs the file, whose folder would come first: `import config` would be spark_dl/config."""
    (tmp_path / "config.py").write_text("print('of the user')\n")
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    file = Path(spark_dl.__file__).parent / "__main__.py"
    first = f"atexit.register(lambda: __import__('config')); sys.path.insert(0, {str(file.parent)!r})"
    code = f"import sys, atexit; {first}; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code, file, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"spark_dl {spark_dl.__version__}\nof the user\n", done.stderr
