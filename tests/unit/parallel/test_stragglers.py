"""Delays that are added to slow ranks: what they are drawn from, and that they can be drawn again."""

import numpy as np
import pytest

from spark_dl.parallel.stragglers import delay_s
from tests.builders.settings import make_config


def config(kind, mean=0.5, ranks=()):
    mean = mean if kind != "none" else 0.0
    return make_config(straggler=kind, straggler_s=mean, straggler_ranks=ranks, num_ranks=4)


def delays(kind, ranks, count):
    of_kind = config(kind)
    return [delay_s(of_kind, rank, n) for rank in ranks for n in range(count)]


@pytest.mark.parametrize("kind", ["constant", "exponential", "shifted"])
def test_the_mean_of_all_kinds_is_the_same(kind):
    drawn = delays(kind, ranks=range(4), count=500)
    assert np.mean(drawn) == pytest.approx(0.5, rel=0.06)


def test_the_spread_is_that_of_the_distribution():
    drawn = {kind: delays(kind, ranks=[1], count=2000) for kind in ("constant", "exponential", "shifted")}
    spread = {kind: np.std(found) for kind, found in drawn.items()}
    assert spread == pytest.approx({"constant": 0.0, "exponential": 0.5, "shifted": 0.25}, rel=0.08)
    assert min(drawn["shifted"]) >= 0.25


def test_a_delay_depends_on_rank_and_computation_alone():
    one = delay_s(config("exponential"), 2, 7)
    assert one == delay_s(config("exponential"), 2, 7)
    assert len({one, delay_s(config("exponential"), 1, 7), delay_s(config("exponential"), 2, 8)}) == 3


def test_only_the_named_ranks_are_slow():
    assert [delay_s(config("constant", ranks=(1, 3)), rank, 0) for rank in range(4)] == [0, 0.5, 0, 0.5]
    assert delay_s(config("none"), 0, 0) == 0
