"""README and docs: sizes, links, and the page that is written from docstrings."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_page_of_the_settings_is_up_to_date():
    command = [sys.executable, ROOT / "docs" / "write_configuration.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr or "renew it: .venv/bin/python docs/write_configuration.py"
