"""The page of the benchmark of gradient exchange: what it says is what was measured."""

import importlib.util
import json
import re

import pytest

from benchmarks.exchange import error_runtime, report
from benchmarks.exchange.answers import answers
from benchmarks.exchange.log import Log
from spark_dl import driver

pytest.importorskip("matplotlib", reason="the report needs matplotlib")


def exchange_row(method, mib, seconds, busiest=3.0, hosts=4):
    size = mib * 2**20
    limit = 1.5 * size / 25e6
    return {
        "method": method, "hosts": hosts, "mib": mib, "seconds": seconds, "bytes_per_rank": 1.5 * size,
        "busiest_link_bytes": busiest * size, "limit_s": limit, "ratio_to_limit": limit / seconds,
    }  # fmt: skip


RESULTS = {
    "about": {"date": "2026-01-02", "network": "4 hosts at 200 Mbit/s", "command": "jobs/bench.py exchange <all>"},
    "exchange": [
        exchange_row(method, mib, factor * mib / 15) for mib in (1, 64)
        for method, factor in (("ddp", 1), ("tree_reduce", 5), ("parameter_server async", 2))
    ],
    "crossings": [{"method": "tree_reduce", "hosts": 4, "faster_mib": 1, "slower_mib": 16}],
    "compression": [
        {"method": method, "hosts": 4, "mib": 16, "rate_mbit": rate, "seconds": 1.0, "bytes_per_rank": 2e7,
         "times_ring": times, "bytes_factor": share}
        for method, rate, times, share in (
            ("ddp", 200, 1, 1), ("ddp topk", 200, 0.25, 0.125), ("ddp topk", None, 3, 0.125),
        )
    ],
    "waves": [
        {"method": "tree_reduce", "ranks": 4, "slots": 4, "compute_s": 0.5, "step_s": 0.8},
        {"method": "tree_reduce", "ranks": 8, "slots": 4, "compute_s": 0.5, "step_s": 1.4},
        {"method": "ddp", "ranks": 8, "slots": 4, "compute_s": 0.5, "refused_s": 0.2, "reason": "8 ranks, 4 slots"},
    ],
    "breakdown": [
        {"method": method, "profile": "resnet50", "step_s": 4, "forward_s": 1, "backward_s": 2, "hidden_s": hidden,
         "exposed_s": 1, "optimizer_s": 0.1, "wait_s": 0, "other_s": 0, "communication_s": 3,
         "times_largest": 4 / 3}
        for method, hidden in (("ddp", 1.5), ("tree_reduce", 0.0))
    ],
    "buckets": [{"profile": "resnet50", "bucket_mib": size, "step_s": 2, "predicted_s": 2.1} for size in (1, 25)],
    "auto_bucket_mib": 25,
    "scaling": [
        {"kind": kind, "method": "ddp", "ranks": ranks, "step_s": 1, "efficiency": 0.9, "predicted_efficiency": 0.91}
        for kind in ("weak", "strong") for ranks in (1, 2, 4)
    ],
    "stragglers": [
        {"method": method, "seconds": seconds, "accuracy": 0.97, "exact": method == "ddp", "staleness": staleness,
         "update_s": 0.3, "theory_s": 0.25,
         "curve": [{"seconds": s, "step": s, "loss": 1 / s} for s in (1, 2, 3)]}
        for method, seconds, staleness in (
            ("ddp", 30.0, None), ("parameter_server async", 10.0, {"mean": 1.5, "max": 4}),
        )
    ],
    "model": [
        {"method": "ddp", "hosts": 4, "mib": n, "measured_s": 1.0 * n, "predicted_s": 1.1 * n, "held_out": n > 1}
        for n in (1, 16)
    ],
    "plan": [
        {"method": "ddp", "ranks": ranks, "messages": 2 * ranks, "bytes_per_rank": 2e8, "busiest_link_bytes": 2e8}
        for ranks in (16, 4096)
    ],
}  # fmt: skip


