"""A range of ranks: as many as the cluster has slots for, of the numbers that the other settings allow."""

import dataclasses

import pytest

from spark_dl import DDP, Config, Launch, Mesh
from spark_dl.launch import preflight
from spark_dl.launch.calls import launch_settings
from spark_dl.launch.supervise import MoreSlotsError, check_growth, fit_ranks
from spark_dl.trials.checks import check_cluster
from tests.builders.models import small_config


@pytest.fixture
def slots(monkeypatch):
    """Sets the numbers of slots that the cluster has, one after another; the last one stays."""
    monkeypatch.setattr(preflight, "build_profile", lambda spark, launch: None)

    def have(*numbers):
        left = list(numbers)
        monkeypatch.setattr(preflight, "num_slots", lambda *_: left.pop(0) if len(left) > 1 else left[0])

    return have


def config(num_ranks=8, min_ranks=2, **launch):
    return Config(launch=Launch(num_ranks=num_ranks, min_ranks=min_ranks, start_timeout_s=0.5, **launch))


@pytest.mark.parametrize(("has", "expected"), [(8, 8), (20, 8), (5, 5), (2, 2), (1, 2), (None, 8)])
def test_there_are_as_many_ranks_as_slots_within_the_range(slots, has, expected):
    slots(has)  # of one slot, the call that starts the ranks says what is missing
    assert fit_ranks(None, config(), 8, wait_s=0).launch.num_ranks == expected
    exact = dataclasses.replace(config(), launch=Launch(num_ranks=8))
    assert fit_ranks(None, exact, 8, wait_s=0) is exact


def test_executors_that_come_soon_are_waited_for(slots):
    slots(0, 1, 3, 8)
    assert fit_ranks(None, config(), 8, wait_s=10).launch.num_ranks == 8


def test_numbers_that_the_settings_do_not_allow_are_passed_by(slots):
    slots(7)
    mesh = dataclasses.replace(config(), parallel=Mesh(tensor=4))
    assert fit_ranks(None, mesh, 8, wait_s=0).launch.num_ranks == 4
    slots(3)
    with pytest.raises(ValueError, match=r"launch\.min_ranks: no number of ranks from 2 to 3, .*; with 3: parallel"):
        fit_ranks(None, mesh, 8, wait_s=0)


def test_more_slots_end_an_attempt_at_a_checkpoint_and_as_many_or_fewer_do_not(slots):
    runs = dataclasses.replace(config(), launch=dataclasses.replace(config().launch, num_ranks=4))
    for has in (2, 4, None):
        slots(has)
        check_growth(None, runs, 8)
    slots(6)
    with pytest.raises(MoreSlotsError, match="slots for 6 ranks now, and 4 run"):
        check_growth(None, runs, 8)
    check_growth(None, runs, 4)  # all that were asked for run


def test_a_range_that_cannot_be_is_an_error_that_names_the_key():
    for fewest in (0, 9, 1.5):
        with pytest.raises(ValueError, match=r"launch\.min_ranks: expected"):
            Launch(num_ranks=8, min_ranks=fewest)
    with pytest.raises(ValueError, match=r"launch\.min_ranks: expected null with shards.storage='local'"):
        small_config(2, launch={"min_ranks": 1, "storage": "local"}, parallel=DDP())
    with pytest.raises(ValueError, match=r"launch\.min_ranks: expected null for a function of your own"):
        launch_settings(Launch(num_ranks=2, min_ranks=1), None)
    with pytest.raises(ValueError, match=r"launch\.min_ranks: expected null for trials"):
        check_cluster(None, config(), 1)
