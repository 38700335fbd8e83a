"""Runs rounds of random cases, and keeps what falls as tests."""

import hashlib
import importlib
import itertools
import pathlib
import shutil
from dataclasses import dataclass

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import changes, damage, keys, resumed, states, tables, ties, windows
from tests.fuzz import settings as settings_
from tests.ranks.launcher import RankFailed

PROPERTIES = {
    "tables": tables,
    "windows": windows,
    "states": states,
    "resumed": resumed,
    "settings": settings_,
    "damage": damage,
    "keys": keys,
    "ties": ties,
    "changes": changes,
}
"""Modules with `cases`, a strategy, and `check`, called with the session, a folder that does not exist, and a case. The
text of a case can be evaluated in its module."""
FOUND = pathlib.Path(__file__).parent / "found"
_TEXT = '''"""Found by `make fuzz`: {error}"""

# ruff: noqa
# fmt: off
from tests.fuzz.{name} import *

NAME = {name!r}
CASE = {case!r}
'''
_numbers = itertools.count()


@dataclass(frozen=True)
class Failure:
    """A case that fell, as small as it could be made."""

    name: str
    case: object
    error: BaseException

    def __str__(self):
        return f"{type(self.error).__name__}: {str(self.error)[:600]}\n{self.case!r}"

    def keep(self):
        """Writes the case as Python. Returns its path."""
        number = hashlib.sha256(repr(self.case).encode()).hexdigest()[:8]
        text = str(self.error)
        if isinstance(self.error, RankFailed):  # a traceback, with paths of this machine
            text = text.strip().splitlines()[-1]
        error = " ".join(f"{type(self.error).__name__}: {text}".split())[:200]
        error = error.replace("\\", "/").replace('"', "'")
        path = FOUND / f"{self.name}_{number}.py"
        path.write_text(_TEXT.format(error=error, name=self.name, case=self.case))
        return path


def run_round(name, spark, folder, *, seed, cases, shrink=True):
    """Runs a round of random cases. Returns the number of cases, and a Failure or None."""
    ran = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases, deadline=None, database=None, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
    )  # fmt: skip
    @given(PROPERTIES[name].cases())
    def check(case):
        ran.append(case)
        of_case = pathlib.Path(folder, str(next(_numbers)))
        try:
            PROPERTIES[name].check(spark, of_case, case)
        finally:
            shutil.rmtree(of_case, ignore_errors=True)

    try:
        check()
    except Exception as error:  # of the smallest case, which ran last
        return len(ran), Failure(name, ran[-1], error)
    return len(ran), None


def found_cases():
    """The paths of the cases that were found before."""
    return sorted(path for path in FOUND.glob("*.py") if path.name != "__init__.py")


def try_found(path, spark, folder):
    """Tries a case that was found before. Returns a Failure or None."""
    found = importlib.import_module(f"tests.fuzz.found.{path.stem}")
    try:
        PROPERTIES[found.NAME].check(spark, pathlib.Path(folder, str(next(_numbers))), found.CASE)
    except Exception as error:
        return Failure(found.NAME, found.CASE, error)
    return None
