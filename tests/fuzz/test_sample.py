"""A sample of random cases, the same each time; `make fuzz` draws others."""

import pytest

from tests.fuzz import run

CASES = {"tables": 20, "windows": 12, "states": 60, "resumed": 12, "settings": 30, "damage": 40}
"""Together, about two minutes."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_random_cases_are_right_or_refused(spark, tmp_path, name):
    ran, failure = run.run_round(name, spark, tmp_path, seed=1, cases=CASES[name], shrink=False)
    assert failure is None, str(failure)
    assert ran >= CASES[name]
