"""Which rank is a straggler, and by what; how the lines of an attempt become its times."""

import numpy as np
import pytest

from spark_dl.track.time_split import find_stragglers, split_of
from tests.builders.run_folders import times_line


def even(ranks, count, start=0):
    return [times_line(start + i + 1, [0.0] * ranks, [1.0] * ranks) for i in range(count)]


def slowed(ranks, count, rank, *, data=0.0, compute=0.0, start=0):
    more = np.eye(ranks)[rank]
    return [times_line(start + i + 1, data * more, 1.0 + compute * more) for i in range(count)]


def test_the_parts_of_each_rank_add_up_to_its_intervals():
    split = split_of([times_line(5, [0.5, 0.0], [1.0, 2.0]), times_line(10, [0.0, 0.25], [1.0, 1.0])])
    assert split.last_steps == [5, 10]
    assert split.totals("wait").tolist() == [0.75, 0.0]
    parts = split.data + split.compute + split.communication + split.wait
    assert parts == pytest.approx(np.repeat(split.seconds[:, None], 2, axis=1))


@pytest.mark.parametrize("ranks", [2, 3, 8, 17, 40])
@pytest.mark.parametrize(("surplus", "cause"), [
    ({"data": 0.5}, "data"), ({"compute": 0.5}, "compute"), ({"data": 0.3, "compute": 0.3}, "data and compute"),
])  # fmt: skip
def test_a_rank_that_is_slow_for_several_intervals_is_named_with_what_took_it_longer(ranks, surplus, cause):
    (found,) = find_stragglers(split_of([*even(ranks, 6), *slowed(ranks, 4, ranks - 1, start=6, **surplus)]))
    assert (found.rank, found.cause, found.intervals, found.of) == (ranks - 1, cause, 4, 10)
    assert (found.first_step, found.last_step) == (7, 10)
    assert found.factor == pytest.approx(1 + sum(surplus.values()))
    assert found.surplus_s == pytest.approx(4 * sum(surplus.values()))


@pytest.mark.parametrize("lines", [
    pytest.param(even(3, 9), id="even ranks"),
    pytest.param([*slowed(3, 2, 1, compute=9), *even(3, 9, 2)], id="two intervals only"),
    pytest.param([*slowed(3, 4, 1, compute=0.2)], id="slightly slower"),
    pytest.param([*slowed(3, 3, 1, compute=0.3), *even(3, 90, 3)], id="for a small part of the time"),
    pytest.param([times_line(i, [0, 0, 0], 1.0 + 2 * np.eye(3)[i % 3]) for i in range(1, 30)], id="in turn"),
    pytest.param(slowed(1, 5, 0, compute=3), id="one rank"),
    pytest.param(slowed(2, 2, 0, compute=3), id="too few lines"),
])  # fmt: skip
def test_no_rank_is_named_without_cause(lines):
    assert find_stragglers(split_of(lines)) == []


def test_the_rank_with_the_largest_surplus_is_first():
    more = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
    lines = [times_line(i, [0.0] * 5, 1.0 + more) for i in range(1, 5)]
    assert [s.rank for s in find_stragglers(split_of(lines))] == [3, 1]


def test_many_ranks_and_lines_take_no_time():
    rng = np.random.default_rng(0)
    lines = [times_line(i, np.zeros(256), 1.0 + 0.1 * rng.random(256) + np.eye(256)[7]) for i in range(1, 501)]
    assert [s.rank for s in find_stragglers(split_of(lines))] == [7]


@pytest.mark.parametrize("lines", [
    [], [{"kind": "step", "step": 1, "time": 1.0, "seconds": 1.0, "data_s": 0.1}],
    [{**times_line(1, [0.0], [1.0]), "ranks": {"data_s": [0.0]}}], [{**times_line(1, [0.0], [1.0]), "ranks": "none"}],
    [{**times_line(1, [0.0], [1.0]), "seconds": None}],
    [{**times_line(1, [0.0], [1.0]), "ranks": {"data_s": [], "compute_s": [], "wait_s": []}}],
])  # fmt: skip
def test_what_was_not_measured_is_not_invented(lines):
    assert split_of(lines) is None


def test_after_a_change_of_the_number_of_ranks_the_last_one_counts():
    assert split_of([*even(2, 3), *even(4, 5, 3)]).data.shape == (5, 4)
