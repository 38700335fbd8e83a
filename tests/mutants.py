"""Changes the package in one place at a time, and says which changes no test notices.

`make mutants ROOM=data/columns N=30` draws 30 changes in `spark_dl/data/columns` by a seed, makes each in a copy of the
repository, and runs the tests of its module there (those of `make check`); the changes that these let pass then meet
the fast tests of the whole suite that `ROOM` or `TESTS` names. At the end it prints what was noticed, and each survivor
with its line and what it became. `tests/mutants.txt` lists the changes that were judged to change nothing that a user
can see, each with its reason; they are not drawn.

mutmut calls functions through wrappers that it puts into the source, which do not survive the pickling to Spark's
executors. cosmic-ray changes files in place and runs any command, but draws no samples, and does not drop a call, an
argument or an operand, which most of the faults found so far were.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import os
import queue
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "tests" / "mutants.txt"
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip
_NOT_CHANGED = ("__repr__", "_repr_html_", "__str__")
"""Functions whose results are for people."""
_LOGS = ("_log", "logging", "warnings", "report")
_OWN_TIMEOUT_S, _SUITE_TIMEOUT_S = 600, 3600

_running: set[subprocess.Popen[bytes]] = set()
"""The tests that run now, each in a process group of its own, which a signal to this process does not reach."""


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    source: str
    """The whole changed file."""
    text: str = ""
    """The line, before the change."""

    @property
    def name(self) -> str:
        """The change without its line number, which other changes of the file move."""
        return f"{self.path}: {self.text}: {self.kind}: {self.before} -> {self.after}"


class _Changes(ast.NodeVisitor):
    """Collects the changes of a file as (node, kind, replacement)."""

    def __init__(self) -> None:
        self.changes: list[tuple[ast.AST, str, str]] = []

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
            return  # words for people; positions inside of f-strings are wrong before Python 3.12
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        super().visit(node)

    def add(self, node: ast.AST, kind: str, replacement: ast.AST | str) -> None:
        text = replacement if isinstance(replacement, str) else ast.unparse(ast.fix_missing_locations(replacement))
        is_expression = isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Name))
        self.changes.append((node, kind, f"({text})" if is_expression else text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _NOT_CHANGED:
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # and not its decorators: a record that is not frozen is the same
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        if len(node.ops) == 1 and (other := _COMPARE.get(type(node.ops[0]))):
            self.add(node, "comparison", ast.Compare(node.left, [other()], node.comparators))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        for i in range(len(node.values)):
            left = [value for j, value in enumerate(node.values) if j != i]
            self.add(node, "operand", left[0] if len(left) == 1 else ast.BoolOp(node.op, left))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if any(_is_text(side) for side in (node.left, node.right)):
            return
        if other := _ARITHMETIC.get(type(node.op)):
            self.add(node, "arithmetic", ast.BinOp(node.left, other(), node.right))
        self.add(node, "operand", node.left)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, "constant", str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        self.generic_visit(node)
        self.add(node.test, "condition", ast.UnaryOp(ast.Not(), node.test))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        self.add(node, "condition", node.body)
        self.add(node, "condition", node.orelse)

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        # A bool is changed as a constant is, and None in place of False is the same to an `if`.
        value = node.value.value if isinstance(node.value, ast.Constant) else node.value
        if value is not None and value is not False:
            self.add(node, "return", "return None")

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "raise", "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).split(".")[0].endswith(_LOGS):
            self.generic_visit(node)
            self.add(node, "call", "pass")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self.add(node, "assignment", "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.add(node, "assignment", "pass")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None and not ast.unparse(node.func).endswith(_LOGS):
                left = [other for j, other in enumerate(node.keywords) if j != i]
                self.add(node, f"argument {keyword.arg}", ast.Call(node.func, node.args, left))

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "continue", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "break", "pass")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def own_tests(path: str) -> list[str]:
    """The test files of a module: of its name, at each level, or those that `tests/README.md` lists for it."""
    module = Path(path).relative_to("spark_dl")
    tests = ROOT / "tests"
    changed_tests = runpy.run_path(str(ROOT / "conf" / "changed_tests.py"))
    if listed := changed_tests["listed_tests"]().get(str(module)):
        return [f"tests/{name}" for name in listed]
    mirrored = [str(test) for test in changed_tests["tests_of"](path)]
    if module.name == "__init__.py":
        return mirrored
    by_name = [str(test.relative_to(ROOT)) for test in sorted(tests.rglob(f"test_{module.stem}.py"))]
    elsewhere = [test for test in by_name if not test.startswith("tests/unit/")]
    own = [test for test in mirrored if Path(test).stem.endswith(module.stem)]
    return [*own, *elsewhere] if own else by_name or mirrored


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yields all changes of a file, in the order of its lines."""
    source = path.read_text()
    changes = _Changes()
    changes.visit(ast.parse(source))
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    content = source.encode()
    for node, kind, text in changes.changes:
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        changed = (content[:start] + text.encode() + content[end:]).decode()
        before = " ".join(content[start:end].decode().split())
        number = node.lineno  # type: ignore[attr-defined]
        after, line = " ".join(text.split()), lines[number - 1].strip()
        yield Mutant(str(path.relative_to(ROOT)), number, kind, before, after, changed, line)


