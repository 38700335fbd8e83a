"""Clocks of hosts that differ, and that jump while ranks wait for each other: nothing depends on the time of day."""

import ast
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import spark_dl
from spark_dl.rundir import checkpoint
from tests.builders.clock import HAS_COMPILER, build_clock
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs, same_bits

DAY_S = 24 * 3600
PACKAGE = Path(spark_dl.__file__).parent
REPOSITORY = PACKAGE.parent


def train(tmp_path, name, library, jumps):
    """Trains with a rank for each jump of a clock. Returns the weights, and what the ranks print."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ, "LD_PRELOAD": library, "WORLD_SIZE": str(len(jumps)), "LOCAL_WORLD_SIZE": str(len(jumps)),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = []
    try:
        for rank, seconds in enumerate(jumps):
            job = ["-m", "tests.ranks.clock_job", str(tmp_path / "data"), str(tmp_path / name), library, str(seconds)]
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *job], env=own, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True,
                )
            )  # fmt: skip
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    return checkpoint.load(checkpoint.find(str(tmp_path / name)), "model.pt")["0"], [json.loads(o) for o, _ in outputs]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not HAS_COMPILER, reason="the library that sets the clock back needs gcc")
def test_F27_clocks_that_jump_change_nothing(tmp_path):
    library = build_clock(tmp_path)
    write_dataset(str(tmp_path / "data"), blobs(245), group_rows=40)
    start = time.monotonic()
    weights, outputs = train(tmp_path, "jumped", library, [-DAY_S, DAY_S])
    assert outputs == [[24, -DAY_S], [24, DAY_S]]
    assert time.monotonic() - start < 100
    twin, outputs = train(tmp_path, "twin", library, [0, 0])
    assert outputs == [[24, 0], [24, 0]]
    assert same_bits(weights, twin)


def _times_of_day(tree):
    """The calls of `time.time()`, each with whether it is a value of a dict, that is, only noted."""
    noted = {id(value) for node in ast.walk(tree) if isinstance(node, ast.Dict) for value in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "datetime.now", "datetime.utcnow"):
            yield node.lineno, id(node) in noted


@pytest.mark.parametrize("room", ["launch", "parallel", "baselines", "training", "rundir", "data/load", "data/read"])
def test_F27_the_time_of_day_is_noted_and_never_compared(room):
    """For waits and limits there is the monotonic clock. Leases of the store, which outlive processes, need dates."""
    found = [
        f"{path}:{line}"
        for path in (PACKAGE / room).rglob("*.py")
        for line, is_noted in _times_of_day(ast.parse(path.read_text()))
        if not is_noted
    ]
    assert found == []
    assert list(_times_of_day(ast.parse("x = {'a': time.time()}; y = time.time() + 5"))) == [(1, True), (1, False)]
