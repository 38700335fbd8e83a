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
COPIES = {"copies": arguments.Option(kind=int, default=1, help="number of copies")}


def test_datasets_by_url_are_handed_on_whoever_wrote_them(tmp_path):
    urls = {"train": str(tmp_path / "plain parquet"), "test": "s3://bucket/petastorm"}
    assert arguments.read_datasets(None, arguments.Input(datasets=urls)) == urls


def test_a_model_without_its_function_or_with_one_that_is_not_there_is_wrong_usage():
    with pytest.raises(arguments.UsageError, match="^model.build: expected 'package.module:name'"):
        arguments.Model(build="").spec()
    with pytest.raises(arguments.UsageError, match="^model.metrics.top: torch.nn has no 'Top'"):
        arguments.Model(build="torch.nn:Identity", metrics={"top": "torch.nn:Top"}).spec()


def test_help_is_a_screen_and_says_where_the_settings_are(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        arguments.parse("copy", "Copies.", COPIES, ["--help"])
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 24
    assert "usage: spark-dl copy [--config FILE]" in said
    assert "number of copies (default: 1)" in said
    assert "spark-dl copy --help-all" in said
    assert "--train.lr LR" not in said


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        arguments.parse("job", "A job.", {"output": arguments.Option(help="folder for the files")}, ["--help-all"])
    said = " ".join(capsys.readouterr().out.split())
    assert "--output TEXT folder for the files" in said
    value = r"(\S+|{{.*?}}|\(default: [^)]+\))"
    option = rf"--{{0}} {value}( --{{0}}\+ \S+)? (one of|[`A-Z])[^(]{{{{15}}}}"  # its name, its value, and some words
    assert [key for key in config_keys() if not re.search(option.format(re.escape(key)), said)] == []


@pytest.mark.parametrize(("args", "message"), [
    (["--copies", "two"], "copies: expected a whole number, found 'two'"),
    (["--spark_conf", "3"], "spark_conf: expected a mapping of names to strings, found 3"),
    (["--input.sql", "3"], "input.sql: expected a mapping of names to strings, found 3"),
    (["--model", "3"], "model: expected a section with settings, found 3"),
    (["train.lr=3"], "expected an option such as --copies, found 'train.lr=3'"),
    (["--=3"], "expected an option such as --copies, found '--=3'"),
    (["--copies"], "copies: expected a value, as in --copies=..., found nothing"),
])  # fmt: skip
def test_an_option_of_another_type_is_an_error_that_says_what_it_takes(capsys, args, message):
    with pytest.raises(SystemExit, match="^2$"):
        arguments.parse("job", "A job.", COPIES, args)
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


def test_each_of_the_options_is_taken_alone_from_the_command_line_or_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("resume: true\n")
    flag = arguments.Option(kind=bool, default=False, help="")
    options, pairs = {"resume": flag, "overwrite": flag}, [("resume", "overwrite")]
    for args in (["--resume"], ["--overwrite"], [f"--config={tmp_path / 'run.yaml'}"], []):
        job = arguments.parse("job", "A job.", options, args, exclusive=pairs)
        assert job.args["resume"] + job.args["overwrite"] == len(args)
    with pytest.raises(SystemExit, match="^2$"):
        arguments.parse("job", "A job.", options, [f"--config={tmp_path / 'run.yaml'}", "--overwrite"], exclusive=pairs)


def test_help_lists_every_strategy_with_a_line_for_each_of_its_settings(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        arguments.parse("job", "A job.", {}, ["--help-all"])
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


PLACES = {
    "path": arguments.Option(is_positional=True, help="where"),
    "keep_last": arguments.Option(kind=int | None, help="how many"),
    "columns": arguments.Option(kind=tuple[str, ...], default=(), help="which"),
    "stages": arguments.Option(kind=tuple[int, ...], default=(0, 1), help="which"),
    "delete": arguments.Option(kind=bool, default=False, help="whether"),
}


@pytest.mark.parametrize(("given", "expected"), [
    (["runs"], {"path": "runs", "keep_last": None, "columns": (), "stages": (0, 1), "delete": False}),
    (["runs", "--keep-last", "3", "--delete"], {"keep_last": 3, "delete": True}),
    (["--keep_last=3", "runs"], {"path": "runs", "keep_last": 3}),
    (["runs", "--columns", "a,b c", "--stages=2,3"], {"columns": ("a", "b c"), "stages": (2, 3)}),
    (["runs", "--columns", "[no, 1]"], {"columns": ("no", "1")}),
])  # fmt: skip
def test_a_command_without_settings_takes_places_and_lists(given, expected):
    job = arguments.parse("clean", "Cleans.", PLACES, given, has_settings=False)
    assert {name: job.args[name] for name in expected} == expected


@pytest.mark.parametrize(("given", "message"), [
    ([], "expected PATH, found nothing; see spark-dl clean --help"),
    (["runs", "more"], "expected an option such as --path, found 'more'"),
    (["runs", "--keep_lst", "3"], "unknown option --keep_lst; did you mean 'keep_last'?"),
    (["runs", "--train.lr", "3"], "unknown option --train.lr; expected one of"),
    (["runs", "--keep-last", "x"], "keep_last: expected a whole number or null, found 'x'"),
    (["runs", "--stages", "a"], "stages: expected a list of whole numbers, found ['a']"),
])  # fmt: skip
def test_what_is_wrong_in_a_command_without_settings_is_said(capsys, given, message):
    with pytest.raises(SystemExit, match="^2$"):
        arguments.parse("clean", "Cleans.", PLACES, given, has_settings=False)
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_an_option_that_is_needed_is_wrong_usage_without_it():
    job = arguments.parse("job", "A job.", {"output": arguments.Option(help="folder")}, [])
    with pytest.raises(arguments.UsageError, match="^output: expected a value, found nothing; pass --output"):
        job.required("output")
