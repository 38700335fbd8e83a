"""Lists the errors of the package that no test reaches: each `raise` whose line no test has run.

`make raises` runs the tests with coverage, in the processes of ranks and in Spark's Python workers, too, and compares
what they have run with every `raise` of `spark_dl`. `tests/raises.txt` lists those that no test reaches, each with the
reason. It fails if another one is not reached, and if one on the list is, or is gone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "tests" / "raises.txt"
_SETTINGS = """[run]
source_pkgs = spark_dl
parallel = true
data_file = {folder}/data
patch = subprocess, fork, _exit, execv
sigterm = true
disable_warnings = no-data-collected, module-not-measured, module-not-imported, couldnt-parse
"""


def raises_of(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields the first and the last line of each `raise`, and its text; not of those that raise what was caught."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Name):
            yield node.lineno, node.end_lineno or node.lineno, " ".join(ast.unparse(node).split())


def unreached(sources: Mapping[str, str], executed: Mapping[str, set[int]]) -> list[tuple[str, int, str]]:
    """Returns path, line and text of each `raise` of which no line was run, in the order of the files."""
    return [
        (path, first, text)
        for path, source in sorted(sources.items())
        for first, last, text in sorted(raises_of(source))
        if not executed.get(path, set()) & {*range(first, last + 1)}
    ]


def judged(found: Sequence[tuple[str, int, str]], listed: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns what is not reached and not listed, and what is listed and reached, or gone."""
    names = {f"{path}: {text}": line for path, line, text in found}
    new = [f"{name.partition(': ')[0]}:{line}: {name.partition(': ')[2]}" for name, line in names.items()
           if name not in listed]  # fmt: skip
    return new, [name for name in listed if name not in names]


def read_listed(text: str) -> dict[str, str]:
    """Returns the reasons by `raise`. Raises ValueError for a line without a reason."""
    listed = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, reason = line.partition("  # ")
            if not reason:
                raise ValueError(f"{LISTED.name}: expected two spaces, # and the reason at the end of {line!r}")
            listed[name] = reason
    return listed


def run_tests(folder: str, tests: Sequence[str]) -> dict[str, set[int]]:
    """Runs tests, and returns the lines of each file that they have run."""
    settings = Path(folder) / "settings"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(_SETTINGS.format(folder=folder))
    env = {**os.environ, "COVERAGE_RCFILE": str(settings), "CUDA_VISIBLE_DEVICES": ""}
    coverage = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *tests], env=env, cwd=ROOT, check=False)
    for command in ("combine", "json"):
        where = ["-o", f"{folder}/lines.json"] if command == "json" else [folder]
        subprocess.run([*coverage, command, f"--rcfile={settings}", *where], env=env, cwd=ROOT, check=True)
    files = json.loads(Path(folder, "lines.json").read_text())["files"]
    return {path: {*about["executed_lines"]} for path, about in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Lists the errors of the package that no test reaches.")
    _, tests = parser.parse_known_args()  # of pytest
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "spark_dl").rglob("*.py"))}
    with tempfile.TemporaryDirectory(prefix="raises-") as folder:
        executed = run_tests(folder, tests)
    found = unreached(sources, executed)
    new, gone = judged(found, read_listed(LISTED.read_text()))
    total = sum(1 for source in sources.values() for _ in raises_of(source))
    print(f"\n{total} errors, {len(found)} of which no test reaches")
    for line in new:
        print(f"  not reached, and not in tests/raises.txt: {line}")
    for line in gone:
        print(f"  in tests/raises.txt, but reached or gone: {line}")
    return 1 if new or gone else 0


if __name__ == "__main__":
    sys.exit(main())
