"""The benchmark of models that are cut, on a small scale: what it measures is what the formulas say."""

import pytest

from spark_dl.bench.exchange.log import Log
from spark_dl.bench.parallel import parallel
from tests.hosts.conftest import parts

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

SMALL = {
    "bubbles": {"pass_s": 0.06, "micro_batches": [4], "schedules": ["gpipe", "interleaved"]},
    "pipedream": {"pass_s": 0.12, "mini_batches": 8, "gpipe_steps": 2},
    "plans": {"layers": 3, "repeats": 1, "parameter_mib": 0.25, "global_batch_size": 4},
}


@pytest.fixture(scope="module")
def measured(possible):
    before, log = parts(), Log()
    options = parallel.Options(sections=("sent", *SMALL), rate_mbit=400, repeats=1, arguments=SMALL)
    results = parallel.measure(options, log)
    assert results["left_out"] == []
    assert parts() <= before
    return results


def test_a_rank_sends_the_bytes_of_the_formula(measured):
    found = parallel.summary(measured)
    expected = {"ddp": 1.5, "zero1": 1.5, "zero2": 1.5, "zero3": 2.25, "zero3_gloo": 3.0}
    assert found["sent_per_gradient"] == pytest.approx(expected, rel=0.03)
    assert found["sent_times_formula"].keys() == {*expected, "tensor", "pipeline"}
    assert all(times == pytest.approx(1, rel=0.03) for times in found["sent_times_formula"].values())


def test_pipelines_wait_as_long_as_their_schedule_says(measured):
    for row in measured["bubbles"]:
        assert row["measured"] == pytest.approx(row["formula"], abs=0.1)
        layers = 4 * row["stages_per_rank"]
        assert len(row["passes"]) == 3 * 4 * layers  # forward, for inputs and for weights, of four micro-batches
    ours, gpipe = measured["pipedream"]
    assert 0.7 < ours["of_ideal"] <= 1.01
    assert 0.7 < gpipe["of_ideal"] <= 1.01
    assert [len(row["passes"]) for row in (ours, gpipe)] == [3 * 8 * 4, 3 * 8 * 4]


def test_all_plans_are_measured(measured):
    rows = measured["plans"]
    meshes = {(row["pipeline"], row["data"], row["zero_stage"]) for row in rows}
    assert meshes == {(4, 1, 0), *((2, 2, zero) for zero in (0, 1, 3)), *((1, 4, zero) for zero in (0, 1, 2, 3))}
    assert all(row["measured_s"] > 0.1 for row in rows)
    assert parallel.summary(measured)["planner"]["times_best"] < 1.5
