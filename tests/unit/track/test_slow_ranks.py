"""A rank that the others wait for is found while the run goes on, and no rank is found in a healthy run."""

import json

import numpy as np
import pytest

from spark_dl.track.time_split import INTERVALS, SlowRanks
from tests.builders.run_folders import times_line


def found_in(lines):
    """(last step, rank) of each finding, in order."""
    watch = SlowRanks()
    return [(line["step"], slow.straggler.rank) for line in lines for slow in watch.put(line)]


def lines_of(ranks, count, *, slow=(), data=0.0, compute=0.0, each_s=1.0, start=0):
    """Log lines of which the ranks `slow` take longer, as a share of the time of the others."""
    more = np.array([float(rank in slow) for rank in range(ranks)])
    return [
        times_line(start + i + 1, each_s * data * more, each_s * (1.0 + compute * more), each_s / 10)
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 17])
@pytest.mark.parametrize(("surplus", "cause"), [({"data": 1.0}, "data"), ({"compute": 1.0}, "compute")])
def test_F20_a_slow_rank_is_found_once_with_what_took_it_longer(ranks, surplus, cause):
    watch, found = SlowRanks(), []
    for line in [*lines_of(ranks, 5), *lines_of(ranks, 30, slow={ranks - 1}, start=5, **surplus)]:
        found += watch.put(line)
    (slow,) = found
    event = slow.to_event("host-1")
    assert slow.describe("host-1").startswith(f"rank {ranks - 1} on host-1 is slow")
    assert f"because of {cause}" in slow.describe("host-1")
    assert json.loads(json.dumps(event)) == event
    assert (event["kind"], event["rank"], event["host"], event["cause"]) == ("straggler", ranks - 1, "host-1", cause)
    assert event["step"] == 5 + INTERVALS
    assert event[f"{cause}_s"] > event["others"][f"{cause}_s"]
    assert (event["wait_s"], event["others"]["wait_s"]) == (0.0, pytest.approx(event["seconds"] / 2, rel=0.2))


def test_F20_it_is_named_again_after_it_was_as_fast_as_the_others():
    slow = {"slow": {1}, "compute": 2.0}
    lines = [*lines_of(3, 7, **slow), *lines_of(3, 3, start=7), *lines_of(3, 9, **slow, start=10)]
    assert found_in(lines) == [(5, 1), (14, 1)]


def test_F20_short_log_lines_are_added_up():
    found = found_in(lines_of(2, 300, slow={0}, compute=1.0, each_s=0.01))
    assert [rank for _, rank in found] == [0]
    assert 90 < found[0][0] < 150


@pytest.mark.parametrize("lines", [
    pytest.param(lines_of(3, 50), id="even ranks"),
    pytest.param(lines_of(2, 50, slow={1}, compute=0.4), id="slightly slower"),
    pytest.param([*lines_of(2, 1, slow={1}, compute=60), *lines_of(2, 50, start=1)], id="preparations"),
    pytest.param([*lines_of(2, 9), *lines_of(2, 3, slow={1}, compute=3, start=9), *lines_of(2, 9, start=12)], id="3"),
    pytest.param([times_line(i, [0, 0, 0], 1.0 + 2 * np.eye(3)[i % 3]) for i in range(1, 60)], id="in turn"),
    pytest.param(lines_of(4, 50, slow={0, 1}, compute=0.3), id="half of them slightly"),
    pytest.param(lines_of(1, 50, slow={0}, compute=3), id="one rank"),
    pytest.param(lines_of(2, 150, slow={0}, compute=3, each_s=0.002), id="a run of a second"),
    pytest.param([{"kind": "step", "step": i, "data_s": 9.0, "seconds": 9.0} for i in range(9)], id="not measured"),
])  # fmt: skip
def test_F20_no_rank_is_named_in_a_healthy_run(lines):
    assert found_in(lines) == []


def test_F20_noise_of_a_busy_machine_is_no_straggler():
    rng = np.random.default_rng(0)
    lines = [times_line(i, 0.1 * rng.random(4), 1.0 + rng.random(4)) for i in range(1, 500)]
    assert found_in(lines) == []
