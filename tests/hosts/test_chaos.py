"""`jobs/bench.py chaos` with few seeds: random faults change nothing that a run ends with."""

import json
import os
import subprocess
import sys

import pytest

from tests.hosts.conftest import REPOSITORY, parts, wait_until
from tests.spark.conftest import FAST_JVM

SEEDS = 3
RUNS = 3 * SEEDS
"""One for each strategy."""


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_F32_random_faults_end_with_the_bits_of_an_undisturbed_run(possible, tmp_path):
    command = [sys.executable, "jobs/bench.py", "chaos", "--seeds", str(SEEDS), "--out", str(tmp_path / "rows.json")]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env={**os.environ, "JAVA_TOOL_OPTIONS": FAST_JVM}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=1400)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = json.loads(out.splitlines()[-1])
    assert found.pop("faults") == sum(len(row["faults"]) for row in rows) >= RUNS, err[-3000:]
    assert found == {"seeds": SEEDS, "equal": SEEDS, "lost_rows": 0, "repeated_rows": 0, "hangs": 0, "leftovers": 0}, (
        err[-3000:]
    )
    assert [row["error"] for row in rows] == [None] * RUNS
    assert sum(row["restarts"] for row in rows) > 0
    wait_until(lambda: not parts(f"spark_dl-{process.pid}-"))
