"""Profiles of steps: traces in Chrome's format, which Perfetto and TensorBoard open."""

import gzip
import json
import re

import pytest
import torch

from spark_dl import worker
from spark_dl.training.profile_summary import PARTS
from spark_dl.training.step_times import build_profile
from tests.builders.models import small_config
from tests.ranks.runs import make_run


def spans(run_dir, rank=0):
    """The time of the spans of a trace by name, each as (start, end)."""
    with gzip.open(f"{run_dir}/profile/rank-{rank}.pt.trace.json.gz", "rt") as file:
        trace = json.load(file)
    found = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def steps_of(found):
    return sorted(int(name.removeprefix("step ")) for name in found if re.fullmatch(r"step \d+", name))


def test_the_steps_are_in_the_trace_with_what_torch_did_in_them(tmp_path):
    run = make_run(tmp_path, small_config(1, train={"epochs": 3}, profile_steps=(5, 8)))  # 6 steps in each epoch
    worker.main(run)
    found = spans(run.run_dir)
    assert steps_of(found) == [5, 6, 7, 8]
    assert len(found["wait for data"]) >= 4
    for step in range(5, 9):
        ((start, end),) = found[f"step {step}"]
        for name in ("aten::addmm", "Optimizer.step#SGD.step"):
            assert any(start <= a <= b <= end for a, b in found[name]), (step, name)
    with open(f"{run.run_dir}/profile/rank-0.summary.json") as file:
        summary = json.load(file)
    assert (summary["steps"], summary["device"]) == (4, "cpu")
    assert sum(summary[f"{part}_s"] for part in PARTS) == pytest.approx(summary["step_s"])
    assert summary["compute_s"] > 0
    assert {"ProfilerStep#1", "ProfilerStep#4"} <= found.keys(), "TensorBoard's plugin finds the steps by these names"


def test_a_run_that_ends_early_has_the_steps_until_then(tmp_path):
    run = make_run(tmp_path, small_config(1, train={"max_steps": 3}, profile_steps=(2, 9)))
    worker.main(run)
    assert steps_of(spans(run.run_dir)) == [2, 3]


def test_a_step_that_fails_ends_the_profile_so_that_the_next_run_can_have_one(tmp_path):
    run = make_run(tmp_path, small_config(1, profile_steps=(1, 4)))
    profile = build_profile(run, FakeWorld, 0)
    steps = profile.steps(batches())
    next(steps)
    with pytest.raises(ArithmeticError):
        steps.throw(ArithmeticError("in a step"))
    profile.close()
    assert steps_of(spans(run.run_dir)) == [1]
    run_again = make_run(tmp_path, small_config(1, profile_steps=(1, 2)), name="again")
    worker.main(run_again)
    assert steps_of(spans(run_again.run_dir)) == [1, 2]


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    run = make_run(tmp_path, small_config(1, train={"max_steps": 4}, profile_steps=(1, 2)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file where the folder belongs")
    assert worker.main(run).result["steps"] == 4
    assert "track.profile_steps: cannot write the profile" in caplog.text


class FakeWorld:
    rank, device = 0, torch.device("cpu")


def batches():
    yield from range(9)


@pytest.mark.parametrize(("settings", "rank", "first_step", "expected"), [
    ({}, 0, 0, False),
    ({"profile_steps": (3, 5)}, 1, 0, True),
    ({"profile_steps": (3, 5)}, 1, 4, True),
    ({"profile_steps": (3, 5)}, 1, 5, False),
    ({"profile_steps": (3, 5), "profile_ranks": (0,)}, 1, 0, False),
    ({"profile_steps": (3, 5), "profile_ranks": (0,)}, 0, 0, True),
])  # fmt: skip
def test_only_the_ranks_and_steps_that_are_asked_for_are_profiled(tmp_path, settings, rank, first_step, expected):
    class World(FakeWorld):
        pass

    World.rank = rank
    run = make_run(tmp_path, small_config(2, **settings))
    assert (build_profile(run, World, first_step) is not None) == expected
