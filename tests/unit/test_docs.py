"""README and docs: sizes, links, and the page that is written from docstrings."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spark_dl
import spark_dl.ml
from spark_dl import strategy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_lines_are_at_most_140_characters(path):
    assert [number for number, line in prose(path) if len(line) > 140] == []


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path):
    for number, line in prose(path):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", line):
            assert "://" in target or (path.parent / target).exists(), f"line {number}: {target}"


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
    listed = re.findall(r"^\.\. auto\w+:: (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    of_package = {*spark_dl.__all__} - {"nn"}
    of_strategies = {*strategy.__all__} - of_package
    assert sorted(listed) == sorted([*of_package, *of_strategies, *spark_dl.ml.__all__, *spark_dl.nn.__all__])


def test_the_table_of_the_result_has_every_field():
    table = re.search(r"returns a `TrainResult`:\n\n((?:\|.*\n)+)", (ROOT / "docs" / "ways-in.md").read_text())[1]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(f.name for f in dataclasses.fields(spark_dl.TrainResult))


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
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    done = subprocess.run(
        [*command, "-b", "html", "docs", tmp_path / "html"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "html" / "index.html").exists()


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
    known, rows = messages(), [*rows_of_failures((ROOT / "docs" / "failures.md").read_text())]
    assert len(rows) > 150
    missing = {row: [words for words in words_of(row) if words not in known and words not in OF_OTHERS] for row in rows}
    assert {row: words for row, words in missing.items() if words} == {}
