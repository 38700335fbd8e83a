"""The program that lists errors which no test reaches."""

import shutil
import subprocess

import pytest

from tests import mutants
from tests.raises import judged, noted, noting, raises_of, read_listed, run_tests, unreached

SOURCE = """from __future__ import annotations
def first(x):
    if x == 1: raise LookupError("é"); x = 2
    if x:
        raise ValueError(
            "of several lines"
        )
    try:
        return 1 / x
    except ZeroDivisionError as error:
        raise
    except TypeError as error:
        raise error
    raise KeyError(x) from None
"""


def test_each_error_is_found_with_its_lines_but_for_those_that_are_passed_on():
    assert sorted(raises_of(SOURCE)) == [
        (3, 15, "raise LookupError('é')"), (5, 8, "raise ValueError('of several lines')"),
        (14, 4, "raise KeyError(x) from None"),
    ]  # fmt: skip


def test_an_error_is_what_it_was_and_its_line_is_noted(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    changed = noting(SOURCE, "spark_dl/a.py", str(notes))
    assert changed.count("\n") == SOURCE.count("\n")
    defined = {}
    exec(compile(changed, "a.py", "exec"), defined)
    for x, error, line in ((1, LookupError, 3), (7, ValueError, 5)):
        with pytest.raises(error) as caught:
            defined["first"](x)
        assert caught.traceback[-1].lineno + 1 == line
        assert caught.traceback[-1].locals == {"x": x}
    with pytest.raises(ZeroDivisionError):
        defined["first"](0)
    reached = noted(notes)
    assert reached == {"spark_dl/a.py:3", "spark_dl/a.py:5"}
    assert [line for _, line, _ in unreached({"spark_dl/a.py": SOURCE}, reached)] == [14]
    shutil.rmtree(notes)  # and cannot be written
    with pytest.raises(LookupError):
        defined["first"](1)


def test_what_is_new_and_what_is_gone_is_named():
    found = [("a.py", 3, "raise ValueError"), ("b.py", 7, "raise KeyError")]
    listed = read_listed("# remarks\n\na.py: raise ValueError  # no disk does so here\nc.py: raise OSError  # gone\n")
    assert judged(found, listed) == (["b.py:7: raise KeyError"], ["c.py: raise OSError"])
    with pytest.raises(ValueError, match="expected two spaces, # and the reason"):
        read_listed("a.py: raise ValueError\n")


def test_the_lines_are_those_that_the_tests_and_their_processes_have_run(tmp_path, monkeypatch):
    """In the process of pytest, in a child, and in a fork that ends by SIGKILL."""
    project = tmp_path / "project"
    (project / "spark_dl").mkdir(parents=True)
    (project / "spark_dl" / "__init__.py").write_text("")
    (project / "spark_dl" / "shown.py").write_text(
        "def run(which):\n    if which == 'child':\n        raise ValueError(1)\n    if which == 'fork':\n"
        "        raise ValueError(2)\n    if which == 'here':\n        raise ValueError(3)\n"
        "    raise ValueError(which)\n"
    )
    (project / "test_shown.py").write_text(
        "import os, signal, subprocess, sys\nimport pytest\nfrom spark_dl.shown import run\n"
        "def test_all():\n    pytest.raises(ValueError, run, 'here')\n"
        "    assert subprocess.call([sys.executable, '-c', 'from spark_dl.shown import run; run(\"child\")'])\n"
        "    if not (pid := os.fork()):\n        try:\n            run('fork')\n        finally:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n    os.waitpid(pid, 0)\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    monkeypatch.setattr(mutants, "ROOT", project)
    reached = run_tests(str(tmp_path), ["-q", "test_shown.py"])
    assert reached == {f"spark_dl/shown.py:{line}" for line in (3, 5, 7)}
