"""Writes `docs/contracts.md`: the faults, bad inputs and attacks that tests do, each with its tests and their times.

python docs/write_contracts.py [junit.xml ...]    the times are those of pytest's `--junitxml`; others stay as they are
python docs/write_contracts.py --check            only compares the names of the tests
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("contracts.md")
HEAD = """# Faults, bad inputs and attacks

<!-- Written by docs/write_contracts.py from the names of the tests. Do not edit. -->

This page lists what can go wrong, what spark_dl promises then, and the tests that do it. The tests use real faults:
killed and stopped processes, cut links, full disks, flipped bits, hostile files and clients. A test has the number of
its line in its name. The time is that of all its cases, on 2 cores. A test without a time needs something that the
machine did not have, or takes minutes (`make test-long`). [Troubleshooting](troubleshooting.md) explains the messages.
"""
SECTIONS = {"F": "Faults", "B": "Bad inputs", "S": "Attacks"}
CONTRACTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("contracts.yaml").read_text())
LEFT_OUT: dict[str, str] = {}
"""Why a number has no test."""


def named_tests() -> dict[str, list[str]]:
    """Returns the tests with a number in their name, by the number: `folder/test_file.py::test_name`."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_([FBS]\d\d)_", node.name)):
                found[match[1]].append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return found


def measured(reports: list[str]) -> dict[str, float]:
    """Returns the seconds of all cases of each test, from the reports of pytest."""
    found: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - of our own pytest
            if case.find("skipped") is None and re.match(r"test_[FBS]\d\d_", name := case.attrib["name"]):
                file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
                found[f"{file}.py::{name.partition('[')[0]}"] += float(case.attrib["time"])
    return found


def written_times() -> dict[str, float]:
    """Returns the times that the page has."""
    lines = PAGE.read_text() if PAGE.exists() else ""
    return {test: float(seconds) for test, seconds in re.findall(r"`([^`]+::[^`]+)` \(([\d.]+) s\)", lines)}


def render(times: dict[str, float]) -> str:
    """Returns the page."""
    tests, parts = named_tests(), [HEAD]
    for letter, title in SECTIONS.items():
        parts += [f"## {title}\n", "| Number | What is promised, or what is tried | Tests |", "|---|---|---|"]
        for number, promise in CONTRACTS.items():
            if number[0] == letter:
                cells = [f"`{t}`" + (f" ({times[t]:.1f} s)" if t in times else "") for t in tests.get(number, ())]
                parts.append(f"| {number} | {promise} | {'<br>'.join(cells) or LEFT_OUT.get(number, '')} |")
        parts.append("")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Writes the page, or compares it. Returns the exit code."""
    text = render(written_times() | measured([a for a in arguments if a != "--check"]))
    if "--check" not in arguments:
        PAGE.write_text(text)
        return 0
    tests = named_tests()
    missing = [number for number in CONTRACTS if number not in tests and number not in LEFT_OUT]
    if missing:
        sys.stderr.write(f"numbers without a test: {', '.join(missing)}\n")
    return int(bool(missing) or not PAGE.exists() or PAGE.read_text() != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
