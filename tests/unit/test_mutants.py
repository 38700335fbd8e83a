"""The program that changes the package: what it changes, and that a test which fails notices it."""

import ast
import subprocess

import pytest

from tests import mutants
from tests.mutants import Copy, Mutant, draw, mutants_of, own_tests

SOURCE = '''"""Words that are not changed: 1 < 2."""
from dataclasses import dataclass; from typing import Final


def checked(numbers: list[int], *, most: int = 3) -> int:
    """Nor are these."""
    if not numbers:
        raise ValueError(f"found {len(numbers) - 1}")
    numbers.sort(reverse=True)
    total = 0
    for number in numbers:
        if number > most and number != 7:
            continue
        total += number * 2
    return total


@dataclass(frozen=True)
class Shown:
    at: Final[int] = 1

    def __repr__(self) -> str:
        return str(1 + 1)
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "spark_dl" / "shown.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_each_kind_of_change_is_made_in_its_place_and_words_stay(file):
    found = {(each.line, each.kind, each.before, each.after) for each in mutants_of(file)}
    assert found == {
        (5, "constant", "3", "4"), (7, "condition", "not numbers", "(not not numbers)"),
        (8, "raise", 'raise ValueError(f"found {len(numbers) - 1}")', "pass"),
        (9, "argument reverse", "numbers.sort(reverse=True)", "(numbers.sort())"), (9, "constant", "True", "False"),
        (9, "call", "numbers.sort(reverse=True)", "pass"), (10, "constant", "0", "1"),
        (12, "comparison", "number > most", "(number >= most)"), (12, "comparison", "number != 7", "(number == 7)"),
        (12, "constant", "7", "8"), (12, "operand", "number > most and number != 7", "(number > most)"),
        (12, "operand", "number > most and number != 7", "(number != 7)"),
        (12, "condition", "number > most and number != 7", "(not (number > most and number != 7))"),
        (13, "continue", "continue", "pass"), (14, "assignment", "total += number * 2", "pass"),
        (14, "arithmetic", "number * 2", "(number // 2)"), (14, "operand", "number * 2", "(number)"),
        (14, "constant", "2", "3"), (15, "return", "return total", "return None"), (20, "constant", "1", "2"),
    }  # fmt: skip


def test_each_changed_file_differs_in_one_place(file):
    for each in mutants_of(file):
        changed = each.source.splitlines()
        lines = [i for i, line in enumerate(SOURCE.splitlines(), 1) if line != changed[i - 1]]
        assert lines == [each.line], each.name
        ast.parse(each.source)


def test_a_seed_draws_the_same_changes_and_none_that_is_listed(file, tmp_path, monkeypatch):
    listed = tmp_path / "mutants.txt"
    listed.write_text("# a remark\n")
    monkeypatch.setattr(mutants, "EQUIVALENT", listed)
    everything = draw("", 99, seed=1)
    assert draw("shown", 5, seed=1) == draw("", 5, seed=1) != draw("", 5, seed=2)
    listed.write_text(f"{everything[0].name} # it is the same\n")
    assert everything[0] not in draw("", 99, seed=1)
    assert len(draw("", 99, seed=1)) == len(everything) - 1


def test_each_change_of_the_list_is_one_of_the_package_and_has_a_reason():
    listed = [line.rpartition(" # ") for line in mutants.EQUIVALENT.read_text().splitlines() if line[0] != "#"]
    assert all(name and reason for name, _, reason in listed)
    assert len({name for name, _, _ in listed}) == len(listed)
    files = {name.partition(": ")[0] for name, _, _ in listed}
    assert {name for name, _, _ in listed} - {
        each.name for path in files for each in mutants_of(mutants.ROOT / path)
    } == set()


def test_a_module_is_tested_by_the_files_of_its_name_or_those_that_are_listed():
    assert own_tests("spark_dl/data/columns/cells.py") == ["tests/unit/data/columns/test_cells.py"]
    assert own_tests("spark_dl/world.py") == ["tests/ranks/test_leaving.py"]
    assert own_tests("spark_dl/predict.py") == ["tests/spark/test_predict.py"]


def test_a_failure_and_a_hang_are_noticed_and_the_copy_is_as_before(file, tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "test_shown.py").write_text(
        "from spark_dl.shown import checked\n\ndef test_total():\n    assert checked([1, 2, 9]) == 6\n"
    )
    (tmp_path / ".gitignore").write_text(".venv\n")
    folder = tmp_path.parent / f"{tmp_path.name}-copy"
    folder.mkdir()
    copy = Copy(str(folder))
    (folder / "spark_dl" / "__init__.py").touch()
    assert copy.passes(["test_shown.py"], 60)

    def changed(kind, before, source=""):
        found = next(each for each in mutants_of(file) if (each.kind, each.before) == (kind, before))
        return Mutant(found.path, found.line, kind, before, "", source or found.source)

    assert copy.notices(changed("arithmetic", "number * 2"), ["test_shown.py"], 60)
    assert not copy.notices(changed("constant", "7"), ["test_shown.py"], 60)
    hangs = changed("constant", "7", SOURCE.replace("total = 0", "import time; time.sleep(600)"))
    assert copy.notices(hangs, ["test_shown.py"], 3)
    assert (folder / "spark_dl" / "shown.py").read_text() == SOURCE
