"""README and docs: sizes, links, and the page that is written from docstrings."""

import ast
import dataclasses
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import spark_dl
import spark_dl.ml
from spark_dl import strategy
from spark_dl.cli import exit_codes
from spark_dl.cli.arguments import Input, Model
from spark_dl.config import strategies
from spark_dl.config.load import sections
from spark_dl.launch.supervise import RESTARTS

ROOT = Path(__file__).parents[2]
TUTORIAL = "tutorial.md"
"""The notebook with its outputs, which the build of the documentation writes."""
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name != TUTORIAL]
IDS = [p.relative_to(ROOT).as_posix() for p in PAGES]


def prose(path):
    """The lines outside of tables and code."""
    found, is_code = [], False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_code ^= line.startswith("```")
        if not is_code and not line.startswith("|"):
            found.append((number, line))
    return found


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_lines_are_at_most_140_characters(path):
    assert [number for number, line in prose(path) if len(line) > 140] == []


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path):
    for number, line in prose(path):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", line):
            is_there = "://" in target or (path.parent / target).exists() or target == TUTORIAL
            assert is_there, f"line {number}: {target}"


@pytest.mark.parametrize("path", [*PAGES, ROOT / "SECURITY.md"], ids=[*IDS, "SECURITY.md"])
def test_files_that_are_named_exist(path):
    """A file is named from the root, from the package, or, as tests are, from `tests`."""
    named = re.findall(r"`(\w[\w./-]*/[\w.-]+\.(?:cfg|conf|md|py|sh|yaml))(?:::\w+)?`", path.read_text())
    folders = (ROOT, ROOT / "spark_dl", ROOT / "tests")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def headings(path):
    """The anchors of a page, as a code host and Sphinx make them from its headings."""
    lines = [re.match(r"#+ (.*)", line) for _, line in prose(path)]
    return {re.sub(r"[^\w\- ]", "", m[1].lower()).replace(" ", "-") for m in lines if m}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_anchors_are_headings(path):
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text()):
        page = path.parent / target if target else path
        assert anchor in headings(page), f"{page} has no heading {anchor}"


def test_the_table_of_lines_counts_the_code_below_it_and_no_other_tool_needs_fewer():
    text = (ROOT / "docs" / "lines-of-code.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| [^|]+ \| (\d+) \|$", text, re.MULTILINE)
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert [task for task, *_ in rows] == list(sections)
    for task, ours, theirs in rows:
        blocks = re.findall(r"^```python\n(.*?)^```", sections[task], re.MULTILINE | re.DOTALL)
        counted = [sum(bool(line) for line in block.splitlines()) for block in blocks]
        assert counted == [int(ours), int(theirs)], task
        assert int(ours) <= int(theirs)


