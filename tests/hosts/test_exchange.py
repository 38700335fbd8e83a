"""The benchmark of gradient exchange as its command is called, on a small scale: figures of all that it measures."""

import json
import subprocess
import sys

import pytest

from tests.hosts.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

KEYS = {"method", "hosts", "mib", "seconds", "bytes_per_rank", "limit_s", "ratio_to_limit", "busiest_link_bytes"}


def bench(folder, *args):
    """The last line of standard output, and the results behind the report. Nothing is left of the hosts."""
    command = [sys.executable, "jobs/bench.py", "exchange", *args, "--report", str(folder / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "<svg" in (folder / "report.html").read_text()
    return json.loads(done.stdout.splitlines()[-1]), json.loads((folder / "report.json").read_text())


def test_exchanges_are_measured_by_the_links_own_counters(hosts, tmp_path):
    methods = "ddp,ring,tree_reduce,parameter_server async"
    last, results = bench(
        tmp_path, "--hosts", "3", "--rate-mbit", "400", "--mib", "1,4", "--methods", methods, "--sections", "exchange"
    )
    rows = {(row["method"], row["mib"]): row for row in last["rows"]}
    assert rows.keys() == {(method, mib) for method in methods.split(",") for mib in (1, 4)}
    assert all(row.keys() == KEYS and row["hosts"] == 3 for row in rows.values())
    for method in ("ddp", "ring"):  # 2 N (P - 1) / P, and the headers of packets
        assert 4 / 3 < rows[method, 4]["bytes_per_rank"] / (4 << 20) < 1.1 * 4 / 3
        assert rows[method, 4]["limit_s"] == pytest.approx(4 / 3 * (4 << 20) * 8 / 400e6)
        assert 0.2 < rows[method, 4]["ratio_to_limit"] < 1.05
    # The driver gets all gradients and sends the weights: the busiest link carries more than in a ring.
    assert rows["tree_reduce", 4]["busiest_link_bytes"] > 2 * rows["ddp", 4]["busiest_link_bytes"]
    assert {point["method"] for point in results["model"]} == {"ddp", "ring", "tree_reduce"}
    assert {row["ranks"] for row in results["plan"]} == {16, 64, 256, 1024, 4096}
