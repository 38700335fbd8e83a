"""What a model changes beside its parameters: a warning names it, and a validation leaves the random numbers alone."""

import logging

import pytest
import torch
from torch import nn

from spark_dl import ModelSpec, worker
from tests.builders.models import build_mlp, small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, resume, train


class Counting(nn.Module):
    """Its step depends on the number of calls, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = build_mlp(), 0

    def forward(self, features):
        self.calls += 1
        return self.layers(features) / self.calls


class Noisy(nn.Module):
    """It draws random numbers in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.layers = build_mlp()

    def forward(self, features):
        return self.layers(features + torch.randn_like(features))


def messages_of_training(run):
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("spark_dl")
    logger.addHandler(handler)
    try:
        worker.main(run)
    finally:
        logger.removeHandler(handler)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_no_checkpoint_has_is_named_in_one_warning(tmp_path, num_ranks):
    run = make_run(tmp_path, small_config(num_ranks), spec=ModelSpec(build=Counting))
    of_ranks = run_ranks(messages_of_training, num_ranks, run)
    (warning,) = [m for messages in of_ranks for m in messages if "'calls' of Counting" in m]
    assert "checkpoint" in warning
    assert "register_buffer" in warning or "buffer" in warning


def test_a_model_whose_state_is_saved_is_not_warned_of(tmp_path):
    run = make_run(tmp_path, small_config(1), spec=ModelSpec(build=build_mlp))
    assert [m for m in run_ranks(messages_of_training, 1, run)[0] if "checkpoint" in m and " of " in m] == []


def test_a_run_that_ends_within_an_epoch_goes_on_as_if_it_had_not(tmp_path):
    """It has one validation more, which draws random numbers."""
    config = small_config(2, {"validation_fraction": 0.2})
    spec = ModelSpec(build=Noisy)
    whole = train(make_run(tmp_path, config, spec=spec, name="whole"))
    run = make_run(tmp_path, cut_at(config, 2), spec=spec, name="cut")
    assert_same_to_the_bit(whole, resume(run, train(run), config))


def note_position(model, position):
    model.positions = [*getattr(model, "positions", []), (position.step, position.is_validation)]
    note_position.seen = model.positions


def positions_of_training(run):
    worker.main(run)
    return note_position.seen


def test_a_function_of_the_position_knows_that_it_is_a_validation(tmp_path):
    spec = ModelSpec(build=build_mlp, set_position=note_position)
    run = make_run(tmp_path, small_config(1, {"validation_fraction": 0.5, "epochs": 1}), spec=spec)
    (seen,) = run_ranks(positions_of_training, 1, run)
    assert [is_validation for _, is_validation in seen] == [False] * (len(seen) - 1) + [True]