def test_every_public_name_is_in_the_reference():
    """Each has a page of its own."""
    listed = re.findall(r"^   (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    for name in ("RankDataset", "main", "Run", "Evaluation", "Position"):
        listed.remove(name)  # what functions get and return, and what torchrun calls
    of_package = {*spark_dl.__all__} - {"nn"}
    of_strategies = {*strategy.__all__} - of_package
    assert sorted(listed) == sorted([*of_package, *of_strategies, *spark_dl.ml.__all__, *spark_dl.nn.__all__])


def test_the_table_of_the_result_has_every_field():
    table = re.search(r"returns a `TrainResult`:\n\n((?:\|.*\n)+)", (ROOT / "docs" / "train.md").read_text())[1]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(f.name for f in dataclasses.fields(spark_dl.TrainResult))


def known_settings():
    """The default of each setting, by its key, of all strategies and of the sections that the commands add."""
    known = {}
    for strategy_name in strategies.names():
        for section, kind in {**sections(strategy_name), "input": Input, "model": Model}.items():
            for field in dataclasses.fields(kind):
                known[f"{section}.{field.name}"] = field.default
    return {**known, "parallel.strategy": strategies.DEFAULT}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_settings_that_are_named_exist(path):
    known = known_settings()
    all_sections = {key.split(".")[0] for key in known} - {"data"}  # `data.column` can be a column of a user, too
    named = re.findall(r"(?<=`)([a-z]+\.[a-z_]+)(?=[`:=])", path.read_text())
    unknown = {key for key in named if key.split(".")[0] in all_sections and key not in known}
    assert (
        unknown
        - {"loader.py", "launch.py", "train.py", "checkpoint.py", "track.py", "model.py", "model.pt", "train.yaml"}
        == set()
    )


def test_the_numbers_of_defaults_in_the_text_are_those_of_the_settings():
    known, found = known_settings(), []
    for path in PAGES:
        text = " ".join(path.read_text().split())
        for key, number in re.findall(r"`([a-z]+\.[a-z_]+)`[^`|.]{0,12}?\(?(\d[\d,]*)(?: \w+)? by default", text):
            found.append((path.name, key, float(number.replace(",", ""))))
    assert len(found) > 3
    special = {"launch.max_restarts": RESTARTS}  # which is "auto"
    wrong = [(page, key, n) for page, key, n in found if n != special.get(key, known[key])]
    assert wrong == []


def test_the_table_of_exit_codes_has_each_code_and_no_other():
    page = (ROOT / "docs" / "commands.md").read_text()
    table = re.search(r"^\| Exit code \|.*\n\|-.*\n((?:\|.*\n)+)", page, re.MULTILINE)[1]
    codes = {int(n) for row in table.splitlines() for n in re.findall(r"\d+", row.split("|")[1])}
    ours = {exit_codes.DONE, exit_codes.FAILED, exit_codes.USAGE, exit_codes.TEMPORARY}
    assert codes == ours | {128 + signal.SIGINT, 128 + signal.SIGTERM}


def test_the_page_of_the_settings_is_up_to_date():
    command = [sys.executable, ROOT / "docs" / "write_configuration.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr or "renew it: .venv/bin/python docs/write_configuration.py"


def test_each_fault_bad_input_and_attack_has_a_test_and_the_page_lists_them():
    command = [sys.executable, ROOT / "docs" / "write_contracts.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr or "renew it: .venv/bin/python docs/write_contracts.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_pages_are_built_without_a_warning(tmp_path):
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "api"))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    done = subprocess.run(
        [*command, "-b", "html", docs, tmp_path / "html"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()
    assert "confusion" in (tmp_path / "html" / "tutorial.html").read_text()
    names = {path.stem.rpartition(".")[2] for path in (tmp_path / "html" / "api").glob("*.html")}
    assert {*spark_dl.__all__} - {"nn"} <= names, "a page for each name"


def messages():
    """The strings of the package and its jobs, on one line each, with "..." for what is filled in."""

    def text(node):
        match node:
            case ast.Constant(value=str()):
                return node.value
            case ast.JoinedStr():
                return "".join(text(part) for part in node.values)
            case ast.BinOp(op=ast.Add()):
                return text(node.left) + text(node.right)
            case _:
                return "..."

    found = set()
    for path in (*(ROOT / "spark_dl").rglob("*.py"), *(ROOT / "jobs").glob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        found |= {text(node) for node in nodes if isinstance(node, ast.expr) and node not in docstrings}
    return "\n".join(re.sub(r"%[\d.]*[dsfg]", "...", " ".join(message.split())) for message in found)


OF_OTHERS = {"No space left on device"}
"""Words in the tables of failures that are of the kernel, torch or Spark."""


def rows_of_failures(page):
    """The first columns of the tables with the words of messages, by row."""
    for table in re.findall(r"^\| Words in the message .*\n\|-.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        yield from re.findall(r"^\| (.*?) \|", table, re.MULTILINE)


def words_of(row):
    """The parts of the messages of a row, without what is filled in and without the key or the path before a colon."""
    parts = (part.strip(" `.:=") for part in re.split(r"; |: |\.\.\.|<\w+>|`", row))
    return [part for part in parts if part]


def test_the_page_of_failures_has_the_words_of_the_messages():
    known, rows = messages(), [*rows_of_failures((ROOT / "docs" / "troubleshooting.md").read_text())]
    assert len(rows) > 150
    missing = {row: [words for words in words_of(row) if words not in known and words not in OF_OTHERS] for row in rows}
    assert {row: words for row, words in missing.items() if words} == {}
