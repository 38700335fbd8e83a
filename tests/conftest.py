"""What every test must leave as it found it: environment, process group, threads, child processes, working folder."""

import contextlib
import gc
import hashlib
import logging
import os
import re
import signal
import threading
import time
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

# Before torch is imported. Ranks of tests share two cores: threads of OpenMP that wait for work keep them busy.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import torch.distributed as dist

from tests.builders import s3
from tests.ranks.launcher import pool_pids

_KEPT = {
    "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON",
    "SPARK_LOCAL_IP", "PYTHONPATH", "JAVA_TOOL_OPTIONS", "PYTORCH_NVML_BASED_CUDA_CHECK",
    "_MLFLOW_TELEMETRY_SESSION_ID", "_RJEM_MALLOC_CONF", *s3.ENV,
}  # fmt: skip
"""Set by torch, by Lightning, by MLflow, by Polars and by the Spark fixture, for the whole session."""
_LEAVE_WAIT_S = 10.0
_LONG_S = 900
"""The time limit of long tests without one of their own; that of others is in pyproject.toml."""


def pytest_collection_modifyitems(items):
    """The largest groups of tests that run in one process come first; unit tests fill the rest of the time."""
    items[:] = [item for item in items if not _in_another_mode(item)]
    for item in items:
        if any(_mode_of(item) in marker.args for marker in item.iter_markers("long_in")):
            item.add_marker("long")
        if _mode_of(item) in ("local-cluster", "connect"):  # which take a while to start
            item.add_marker("slow")
    _mark_what_is_not_sampled(items)
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_LONG_S))
    order = {
        "ranks": 0, "local 0": 0, "local 1": 0, "gpu": 0, "local-cluster": 1, "fuzz": 1, "connect": 2, "hosts": 3,
        "package": 3, "tests/spark/test_jobs.py": 3, "petastorm": 4, "spark": 5, "storage": 6, "unit": 7,
        "benchmarks": 7,
    }  # fmt: skip
    items.sort(key=lambda item: order.get(_costly_fixture(item.nodeid), order[item.nodeid.split("/")[1]]))


def pytest_collection_finish():
    """What is there now stays: torch, and 10,000 tests. Garbage collection need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share a costly fixture run in one process: of a Spark cluster, of the rank pool, or of a file.

    Hosts share the cores of the machine, and their rates are measured, so one process has all of them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFixture(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _costly_fixture(nodeid)

    return ByFixture(config, log)


def _costly_fixture(nodeid):
    """Tests with the same name of it share it: a kind of Spark session, or a pool of ranks; a file shares its own.

    There are two pools of ranks and two local sessions, as these tests take longest.
    """
    path, _, test = nodeid.partition("::")
    mode = re.search(r"[\[-](local-cluster|local|connect)[-\]]", test)
    folder, half = Path(path).parent.name, zlib.crc32(path.encode()) % 2
    if folder == "ranks":
        return f"ranks {half}"
    if folder == "spark" and mode:
        return f"local {half}" if mode.group(1) == "local" else mode.group(1)
    return folder if folder in ("hosts", "gpu") else path


def _in_another_mode(item):
    """Tests of what does not depend on the kind of cluster run in some modes only."""
    mode, marker = _mode_of(item), item.get_closest_marker("modes")
    return mode is not None and marker is not None and mode not in marker.args


def _mark_what_is_not_sampled(items):
    """Of the cases of a test that has many, some stay where they are; the others are long.

    A hash of their names chooses, so that no value of a parameter is left out by the order of the cases, and a new case
    changes the choice by one at most.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0], item.get_closest_marker("slow") is None].append(item)
    for same_test in cases.values():
        (kept,) = same_test[0].get_closest_marker("sampled").args
        for item in sorted(same_test, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())[kept:]:
            item.add_marker("long")


def _mode_of(item):
    """The kind of the Spark cluster of a test; None without one."""
    return item.callspec.params.get("spark") if hasattr(item, "callspec") else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """PySpark says in the environment that there is a Connect session. The processes of other tests must not see it."""
    if _costly_fixture(item.nodeid) != "connect":
        os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)


@pytest.fixture
def no_launcher(monkeypatch):
    """This process is alone, whatever has started it: no variables of torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def _of_process():
    return logging.getLogger("spark_dl").level, signal.getsignal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def no_leaks(request):
    if "tmp_path" in request.fixturenames:  # so that it is removed after what uses it has ended
        request.getfixturevalue("tmp_path")
    env = dict(os.environ)
    threads = set(threading.enumerate())
    children = _children()
    folder = set(os.listdir("."))
    kept = _of_process()
    yield
    changed = {k for k in env.keys() | os.environ.keys() if env.get(k) != os.environ.get(k)} - _KEPT
    assert not changed, f"environment variables left changed: {changed}"
    assert _of_process() == kept, "the level of the log, or the handler of SIGTERM, was left changed"
    assert not dist.is_initialized(), "a process group was left"
    assert _gone(lambda: [t.name for t in set(threading.enumerate()) - threads if t.name.startswith("spark_dl")]) == []
    if not {"spark", "driver"} & set(request.fixturenames):  # Spark's own Python workers outlive a test
        assert _gone(lambda: [_command(pid) for pid in _children() - children - pool_pids()]) == []
    assert set(os.listdir(".")) - folder <= {"spark-warehouse", "artifacts", "__pycache__", ".hypothesis"}, (
        "files left behind"
    )


def _children():
    """Numbers of the child processes and theirs, without those that Python's multiprocessing keeps for itself.

    Linux lists the children of a process; psutil reads all processes of the machine, 10 ms for each of 4,000 tests.
    """
    return {pid for pid in _descendants(os.getpid()) if "resource_tracker" not in _command(pid)}


def _descendants(pid):
    """Not below a JVM: its children move from thread to thread as threads end, so one reading can miss them."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread or the process has just ended
            for child in map(int, listed.read_text().split()):
                found += [child, *([] if "/bin/java " in _command(child) else _descendants(child))]
    return found


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has just ended
        return "resource_tracker"


def _gone(left):
    end = time.monotonic() + _LEAVE_WAIT_S
    while left() and time.monotonic() < end:
        time.sleep(0.05)
    return left()
