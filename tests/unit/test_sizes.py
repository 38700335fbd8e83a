"""How large a file, a folder and a function may be, so that each stays one idea."""

import ast
from collections import Counter
from pathlib import Path

import spark_dl

PACKAGE = Path(spark_dl.__file__).parent
MODULES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}


def lengths(path):
    """Lines of every function of a file, by its name."""
    tree = ast.parse(path.read_text())
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {f.name: f.end_lineno - f.lineno + 1 for f in functions}


def test_a_file_has_at_most_350_lines_and_a_function_70():
    files = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    functions = {f"{name}: {f}": lines for name, path in MODULES.items() for f, lines in lengths(path).items()}
    assert {name: lines for name, lines in files.items() if lines > 350} == {}
    assert {name: lines for name, lines in functions.items() if lines > 70} == {}


def test_a_folder_has_at_most_sixteen_files():
    sizes = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(folder): size for folder, size in sizes.items() if size > 16} == {}


def test_train_of_the_driver_is_a_screen():
    assert lengths(PACKAGE / "driver.py")["train"] <= 45
