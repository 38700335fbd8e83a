"""The benchmark of gradient exchange as its command is called, on a small scale: figures of all that it measures."""

import json
import subprocess
import sys

import pytest

from benchmarks.model.profiles import PROFILES
from benchmarks.testbed import testbed
from benchmarks.testbed.standalone import start_spark
from spark_dl.parallel.exchange.buckets import CANDIDATES_MIB
from tests.hosts.conftest import REPOSITORY, parts
from tests.spark.conftest import FAST_JVM

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def fast_jvm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", FAST_JVM)
        yield


KEYS = {"method", "exact", "hosts", "mib", "seconds", "bytes_per_rank", "limit_s", "ratio_to_limit",
        "busiest_link_bytes", "times_ring"}  # fmt: skip


METHODS = ("ddp", "ddp topk", "tree_reduce", "stream")


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
    assert said.count("left out") == 1, said[-3000:]
    assert parts(f"spark_dl-{process.pid}-") == set()
    assert "<svg" in (folder / "report.html").read_text()
    return json.loads(out.splitlines()[-1]), json.loads((folder / "report.json").read_text())


def test_exchanges_are_measured_by_the_links_own_counters(measured):
    last, results = measured
    rows = {(row["method"], row["mib"]): row for row in last["rows"]}
    assert rows.keys() == {(method, 4) for method in METHODS}
    (unchecked,) = last["left_out"]  # of one size
    assert unchecked.startswith("the cost model of ddp, ddp topk, tree_reduce: ")
    assert results["left_out"] == last["left_out"]
    assert not {"model", "crossings"} & results.keys()
    assert [rows[method, 4]["exact"] for method in METHODS] == [True, False, True, False]
    assert all(row.keys() == KEYS and row["hosts"] == 2 for row in rows.values())
    ddp = rows["ddp", 4]  # 2 N (P - 1) / P, and the headers of packets
    assert 1 < ddp["bytes_per_rank"] / (4 << 20) < 1.02
    assert ddp["limit_s"] == pytest.approx((4 << 20) * 8 / 400e6)
    assert 0.2 < ddp["ratio_to_limit"] < 1.05
    stream = rows["stream", 4]  # the same bytes, and nobody waits for another rank
    assert 1 < stream["bytes_per_rank"] / (4 << 20) < 1.02
    assert stream["ratio_to_limit"] > 0.9 * ddp["ratio_to_limit"]
    # The driver gets all gradients and sends the weights: the busiest link carries more than in a ring.
    assert rows["tree_reduce", 4]["busiest_link_bytes"] > 1.5 * ddp["busiest_link_bytes"]
    assert rows["tree_reduce", 4]["times_ring"] > 1
    assert {(row["method"], row["ranks"]) for row in results["plan"]} == {
        (method, ranks) for method in ("ddp", "tree_reduce") for ranks in (2, 16, 64, 256, 1024, 4096)
    }
    for row in results["plan"]:  # what is counted for large clusters is what went over these links
        if row["ranks"] == 2:
            assert row["measured_busiest_bytes"] == pytest.approx(row["busiest_link_bytes"], rel=0.3)


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


def run_on(bed, *arguments, folder, timeout_s=500):
    """The last line of the command's standard output, run where a driver would, and the results behind its report."""
    command = [
        sys.executable,
        str(REPOSITORY / "jobs" / "bench.py"),
        "exchange",
        "--report",
        str(folder / "report.html"),
    ]
    out = bed.run(bed.driver, [*command, *arguments], timeout_s=timeout_s)
    return json.loads(out.splitlines()[-1]), json.loads((folder / "report.json").read_text())


def test_a_cluster_that_is_there(hosts, tmp_path):
    shared, methods = tmp_path / "shared", ("ddp", "ddp topk")
    with hosts(2, rate_mbit=400) as bed:
        last, results = run_on(
            bed, "--master", start_spark(bed), "--folder", str(shared), "--hosts", "2", "--rate-mbit", "400",
            "--mib", "1,4", "--methods", ",".join(methods), "--sections", "exchange,buckets,stragglers,scaling",
            "--scale", "0.05", "--repeats", "1", "--straggler-s", "0.01", folder=tmp_path,
        )  # fmt: skip
    assert {(row["method"], row["mib"]) for row in last["rows"]} == {(m, mib) for m in methods for mib in (1, 4)}
    scaling, unchecked = last["left_out"]
    assert scaling == "scaling: needs virtual hosts on this machine"
    assert unchecked.startswith("the cost model of ddp, ddp topk: ")
    sizes = {row["bucket_mib"] for row in results["buckets"]}
    assert len(sizes) > 3
    assert sizes <= {*CANDIDATES_MIB}
    for row in results["buckets"]:  # the model of the buckets is that of this network, which can only be slower
        layers = PROFILES[row["profile"]]().shrunk(0.05).backward_layers()
        sent_bits = 8 * sum(layer.gradient_bytes for layer in layers)
        assert min(row["predicted_s"], row["step_s"]) > 0.8 * sent_bits / 400e6
    rows = {row["method"]: row for row in results["stragglers"]}
    assert {method: row["exact"] for method, row in rows.items()} == {"ddp": True, "ddp topk": False}
    assert all(row["accuracy"] > 0.8 for row in rows.values())
    assert list(shared.iterdir()) == []


def test_a_cluster_with_more_slots_than_hosts_is_refused(hosts, tmp_path):
    with hosts(2, rate_mbit=400) as bed:
        master = start_spark(bed, cores_per_worker=2)
        with pytest.raises(RuntimeError, match=r"has 4 task slots; expected 2, one on each .*spark\.cores\.max"):
            run_on(bed, "--master", master, "--folder", str(tmp_path), "--hosts", "2", folder=tmp_path)


def test_scaling_shares_out_the_compute_or_keeps_it(possible, tmp_path):
    command = [
        sys.executable, "jobs/bench.py", "exchange", "--sections", "scaling", "--methods", "ddp",
        "--scaling-ranks", "1,2", "--rate-mbit", "400", "--scale", "0.05", "--repeats", "1",
        "--report", str(tmp_path / "report.html"),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=REPOSITORY, timeout=300, stdout=subprocess.DEVNULL)
    rows = {(row["kind"], row["ranks"]): row for row in json.loads((tmp_path / "report.json").read_text())["scaling"]}
    assert rows.keys() == {(kind, ranks) for kind in ("weak", "strong") for ranks in (1, 2)}
    for kind, ranks in rows:
        row = rows[kind, ranks]
        assert row["backward_s"] == pytest.approx(rows["weak", 1]["backward_s"] / (ranks if kind == "strong" else 1))
        assert row["step_s"] >= row["forward_s"] + row["backward_s"]
        share = ranks if kind == "strong" else 1
        assert row["efficiency"] == pytest.approx(rows[kind, 1]["step_s"] / share / row["step_s"])
