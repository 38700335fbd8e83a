"""A sample of random cases, the same each time, and those that fell before; `make fuzz` draws others."""

import subprocess
import sys

import pytest

from tests.fuzz.__main__ import SAMPLE
from tests.spark.conftest import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_cases_are_right_or_refused():
    """In a process of its own, as a process has one Spark session."""
    command = [sys.executable, "-m", "tests.fuzz", "--sample"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"damage: {SAMPLE['damage']} cases" in done.stdout
