"""The examples, run as a user runs them, keep what their docstrings promise."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.spark.conftest import REPOSITORY
from tests.spark.test_jobs import environment

HAS_SKLEARN = importlib.util.find_spec("sklearn") is not None  # importing it changes the environment
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HAS_SKLEARN, reason="needs scikit-learn"),
]
TIMEOUT_S = 300


def run(name, *args, code=0):
    """Runs an example in a local session. Returns its standard output and standard error."""
    command = [sys.executable, f"examples/{name}.py", *map(str, args)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, done.stderr


@pytest.fixture
def flights():
    """The table of flights that `make test-long` downloads."""
    if not (REPOSITORY / ".data" / "flights.csv.zip").exists():
        pytest.skip("no .data/flights.csv.zip; `make .data/flights.csv.zip` downloads it")


@pytest.mark.long
def test_linear_regression_reaches_the_exact_solution(tmp_path):
    out, _ = run("linear_regression", "--folder", tmp_path)
    errors = dict(re.findall(r"^(\S.*?) +\d+\.\d +(\d\.\d+)$", out, re.MULTILINE))
    assert {"exact, by Spark ML", "by hand", "nn.Linear, ddp", "nn.Linear, tree_reduce"} <= set(errors)
    assert ("nn.Linear, horovod" in errors) != ("horovod is left out" in out)
    exact = float(errors["exact, by Spark ML"])
    assert exact == pytest.approx(
        0.4823 * 441 / 442, abs=1e-4
    )  # 1 - R^2 of this table is 0.4823; Spark divides by n - 1
    for error in errors.values():
        assert exact <= float(error) + 1e-6 <= exact * 1.001 + 2e-6
    last = re.fullmatch(
        r"largest excess over the exact solution 0\.0\d+%, between strategies 0\.\d+%", out.splitlines()[-1]
    )
    assert last, out


@pytest.mark.long
def test_linear_regression_says_so_if_it_does_not(tmp_path):
    _, err = run("linear_regression", "--folder", tmp_path, "--steps", "2", code=1)
    assert "error: the excess is above 0.1%" in err


@pytest.mark.long
def test_streaming_scoring_scores_every_row_once(tmp_path):
    out, _ = run("streaming_scoring", "--folder", tmp_path)
    batches = [[int(n) for n in found.split(",")] for found in re.findall(r"^query \d: .*\[(.*)\]$", out, re.MULTILINE)]
    assert [len(found) for found in batches] == [3, 3]
    assert [sum(found) for found in batches] == [599, 599]
    assert "1198 images: 1198 rows scored, 1198 ids, 1198 predictions equal" in out.splitlines()[-1]
    (accuracy,) = re.findall(r"^(\d+\.\d)% of the digits are right", out, re.MULTILINE)
    assert float(accuracy) > 80


@pytest.mark.long
def test_embeddings_of_real_flights_are_as_good_as_logistic_regression_or_better(flights, tmp_path):
    out, _ = run("flights", "--folder", tmp_path)
    (found,) = re.findall(r"embeddings (0\.\d+), Spark's logistic regression (0\.\d+)$", out, re.MULTILINE)
    assert float(found[0]) >= float(found[1]) > 0.6


@pytest.mark.long
def test_a_cnn_knows_from_which_photo_a_tile_is(tmp_path):
    out, _ = run("images", "--folder", tmp_path)
    (accuracy,) = re.findall(r"^accuracy on the held-out tiles: (\d+\.\d)%$", out, re.MULTILINE)
    assert float(accuracy) >= 90


@pytest.mark.long
def test_a_model_of_flights_is_better_after_each_new_month(flights, tmp_path):
    out, _ = run("incremental", "--folder", tmp_path)
    lines = re.findall(
        r"^month (\d+) arrived, .*: AUROC on month (\d+): (0\.\d+) before, (0\.\d+) after$", out, re.MULTILINE
    )
    assert [(int(month), int(unseen)) for month, unseen, *_ in lines] == [(5, 6), (6, 7)]
    for *_, before, after in lines:
        assert 0.6 < float(before) < float(after)
    assert sorted(p.name for p in (tmp_path / "table").glob("month=*")) == [f"month={n}" for n in range(1, 7)]
    steps = [int(n) for n in re.findall(r"^\S*run-0\d: (\d+) steps", out, re.MULTILINE)]
    assert len(steps) == 3
    assert max(steps[1:]) < 60 < steps[0]  # 28,128 and 27,075 rows in batches of 512: the new month only


def test_flights_that_cannot_be_downloaded_are_an_error_that_says_what_to_do(tmp_path):
    env = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "0",
    }
    wanted = tmp_path / "flights.csv.zip"
    command = [sys.executable, "examples/flights.py", "--download", "--data", wanted]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=REPOSITORY, env={**os.environ, **env}
    )
    assert done.returncode == 1
    assert "error: cannot download the flights: ERROR: " in done.stderr
    assert f"name it with --data, or copy it to {wanted}" in done.stderr
    assert not wanted.exists()
