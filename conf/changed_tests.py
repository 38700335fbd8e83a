"""Prints the unit tests of the files that differ from a revision (HEAD by default), for `make check`.

Tests mirror the package: `spark_dl/a/b.py` is tested in `tests/unit/a/test_b.py`, or in the files that
`tests/README.md` lists for it, or else in the folder `tests/unit/a`. The tests of `benchmarks/a/b.py` are in
`tests/benchmarks/a`.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

TESTS = {"spark_dl": Path("tests/unit"), "benchmarks": Path("tests/benchmarks")}
"""The folder with the unit tests of each package."""


@functools.cache
def listed_tests() -> dict[str, list[str]]:
    """The test files below `tests/` of each module below `spark_dl/` that `tests/README.md` lists."""
    _, _, table = Path("tests/README.md").read_text().partition("## Modules whose tests have another name")
    listed = {}
    for modules, tests in re.findall(r"^\| (`.*`) \| (`.*`) \|$", table, re.MULTILINE):
        listed |= dict.fromkeys(re.findall(r"`(.+?)`", modules), re.findall(r"`(.+?)`", tests))
    return listed


def tests_of(changed: str) -> list[Path]:
    """The unit tests of one file of the repository."""
    path = Path(changed)
    if Path(*path.parts[:2]) in TESTS.values():
        return [path] if path.name.startswith("test_") and path.exists() else []
    if path.suffix == ".md" or path.parts[0] == "docs":
        return [Path("tests/unit/test_docs.py")]
    if path.parts[0] not in TESTS:
        return []
    top = TESTS[path.parts[0]]
    folder = top.joinpath(*path.parts[1:-1])
    named = folder.parent / f"test_{folder.name}.py" if path.name == "__init__.py" else folder / f"test_{path.name}"
    if path.name != "__init__.py":  # `test_storage_owner.py` beside the folder, for `storage/owner.py`
        joined = folder.parent / f"test_{folder.name}_{path.name}"
        named = named if named.exists() or not joined.exists() else joined
    listed = listed_tests().get("/".join(path.parts[1:]), []) if path.parts[0] == "spark_dl" else []
    if of_units := [Path("tests", test) for test in listed if test.startswith("unit/")]:
        return of_units
    found = [test for test in (named, folder) if test.exists() and test != top][:1]
    # A file without tests of its own is tested by those of the files that import it.
    return found or tests_of_importers(path, top)


def tests_of_importers(path: Path, top: Path) -> list[Path]:
    """The unit tests that name the module of a file, or else all unit tests."""
    parts = path.with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    found = [test for test in sorted(top.rglob("test_*.py")) if module in test.read_text()]
    return found or [top]


def main() -> None:
    """Prints one path on each line, and the test of imports with them."""
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    listed = ["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"]
    changed = [name for command in listed for name in subprocess.check_output(command, text=True).splitlines()]
    found = {test for name in changed for test in tests_of(name)}
    if found:
        found.add(Path("tests/unit/test_imports.py"))
    sys.stdout.writelines(f"{test}\n" for test in sorted(found))


if __name__ == "__main__":
    main()
