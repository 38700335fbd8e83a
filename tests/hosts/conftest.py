"""Beds for tests, and what every test must leave: no namespace, file or process of a bed that it made."""

import os
import pathlib
import time

import pytest

from spark_dl.bench.testbed import reap, testbed

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
