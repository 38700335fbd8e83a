"""The summary of a trace, against traces that were made by hand and a definition that looks at each microsecond."""

import random

import pytest

from spark_dl.training.profile_summary import PARTS, summary_of


def span(name, start, end, cat="user_annotation"):
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start}


def test_each_moment_of_a_step_counts_once():
    summary = summary_of([
        span("wait for data", 0, 20), span("step 7", 20, 100),
        span("wait for data", 100, 130), span("step 8", 130, 200),
        span("wait for data", 200, 900), {"ph": "i", "name": "step 9", "ts": 5}, {"ph": "M", "name": "process_name"},
        span("gemm", 30, 60, "kernel"), span("gemm", 50, 80, "kernel"), span("copy", 110, 120, "gpu_memcpy"),
        span("ncclDevKernel_AllReduce", 70, 95, "kernel"), span("gemm", 150, 160, "kernel"),
        span("aten::mm", 20, 90, "cpu_op"),
    ])  # fmt: skip
    assert summary == {
        "steps": 2, "device": "gpu", "step_s": pytest.approx(100e-6), "compute_s": pytest.approx(35e-6),
        "communication_s": pytest.approx(7.5e-6), "data_s": pytest.approx(20e-6), "host_s": pytest.approx(37.5e-6),
        "operations": 2.5,
        "top": [["gemm", pytest.approx(35e-6), 1.5], ["ncclDevKernel_AllReduce", pytest.approx(12.5e-6), 0.5],
                ["copy", pytest.approx(5e-6), 0.5]],
    }  # fmt: skip


def test_without_a_gpu_the_device_is_the_cpu():
    summary = summary_of([
        span("step 1", 0, 100), span("aten::addmm", 10, 40, "cpu_op"), span("aten::mm", 20, 30, "cpu_op"),
        span("gloo:all_reduce", 35, 70), span("c10d::allreduce_", 34, 36, "cpu_op"),
    ])  # fmt: skip
    assert (summary["device"], summary["operations"]) == ("cpu", 3)
    own = {"aten::addmm": 18, "aten::mm": 10, "c10d::allreduce_": 2}  # without what they call
    assert summary["top"] == [[name, pytest.approx(us * 1e-6), 1.0] for name, us in own.items()]
    assert [round(summary[f"{part}_s"] * 1e6) for part in PARTS] == [30, 30, 0, 40]


@pytest.mark.parametrize("events", [[], [span("step 1", 0, 1, "cpu_op")], [span("a step 1", 0, 1)]])
def test_a_trace_without_steps_has_no_summary(events):
    assert summary_of(events) == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_are_those_of_each_microsecond(seed):
    rng = random.Random(seed)
    kinds = {"kernel": "kernel", "ncclKernel": "kernel", "wait for data": "user_annotation"}
    spans = []
    for _ in range(40):
        name, start = rng.choice([*kinds]), rng.randrange(0, 220)
        spans.append(span(name, start, start + rng.randrange(1, 30), kinds[name]))
    spans += [span("step 1", 0, 90), span("step 2", 110, 200)]
    at = [{s["name"] for s in spans if s["ts"] <= us < s["ts"] + s["dur"]} for us in range(200)]
    expected = [
        sum("kernel" in names for names in at),
        sum("ncclKernel" in names and "kernel" not in names for names in at),
        sum("wait for data" in names and not names & {"kernel", "ncclKernel"} for names in at),
    ]
    summary = summary_of(spans)
    assert [round(summary[f"{part}_s"] * 2e6) for part in PARTS] == [*expected, 200 - sum(expected)]