def written(tmp_path, results):
    report.write_report(results, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def test_every_section_has_its_picture_and_its_rows(tmp_path):
    page = written(tmp_path, RESULTS)
    assert page.count("<h2>") == 10
    assert page.count("<svg") == 8  # two of them about the exchange
    assert page.count("<tr>") == 9 + sum(len(rows) for rows in RESULTS.values() if isinstance(rows, list)) - 1
    assert "jobs/bench.py exchange &lt;all&gt;" in page
    assert json.loads((tmp_path / "report.json").read_text()) == RESULTS


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    page = written(tmp_path, RESULTS)
    outside = re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page)
    assert [link for link in outside if "w3.org" not in link] == []
    assert "<script" not in page


def test_a_part_that_was_not_measured_is_not_there(tmp_path):
    page = written(tmp_path, {"exchange": RESULTS["exchange"]})
    assert page.count("<h2>") == 2
    assert "Scaling" not in page
    assert written(tmp_path, {"about": {}}).count("<h2>") == 1


def test_the_answers_are_the_figures():
    found = answers(RESULTS)
    assert found[0].startswith(
        "Cost of a shuffle compared to a ring: for 64 MiB on 4 hosts, the ring takes 4.27 s (94% of"
    )
    assert "tree_reduce takes 5.0 times as long, parameter_server async takes 2.0 times as long" in found[0]
    assert "On 4 hosts tree_reduce is faster than DDP's ring at 1 MiB and slower at 16 MiB" in found[1]
    assert "ddp topk against whole gradients, 16 MiB: at 200 Mbit/s it sends 8.0 times fewer" in found[2]
    assert "takes 0.25 times as long; on links without a limit" in found[2]
    assert "DDP hides 1.50 of 2.50 s" in found[3]
    assert "with 8 ranks on 4 slots, treeReduce runs tasks in waves. A step takes 1.40 s instead of 0.80" in found[4]
    assert "DDP stops with an error after 0.2 s" in found[4]
    assert "parameter_server async finishes after 10 s (accuracy 0.970), ddp after 30 s" in found[5]
    assert answers({}) == []


def test_answers_do_not_need_each_other():
    assert [text[:25] for text in answers({"crossings": RESULTS["crossings"]})] == ["On 4 hosts tree_reduce is"]
    assert answers({"stragglers": RESULTS["stragglers"][:1]}) == []


def test_results_are_kept_where_the_page_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"the report needs jinja2: pip install matplotlib jinja2 \(the extra spark_dl\[plot\]",
    ):
        report.write_report(RESULTS, tmp_path / "new" / "report.html")
    assert json.loads((tmp_path / "new" / "report.json").read_text()) == RESULTS


def test_a_method_that_fails_is_left_out_and_loses_nothing(monkeypatch):
    def train(*args, **options):
        raise RuntimeError("rank 1 failed\nTraceback ...")

    monkeypatch.setattr(driver, "train", train)
    monkeypatch.setattr(error_runtime, "write_digits", lambda folder: None)
    log = Log()
    found = error_runtime.measure(None, "", num_hosts=4, straggler_s=0.0, methods=["ddp"], log=log)
    assert found == []
    assert log.left_out == ["ddp under stragglers: rank 1 failed"]


def test_what_was_left_out_stands_in_the_page(tmp_path):
    assert "Left out" not in written(tmp_path, {"about": {}, "left_out": []})
    assert "<li>ddp, 16 MiB: rank 1 &lt;failed&gt;</li>" in written(
        tmp_path, {"about": {}, "left_out": ["ddp, 16 MiB: rank 1 <failed>"]}
    )


def test_a_page_in_the_place_of_its_json_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(
        ValueError, match=r"^report: expected the name of a page, such as report\.html, found .*out\.json"
    ):
        report.check(tmp_path / "out.json")