def draw(room: str, count: int, seed: int) -> list[Mutant]:
    """Draws changes in a folder or a file of the package, without those that were judged equivalent."""
    at = ROOT / "spark_dl" / room
    files = sorted(at.rglob("*.py")) if at.is_dir() else [at.with_suffix(".py")]
    known = {line.rpartition(" # ")[0] for line in EQUIVALENT.read_text().splitlines() if not line.startswith("#")}
    found = [mutant for file in files for mutant in mutants_of(file) if mutant.name not in known]
    return random.Random(seed).sample(found, min(count, len(found)))


class Copy:
    """A copy of the repository, in which one change at a time is made."""

    def __init__(self, folder: str):
        self.path = Path(folder)
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.path / name)
        for name in (".venv", ".venv-petastorm", ".data"):
            if (ROOT / name).exists():
                (self.path / name).symlink_to((ROOT / name).resolve())

    @property
    def env(self) -> dict[str, str]:
        """The environment in which processes find the package of the copy, and no GPU."""
        return {**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}

    def notices(self, mutant: Mutant, tests: Sequence[str], timeout_s: float) -> bool:
        """Whether one of the tests fails, or does not end, with the change."""
        file = self.path / mutant.path
        before = file.read_text()
        file.write_text(mutant.source)
        try:
            return not self.passes(tests, timeout_s)
        finally:
            file.write_text(before)

    def passes(self, tests: Sequence[str], timeout_s: float) -> bool:
        """Runs tests. Those that do not end in time are killed, with what they have started."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
                   "-m", "not slow and not long", *tests]  # fmt: skip
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command, cwd=self.path, env=self.env, stdout=quiet, stderr=quiet, start_new_session=True
        ) as process:
            _running.add(process)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
            finally:
                _end(process)
                _running.discard(process)
        if code == 5:  # no test was selected
            return True
        return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Changes the package in one place at a time.")
    parser.add_argument("room", help="folder or module below spark_dl, such as data/columns; '' for all")
    parser.add_argument("--count", type=int, default=30, help="number of changes (30)")
    parser.add_argument("--seed", type=int, default=0, help="which changes are drawn (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="changes that are tried at once")
    parser.add_argument("--suite", nargs="*", default=[], help="further tests, for what a module's own let pass")
    options = parser.parse_args()
    mutants = draw(options.room, options.count, options.seed)
    if not mutants:
        parser.error(f"nothing to change in spark_dl/{options.room}")
    own, later, survivors = [], [], []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for i in range(options.jobs):
            (Path(folder) / str(i)).mkdir()
            copies.put(Copy(str(Path(folder) / str(i))))

        def try_one(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.get()
            try:
                if copy.notices(mutant, own_tests(mutant.path), _OWN_TIMEOUT_S):
                    return mutant, "own"
                if options.suite and copy.notices(mutant, options.suite, _SUITE_TIMEOUT_S):
                    return mutant, "suite"
                return mutant, ""
            finally:
                copies.put(copy)

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        begin = time.monotonic()
        pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
        try:
            for done, (mutant, by) in enumerate(pool.map(try_one, mutants), 1):
                {"own": own, "suite": later, "": survivors}[by].append(mutant)
                state = {"own": "noticed", "suite": "noticed by the suite", "": "SURVIVED"}[by]
                print(f"[{done}/{len(mutants)}, {time.monotonic() - begin:.0f} s] {state}: {mutant.path}:{mutant.line} "
                      f"{mutant.kind}", flush=True)  # fmt: skip
        finally:  # after an interrupt, nothing more is begun, and what runs is ended
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*_running]:
                _end(process)
            pool.shutdown()
    print(f"\n{len(mutants)} changes in spark_dl/{options.room}, seed {options.seed}: {len(own)} noticed by the tests "
          f"of their modules, {len(later)} by the suite, {len(survivors)} survived")  # fmt: skip
    for mutant in survivors:
        print(f"  line {mutant.line} of {mutant.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
