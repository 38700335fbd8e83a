"""The benchmark of gradient exchange as its command is called, on a small scale: figures of all that it measures."""

import json
import subprocess
import sys

import pytest

from spark_dl.bench import testbed
from spark_dl.parallel.buckets import CANDIDATES_MIB
from tests.hosts.conftest import REPOSITORY, parts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {"method", "exact", "hosts", "mib", "seconds", "bytes_per_rank", "limit_s", "ratio_to_limit",
        "busiest_link_bytes", "times_ring"}  # fmt: skip


METHODS = ("ddp", "ddp topk", "tree_reduce")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The last line of standard output, and the results behind the report. Nothing is left of the hosts."""
    if reason := testbed.unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("exchange")
    command = [
        sys.executable, "jobs/bench.py", "exchange", "--hosts", "2", "--rate-mbit", "400", "--mib", "4",
        "--scale", "0.1", "--repeats", "2", "--methods", ",".join(METHODS),
        "--sections", "exchange,compression,breakdown,waves", "--report", str(folder / "report.html"),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        out, said = process.communicate(timeout=560)
    assert process.returncode == 0, said[-3000:]
    assert "left out" not in said, said[-3000:]
    assert parts(f"spark_dl-{process.pid}-") == set()
    assert "<svg" in (folder / "report.html").read_text()
    return json.loads(out.splitlines()[-1]), json.loads((folder / "report.json").read_text())


def test_exchanges_are_measured_by_the_links_own_counters(measured):
    last, results = measured
    rows = {(row["method"], row["mib"]): row for row in last["rows"]}
    assert rows.keys() == {(method, 4) for method in METHODS}
    assert last["left_out"] == results["left_out"] == []
    assert [rows[method, 4]["exact"] for method in METHODS] == [True, False, True]
    assert all(row.keys() == KEYS and row["hosts"] == 2 for row in rows.values())
    ddp = rows["ddp", 4]  # 2 N (P - 1) / P, and the headers of packets
    assert 1 < ddp["bytes_per_rank"] / (4 << 20) < 1.02
    assert ddp["limit_s"] == pytest.approx((4 << 20) * 8 / 400e6)
    assert 0.2 < ddp["ratio_to_limit"] < 1.05
    # The driver gets all gradients and sends the weights: the busiest link carries more than in a ring.
    assert rows["tree_reduce", 4]["busiest_link_bytes"] > 1.5 * ddp["busiest_link_bytes"]
    assert rows["tree_reduce", 4]["times_ring"] > 1
    assert {point["method"] for point in results["model"]} == {*METHODS}
    assert {row["ranks"] for row in results["plan"]} == {16, 64, 256, 1024, 4096}


def test_compression_is_measured_with_and_without_a_limit_of_the_links(measured):
    found = {(row["method"], row["rate_mbit"]): row for row in measured[1]["compression"]}
    assert found.keys() == {(method, rate) for method in ("ddp", "ddp topk") for rate in (400, None)}
    for rate in (400, None):  # 1 of 100 elements, with its place, to another rank, where N go without compression
        assert 0.02 < found["ddp topk", rate]["bytes_factor"] < 0.03
        assert found["ddp", rate]["bytes_factor"] == found["ddp", rate]["times_ring"] == 1


def test_a_step_is_the_sum_of_its_parts_and_overlaps_in_ddp_alone(measured):
    rows = {row["method"]: row for row in measured[1]["breakdown"]}
    assert rows.keys() == {"ddp", "ddp topk", "tree_reduce"}
    for row in rows.values():
        parts_s = [row[f"{part}_s"] for part in ("forward", "backward", "exposed", "optimizer", "wait", "other")]
        assert sum(parts_s) == pytest.approx(row["step_s"], rel=0.1)
    ddp = rows["ddp"]
    assert ddp["step_s"] < ddp["forward_s"] + ddp["backward_s"] + ddp["communication_s"]
    assert rows["tree_reduce"]["hidden_s"] == 0 < ddp["hidden_s"]
    assert measured[1]["auto_bucket_mib"] in CANDIDATES_MIB


def test_ranks_that_have_no_slot_wait_for_one_or_are_refused(measured):
    few, many, refused = measured[1]["waves"]
    assert many["step_s"] > few["step_s"] + 0.7 * few["compute_s"]  # a second wave
    assert refused["refused_s"] < 30
    assert "4 ranks need 4 task slots" in refused["reason"]
