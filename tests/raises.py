"""Lists the errors of the package that no test reaches: each `raise` that no test has run.

`make raises` runs the tests in a copy of the repository whose `raise` statements note that they were reached, and
compares what was noted with every `raise` of `spark_dl`. `tests/raises.txt` lists those that no test reaches, each with
the reason. It fails if another one is not reached, and if one on the list is, or is gone.

coverage.py writes what it has seen when a process ends. Most errors are raised by ranks, which end by SIGKILL, or by
hooks in threads of C++ that it does not see.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.mutants import Copy

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "tests" / "raises.txt"
_SLASH = "!"
"""In names of notes."""


def raises_of(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields the line of each `raise`, its offset in that line in bytes, and its text.

    One that raises again what was caught is none of its own.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Name):
            yield node.lineno, node.col_offset, " ".join(ast.unparse(node).split())


def noting(source: str, path: str, notes: str) -> str:
    """Returns the source, each `raise` of which first makes a file in the folder `notes`, named by path and line.

    It is a statement of the same line, which imports nothing, as some processes find the package and nothing else. It
    has names of its own: with those of the function, what they refer to would live as long as the error. The file is
    empty, as some processes may write no more to any file.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for number, start, _ in sorted(raises_of(source), reverse=True):
        file = f"{notes}/{path.replace('/', _SLASH)}:{number}"
        note = f"try: open({file!r}, 'a').close()\nexcept OSError: pass"
        line = lines[number - 1]
        lines[number - 1] = line[:start] + f"exec({note!r}, {{}}); ".encode() + line[start:]
    return b"".join(lines).decode()


def noted(notes: Path) -> set[str]:
    """Returns path and line of each `raise` that was noted."""
    return {file.name.replace(_SLASH, "/") for file in notes.iterdir()}


def unreached(sources: Mapping[str, str], reached: set[str]) -> list[tuple[str, int, str]]:
    """Returns path, line and text of each `raise` that was not reached, in the order of the files."""
    return [
        (path, line, text)
        for path, source in sorted(sources.items())
        for line, _, text in sorted(raises_of(source))
        if f"{path}:{line}" not in reached
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


def run_tests(folder: str, tests: Sequence[str]) -> set[str]:
    """Runs tests in a copy below `folder`, and returns path and line of each `raise` that was reached."""
    notes, at = Path(folder, "reached"), Path(folder, "copy")
    at.mkdir()
    notes.mkdir()
    notes.chmod(0o777)  # some tests raise errors as another user
    Path(folder).chmod(0o711)
    copy = Copy(str(at))
    for path, source in sources_of(at).items():
        (at / path).write_text(noting(source, path, str(notes)))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    subprocess.run(command, env=copy.env, cwd=at, check=False)
    return noted(notes)


def sources_of(root: Path) -> dict[str, str]:
    """Returns the files of the package, by their path below `root`."""
    return {str(path.relative_to(root)): path.read_text() for path in sorted((root / "spark_dl").rglob("*.py"))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Lists the errors of the package that no test reaches.")
    _, tests = parser.parse_known_args()  # of pytest
    with tempfile.TemporaryDirectory(prefix="raises-") as folder:
        reached = run_tests(folder, tests)
    sources = sources_of(ROOT)
    found = unreached(sources, reached)
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
