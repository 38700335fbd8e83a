"""What the jobs share, without Spark."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from spark_dl.cli import arguments
from spark_dl.config import strategies
from spark_dl.config.load import config_keys

JOBS = Path(__file__).parents[3] / "jobs"


def test_datasets_by_url_are_handed_on_whoever_wrote_them(tmp_path):
    urls = {"train": str(tmp_path / "plain parquet"), "test": "s3://bucket/petastorm"}
    assert arguments.read_datasets(None, arguments.Input(datasets=urls)) == urls


def test_a_model_without_its_function_or_with_one_that_is_not_there_is_wrong_usage():
    with pytest.raises(arguments.UsageError, match="^model.build: expected 'package.module:name'"):
        arguments.Model(build="").spec()
    with pytest.raises(arguments.UsageError, match="^model.metrics.top: torch.nn has no 'Top'"):
        arguments.Model(build="torch.nn:Identity", metrics={"top": "torch.nn:Top"}).spec()


def test_help_explains_every_setting(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["job.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        arguments.parse("A job.", {"output": (str, None, "folder for the files")})
    said = " ".join(capsys.readouterr().out.split())
    assert "--output OUTPUT folder for the files" in said
    value = r"(\S+|{{.*?}}|\(default: [^)]+\))"
    option = rf"--{{0}} {value}( --{{0}}\+ \S+)? (one of|[`A-Z])[^(]{{{{15}}}}"  # its name, its value, and some words
    assert [key for key in config_keys() if not re.search(option.format(re.escape(key)), said)] == []


@pytest.mark.parametrize(("args", "message"), [
    (["--copies", "two"], "copies: expected a whole number, found 'two'"),
    (["--spark_conf", "3"], "spark_conf: expected a mapping of names to strings, found 3"),
    (["--input.sql", "3"], "input.sql: expected a mapping of names to strings, found 3"),
    (["--model", "3"], "model: expected a section with settings, found 3"),
    (["train.lr=3"], "expected an option such as --train.lr, found 'train.lr=3'"),
    (["--=3"], "expected an option such as --train.lr, found '--=3'"),
])  # fmt: skip
def test_an_option_of_another_type_is_an_error_that_says_what_it_takes(monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["job.py", *args])
    with pytest.raises(SystemExit, match="^2$"):
        arguments.parse("A job.", {"copies": (int, 1, "number of copies")})
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(("args", "message"), [
    (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
    (["--resume_from", "/run/checkpoints/step-3", "--overwrite"], "--resume_from and --overwrite exclude each other"),
    (["--resume_from", "/run/checkpoints/step-3", "--resume"], "--resume_from and --resume exclude each other"),
])  # fmt: skip
def test_options_that_exclude_each_other_are_wrong_usage_before_spark_starts(monkeypatch, capsys, args, message):
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    with pytest.raises(SystemExit, match="^2$"):  # without a model, the job itself ends with 1 before it starts Spark
        runpy.run_path(str(JOBS / "train.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith(f"error: {message};")


def test_each_of_the_options_is_taken_alone_from_the_command_line_or_a_file(monkeypatch, tmp_path):
    (tmp_path / "run.yaml").write_text("resume: true\n")
    options, pairs = {"resume": (bool, False, ""), "overwrite": (bool, False, "")}, [("resume", "overwrite")]
    for args in (["--resume"], ["--overwrite"], [f"--config={tmp_path / 'run.yaml'}"], []):
        monkeypatch.setattr(sys, "argv", ["train.py", *args])
        job = arguments.parse("A job.", options, exclusive=pairs)
        assert job.args["resume"] + job.args["overwrite"] == len(args)
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config={tmp_path / 'run.yaml'}", "--overwrite"])
    with pytest.raises(SystemExit, match="^2$"):
        arguments.parse("A job.", options, exclusive=pairs)


def test_help_lists_every_strategy_with_a_line_for_each_of_its_settings(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        arguments.parse("A job.", {})
    lines = capsys.readouterr().out.splitlines()
    lines = lines[lines.index("settings of parallel, by strategy:") + 1 :]
    found = {}
    for line in lines:
        if match := re.fullmatch(r"  (\w+): [A-Z].*\.", line):
            found[match[1]] = (strategy := set())
        elif line:
            match = re.fullmatch(r"    --(parallel\.\w+) \(default: .+\)  [A-Z].*\.", line)
            assert match, line
            strategy.add(match[1])
    for name in strategies.names():
        assert found[name] == {key for key in config_keys(name) if key.startswith("parallel.")} - {"parallel.strategy"}
    assert "    --parallel.tree_depth (default: 2)  Levels of `treeReduce`." in lines


def test_where_the_rows_come_from_is_said_by_the_settings(tmp_path):
    class Spark:
        def table(self, name):
            return f"table {name}"

    assert arguments.read_datasets(Spark(), arguments.Input(table="t")) == {"train": "table t"}
    with pytest.raises(ValueError, match="^input: expected a path, a table, a function or datasets, found none"):
        arguments.read_datasets(Spark(), arguments.Input())
    (tmp_path / "rows_of_mine.py").write_text("def rows(spark):\n    return [1]\n")
    with pytest.raises(ValueError, match=r"^input.function: expected a function .*, it returned \[1\]"):
        arguments.read_datasets(Spark(), arguments.Input(function=f"{tmp_path}/rows_of_mine.py:rows"))
    assert arguments.dataset({"train": 1}, "train") == 1
    with pytest.raises(ValueError, match=r"no dataset 'test' among \['train'\]; add it to input.sql"):
        arguments.dataset({"train": 1}, "test")
