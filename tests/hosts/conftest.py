"""Beds for tests, and what every test must leave: no namespace, file or process of a bed that it made."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks.testbed import reap, testbed
from tests.spark.conftest import FAST_JVM

REPOSITORY = pathlib.Path(__file__).parents[2]
LEAVE_WAIT_S = 20.0


@pytest.fixture(scope="session")
def possible():
    if reason := testbed.unavailable():
        pytest.skip(reason)


@pytest.fixture
def hosts(possible):
    """`testbed.hosts`, where this machine can make them. Afterwards nothing is left of them."""
    before = parts()
    yield testbed.hosts
    wait_until(lambda: parts() <= before, lambda: f"left of a bed: {parts() - before}")


def run_driver(bed, folder, *command, timeout_s=240.0):
    """Runs a Python module as the driver of a bed, to its end. Returns what its last line says, as JSON.

    Its output is in the files `stdout` and `stderr` of the folder.
    """
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        driver = bed.popen(
            bed.driver, [sys.executable, "-m", *command], cwd=REPOSITORY, env={"JAVA_TOOL_OPTIONS": FAST_JVM},
            stdout=out, stderr=err,
        )  # fmt: skip
    try:
        code = driver.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = "none in time"
    assert code == 0, testbed.read_tail(folder / "stderr")
    return json.loads((folder / "stdout").read_text().splitlines()[-1])


def state_of(pid):
    """As proc_pid_stat(5) has it; Z for one that is gone, or need only be waited for."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def parts(bed=None):
    """The namespaces, their files and the folder of a bed, or of all beds of this process."""
    prefix = bed or f"spark_dl-{os.getpid()}-"
    folders = (reap.NAMESPACES, reap.FILES, reap.bed_folder("x").parent)
    return {path for folder in folders for path in folder.glob(f"{prefix}*")}


def wait_until(true, message=lambda: "", timeout_s=LEAVE_WAIT_S):
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, message()
        time.sleep(0.05)
