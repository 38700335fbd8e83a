"""The program that lists errors which no test reaches."""

import pytest

from tests import raises
from tests.raises import judged, raises_of, read_listed, run_tests, unreached

SOURCE = """def first(x):
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
    found = [(3, 5, "raise ValueError('of several lines')"), (12, 12, "raise KeyError(x) from None")]
    assert sorted(raises_of(SOURCE)) == found


@pytest.mark.parametrize(("executed", "lines"), [
    ({}, [3, 12]), ({"a.py": {1, 2}}, [3, 12]), ({"a.py": {4}}, [12]), ({"a.py": {3, 12}}, []),
    ({"b.py": {3}}, [3, 12]),
])  # fmt: skip
def test_an_error_is_reached_if_one_of_its_lines_was_run(executed, lines):
    assert [line for _, line, _ in unreached({"a.py": SOURCE}, executed)] == lines


def test_what_is_new_and_what_is_gone_is_named():
    found = [("a.py", 3, "raise ValueError"), ("b.py", 7, "raise KeyError")]
    listed = read_listed("# remarks\n\na.py: raise ValueError  # no disk does so here\nc.py: raise OSError  # gone\n")
    assert judged(found, listed) == (["b.py:7: raise KeyError"], ["c.py: raise OSError"])
    with pytest.raises(ValueError, match="expected two spaces, # and the reason"):
        read_listed("a.py: raise ValueError\n")


def test_the_lines_are_those_that_the_tests_and_their_processes_have_run(tmp_path, monkeypatch):
    """The program is measured as the package is: in the process of pytest, in a child and in a fork."""
    (tmp_path / "spark_dl").mkdir()
    (tmp_path / "spark_dl" / "__init__.py").write_text("")
    (tmp_path / "spark_dl" / "shown.py").write_text(
        "def run(which):\n    if which == 'child':\n        return 1\n    if which == 'fork':\n        return 2\n"
        "    if which == 'here':\n        return 3\n    raise ValueError(which)\n"
    )
    (tmp_path / "test_shown.py").write_text(
        "import os, subprocess, sys\nfrom spark_dl.shown import run\n"
        "def test_all():\n    run('here')\n"
        "    subprocess.run([sys.executable, '-c', 'from spark_dl.shown import run; run(\"child\")'], check=True)\n"
        "    pid = os.fork()\n    if not pid:\n        run('fork')\n        os._exit(0)\n    os.waitpid(pid, 0)\n"
    )
    monkeypatch.setattr(raises, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = run_tests(str(tmp_path / "of-coverage"), ["-q", "-p", "no:cacheprovider", "test_shown.py"])
    assert lines["spark_dl/shown.py"] >= {3, 5, 7}
    assert 8 not in lines["spark_dl/shown.py"]
