"""How large a file, a folder and a function may be, so that each stays one idea."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import spark_dl

PACKAGE = Path(spark_dl.__file__).parent
MODULES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}


def lengths(path):
    """Lines of every function of a file, by its name."""
    tree = ast.parse(path.read_text())
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f.name: f.end_lineno - f.lineno + 1 for f in functions}


@pytest.mark.parametrize("name", MODULES)
def test_a_file_has_at_most_350_lines_and_a_function_70(name):
    assert len(MODULES[name].read_text().splitlines()) <= 350
    assert {function: lines for function, lines in lengths(MODULES[name]).items() if lines > 70} == {}


def test_a_folder_has_at_most_sixteen_files():
    sizes = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > 16} == {}


def test_train_of_the_driver_is_a_screen():
    assert lengths(PACKAGE / "driver.py")["train"] <= 45
